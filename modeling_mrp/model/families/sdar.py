"""SDAR's backbone (`sdar`): Qwen3, and a mask that has to be given. The other families begin here."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from .registry import family


@family("sdar")
class MRPBackbone(Qwen3Model):
    """transformers' `Qwen3Model` with a mask that must be given, since its own is causal: the backbone of dense SDAR.

    Attributes:
        family: The name by which it was registered.
        models: Names of its published models.
        paper: Where they are described; None if no paper is cited.
        shifted: Whether a hidden state is that of the next position: the logits of position i predict the token at i + 1.
        unsaid: Fields that its published configs leave out, with their values.
    """

    _tp_plan: ClassVar[Any] = {"embed_tokens": "replicate"}  # rows of lm_head, with which it may be tied, are read
    family: ClassVar[str]
    models: ClassVar[str] = "SDAR"
    paper: ClassVar[str | None] = "2510.06303"
    shifted: ClassVar[bool] = False
    unsaid: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """As `Qwen3Model.forward`; `ValueError` if the mask is no dictionary, as where a trainer computes a next-token loss."""
        if not isinstance(attention_mask, dict):
            raise ValueError(
                "the backbone was called without the model around it, and would see a causal mask instead of its own. "
                "TRL's trainers do so for a next-token loss, which ruins the model: train with mrp_trainer.MRPTrainer, which "
                "takes the same records, or with transformers' Trainer and labels. For logits or hidden states call the model"
            )
        return super().forward(*args, attention_mask=attention_mask, **kwargs)

    @classmethod
    def reads(cls, fields: Mapping[str, Any]) -> bool:
        """Tell if a published config is one of this family: if its `model_type` is the family's name."""
        return bool(fields.get("model_type") == cls.family)

    @classmethod
    def translated(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Translate those fields of a published config that are not null into those of `MRPConfig`; others are dropped."""
        return {**cls.unsaid, **fields}

    @classmethod
    def note(cls, source: str) -> str | None:
        """Return what a user of the checkpoint `source` has to know; None if there is nothing."""
        return None
