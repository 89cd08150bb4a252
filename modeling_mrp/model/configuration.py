"""Configuration of an SDAR block-diffusion backbone with an optional MRP head."""

import math
import os
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_LARGEST_SIZE = (1 << 63) - 1  # of a tensor
_LONGEST_LIST = 1 << 16  # transformers makes lists of layers and labels
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_ROPE_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS.keys() - {"default"}))

# How transformers 4.52, which wrote the published configs, spelled three of today's fields.
_OLD_SPELLINGS = {"rope_theta", "rope_scaling", "torch_dtype"}


def our_fields(fields: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Translate a config's fields for `MRPConfig`: ours stay, of a published one those that are known, under our model type.

    Raises:
        ValueError: for the config of another kind of model.
    """
    kind = fields.get("model_type", "sdar_mrp")
    if kind == "sdar_mrp":
        return fields
    if kind == "qwen3":
        raise ValueError(
            "the config's model_type is 'qwen3', an autoregressive model: open it with MRPForCausalLM.from_backbone, as a "
            "backbone to be converted by training"
        )
    if kind != "sdar":
        raise ValueError(
            f"the config's model_type is {kind!r}: what loads are checkpoints of this package ('sdar_mrp') and published ones "
            "('sdar')"
        )
    kept = {name: value for name, value in fields.items() if name in known or name in _OLD_SPELLINGS}
    return {**kept, "model_type": "sdar_mrp"}


class MRPConfig(Qwen3Config):
    """A `Qwen3Config` plus what block diffusion and the MRP head need (SDAR, arXiv 2510.06303; MRP, arXiv 2605.18817).

    The published configs (`model_type: "sdar"`) load too; fields of theirs that mean nothing here are dropped.

    Args:
        block_size: Tokens per diffusion block, counted from absolute position 0.
        mask_token_id: The id that stands for a token not revealed yet. It is never emitted.
        num_nextn_predict_layers: Decoder layers of the MRP head (published: 3); 0 for a backbone without a head.
        num_mrp_heads: Number of heads. Only one is defined: it serves every draft depth.
        head_predicts: `residual`: the head's output is added to the hidden states it read. `hidden`: it takes their place,
            the paper's ablation ("direct prediction").
        draft_vocab_size: How many of the vocabulary's tokens the head drafts from (`MRPHead.draft_token_ids`); 0: all of them.
        base_model_name_or_path: In the config of a head repository, which holds the head alone: the backbone it belongs to.
            None everywhere else, also in a loaded model, which has its backbone.
        base_model_revision: The backbone's commit, branch or tag.
        speculators_config: In the config of a head repository: what it is, as vLLM's library speculators writes it
            (`describe_speculator`), for its tools. Nothing here reads it.
        speculators_model_type: With it, its kind of model: "mrp".

    Raises:
        ValueError: if `block_size` or a size of the backbone is not positive or too large; `mask_token_id` or
            `pad_token_id` lies outside of the vocabulary; the dtype, the activation or the kind of rotary embedding
            is unknown, or its base or the norms' epsilon no number above 0; the number of heads is not 1,
            `head_predicts` is unknown, the draft vocabulary is as large as the vocabulary or comes without a head;
            the kinds of layers are not as many as the layers, a layer uses sliding-window attention (the block-causal
            mask has no window), the attention is another repository's; or the backbone's name or revision is not a
            text; when read from a file or dict, also for the config of another kind of model, and for values of the
            wrong type.
    """

    model_type = "sdar_mrp"

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
    draft_vocab_size: int = 0
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    speculators_config: dict[str, Any] | None = None
    speculators_model_type: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for dtype in (self.dtype, kwargs.get("torch_dtype")):
            name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
            if dtype is not None and name not in _DTYPES:
                raise ValueError(f"dtype is {dtype!r}: use one of {', '.join(_DTYPES)}, or leave it out")
        self._check_bounds(kwargs.get("num_labels"))
        super().__post_init__(**kwargs)
        self._check_backbone()
        self._check_numerics()
        if not isinstance(self.block_size, int) or not 1 <= self.block_size <= self.max_position_embeddings:
            raise ValueError(
                f"block_size is {self.block_size!r}: it must be an int of at least 1 and at most max_position_embeddings, "
                f"{self.max_position_embeddings} (published checkpoints use 4 to 64)"
            )
        if not isinstance(self.mask_token_id, int) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id!r}, outside the vocabulary of {self.vocab_size} tokens: "
                "set it to the id of the tokenizer's mask token"
            )
        if not isinstance(self.num_nextn_predict_layers, int) or self.num_nextn_predict_layers < 0:
            raise ValueError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers}: use 0 for no head, or a depth of 1 or more"
            )
        if self.num_mrp_heads != 1:
            raise ValueError(f"num_mrp_heads is {self.num_mrp_heads}: one head serves every draft depth, so it must be 1")
        if self.head_predicts not in ("residual", "hidden"):
            raise ValueError(f"head_predicts is {self.head_predicts!r}: choose 'residual' or 'hidden'")
        if not isinstance(self.draft_vocab_size, int) or not 0 <= self.draft_vocab_size < self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size!r}: use 0 for the whole vocabulary, or an int below its size, "
                f"{self.vocab_size}"
            )
        if self.draft_vocab_size and not self.num_nextn_predict_layers:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}, but there is no head to draft with: use 0")
        if self.base_model_name_or_path is not None and not (
            isinstance(self.base_model_name_or_path, str) and self.base_model_name_or_path
        ):
            raise ValueError(
                f"base_model_name_or_path is {self.base_model_name_or_path!r}: name the backbone of this head, or leave it out"
            )
        if self.base_model_revision is not None and (
            not isinstance(self.base_model_revision, str) or self.base_model_name_or_path is None
        ):
            raise ValueError(
                f"base_model_revision is {self.base_model_revision!r} and base_model_name_or_path "
                f"{self.base_model_name_or_path!r}: a revision is a commit, branch or tag of the backbone that is named"
            )

    def _check_bounds(self, num_labels: Any) -> None:
        """Check what is too large before anything is made of it."""
        sizes = {name: getattr(self, name) for name in (*_SIZES, "num_nextn_predict_layers")}
        for name, size in {**sizes, "num_labels": num_labels}.items():
            most = _LONGEST_LIST if name in ("num_hidden_layers", "num_labels") else _LARGEST_SIZE
            if isinstance(size, int) and size > most:
                raise ValueError(f"{name} is {size if size.bit_length() < 99 else 'huge'}: it must be at most {most}")

    def _check_backbone(self) -> None:
        """Check what Qwen3's own config lets pass."""
        for name in _SIZES:
            if not isinstance(size := getattr(self, name), int) or size < 1:
                raise ValueError(f"{name} is {size!r}: it must be an int of at least 1")
        if any(kind != "full_attention" for kind in self.layer_types or ()):
            raise ValueError(f"layer_types is {self.layer_types}: block diffusion needs 'full_attention' in every layer")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers and num_hidden_layers is {self.num_hidden_layers}: make "
                "them agree, or leave layer_types out"
            )
        if "/" in str(self._attn_implementation):
            raise ValueError(
                f"attn_implementation is {self._attn_implementation!r}, code of another repository, which is not run (and "
                "knows no block-causal mask): use 'sdpa' or 'eager'"
            )

    def _check_numerics(self) -> None:
        """Check what Qwen3's own layers would find out late, or never."""
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act is {self.hidden_act!r}, which transformers does not know: SDAR's is 'silu'")
        rope = self.rope_parameters or {}
        if (kind := rope.get("rope_type", "default")) not in _ROPE_TYPES:
            raise ValueError(f"rope_type in rope_parameters is {kind!r}: use one of {', '.join(_ROPE_TYPES)}")
        above_0 = {"rope_theta in rope_parameters": rope.get("rope_theta"), "rms_norm_eps": self.rms_norm_eps}
        if "factor" in rope:
            above_0["factor in rope_parameters"] = rope["factor"]
        for name, value in above_0.items():
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: it must be a number above 0")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id!r}, outside the vocabulary of {self.vocab_size} tokens: set it to the id "
                "of the tokenizer's pad token, or to null"
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the fields of a `config.json` as transformers does, in our spelling."""
        found, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return our_fields(found, {field.name for field in fields(cls)}), kwargs

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
        """Select the fields to save: a checkpoint that carries its backbone has none that name one."""
        saved = super().to_diff_dict()
        of_heads = ("base_model_", "speculators_")
        if self.base_model_name_or_path is None:
            return {name: value for name, value in saved.items() if not name.startswith(of_heads)}
        return {name: value for name, value in saved.items() if value is not None or not name.startswith(of_heads)}

    def describe_speculator(self, verifier: str, architectures: list[str]) -> None:
        """Say in the words of speculators that this is an MRP head, and what verifies its drafts.

        Args:
            verifier: The backbone's name.
            architectures: Those in the backbone's own config.
        """
        drafted = {"proposal_type": "greedy", "speculative_tokens": max(self.block_size - 1, 1)}  # of a block but its next one
        self.speculators_model_type = "mrp"
        self.speculators_config = {
            "algorithm": "mrp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**drafted, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        }

    @property
    def has_head(self) -> bool:
        """True if the checkpoint carries an MRP head."""
        return self.num_nextn_predict_layers > 0


__all__ = ["MRPConfig"]
