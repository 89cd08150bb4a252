"""Configuration of a block-diffusion backbone with an optional MRP head."""

import dataclasses
import re
from pathlib import Path
from typing import Any, ClassVar

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .code import AUTO_MAP, write_code
from .families.sdar import DENSE, backbone_of, families

# How transformers 4.52, which wrote the published configs, spelled three of today's fields.
_OLD_SPELLINGS = {"rope_theta", "rope_scaling", "torch_dtype"}


def our_fields(fields: dict[str, Any], source: str = "") -> dict[str, Any]:
    """Translate a config's fields for `MRPConfig`: those of this package as they are, of others the known ones.

    Raises:
        ValueError: for an unsupported head, or kind of model, by its fields or the name of its repository, `source`.
    """
    for name, ours in (("head_predicts", "residual"), ("num_mrp_heads", 1)):
        if (value := fields.get(name, ours)) != ours:
            raise ValueError(f"{name} is {value!r}: a head here is one, of residuals ({name}={ours!r})")
    kind = str(fields.get("model_type", "sdar_mrp"))
    if kind == "sdar_mrp":
        return fields
    causal = fields.get("use_regular_causal") or re.match(r"(i-dlm|uno)\b", Path(source).name.lower())
    if kind.startswith("sdar") and causal:
        raise ValueError(
            f"{source or 'the config'} is of I-DLM or UNO, by its name or by use_regular_causal: each token of it sees the "
            "tokens before it alone, and predicts the next one. It does not load; models that do are in docs/models.md"
        )
    known = {field.name for field in dataclasses.fields(MRPConfig)} | _OLD_SPELLINGS
    if kind != DENSE:
        backbone = next((one for one in families().values() if one.published.items() <= fields.items()), None)
        if backbone is None:
            raise ValueError(
                f"the config's model_type is {kind!r}: what loads are checkpoints of this package ('sdar_mrp'), published ones "
                "('sdar' and those in docs/models.md) and, by MRPForCausalLM.from_backbone, autoregressive ones ('qwen3'). The "
                "code of a repository reads its own family alone: for others install this package"
            )
        fields = backbone.translated({name: value for name, value in fields.items() if value is not None})
        known |= backbone.fields.keys() | backbone.unsaid.keys()
    return {**{name: value for name, value in fields.items() if name in known}, "model_type": "sdar_mrp"}


class MRPConfig(Qwen3Config):
    """A `Qwen3Config` plus fields of block diffusion and of the MRP head (SDAR, arXiv 2510.06303; MRP, arXiv 2605.18817).

    Published configs load too, without their fields that have no meaning here. `ValueError` for values that are out of range or
    not supported.

    Args:
        family: The family of the backbone (`modeling_mrp/model/families`); some families have further fields.
        block_size: Tokens per diffusion block, counted from absolute position 0.
        mask_token_id: The id that stands for a token not revealed yet. It is never emitted.
        num_nextn_predict_layers: Decoder layers of the MRP head (published: 3); 0 for a backbone without a head.
        base_model_name_or_path, base_model_revision: The backbone, in the config of a repository that holds a head alone.
    """

    model_type = "sdar_mrp"
    # transformers' layers read the number of experts by this name; families without experts have neither field.
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    block_size: int = 16
    mask_token_id: int = 151669
    num_nextn_predict_layers: int = 0
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    family: str = DENSE

    def __post_init__(self, **kwargs: Any) -> None:
        for name, value, least, most, why in (
            ("block_size", self.block_size, 1, self.max_position_embeddings, "max_position_embeddings"),
            ("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1, "the tokenizer's mask token, inside the vocabulary"),
            ("pad_token_id", self.pad_token_id or 0, 0, self.vocab_size - 1, "inside the vocabulary, or null"),
            ("num_nextn_predict_layers", self.num_nextn_predict_layers, 0, 1024, "0: no head"),
        ):
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}: it must be an int from {least} to {most} ({why})")
        super().__post_init__(**{**backbone_of(self.family).fields, **kwargs})
        if self.layer_types != ["full_attention"] * self.num_hidden_layers:
            needed = f"block diffusion needs 'full_attention' in each of the {self.num_hidden_layers} layers"
            raise ValueError(f"layer_types is {self.layer_types}: {needed}")
        if "/" in str(self._attn_implementation):
            raise ValueError(
                f"attn_implementation is {self._attn_implementation!r}, code of another repository, which is not run (and "
                "knows no block-causal mask): use 'sdpa' or 'eager'"
            )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the fields of a `config.json` as transformers does; return them translated by `our_fields`."""
        found, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return our_fields(found, str(pretrained_model_name_or_path)), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from fields of this package or of a published config."""
        return super().from_dict(our_fields(config_dict), **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `save_pretrained` names the remote code itself; transformers would name the file with this class."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the config, with an `auto_map` that names the remote code, and write this code beside it."""
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)
        write_code(Path(save_directory), self.family)

    @property
    def has_head(self) -> bool:
        """True if the checkpoint carries an MRP head."""
        return self.num_nextn_predict_layers > 0
