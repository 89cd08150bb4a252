"""The model card of a checkpoint: rendered from a template out of what lies in its folder, without any connection."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, RepoCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from modeling_mrp import __version__
from modeling_mrp.generate.budget import UNTIMED_STATES
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.model.families.registry import DENSE, backbone_of
from modeling_mrp.model.layouts import HEAD, is_hub_id

from ..evaluate.cost import CHARGED, charged, charged_as
from ..evaluate.results import mode_name
from .cardtext import (
    ADAPTER_ALONE,
    HEAD_ALONE,
    MODES,
    NOT_SHOWN,
    PICTURE,
    SEE,
    SHOWN,
    SOURCES,
    STOCK,
    SUMMARIES,
    TEMPLATE,
    UNIT,
    USE,
)
from .folder import json_of, tensors_in
from .hub import CONFIGS, tags_of
from .recipe import model_of, recipe_of

_RENDERED = re.compile(r"<!-- Rendered from a template for (.+); without this line, pushing keeps the card as it is\. -->")
_OURS = ("families", "versions")  # of an about file's metadata: for the rendering, not for the card
_FORM = "[More Information Needed]"  # in the card of peft, and of a model that pushed itself


@dataclass
class About:
    """What a person says of a checkpoint: a Markdown file with metadata, a summary and sections.

    Attributes:
        metadata: Goes into the card's own (`license`, `language`, `tags`, `base_model`, ...). `families` names what was
            measured, by family of the results; `versions` says with which versions, instead of those installed.
        summary: The text before the first heading.
        sections: By heading of the second level. They replace those of the template, or follow them; `Numbers` stands
            before the table.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    summary: str = ""
    sections: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | str) -> "About":
        """Reads an about file.

        Raises:
            ValueError: if it is not there, or its metadata is not a mapping.
        """
        check_file(path, "give a Markdown file that tells of the checkpoint, or leave it out")
        text = Path(path).read_text(encoding="utf-8")
        metadata = RepoCard(text).data.to_dict() if REGEX_YAML_BLOCK.search(text) else {}
        summary, *parts = re.split(r"^## +", REGEX_YAML_BLOCK.sub("", text, count=1), flags=re.MULTILINE)
        pairs = (part.partition("\n") for part in parts)
        return cls(metadata, summary.strip(), {heading.strip(): body.strip() for heading, _, body in pairs})


def check_file(path: Path | str, remedy: str) -> None:
    """Raise `ValueError` for a file that is not there."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: {remedy}")


def read_results(paths: Iterable[Path | str]) -> list[dict[str, Any]]:
    """The measurements in result files, lines of `mrp evaluate`; lines that say how a benchmark ran are left out.

    Raises:
        ValueError: if a file is not there, or a line is no JSON or lacks what the card needs; both are named.
    """
    lines: list[dict[str, Any]] = []
    for path in map(Path, paths):
        check_file(path, "give result files, the lines that mrp evaluate writes")
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            needed = ("family", "decoding", "accuracy", "tokens_per_forward")
            if isinstance(line, dict) and "benchmark" in line:
                continue
            if isinstance(line, dict) and "file" in line:  # prompts of a file instead of a family of tasks
                line = {"family": Path(str(line["file"])).stem, **line}
            if not isinstance(line, dict) or any(name not in line for name in needed):
                raise ValueError(
                    f"{path}, line {number} is no measurement with {', '.join(needed)}: give lines of mrp evaluate --output"
                )
            lines.append(line)
    return lines


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def results_table(lines: Sequence[Mapping[str, Any]], shape: str = CHARGED) -> str:
    """Accuracy and cost of every mode, a row a mode, those of one decoding together, the families side by side.

    Args:
        lines: Measurements.
        shape: The published shape at whose rate passes of the head are charged.
    """
    families, decodings = (list(dict.fromkeys(line[name] for line in lines)) for name in ("family", "decoding"))
    modes: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: decodings.index(line["decoding"])):
        modes.setdefault(mode_name(line), {})[line["family"]] = charged(line, shape)
    pair = ", ".join(families)
    head = [
        "mode",
        *(f"{family} %" for family in families),
        f"tokens / unit at {shape} ({pair})",
        f"tokens / forward ({pair})",
        "head forwards / token",
        f"same as {next(iter(modes))} % ({pair})",
    ]

    def cells(by: dict[str, Mapping[str, Any]], name: str, digits: int) -> list[str]:
        values = [by.get(family, {}).get(name) for family in families]
        return ["-" if value is None else f"{value:.{digits}f}" for value in values]

    return markdown_table(
        head,
        [
            [
                mode,
                *cells(by, "accuracy", 1),
                ", ".join(cells(by, "tokens_per_unit", 2)),
                ", ".join(cells(by, "tokens_per_forward", 2)),
                ", ".join(cells(by, "head_per_token", 2)),
                ", ".join(cells(by, "identical_to_first", 1)),
            ]
            for mode, by in modes.items()
        ],
    )


METRICS = (
    ("accuracy", "accuracy %"),
    ("tokens_per_unit", "tokens per backbone forward, head passes charged as at {}"),
    ("tokens_per_forward", "tokens per backbone forward"),
)


def eval_results(
    lines: Sequence[Mapping[str, Any]], defaults: MRPGenerationConfig, families: Mapping[str, str], shape: str = CHARGED
) -> list[EvalResult]:
    """The card's `model-index`: accuracy and cost of every decoding, at the settings that a user gets by default.

    Args:
        lines: Measurements. Of a decoding that was not measured at the default settings, all are taken.
        defaults: The checkpoint's generation config, checked.
        families: A name of what was measured, by family.
        shape: The published shape at whose rate passes of the head are charged.
    """

    own = defaults.to_dict()
    if own.get("num_draft_states") == "auto":  # counts follow the clock there
        own["num_draft_states"] = UNTIMED_STATES

    def is_default(line: Mapping[str, Any]) -> bool:
        settings = ("target", "num_draft_states", "draft_branches", "confidence_threshold")
        given = {name: line[name] for name in settings if name in line} | line.get("set", {})
        return all(own.get(name) == value for name, value in given.items())

    at_default = {line["decoding"] for line in lines if is_default(line)}
    results = []
    for line in lines:
        if line["decoding"] in at_default and not is_default(line):
            continue
        for metric, label in METRICS:
            if (value := charged(line, shape).get(metric)) is None:  # of prompts without answers, or lines without head passes
                continue
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=line["family"],
                    dataset_name=families.get(line["family"], line["family"]),
                    metric_type=metric,
                    metric_value=round(value, 3),
                    metric_name=f"{label.format(shape)}, {mode_name(line)}",
                )
            )
    return results


def _facts(folder: Path, kind: str, config: Mapping[str, Any]) -> str:
    """What the folder holds, as a table."""
    tensors = tensors_in(folder)
    counts = {name: math.prod(of.shape) for name, of in tensors.items() if "F" in of.dtype}
    head = sum(count for name, count in counts.items() if HEAD in name)
    rest = sum(counts.values()) - head
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rows = []
    if config.get("hidden_size"):
        rows.append(
            (
                "backbone",
                f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, vocabulary {config['vocab_size']}, "
                f"blocks of {config['block_size']} tokens",
            )
        )
        rows.append(("head", f"{config['num_nextn_predict_layers']} layers" if config["num_nextn_predict_layers"] else "none"))
    if kind == "head":
        revision = config.get("base_model_revision")
        rows.append(("of the backbone", f"`{config['base_model_name_or_path']}`" + (f" at `{revision}`" if revision else "")))
    if kind == "full":
        rows.append(("parameters", f"{rest:,} of the backbone, {head:,} of the head"))
    else:
        rows.append(("parameters here", f"{head + rest:,}"))
    kinds = ", ".join(sorted({of.dtype for of in tensors.values()}))
    rows.append(("weights", f"safetensors, {kinds}, {size / 1e6:,.1f} MB" if tensors else "none"))
    return markdown_table(("", ""), rows)


def render_card(
    folder: Path | str,
    kind: str,
    name: str,
    results: Sequence[Mapping[str, Any]] = (),
    about: About | None = None,
    extra_tags: Sequence[str] = (),
) -> ModelCard:
    """The card of a saved checkpoint.

    Args:
        folder: What `save_pretrained` wrote: a full model, a head or an adapter.
        kind: "full", "head" or "adapter".
        name: The repository id, or the folder as a user writes it: what the examples load, and the title.
        results: Measurements, as `read_results` gives them.
        about: What a person says of the checkpoint.
        extra_tags: Tags beside those that every card has.
    """
    folder, about = Path(folder), about or About()
    config = json_of(folder / CONFIGS[kind])
    defaults = MRPGenerationConfig(**json_of(folder / "generation_config.json"))
    defaults.check(config.get("block_size", 16), True)
    family = config.get("family", DENSE)
    title, shape = _title(name), charged_as(config.get("hidden_size"))
    base = config.get("base_model_name_or_path")
    metadata = _metadata(kind, family, model_of(folder) if kind == "full" else base, about, extra_tags)
    if results:
        metadata["model_name"] = title
        metadata["eval_results"] = eval_results(results, defaults, about.metadata.get("families", {}), shape)
    text_of = "backbone" if kind == "full" and not config.get("num_nextn_predict_layers") else kind
    headless = text_of == "backbone" or (kind == "adapter" and not any("mrp_head." in tensor for tensor in tensors_in(folder)))
    of_base = base or metadata["base_model"] or "org/backbone"
    use = {"head": HEAD_ALONE, "adapter": ADAPTER_ALONE}.get(text_of, "").format(base=of_base) + USE.format(
        model=of_base if text_of == "adapter" else name,
        adapted=f'model.load_adapter("{name}")\n' if text_of == "adapter" else "",
        tokenizer=of_base if text_of in ("head", "adapter") else name,
        decoding="self_spec" if headless else "mrp_spec",
    )
    if family == DENSE and text_of in ("full", "head"):
        use += "\n\n" + STOCK.format(name=name)
    more = f' --tokenizer "{base}"' if base and kind != "full" else ""
    see = SEE.format(shown=SHOWN if (folder / PICTURE).is_file() else NOT_SHOWN, name=name, more=more)
    return ModelCard.from_template(
        ModelCardData(**metadata),
        template_str=TEMPLATE,
        name=name,
        title=title,
        summary=about.summary or _summary(text_of, backbone_of(family).models),
        facts=_facts(folder, kind, config),
        sections={
            "Use": use,
            "A decode to look at": see,
            "Decoding modes": MODES.format(default=defaults.decoding),
            **_told(about, results, recipe_of(folder, metadata["base_model"]), shape, family),
        },
    )


def _summary(kind: str, models: str) -> str:
    """What a repository of a kind holds, of the models that are called so."""
    said = SUMMARIES[kind].format(models="an SDAR" if models == "SDAR" else f"a {models}")
    return said[0].upper() + said[1:]


def _metadata(kind: str, family: str, base_model: str | None, about: About, extra_tags: Sequence[str]) -> dict[str, Any]:
    """A card's metadata but for the results: what is known of its kind, and before that what the person says."""
    given = {key: value for key, value in about.metadata.items() if key not in _OURS}
    tags = given.get("tags") or []
    metadata = {
        "library_name": "peft" if kind == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "license": "other" if "license_name" in given else "unknown",
        "base_model": base_model if base_model is None or is_hub_id(base_model) else None,
        **given,
        "tags": [*tags_of(kind, family), *([tags] if isinstance(tags, str) else tags), *extra_tags],
    }
    if metadata["base_model"]:
        metadata.setdefault("base_model_relation", "finetune" if kind == "full" else "adapter")
    return metadata


def _told(about: About, results: Sequence[Mapping[str, Any]], recipe: str | None, shape: str, family: str) -> dict[str, str]:
    """The card's sections from `Numbers` on."""
    papers = {"MRP, Multi-token Residual Prediction": "2605.18817", backbone_of(family).models: backbone_of(family).paper}
    versions = {"transformers": version("transformers"), "torch": version("torch"), "modeling-mrp": __version__}
    versions |= about.metadata.get("versions", {})
    sections = {
        "Numbers": "Not measured yet.",
        "Training": recipe or "The recipe was not recorded.",
        "Limits": "Those of the backbone: the lossless modes repeat its text, the others change it.",
        **about.sections,
        "Versions": "Saved with " + ", ".join(f"{package} {number}" for package, number in versions.items()) + ".",
        "Sources": "\n".join(SOURCES.format(name=name, paper=paper) for name, paper in papers.items() if paper),
    }
    if results:
        sections["Numbers"] = (about.sections.get("Numbers", "") + "\n\n" + results_table(results, shape) + UNIT).strip()
    return sections


def is_own_card(text: str) -> bool:
    """Whether a person wrote or edited this card: neither one of ours as rendered, nor a form that was never filled in."""
    return _RENDERED.search(text) is None and _FORM not in text


def renamed(text: str, name: str, base: str | None = None, picture: bool = False) -> str | None:
    """A rendered card under another name: its title, what its examples load, and whether it shows a picture.

    Args:
        text: The card.
        name: The repository id, or the folder as a user writes it.
        base: The base model that its config names.
        picture: Whether there is one to show.

    Returns:
        The card; None if it was not rendered, or is about another base model.
    """
    found = _RENDERED.search(text)
    if found is None or (base is not None and RepoCard(text).data.to_dict().get("base_model") != base):
        return None
    text = text.replace(SHOWN, NOT_SHOWN).replace(NOT_SHOWN, SHOWN if picture else NOT_SHOWN)
    text = text.replace(found[0], found[0].replace(found[1], name)).replace(f'"{found[1]}"', f'"{name}"')
    return text.replace(f"\n# {_title(found[1])}\n", f"\n# {_title(name)}\n", 1)


def _title(name: str) -> str:
    return name.rstrip("/").split("/")[-1]


def check_card(text: str) -> None:
    """Refuse, with a `ValueError`, a card whose metadata cannot be read; the Hub knows the rules for them."""
    if REGEX_YAML_BLOCK.search(text) is None:
        raise ValueError("the card has no metadata: begin it with a YAML block between two lines of ---")
    try:
        RepoCard(text)
    except Exception as error:  # the YAML parser's errors have no common base that this file may import
        raise ValueError(f"the card's metadata cannot be read: {error}") from error


__all__ = [
    "About",
    "check_card",
    "is_own_card",
    "markdown_table",
    "mode_name",
    "read_results",
    "render_card",
    "renamed",
    "results_table",
]
