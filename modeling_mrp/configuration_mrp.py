"""Configuration of an SDAR block-diffusion backbone with an optional MRP head."""

from typing import Any

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


class MRPConfig(Qwen3Config):
    """A `Qwen3Config` plus what block diffusion and the MRP head need (SDAR, arXiv 2510.06303; MRP, arXiv 2605.18817).

    Args:
        block_size: Tokens per diffusion block, counted from absolute position 0.
        mask_token_id: The id that stands for a token not revealed yet. It is never emitted.
        num_nextn_predict_layers: Decoder layers of the MRP head (published: 3); 0 for a backbone without a head.
        num_mrp_heads: Number of heads. Only one is defined: it serves every draft depth.
        head_predicts: `residual`: the head's output is added to the hidden states it read. `hidden`: it takes their place,
            the paper's ablation ("direct prediction").
        draft_vocab_size: How many of the vocabulary's tokens the head drafts from (`MRPHead.draft_token_ids`); 0: all of them.

    Raises:
        ValueError: if `block_size` is not positive, `mask_token_id` lies outside the vocabulary, the number of heads is not
            1, `head_predicts` is unknown, the draft vocabulary is as large as the vocabulary or comes without a head, or a
            layer uses sliding-window attention (the block-causal mask has no window).
    """

    model_type = "sdar_mrp"
    _auto_class = "AutoConfig"

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

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(
                f"block_size is {self.block_size!r}: it must be an int of at least 1 (published checkpoints use 4 to 64)"
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
        if any(kind != "full_attention" for kind in self.layer_types or ()):
            raise ValueError(f"layer_types is {self.layer_types}: block diffusion needs 'full_attention' in every layer")

    @property
    def has_head(self) -> bool:
        """Whether the checkpoint carries an MRP head."""
        return self.num_nextn_predict_layers > 0


__all__ = ["MRPConfig"]
