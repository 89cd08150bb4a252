"""Configuration of a block-diffusion backbone with an optional MRP head."""

import dataclasses
import re
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .code import AUTO_MAP, write_code
from .families.sdar import DENSE, backbone_of, families

# Three fields as transformers 4.52, which wrote the published configs, spelled them.
_OLD_SPELLINGS = {"rope_theta", "rope_scaling", "torch_dtype"}


# A number's type, least value, largest value, and description.
_Range = tuple[Any, float, float, str]
_SIZE_RANGE: _Range = (Integral, 1, 1 << 20, "a size of the checkpoint's tensors")
_SIZES: dict[str, _Range] = {
    "vocab_size": (Integral, 1, 1 << 24, "a size of the checkpoint's tensors"),
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "head_dim",
        ),
        _SIZE_RANGE,
    ),
    "max_position_embeddings": (Integral, 1, 1 << 62, "the longest text"),
    "rms_norm_eps": (Real, 0, 1, "as the model was trained"),
    "attention_dropout": (Real, 0, 1, "a probability"),
    "initializer_range": (Real, 0, 1e6, "a standard deviation"),
}
_TRAINED_WITH: _Range = (Real, 1e-9, 1e9, "as the model was trained")
# The fields of rope_parameters other than its type, and the fields that each type requires.
_ROPE: dict[str, _Range] = {
    "rope_theta": (Real, 1.0001, 1e12, "the base of the rotary frequencies"),
    "factor": (Real, 1, 1e6, "how much longer texts are than those of the first training"),
    "original_max_position_embeddings": (
        Integral,
        2,
        1 << 62,
        "the longest text of the first training",
    ),
    "partial_rotary_factor": (Real, 1e-9, 1, "the share of a head's dimensions that are rotated"),
    **dict.fromkeys(
        ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
        _TRAINED_WITH,
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (Real, 0, 1e9, "as the model was trained")),
}
_NULLABLE = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_ROPE_NEEDS = {
    **dict.fromkeys(("linear", "dynamic", "yarn", "proportional"), ("factor",)),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def check_number(
    name: str, value: Any, number_type: Any, lower: float, upper: float, reason: str
) -> None:
    """Raise `ValueError` unless a value is a number of the right type and within its bounds.

    Args:
        name: The name of the value, for the message.
        value: The value.
        number_type: `Integral` or `Real`.
        lower, upper: The smallest and the largest value that are allowed.
        reason: The meaning of the number or of a bound, with which the message ends.
    """
    if isinstance(value, bool) or not isinstance(value, number_type) or not lower <= value <= upper:
        type_name = "an int" if number_type is Integral else "a number"
        raise ValueError(
            f"{name} is {value!r}: it must be {type_name} from {lower} to {upper} ({reason})"
        )


def check_rope(rope: Mapping[str, Any], head_dim: int) -> None:
    """Raise `ValueError` if `rope_parameters` do not give finite rotary frequencies for heads of
    `head_dim` dimensions."""
    rope_type = rope.get("rope_type", "default")
    rope_types = ("default", *sorted(ROPE_INIT_FUNCTIONS))
    if rope_type not in rope_types:
        raise ValueError(
            f"rope_type is {rope_type!r} in rope_parameters: it must be one of "
            f"{', '.join(rope_types)}"
        )
    for name in ("rope_theta", *_ROPE_NEEDS.get(rope_type, ())):
        if rope.get(name) is None:
            raise ValueError(
                f"{name} is missing in rope_parameters of the type {rope_type!r}: add it, as the "
                "model was trained"
            )
    for name, bounds in _ROPE.items():
        if name in rope and (rope[name] is not None or name not in _NULLABLE):
            check_number(name, rope[name], *bounds)
    frequencies = int(head_dim * (rope.get("partial_rotary_factor") or 1)) // 2
    if not frequencies:
        raise ValueError(
            f"partial_rotary_factor is {rope.get('partial_rotary_factor')!r}: of a head's "
            f"{head_dim} dimensions (head_dim) it must leave two or more to be rotated"
        )
    if rope_type == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        raise ValueError(
            f"low_freq_factor is {rope['low_freq_factor']!r}: it must be below high_freq_factor"
        )
    factor_lists = ("short_factor", "long_factor") if rope_type == "longrope" else ()
    for name in factor_lists:
        if not isinstance(rope[name], list) or len(rope[name]) != frequencies:
            raise ValueError(
                f"{name} is {rope[name]!r}: it must be a list of {frequencies} numbers, one for "
                "each frequency"
            )
        for number in rope[name]:
            check_number(f"a number in {name}", number, *_TRAINED_WITH)


def check_dtype(dtype: Any) -> None:
    """Raise `ValueError` unless a config's dtype is None, a floating-point `torch.dtype`, or the
    name of such a dtype."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (
        isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point
    ):
        raise ValueError(
            f"dtype is {dtype!r}: it must be the name of a floating-point dtype, such as 'bfloat16'"
        )


# Types of autoregressive checkpoints, and of the block-diffusion models with their layers.
AUTOREGRESSIVE = {"qwen3": DENSE, "qwen2": "Fast_dLLM_Qwen", "llama": "shifted_llama"}
# Those that become shifted models only if that is asked for.
SHIFTED = {"qwen3": "shifted_qwen3"}


def is_autoregressive(fields: dict[str, Any]) -> bool:
    """Return whether the fields of a config are those of an autoregressive checkpoint that can be
    opened as a block-diffusion model.

    This is so if `model_type` is a key of `AUTOREGRESSIVE`, such as `llama`, and no family of
    backbones identifies the config as one of its own (`MRPBackbone.published`). For example,
    configs of Stable-DiffCoder have the `model_type` `llama`, too, but the result for them is
    False.
    """
    return fields.get("model_type") in AUTOREGRESSIVE and not any(
        family.published.items() <= fields.items() for family in families().values()
    )


def as_block_diffusion(fields: dict[str, Any], shifted: bool | None = None) -> dict[str, Any]:
    """Convert the config fields of an autoregressive checkpoint into those of a block-diffusion
    model with the same layers.

    Args:
        fields: The fields; `model_type` is a key of `AUTOREGRESSIVE`.
        shifted: Which token the hidden state at a position of the new model predicts. True: the
            token at the next position, as in the checkpoint. False: the token at the same position,
            as in SDAR; only for Qwen3. None: as with False for Qwen3, and as with True for others.

    Returns:
        A copy of `fields` with the `model_type` of the block-diffusion model.

    Raises:
        ValueError: if `shifted` is False and the checkpoint is not a Qwen3.
    """
    name = fields["model_type"]
    opened = AUTOREGRESSIVE[name] if not shifted else SHIFTED.get(name, AUTOREGRESSIVE[name])
    if shifted is False and name not in SHIFTED:
        raise ValueError(
            f"shifted is False, and a {name} checkpoint is only opened with hidden states that "
            "predict the next token: leave it out"
        )
    return {**fields, "model_type": opened}


def translate_fields(fields: dict[str, Any], source: str = "") -> dict[str, Any]:
    """Translate the fields of a config into those of `MRPConfig`.

    Args:
        fields: The fields of the config.
        source: The name of its repository or folder. It helps to recognise models of I-DLM and UNO,
            which are not supported.

    Returns:
        For a config of this package, `fields` itself. For a published config, a dict with the
        fields that `MRPConfig` and the family of the backbone know; other fields are dropped.

    Raises:
        ValueError: if the head or the kind of model is not supported.
    """
    for name, supported in (("head_predicts", "residual"), ("num_mrp_heads", 1)):
        if (value := fields.get(name, supported)) != supported:
            raise ValueError(
                f"{name} is {value!r}: a head here is one, of residuals ({name}={supported!r})"
            )
    model_type = str(fields.get("model_type", "sdar_mrp"))
    if model_type == "sdar_mrp":
        return fields
    causal = fields.get("use_regular_causal") or re.match(
        r"(i-dlm|uno)\b", Path(source).name.lower()
    )
    if model_type.startswith("sdar") and causal:
        raise ValueError(
            f"{source or 'the config'} is of I-DLM or UNO, by its name or by use_regular_causal: "
            "each token of it sees the tokens before it alone, and predicts the next one. It does "
            "not load; models that do are in docs/models.md"
        )
    known_fields = {field.name for field in dataclasses.fields(MRPConfig)} | _OLD_SPELLINGS
    if model_type != DENSE:
        backbone = None
        for family in families().values():
            if family.published.items() <= fields.items():
                backbone = family
                break
        if backbone is None:
            raise ValueError(
                f"the config's model_type is {model_type!r}: what loads are checkpoints of this "
                "package ('sdar_mrp'), published ones ('sdar' and those in docs/models.md) and, by "
                "MRPForCausalLM.from_backbone, autoregressive ones ('qwen2', 'qwen3', 'llama'). "
                "The code of a repository reads its own family alone: for others install this "
                "package"
            )
        fields = backbone.translate_published(
            {name: value for name, value in fields.items() if value is not None}
        )
        known_fields |= backbone.fields.keys() | backbone.unsaid.keys()
    return {
        **{name: value for name, value in fields.items() if name in known_fields},
        "model_type": "sdar_mrp",
    }


class MRPConfig(Qwen3Config):
    """A `Qwen3Config` plus fields of block diffusion and of the MRP head (SDAR, arXiv 2510.06303;
    MRP, arXiv 2605.18817).

    Published configs can be loaded, too; fields that have no meaning here are dropped. `ValueError`
    is raised for values that are out of range or not supported.

    Args:
        family: The family of the backbone (`modeling_mrp/model/families`); some families have
            further fields.
        block_size: The number of tokens per diffusion block. Blocks are counted from absolute
            position 0.
        mask_token_id: The id that stands for a token not revealed yet. It is never emitted.
        num_nextn_predict_layers: The number of decoder layers of the MRP head (3 in published
            heads); 0 for a backbone without a head.
        base_model_name_or_path, base_model_revision: The name and the revision of the backbone, in
            the config of a repository that holds only a head.
    """

    model_type = "sdar_mrp"
    # transformers' layers read the number of experts by this name; families without experts have
    # neither field.
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}

    block_size: int = 16
    mask_token_id: int = 151669
    num_nextn_predict_layers: int = 0
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    family: str = DENSE

    def __post_init__(self, **kwargs: Any) -> None:
        for name, bounds in _SIZES.items():
            check_number(name, getattr(self, name), *bounds)
        last_id = self.vocab_size - 1
        check_number(
            "block_size",
            self.block_size,
            Integral,
            1,
            self.max_position_embeddings,
            "max_position_embeddings",
        )
        check_number(
            "mask_token_id",
            self.mask_token_id,
            Integral,
            0,
            last_id,
            "the tokenizer's mask token, inside the vocabulary",
        )
        check_number(
            "pad_token_id",
            self.pad_token_id or 0,
            Integral,
            0,
            last_id,
            "inside the vocabulary, or null",
        )
        check_number(
            "num_nextn_predict_layers",
            self.num_nextn_predict_layers,
            Integral,
            0,
            1024,
            "0: no head",
        )
        if self.num_key_value_heads is not None:
            reason = "num_attention_heads"
            check_number(
                "num_key_value_heads",
                self.num_key_value_heads,
                Integral,
                1,
                self.num_attention_heads,
                reason,
            )
            if self.num_attention_heads % self.num_key_value_heads:
                raise ValueError(
                    f"num_key_value_heads is {self.num_key_value_heads}: it must divide "
                    f"num_attention_heads, {self.num_attention_heads}"
                )
        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}: it must be one of {', '.join(sorted(ACT2FN))}"
            )
        check_dtype(self.dtype if self.dtype is not None else kwargs.get("torch_dtype"))
        super().__post_init__(**{**backbone_of(self.family).fields, **kwargs})
        check_rope(self.rope_parameters, self.head_dim)
        if self.layer_types != ["full_attention"] * self.num_hidden_layers:
            requirement = (
                f"block diffusion needs 'full_attention' in each of the {self.num_hidden_layers} "
                "layers"
            )
            raise ValueError(f"layer_types is {self.layer_types}: {requirement}")
        if not isinstance(self._attn_implementation, str | None):
            raise ValueError(
                f"attn_implementation is {self._attn_implementation!r}: use 'sdpa' or 'eager'"
            )
        if "/" in str(self._attn_implementation):
            raise ValueError(
                f"attn_implementation is {self._attn_implementation!r}, code of another "
                "repository, which is not run (and knows no block-causal mask): use 'sdpa' or "
                "'eager'"
            )

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the fields of a `config.json` as transformers does. Return the fields, translated
        into those of this class (`translate_fields`), and the keyword arguments that were not
        used."""
        fields, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return translate_fields(fields, str(pretrained_model_name_or_path)), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from the fields of a config of this package or of a published one. Raise
        `ValueError` for a config of another kind of model, and for fields that cannot be read."""
        fields = translate_fields(config_dict)
        for name in fields:
            if callable(getattr(cls, name, None)) or name in (
                "base_model_tp_plan",
                "base_model_pp_plan",
            ):
                raise ValueError(
                    f"the config has a field {name!r}, which is a part of its class and no "
                    "setting: remove it"
                )
        try:
            return super().from_dict(fields, **kwargs)
        except (
            StrictDataclassError,
            TypeError,
            AttributeError,
            KeyError,
            ArithmeticError,
        ) as error:
            message = " ".join(str(error).split())
            raise ValueError(
                f"a field of the config cannot be read: {message}. Correct it, or download the "
                "config again"
            ) from error

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing. In transformers, this method makes `save_pretrained` name the file with this
        class as the remote code; here, `save_pretrained` names the remote code itself."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the config, with an `auto_map` that names the remote code, and write the remote code
        beside it."""
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)
        write_code(Path(save_directory), self.family)

    @property
    def has_head(self) -> bool:
        """Whether the checkpoint has an MRP head."""
        return self.num_nextn_predict_layers > 0
