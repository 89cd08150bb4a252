"""SDAR's backbone (`sdar`): Qwen3 under a mask that callers pass. It is the base class of all
families, and holds their registry."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from ...versions import tested_versions

DENSE = "sdar"  # the family of a config that names none
FAMILIES: dict[str, Any] = {}  # classes of backbones, which register themselves


class MRPBackbone(Qwen3Model):
    """The backbone of dense SDAR: transformers' `Qwen3Model`, except that callers must pass the
    mask, as the default mask is causal.

    Attributes:
        family: The family's name, the value of `MRPConfig.family`.
        models, paper: The name of its published models, and their paper's arXiv id, or None.
        published: Fields that identify its published configs; `model_type` is the family's name
            unless set here.
        fields: Fields of the config beyond those of `MRPConfig`, with their defaults.
        shifted: Whether the hidden state at position i gives the logits of the token at i + 1,
            instead of the one at i.
    """

    # rows of lm_head, with which it may be tied, are read
    _tp_plan: ClassVar[Any] = {"embed_tokens": "replicate"}
    family: ClassVar[str] = DENSE
    models: ClassVar[str] = "SDAR"
    paper: ClassVar[str | None] = "2510.06303"
    published: ClassVar[dict[str, Any]] = {"model_type": DENSE}
    fields: ClassVar[dict[str, Any]] = {}
    shifted: ClassVar[bool] = False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as torch does; embeddings that get an adapter are untied first
        (`untie`)."""
        untie(self, name, value)
        super().__setattr__(name, value)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Move or cast as torch does (`to`, `half`, ...), but keep the dtype of the rotary
        frequencies, as loading does: rounded to bfloat16, they would turn queries of late positions
        by wrong angles. When `to_empty` moves a model off the meta device, the frequencies are
        computed again, since no checkpoint holds them."""
        rotary: Any = self.rotary_emb
        originals = dict(rotary.named_buffers())
        super()._apply(fn, *args, **kwargs)
        emptied = any(
            originals[name].is_meta and not frequencies.is_meta
            for name, frequencies in rotary.named_buffers()
        )
        if emptied:
            originals = dict(type(rotary)(config=self.config).named_buffers())
        for name, frequencies in list(rotary.named_buffers()):
            if emptied or frequencies.dtype != originals[name].dtype:
                setattr(rotary, name, originals[name].to(frequencies.device))
        return self

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Run `Qwen3Model.forward`; `ValueError` if the mask is not a dictionary, as when a trainer
        computes a next-token loss."""
        if not isinstance(attention_mask, dict):
            raise ValueError(
                "the backbone was called without the model around it, and would see a causal mask "
                "instead of its own. TRL's trainers do so for a next-token loss, which ruins the "
                "model: train with mrp_trainer.MRPTrainer, which takes the same records, or with "
                "transformers' Trainer and labels. For logits or hidden states call the model"
            )
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


FAMILIES[DENSE] = MRPBackbone


def untie(parent: Any, name: str, layer: Any) -> None:
    """Untie an `lm_head` or `embed_tokens` module to which peft adds an adapter: give the module a
    copy of the shared weight.

    An adapter of one module, merged into the shared weight, would change the other module. The copy
    itself changes no result. If peft gives both modules the same rows or the same copy
    (`ensure_weight_tying`), they stay tied.
    """
    config: Any = getattr(parent, "config", None)
    if name not in ("lm_head", "embed_tokens"):
        return
    rows = getattr(layer, "token_adapter", None)
    # peft ties the adapter of lm_head to that of the embedding
    if rows is not None and (name == "embed_tokens" or rows.tied_adapter is not None):
        return
    if name == "lm_head" and (copies := getattr(layer, "modules_to_save", None)) is not None:
        embeddings = getattr(parent.model.embed_tokens, "modules_to_save", {})
        if any(copies[key].weight is embeddings[key].weight for key in copies if key in embeddings):
            config.tie_word_embeddings = True
            return
    base: Any = getattr(layer, "base_layer", getattr(layer, "original_module", None))
    if isinstance(base, nn.Module) and config.tie_word_embeddings:
        weight: Any = base.weight
        base.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        config.tie_word_embeddings = False


@tested_versions()
def families() -> dict[str, Any]:
    """Import all families of this folder; return all registered backbone classes by name (remote
    code has only its own)."""
    this_file = Path(__file__)
    if this_file.stem == DENSE:
        for file in sorted(this_file.parent.glob("[a-z]*.py")):
            import_module(f"{__package__}.{file.stem}")
    return FAMILIES


def backbone_of(name: str) -> Any:
    """Find the backbone class of a family; `ValueError` for an unknown name."""
    if not isinstance(name, str) or (name not in FAMILIES and name not in families()):
        raise ValueError(
            f"family is {name!r}: the families here are {', '.join(sorted(FAMILIES))}. The code of "
            "a repository has that of its own checkpoint only: for others install this package"
        )
    return FAMILIES[name]
