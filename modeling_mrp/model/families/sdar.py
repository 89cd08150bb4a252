"""SDAR's backbone (`sdar`): Qwen3 under a mask that callers pass. Its class is the base class of
all families. This module also holds the registry of families."""

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
        models, paper: The name of the family's published models, and the arXiv id of their paper,
            or None.
        published: The fields that identify published configs of the family, with their values.
            `model_type` is the family's name unless set here.
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
        """Set an attribute as torch does. If the attribute is an embedding to which an adapter is
        added, untie the embedding first (see `untie`)."""
        untie(self, name, value)
        super().__setattr__(name, value)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Move or cast the backbone as torch does (`to`, `half`, ...), but keep the dtype of the
        rotary frequencies, as loading does. If these were rounded to bfloat16, queries at late
        positions would be rotated by wrong angles. When `to_empty` moves a model off the meta
        device, the frequencies are computed again, since no checkpoint holds them."""
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
        """Run `Qwen3Model.forward`. `attention_mask` must be a dict from a kind of layer to its
        mask, in the form of transformers, as `MRPForCausalLM` passes it. Raise `ValueError` for
        anything else, such as the mask of a trainer that calls the backbone itself to compute a
        next-token loss."""
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
    """Give a module its own copy of a weight that `lm_head` and `embed_tokens` share, if peft adds
    an adapter to this module. The config's `tie_word_embeddings` then becomes False.

    The copy itself changes no result. Without it, merging the adapter of one module into the shared
    weight would change the other module, too. The two modules stay tied in two cases, in which peft
    trains both together: it trains the same rows of both, or it gives both the same trained copy of
    the weight (`ensure_weight_tying`).

    Args:
        parent: The module in which peft replaces a module.
        name: The name of the replaced module; names other than `lm_head` and `embed_tokens` are
            left alone.
        layer: The module that peft puts there.
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
    """Import the modules of all families in this folder. Return all registered backbone classes by
    family name; remote code has only the family of its own model."""
    this_file = Path(__file__)
    if this_file.stem == DENSE:
        for file in sorted(this_file.parent.glob("[a-z]*.py")):
            import_module(f"{__package__}.{file.stem}")
    return FAMILIES


def backbone_of(name: str) -> Any:
    """Return the backbone class of a family. Raise `ValueError` if there is no family of this
    name."""
    if not isinstance(name, str) or (name not in FAMILIES and name not in families()):
        raise ValueError(
            f"family is {name!r}: the families here are {', '.join(sorted(FAMILIES))}. The code of "
            "a repository has that of its own checkpoint only: for others install this package"
        )
    return FAMILIES[name]
