"""Configuration of a block-diffusion backbone with an optional MRP head."""

import math
import os
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any, ClassVar

from huggingface_hub.errors import StrictDataclassError
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .families.registry import DENSE, backbone_of, family_reading, refuse_look_alikes

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_LARGEST = (1 << 31) - 1
_MOST_LAYERS = 1024  # a list of them, and their modules, are made before any weights are looked at

# How transformers 4.52, which wrote the published configs, spelled three of today's fields.
_OLD_SPELLINGS = {"rope_theta", "rope_scaling", "torch_dtype"}


def our_fields(fields: dict[str, Any], known: Collection[str], source: str = "") -> dict[str, Any]:
    """Translate a config's fields for `MRPConfig`: ours stay, of a published one those that are known, under our model type.

    Raises:
        ValueError: for the config of another kind of model.
    """
    kind = fields.get("model_type", "sdar_mrp")
    if kind == "sdar_mrp":
        return fields
    refuse_look_alikes(fields, source)
    extra: dict[str, Any] = {}
    if kind != DENSE:
        if (backbone := family_reading(fields)) is None:
            raise ValueError(
                f"the config's model_type is {kind!r}: what loads are checkpoints of this package ('sdar_mrp'), published ones "
                "('sdar' and those in docs/models.md) and, by MRPForCausalLM.from_backbone, autoregressive ones ('qwen3'), to "
                "be converted by training. The code of a repository reads its own family alone: for others install this package"
            )
        fields, extra = backbone.translated(fields), {"family": backbone.family}
        known = {*known, *backbone.fields}
    kept = {name: value for name, value in fields.items() if name in known or name in _OLD_SPELLINGS}
    return {**kept, **extra, "model_type": "sdar_mrp"}


class MRPConfig(Qwen3Config):
    """A `Qwen3Config` plus what block diffusion and the MRP head need (SDAR, arXiv 2510.06303; MRP, arXiv 2605.18817).

    The published configs (`model_type: "sdar"` and those of other families) load too; fields of theirs that mean nothing here
    are dropped. A family may have fields of its own, such as a number of experts.

    Args:
        family: Which layers the backbone has (`modeling_mrp/model/families`); `sdar`: Qwen3's.
        block_size: Tokens per diffusion block, counted from absolute position 0.
        mask_token_id: The id that stands for a token not revealed yet. It is never emitted.
        num_nextn_predict_layers: Decoder layers of the MRP head (published: 3); 0 for a backbone without a head.
        num_mrp_heads: Number of heads. Only one is defined: it serves every draft depth.
        head_predicts: `residual`: the head's output is added to the hidden states it read. `hidden`: it takes their place,
            the paper's ablation ("direct prediction").
        base_model_name_or_path: In the config of a head repository, which holds the head alone: the backbone it belongs to.
            None everywhere else, also in a loaded model, which has its backbone.
        base_model_revision: The backbone's commit, branch or tag.

    Raises:
        ValueError: if a size, a number of layers or an id is out of bounds; the dtype is unknown; the base of the
            rotary embedding or an epsilon is no number above 0; `head_predicts` is unknown; a layer uses sliding-window
            attention (the block-causal mask has no window); the attention is another repository's; when read from a file or
            dict, also for the config of another kind of model, and for values of the wrong type.
    """

    model_type = "sdar_mrp"
    # As transformers' classes of layers spell it; no config of a family without experts has either.
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 8
    block_size: int = 16
    mask_token_id: int = 151669
    num_nextn_predict_layers: int = 0
    num_mrp_heads: int = 1
    head_predicts: str = "residual"
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    family: str = DENSE

    def __post_init__(self, **kwargs: Any) -> None:
        for dtype in (self.dtype, kwargs.get("torch_dtype")):
            name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
            if dtype is not None and name not in _DTYPES:
                raise ValueError(f"dtype is {dtype!r}: use one of {', '.join(_DTYPES)}, or leave it out")
        for name, least, most, why in self._bounds():
            value = vars(self).get(name, kwargs.get(name))
            unset = value is None and name in ("num_key_value_heads", "num_labels", "pad_token_id")
            if not unset and not (isinstance(value, int) and least <= value <= most):
                raise ValueError(f"{name} is {value!r}: it must be an int of at least {least} and at most {most}{why}")
        other = None if self.family == DENSE else backbone_of(self.family)
        super().__post_init__(**(kwargs if other is None else other.completed(kwargs)))
        if self.layer_types != ["full_attention"] * self.num_hidden_layers:
            raise ValueError(
                f"layer_types is {self.layer_types}: block diffusion needs 'full_attention' in each of the "
                f"{self.num_hidden_layers} layers"
            )
        if "/" in str(self._attn_implementation):
            raise ValueError(
                f"attn_implementation is {self._attn_implementation!r}, code of another repository, which is not run (and "
                "knows no block-causal mask): use 'sdpa' or 'eager'"
            )
        theta = (self.rope_parameters or {}).get("rope_theta")
        for name, number in (("rope_theta in rope_parameters", theta), ("rms_norm_eps", self.rms_norm_eps)):
            if not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ValueError(f"{name} is {number!r}: it must be a number above 0")
        if self.head_predicts not in ("residual", "hidden"):
            raise ValueError(f"head_predicts is {self.head_predicts!r}: choose 'residual' or 'hidden'")
        if other is not None:
            other.check(self)

    def _bounds(self) -> Iterator[tuple[str, int, int, str]]:
        """Iterate over fields with their least and greatest value, and why."""
        yield from ((name, 1, _LARGEST, "") for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"))
        yield from ((name, 1, _LARGEST, "") for name in ("num_attention_heads", "num_key_value_heads"))
        yield "max_position_embeddings", 1, _LARGEST, ""
        yield "num_hidden_layers", 1, _MOST_LAYERS, ""
        yield "num_labels", 0, _LARGEST >> 16, ""
        yield "block_size", 1, self.max_position_embeddings, ", max_position_embeddings (published checkpoints use 4 to 64)"
        yield "mask_token_id", 0, self.vocab_size - 1, ": the id of the tokenizer's mask token, inside the vocabulary"
        yield "pad_token_id", 0, self.vocab_size - 1, ": the id of the tokenizer's pad token, inside the vocabulary, or null"
        yield "num_nextn_predict_layers", 0, _MOST_LAYERS, " (0: no head)"
        yield "num_mrp_heads", 1, 1, ": one head serves every draft depth"

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the fields of a `config.json` as transformers does, in our spelling."""
        found, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return our_fields(found, {field.name for field in fields(cls)}, str(pretrained_model_name_or_path)), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from its fields, ours or those of a published config."""
        ours = our_fields(config_dict, {field.name for field in fields(cls)})
        try:
            return super().from_dict(ours, **kwargs)
        except (StrictDataclassError, AttributeError, TypeError, LookupError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"the config holds a value of the wrong type: correct config.json ({reason})") from error

    def to_diff_dict(self) -> dict[str, Any]:
        """Select the fields to save; a backbone is named where there is a name, and a family where it is another."""
        saved = super().to_diff_dict()
        if self.family == DENSE:
            saved.pop("family", None)
        return {name: value for name, value in saved.items() if value is not None or not name.startswith("base_model_")}

    @property
    def has_head(self) -> bool:
        """True if the checkpoint carries an MRP head."""
        return self.num_nextn_predict_layers > 0
