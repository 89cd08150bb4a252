"""The Hub's rules for a model card's metadata, as far as cards of this project use them, and what the Hub reads from it."""

import re
from typing import Any

import yaml

LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "llama3", "gemma", "other", "unknown"}
PIPELINES = {"text-generation", "fill-mask", "feature-extraction", "text-classification", "image-text-to-text"}
RELATIONS = {"adapter", "merge", "quantized", "finetune"}
REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n?---[ \t]*(\r?\n|\Z)", re.DOTALL)


def card_metadata(card: str) -> dict[str, Any]:
    """The metadata at the head of a card; empty where there is none.

    Raises:
        ValueError: if it is not YAML, or not a mapping.
    """
    found = FRONT_MATTER.match(card)
    try:
        data = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError as error:
        raise ValueError(f"YAML metadata cannot be parsed: {error}") from error
    if data is not None and not isinstance(data, dict):
        raise ValueError("YAML metadata must be a mapping")
    return data or {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def validate_card(card: str) -> tuple[list[str], list[str]]:
    """The errors and the warnings that the Hub would report for a card."""
    try:
        data = card_metadata(card)
    except ValueError as error:
        return [str(error)], []
    if not data:
        return [], ["empty or missing yaml metadata in repo card"]
    errors = [f'"license" must be one of {sorted(LICENSES)}' for name in as_list(data.get("license")) if name not in LICENSES]
    if data.get("license") == "other" and not data.get("license_name"):
        errors.append('"license_name" is required where "license" is "other"')
    for name in as_list(data.get("base_model")):
        if not isinstance(name, str) or not REPO_ID.fullmatch(name):
            errors.append(f'"base_model" with value "{name}" is not valid. Use a model id from the Hub')
    if data.get("base_model_relation", "finetune") not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {sorted(RELATIONS)}')
    for key in ("library_name", "pipeline_tag"):
        if not isinstance(data.get(key, ""), str):
            errors.append(f'"{key}" must be a string')
    if not isinstance(data.get("tags", []), list) or not all(isinstance(tag, str) for tag in data.get("tags", [])):
        errors.append('"tags" must be an array of strings')
    errors += model_index_errors(data.get("model-index", []))
    unknown = data.get("pipeline_tag") not in {None, *PIPELINES}
    return errors, [f'The pipeline tag "{data["pipeline_tag"]}" is not in the official list'] if unknown else []


def model_index_errors(index: Any) -> list[str]:
    """What the Hub would say of `model-index`: models with names, results with a task, a dataset and metrics with values."""
    if not isinstance(index, list):
        return ['"model-index" must be an array']
    errors = []
    for i, model in enumerate(index):
        if not model.get("name"):
            errors.append(f'"model-index[{i}].name" is required')
        for j, result in enumerate(model.get("results", [])):
            at = f"model-index[{i}].results[{j}]"
            required = {"task": ("type",), "dataset": ("name", "type")}
            errors += [
                f'"{at}.{part}.{key}" is required'
                for part, keys in required.items()
                for key in keys
                if not (result.get(part) or {}).get(key)
            ]
            if not result.get("metrics"):
                errors.append(f'"{at}.metrics" is required')
            for k, metric in enumerate(result.get("metrics") or []):
                errors += [f'"{at}.metrics[{k}].{key}" is required' for key in ("type", "value") if metric.get(key) is None]
    return errors


def card_tags(data: dict[str, Any]) -> list[str]:
    """The tags that the Hub derives from a card's metadata."""
    tags = [*data.get("tags", []), *(data[key] for key in ("library_name", "pipeline_tag") if key in data)]
    tags += [f"license:{name}" for name in as_list(data.get("license"))]
    for base in as_list(data.get("base_model")):
        tags += [f"base_model:{base}", f"base_model:{data.get('base_model_relation', 'finetune')}:{base}"]
    return list(dict.fromkeys(tags))
