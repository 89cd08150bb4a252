"""The base class of backbones whose layers are not Qwen3's. Each family is a subclass that sets the
differences."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from .sdar import FAMILIES, MRPBackbone


class FamilyBackbone(MRPBackbone):
    """The base class of backbones with other decoder layers of transformers than Qwen3's. A
    subclass names its `family`, under which it is registered, and the classes of its layers.

    Each layer must have a `self_attn.k_proj`, and must write keys of `num_key_value_heads` heads of
    `head_dim` dimensions to the cache.

    Attributes:
        family, models, paper, published: As in `MRPBackbone`.
        fields: Maps the names of config fields that the family has beyond those of `MRPConfig` to
            their defaults.
        shifted: Whether the hidden state at a position predicts the token at the next position,
            instead of the one there.
        unsaid: Maps config fields that published configs of the family may leave out to the values
            that these then have.
        renamed: Maps the names of fields in published configs of the family to their names here.
        layer: The class in transformers of the decoder layers.
        attention, norm_kind, rotary: The classes in transformers of the attention of these layers,
            of norms, and of the rotary embedding.
        conversions: How transformers converts published tensors into the model's, as a sequence of
            its `WeightRenaming` and `WeightConverter` objects.
    """

    unsaid: ClassVar[dict[str, Any]] = {}
    renamed: ClassVar[dict[str, str]] = {}
    layer: ClassVar[Any]
    attention: ClassVar[Any]
    norm_kind: ClassVar[Any]
    rotary: ClassVar[Any]
    conversions: ClassVar[Sequence[Any]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the family of a subclass. Tell transformers how its tensors are converted, which
        of its modules must not be split, and which outputs of its modules can be recorded."""
        super().__init_subclass__(**kwargs)
        if "family" not in vars(cls):  # such as the subclass that FSDP makes
            return
        FAMILIES[cls.family] = cls
        cls.published = {"model_type": cls.family, **vars(cls).get("published", {})}
        cls._no_split_modules = [cls.layer.__name__]
        cls._can_record_outputs = {"hidden_states": cls.layer, "attentions": cls.attention}
        if cls.conversions:
            register_checkpoint_conversion_mapping(
                cls.__name__, list(cls.conversions), overwrite=True
            )

    @classmethod
    def translate_published(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Translate the fields of a published config into fields of `MRPConfig`.

        Args:
            fields: The fields of the published config, without those that are None.

        Returns:
            A dict of these fields, renamed as `renamed` says, and `family`. For fields that the
            config leaves out, the dict has the values in `unsaid`, and a `head_dim`, which is
            `hidden_size` divided by `num_attention_heads`.
        """
        if "hidden_size" in fields and "num_attention_heads" in fields:
            fields = {"head_dim": fields["hidden_size"] // fields["num_attention_heads"], **fields}
        translated = {cls.renamed.get(name, name): value for name, value in fields.items()}
        return {**cls.unsaid, **translated, "family": cls.family}

    def __init__(self, config: Any) -> None:
        if getattr(config, "distributed_config", None) is not None:
            raise ValueError(
                f"a model of the family {self.family!r} is not divided over processes: use "
                "device_map"
            )
        super(Qwen3Model, self).__init__(config)  # its own __init__ would make Qwen3's layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            [self.layer(config, index) for index in range(config.num_hidden_layers)]
        )
        self.norm = self.norm_kind(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = self.rotary(config=config)
        self.has_sliding_layers = False
        self.post_init()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `MRPBackbone.forward` with the same arguments, and return its result. For a model
        with experts in float64, first make the model compute its experts in a loop, as the grouped
        matrix products of torch do not support that dtype."""
        if (
            "num_experts" in self.fields
            and self.dtype == torch.float64
            and self.config._experts_implementation == "grouped_mm"
        ):
            self.set_experts_implementation("eager")
        return super().forward(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # which are not layers of torch
        if "Experts" in type(module).__name__ or "Router" in type(module).__name__:
            for weight in module.parameters(recurse=False):
                init.normal_(weight, mean=0.0, std=self.config.initializer_range)
