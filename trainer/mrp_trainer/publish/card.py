"""The model card of a checkpoint. It is a template that is filled from the files of the
checkpoint's folder, without any network access."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, RepoCard

from modeling_mrp.generate.option_table import OPTIONS
from modeling_mrp.model.code import model_tags
from modeling_mrp.model.families.sdar import DENSE, backbone_of
from modeling_mrp.model.layouts import HEAD, is_hub_id
from modeling_mrp.versions import TESTED

from ..evaluate.cost import CHARGED, Deployment, charged, charged_as
from ..evaluate.results import mode_name
from .evaluations import Benchmark
from .folder import CONFIGS, PICTURE, json_of, tensors_in
from .recipe import model_of, recipe_of

HEAD_TAG = "draft-model"
TEMPLATE = Path(__file__).with_name("card_template.md")
_RENDERED = re.compile(
    r"<!-- Rendered from a template for (.+); without this line, pushing keeps the card as it is\. "
    r"-->"
)
# marks cards that peft or transformers generated and nobody filled in
FORM = "[More Information Needed]"
_SUMMARIES = {
    "full": "{} block-diffusion language model with an MRP head.",
    "backbone": "{} block-diffusion language model without an MRP head.",
    "head": "{} block-diffusion language model's MRP head.",
    "adapter": "{} block-diffusion language model's adapter, by peft.",
}
_DEFAULTS = {
    option.name: option.default
    for option in OPTIONS
    if option.name in ("decoding", "target", "num_draft_states")
}
_METRICS = {
    "accuracy": "accuracy %",
    "tokens_per_unit": "tokens per unit (the predicted time of a forward of one state, {})",
    "tokens_per_forward": "tokens per backbone forward",
}


def read_results(paths: Iterable[Path | str]) -> list[dict[str, Any]]:
    """Read the measurements in files that `mrp evaluate` wrote: for each mode and problem set, a
    dict of settings and results. Header lines are skipped. The field `family` names the problem
    set; for one that was read from a file, it is the file's name without its ending. `ValueError`
    for a line that lacks a needed field."""
    lines: list[dict[str, Any]] = []
    for path in map(Path, paths):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = json.loads(text)
            if "benchmark" in line:
                continue
            if "file" in line:  # the prompts of a file, not a family of tasks
                line = {"family": Path(str(line["file"])).stem, **line}
            if missing := {"family", "decoding", "accuracy", "tokens_per_forward"} - line.keys():
                raise ValueError(
                    f"{path}, line {number} lacks {sorted(missing)[0]}: give lines of mrp evaluate "
                    "--output"
                )
            lines.append(line)
    return lines


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table from the cells of its heading and of its rows."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def results_table(lines: Sequence[Mapping[str, Any]], deployment: Deployment = CHARGED) -> str:
    """Format measurements (dicts of settings and results, as `read_results` returns them) as a
    Markdown table with a row for each mode. Modes with the same value of the option `decoding` are
    next to each other. A missing value is "-".

    Each problem set has a column of its accuracy. Each of the other columns is of one quantity, and
    a cell lists its values on all problem sets, separated by commas. The quantities are tokens per
    unit, tokens per forward, head forwards per token, and the percentage of texts that are equal to
    those of the first mode.

    A unit is the predicted time of a backbone forward that scores one state of each row, at
    `deployment`.
    """
    families = list(dict.fromkeys(line["family"] for line in lines))
    decodings = list(dict.fromkeys(line["decoding"] for line in lines))
    modes: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: decodings.index(line["decoding"])):
        modes.setdefault(mode_name(line), {})[line["family"]] = charged(line, deployment)
    pair = ", ".join(families)
    head = [
        "mode",
        *(f"{family} %" for family in families),
        f"tokens / unit, {deployment} ({pair})",
    ]
    head += [
        f"tokens / forward ({pair})",
        "head forwards / token",
        f"same as {next(iter(modes))} % ({pair})",
    ]

    def cells(by: dict[str, Mapping[str, Any]], name: str, digits: int) -> list[str]:
        texts = []
        for family in families:
            value = by.get(family, {}).get(name)
            texts.append("-" if value is None else f"{value:.{digits}f}")
        return texts

    digits_by_name = {
        "tokens_per_unit": 2,
        "tokens_per_forward": 2,
        "head_per_token": 2,
        "identical_to_first": 1,
    }
    rows = []
    for mode, by in modes.items():
        row = [mode, *cells(by, "accuracy", 1)]
        for name, digits in digits_by_name.items():
            row.append(", ".join(cells(by, name, digits)))
        rows.append(row)
    return markdown_table(head, rows)


def eval_results(
    lines: Sequence[Mapping[str, Any]],
    deployment: Deployment = CHARGED,
    benchmarks: Mapping[str, Benchmark] = MappingProxyType({}),
) -> list[EvalResult]:
    """Make the entries of the card's `model-index` for measurements (see `read_results`).

    For each measurement there are up to three entries: accuracy, tokens per backbone forward, and
    tokens per unit. A unit is the predicted time of a backbone forward that scores one state of
    each row, at `deployment`. Values that a measurement lacks have no entry.

    `benchmarks` maps names of problem sets to benchmarks on the Hub. In the entries of these
    problem sets, `dataset_type` is the id of the benchmark's dataset; in others it is the name of
    the problem set.
    """
    results = []
    for line in lines:
        values = charged(line, deployment)
        benchmark = benchmarks.get(line["family"])
        for metric, label in _METRICS.items():
            value = values.get(metric)
            if value is None:  # problems without answers, or no counts of head passes
                continue
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=benchmark.dataset if benchmark else line["family"],
                    dataset_name=line["family"],
                    metric_type=metric,
                    metric_value=round(value, 3),
                    metric_name=f"{label.format(deployment)}, {mode_name(line)}",
                )
            )
    return results


def _facts(folder: Path, config: Mapping[str, Any]) -> str:
    """Format a Markdown table of what a checkpoint folder holds: the shape of the model, the
    numbers of parameters, and the dtypes and size of the weights."""
    tensors = tensors_in(folder)
    backbone = head = 0
    for name, tensor in tensors.items():
        if "F" in tensor.dtype:
            if HEAD in name:
                head += math.prod(tensor.shape)
            else:
                backbone += math.prod(tensor.shape)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    kinds = ", ".join(sorted({tensor.dtype for tensor in tensors.values()}))
    rows = []
    if config.get("hidden_size"):
        shape = (
            "{num_hidden_layers} layers, hidden {hidden_size}, vocabulary {vocab_size}, blocks of "
            "{block_size} tokens"
        )
        rows.append(("backbone", shape.format(**config)))
        layers = config["num_nextn_predict_layers"]
        rows.append(("head", f"{layers} layers" if layers else "none"))
    rows.append(("parameters here", f"{backbone:,} of the backbone, {head:,} of the head"))
    rows.append(("weights", f"safetensors, {kinds}, {size / 1e6:,.1f} MB"))
    return markdown_table(("", ""), rows)


def render_card(
    folder: Path | str,
    kind: str,
    name: str,
    results: Sequence[Mapping[str, Any]] = (),
    about: Path | str | None = None,
    extra_tags: Sequence[str] = (),
    base: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    benchmarks: Mapping[str, Benchmark] = MappingProxyType({}),
) -> ModelCard:
    """Render the card of a saved checkpoint.

    Args:
        folder: A folder that `save_pretrained` wrote.
        kind: A key of `folder.KINDS`: "full", "head" or "adapter".
        name: The repository id, or the folder as a user writes it. It gives the title, and the
            examples load it.
        results: Measurements, as `read_results` returns them.
        about: A Markdown file that describes the checkpoint. Its metadata override those of the
            template, and its text opens the card.
        extra_tags: Tags in addition to those that every card has.
        base: The base model of a head or an adapter, in place of the one that its config names.
        metadata: Further metadata, such as `license`, `language` and `datasets`, which override
            those of `about`.
        benchmarks: Maps the name of a problem set in the results to its benchmark, if it is a
            benchmark on the Hub.
    """
    folder = Path(folder)
    config = json_of(folder / CONFIGS[kind])
    family_name = config.get("family", DENSE)
    family = backbone_of(family_name)
    deployment = Deployment(charged_as(config.get("hidden_size")))
    if not base:
        base = model_of(folder) if kind == "full" else config.get("base_model_name_or_path")
    user_metadata: dict[str, Any] = {}
    about_text = None
    if about is not None:
        about_card = RepoCard.load(about)
        user_metadata = about_card.data.to_dict()
        about_text = about_card.text.strip()
    user_metadata |= metadata or {}
    tags = list(model_tags(family_name))
    if kind == "head":
        tags.append(HEAD_TAG)
    fields: dict[str, Any] = {
        "library_name": "peft" if kind == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "license": "other" if "license_name" in user_metadata else "unknown",
        "base_model": base if base is None or is_hub_id(base) else None,
        **user_metadata,
        "tags": [*tags, *(user_metadata.get("tags") or []), *extra_tags],
    }
    if fields["base_model"]:
        fields.setdefault("base_model_relation", "finetune" if kind == "full" else "adapter")
    if results:
        fields |= {
            "model_name": _title(name),
            "eval_results": eval_results(results, deployment, benchmarks),
        }
    chosen = json_of(folder / "generation_config.json")
    contents = kind
    if kind == "full" and not config.get("num_nextn_predict_layers"):
        contents = "backbone"
    has_head = contents in ("full", "head") or any(HEAD in tensor for tensor in tensors_in(folder))
    papers = {"MRP, Multi-token Residual Prediction": "2605.18817"}
    if family.paper:
        papers[family.models] = family.paper
    return ModelCard.from_template(
        ModelCardData(**fields),
        template_path=str(TEMPLATE),
        name=name,
        title=_title(name),
        repository=_repository(name),
        tested=TESTED,
        kind=kind,
        base=next(
            (known for known in (base, fields["base_model"]) if known and is_hub_id(known)),
            "org/backbone",  # the name of a repository, not a folder of this machine
        ),
        about=about_text,
        summary=_SUMMARIES[contents].format(
            "An SDAR" if family.models == "SDAR" else f"A {family.models}"
        ),
        facts=_facts(folder, config),
        decoding="mrp_spec" if has_head else "self_spec",
        custom=contents in ("full", "head") and family_name == DENSE,
        picture=(folder / PICTURE).is_file(),
        defaults={option: chosen.get(option) or value for option, value in _DEFAULTS.items()},
        table=results_table(results, deployment) if results else None,
        recipe=recipe_of(folder, fields["base_model"]),
        papers=papers,
    )


def is_users_card(text: str) -> bool:
    """Return whether a card is to be kept as a user's own. It is not if it has the comment that
    this package writes into the cards it renders, or the words "[More Information Needed]" of a
    form that peft or transformers generated and nobody filled in."""
    return _RENDERED.search(text) is None and FORM not in text


def renamed(text: str, name: str) -> str:
    """Return the card `text` with `name` in place of the name for which this package rendered it,
    in the title and the examples. A card that this package did not render is returned unchanged."""
    if (match := _RENDERED.search(text)) is None:
        return text
    text = text.replace(match[0], match[0].replace(match[1], name)).replace(
        f'"{match[1]}"', f'"{name}"'
    )
    text = text.replace(
        f'custom_generate="{_repository(match[1])}"', f'custom_generate="{_repository(name)}"'
    )
    return text.replace(f"\n# {_title(match[1])}\n", f"\n# {_title(name)}\n", 1)


def _repository(name: str) -> str:
    """Return a repository name that `custom_generate` accepts: `name` itself or, if `name` is a
    folder, a name that its repository might have."""
    return name if is_hub_id(name) else f"org/{_title(name)}"


def _title(name: str) -> str:
    return name.rstrip("/").split("/")[-1]
