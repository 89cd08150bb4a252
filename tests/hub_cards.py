"""The Hub's rules for a model card's metadata, as far as cards of this project use them."""

import re
from typing import Any

import yaml
from huggingface_hub import ModelCard

LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "llama3", "gemma", "other", "unknown"}
PIPELINES = {"text-generation", "fill-mask", "feature-extraction", "text-classification", "image-text-to-text"}
RELATIONS = {"adapter", "merge", "quantized", "finetune"}
REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def validate_card(card: str) -> list[str]:
    """The errors that the Hub would report for a card. What is in its `model-index`, huggingface_hub checks as it reads it."""
    try:
        data = ModelCard(card).data
    except (ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        return [f"metadata cannot be read: {error}"]
    errors = [f'"license" must be one of {sorted(LICENSES)}' for name in as_list(data.get("license")) if name not in LICENSES]
    if data.get("license") == "other" and not data.get("license_name"):
        errors.append('"license_name" is required where "license" is "other"')
    for name in as_list(data.get("base_model")):
        if not isinstance(name, str) or not REPO_ID.fullmatch(name):
            errors.append(f'"base_model" with value "{name}" is not valid. Use a model id from the Hub')
    if data.get("base_model_relation", "finetune") not in RELATIONS:
        errors.append(f'"base_model_relation" must be one of {sorted(RELATIONS)}')
    if data.get("pipeline_tag") not in {None, *PIPELINES}:
        errors.append(f'"pipeline_tag" must be one of {sorted(PIPELINES)}')
    if not all(isinstance(tag, str) for tag in as_list(data.get("tags"))):
        errors.append('"tags" must be an array of strings')
    return errors
