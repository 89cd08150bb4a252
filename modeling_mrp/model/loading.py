"""Loading and saving of MRP models: the layouts that are read, backbones with heads from elsewhere, heads on their own."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, extract_commit_hash

from .attaching import BackboneSource, HeadMixin, head_to_save
from .code import AUTO_MAP, write_code
from .configuration import MRPConfig
from .families.registry import backbone_of
from .head import MRPHead
from .layouts import HEAD, backbone_location, hub_options, stored_json

log = logging.getLogger(__name__)

_OF_PUSHES = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")
_KEY_MAPPING = {r"^mrp_modules\.0\.model\.": HEAD}  # transformers renames by it while it loads


class MRPPreTrainedModel(HeadMixin, PreTrainedModel):
    """Loading, saving and initialisation shared by MRP models.

    Attributes:
        backbone_source: Where the backbone came from; None for a model that was made from a config.
    """

    config_class = MRPConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen3DecoderLayer", "MRPHead"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_flash_attn = False  # flash attention takes no block-causal mask
    _supports_flex_attn = True  # for the packed pass of training; decoding is faster with SDPA
    backbone_source: BackboneSource | None = None

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Let `experts_implementation` choose how transformers computes experts; it looks for them in the model's own file."""
        return True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load as transformers does: a full checkpoint of this package, one in the published layouts, or a head repository.

        A head repository's backbone is loaded by the name and revision in its config, and given the head; `revision` and
        `subfolder` are then the head's. Only safetensors are read, and no code but this package's runs.

        Raises:
            ValueError: if the checkpoint lacks a tensor, has one too many, or one of another shape (all are listed), or is cut
                short, or is of another kind of model; if the backbone of a head repository may not be followed or does not
                suit the head; for tensor parallelism of another family than SDAR's.
        """
        kwargs["key_mapping"] = {**_KEY_MAPPING, **(kwargs.get("key_mapping") or {})}
        if pretrained_model_name_or_path is None:  # from a config and a state dict
            return super().from_pretrained(None, *args, config=config, **kwargs)
        source = os.fspath(pretrained_model_name_or_path)
        path, fields = stored_json(source, **hub_options(kwargs))
        local = os.path.isdir(source)
        if not local and (commit := extract_commit_hash(str(path), None)):
            kwargs["revision"] = commit  # all files come from one state
        if fields.get("base_model_name_or_path") is not None:
            return cls._from_head_repository(source, fields, config, kwargs)
        kwargs |= {"use_safetensors": True, "trust_remote_code": False}  # or custom_generate/ would replace generate
        with_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # they are told below
        try:
            model, info = super().from_pretrained(source, *args, config=config, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"a safetensors file of {source} is not whole: download it again ({error})") from error
        told = ("missing_keys", "unexpected_keys", "mismatched_keys")
        if misfits := {name: sorted(info[name]) for name in told if info[name]}:
            raise ValueError(
                f"{source} does not fit its config: {misfits}. Check num_nextn_predict_layers (0: no head), the sizes in "
                "config.json, that the download is whole, and that it is quantized as its config says"
            )
        if (note := backbone_of(model.config.family).note(source)) is not None:
            log.warning(note)
        if not kwargs.get("subfolder"):
            where = os.path.abspath(source) if local else source
            model.backbone_source = BackboneSource(where, None if local else kwargs.get("revision"))
        return (model, info) if with_info else model

    @classmethod
    def from_backbone(cls, backbone: Any, head: Any = None, head_revision: str | None = None, **kwargs: Any) -> Any:
        """Load a backbone and a head that lie in different places.

        Args:
            backbone: A folder or id of any kind that `from_pretrained` takes but a head repository, or of an autoregressive
                Qwen3 checkpoint, which becomes a block-diffusion model only by training; or a loaded model.
            head: What `attach_head` takes, in place of a head that the backbone has; or None.
            head_revision: The commit, branch or tag of `head`.
            kwargs: As for `from_pretrained`; `revision` is the backbone's. A Qwen3 checkpoint takes `block_size` and
                `mask_token_id`, an id that no text holds.

        Raises:
            ValueError: as from `from_pretrained` and `attach_head`.
        """
        if isinstance(backbone, str | os.PathLike):
            model = cls._open_backbone(os.fspath(backbone), kwargs)
        elif hasattr(backbone, "attach_head"):
            model = backbone
        else:
            raise ValueError(f"backbone is {backbone!r}: pass the folder or id of a checkpoint, or a loaded MRP model")
        if head is not None:
            model._take_head(head, hub_options({**kwargs, "revision": head_revision, "subfolder": None}), kwargs)
        return model

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        head_only: bool = False,
        base_model_name_or_path: str | None = None,
        base_model_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save weights, both configs and the remote code as transformers does, or the head alone.

        Args:
            save_directory: As in transformers, like the other arguments that are not named here.
            is_main_process: As in transformers.
            state_dict: As in transformers.
            head_only: Whether to write the head alone, which names its backbone and loads it.
            base_model_name_or_path: With `head_only`, the backbone's name (an id or an absolute path), if it is not what the
                model was loaded from.
            base_model_revision: With it, the backbone's commit, branch or tag.
            kwargs: As in transformers, for the whole model.

        Raises:
            ValueError: for a generation config that `generate` would refuse; with `head_only`, as from `head_to_save`, or for
                `push_to_hub`; without it, if the backbone is named.
        """
        named: dict[str, Any] = {"base_model_name_or_path": base_model_name_or_path, "base_model_revision": base_model_revision}
        folder, pushed = Path(save_directory), kwargs.pop("push_to_hub", False)
        hub = {name: kwargs.pop(name) for name in _OF_PUSHES if name in kwargs}
        self.generation_config._from_model_config = False  # or our options would be dropped when it is read again
        self.check_options()
        self.generation_config.validate(strict=True)  # as it is when it is saved, behind the config
        if head_only:
            if pushed:
                raise ValueError("push_to_hub with head_only=True: save the head to a folder, and push that with `mrp push`")
            source = BackboneSource(base_model_name_or_path, base_model_revision) if base_model_name_or_path else None
            head, config = head_to_save(self, state_dict, source)
            if is_main_process:
                config.save_pretrained(folder)
                self.generation_config.save_pretrained(folder)
                save_file(head, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        elif any(named.values()):
            raise ValueError(f"{named}: a full checkpoint names none. Pass head_only=True, or leave them out")
        else:
            self.config.auto_map = dict(AUTO_MAP)
            kwargs |= {"is_main_process": is_main_process, "state_dict": state_dict}
            kwargs["save_original_format"] = False  # our names, also if the model came in a published layout
            super().save_pretrained(folder, **kwargs)
        both = [path for path in (folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME) if path.is_file()]
        if is_main_process and len(both) == 2:  # transformers leaves those of an earlier save, and loads them first
            min(both, key=lambda path: path.stat().st_mtime_ns).unlink()
        if is_main_process:
            write_code(folder, self.config.family)
            if pushed:
                self.push_to_hub(hub.pop("repo_id", folder.name), token=kwargs.get("token"), **hub)

    @torch.no_grad()
    def _init_weights(self: Any, module: nn.Module) -> None:
        head = self.mrp_head
        if head is not None and module is head.norm and head.predicts == "residual":
            init.zeros_(head.norm.weight)
        else:
            super()._init_weights(module)

    @classmethod
    def _from_head_repository(cls, source: str, fields: dict[str, Any], config: Any, kwargs: dict[str, Any]) -> Any:
        """Load the backbone that a head repository names, and give it the head."""
        where = backbone_location(fields["base_model_name_or_path"], source)
        ours = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
        adapter, name = ours.pop("adapter_kwargs", None) or {}, ours.pop("adapter_name", None)
        if (attention := getattr(config, "_attn_implementation", None)) is not None:  # AutoModel has put it there
            ours.setdefault("attn_implementation", attention)
        if fields.get("base_model_revision") is not None and not os.path.isdir(where):
            ours["revision"] = fields["base_model_revision"]
        loaded = cls._open_backbone(where, ours)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
        model._take_head(source, hub_options(kwargs), kwargs)
        model.name_or_path = model.config.name_or_path = source
        if (adapter_path := adapter.pop("_adapter_model_path", None)) is not None:
            model.load_adapter(adapter_path, adapter_name=name, adapter_kwargs=adapter)
        return loaded

    @classmethod
    def _open_backbone(cls, source: str, kwargs: dict[str, Any]) -> Any:
        """Load a model to put a head on; an autoregressive Qwen3 checkpoint gets a config of ours."""
        _, found = stored_json(source, **hub_options(kwargs))
        if (other := found.get("base_model_name_or_path")) is not None:
            raise ValueError(f"{source} is a head repository and has no backbone; its own is {other!r}: use that")
        if found.get("model_type") == "qwen3" and kwargs.get("config") is None:
            given = {name: value for name, value in kwargs.items() if name in ("block_size", "mask_token_id")}
            config = MRPConfig.from_dict({**found, "model_type": "sdar", **given})
            log.warning(
                f"{source} is an autoregressive Qwen3 checkpoint: until it is trained with the block-diffusion loss (blocks of "
                f"{config.block_size}, mask id {config.mask_token_id}) it generates nonsense"
            )
            kwargs = {name: value for name, value in kwargs.items() if name not in given} | {"config": config}
        return cls.from_pretrained(source, **kwargs)

    def _take_head(self: Any, head: Any, hub: dict[str, Any], kwargs: dict[str, Any]) -> None:
        """Attach a head; take over the options that its repository comes with, unless others were given."""
        self.attach_head(head, **hub)
        if not isinstance(head, MRPHead) and "generation_config" not in kwargs:
            try:
                stored = GenerationConfig.from_pretrained(head, **hub)
            except OSError:  # it comes with none
                return
            self.generation_config = self.generation_config_class.from_dict(stored.to_dict())
