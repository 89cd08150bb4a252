"""The command `mrp heads`, which makes a page about the heads on the Hub from their cards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard

from modeling_mrp.model.code import model_tags
from modeling_mrp.model.families.sdar import DENSE

from .card import HEAD_TAG, markdown_table
from .command import network_errors
from .recipe import settings_in

# the settings of a recipe that the page shows, in this order
_TOLD = ("data", "max_steps", "num_train_epochs", "head_layers", "reveal_rule", "unroll")


@dataclass(frozen=True)
class PublishedHead:
    """A head on the Hub.

    Attributes:
        repo_id: The id of the head's repository.
        backbone: The Hub id of the head's backbone; None if the card names none.
        license: The card's licence.
        recipe: The settings with which the head was trained, by name; empty if the card has none.
        results: The card's measurements.
    """

    repo_id: str
    backbone: str | None
    license: str | None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[EvalResult] = ()

    def speeds(self) -> dict[str, dict[str, tuple[float, str]]]:
        """Find the fastest mode for each problem set and each value of the option `decoding`, among
        the card's measurements. Speed is the number of tokens per unit; a unit is the cost of one
        backbone forward, and a head pass costs a share of it.

        Returns:
            A dict from the name of a problem set to a dict, which maps a value of `decoding`, such
            as `mrp_spec` or `self_spec`, to a pair: the tokens per unit of its fastest mode, and
            the name of this mode, such as "mrp_spec of dynamic K=4 tau=0.9".
        """
        best: dict[str, dict[str, tuple[float, str]]] = {}
        for result in self.results:
            if result.metric_type != "tokens_per_unit":
                continue
            mode = str(result.metric_name).rpartition(", ")[2]
            decoding = mode.partition(" ")[0]
            by_decoding = best.setdefault(result.dataset_name, {})
            by_decoding[decoding] = max(
                (float(result.metric_value), mode), by_decoding.get(decoding, (0.0, ""))
            )
        return best


def published_heads(
    author: str | None = None,
    backbone: str | None = None,
    limit: int = 100,
    token: str | bool | None = None,
) -> list[PublishedHead]:
    """Search the Hub for heads that this package published, and read their cards. The most
    downloaded heads come first.

    Args:
        author: Only heads of this user or organisation.
        backbone: Only heads of this backbone, given by its Hub id.
        limit: The largest number of heads that the search finds. Heads of other backbones count,
            since they are left out only afterwards.
        token: As in `huggingface_hub`.

    Raises:
        OSError: if the Hub cannot be reached.
    """
    api = HfApi(token=token)
    heads = []
    with network_errors(f"the Hub at {api.endpoint}", "repeat the command"):
        models = api.list_models(
            filter=[model_tags(DENSE)[-1], HEAD_TAG], author=author, sort="downloads", limit=limit
        )
        for model in models:
            head = _head_of(model.id, Path(api.hf_hub_download(model.id, "README.md")))
            if backbone in (None, head.backbone):
                heads.append(head)
    return heads


def _head_of(repo_id: str, card_file: Path) -> PublishedHead:
    """Read the card of a head. If its metadata or recipe cannot be read, the card is treated as
    empty."""
    try:
        card = ModelCard.load(card_file, ignore_metadata_errors=True)
        recipe = settings_in(card.text)
    except ValueError:
        return PublishedHead(repo_id, None, None)
    base = card.data.base_model
    return PublishedHead(
        repo_id,
        base[0] if isinstance(base, list) else base,
        card.data.license,
        recipe,
        card.data.eval_results or (),
    )


def heads_page(heads: Sequence[PublishedHead]) -> str:
    """Format a Markdown page of heads: a table with a row per head."""
    rows = []
    for head in heads:
        rows.append(
            (
                _linked(head.repo_id),
                _linked(head.backbone) if head.backbone else "not named",
                _told(head.recipe),
                _measured(head),
                head.license or "unknown",
            )
        )
    table = markdown_table(("head", "backbone", "recipe", "tokens / unit", "licence"), rows)
    return (
        f"# Heads\n\n{table if rows else 'No head was found.'}\n\n"
        "A *unit* is one forward of the backbone, head passes charged by the parameters that they "
        "read. The numbers are those of the cards.\n"
    )


def _linked(repo_id: str) -> str:
    return f"[{repo_id}](https://huggingface.co/{repo_id})"


def _told(recipe: Mapping[str, Any]) -> str:
    parts = []
    for name in _TOLD:
        value = recipe.get(name)
        if value is not None and not (name == "max_steps" and value == -1):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            parts.append(f"{name}: {text}")
    return "; ".join(parts) or "not told"


def _measured(head: PublishedHead) -> str:
    parts = []
    for problem_set, speeds in head.speeds().items():
        if "mrp_spec" in speeds:
            speed, mode = speeds["mrp_spec"]
            text = f"{problem_set}: {speed:.2f} ({mode})"
            if "self_spec" in speeds:
                text += f", {speeds['self_spec'][0]:.2f} without a head"
            parts.append(text)
    return "; ".join(parts) or "not measured"
