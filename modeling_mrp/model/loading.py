"""Loading and saving of MRP models: the layouts that are read, backbones with heads from elsewhere, heads on their own."""

import copy
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_NAME,
    PushToHubMixin,
    cached_file,
    extract_commit_hash,
    find_adapter_config_file,
)

from .attaching import HeadMixin
from .configuration import MRPConfig
from .families.registry import DENSE, backbone_of
from .head import MRPHead
from .layouts import (
    HEAD,
    StoredTensor,
    backbone_location,
    hub_options,
    is_hub_id,
    stored_json,
    stored_tensors,
    weight_files,
)
from .saving import AUTO_MAP, BackboneSource, head_to_save, model_tags, write_code, written_beside

log = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_KEY_MAPPING = {r"^mrp_modules\.0\.model\.": HEAD}  # transformers renames by it while it loads
_OF_THE_HUB = ("repo_id", "commit_message", "commit_description", "private", "token", "create_pr", "revision", "tags")


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
            ValueError: before any weights are read, if the checkpoint lacks a tensor, has one too many, or one of another shape
                (all are listed), has no safetensors, or is of another kind of model; if the backbone of a head repository may
                not be followed or does not suit the head; for tensor parallelism of another family than SDAR's.
        """
        if kwargs.get("gguf_file") is not None or kwargs.get("use_safetensors") is False:
            raise ValueError("only safetensors are read: leave out gguf_file and use_safetensors=False")
        kwargs["key_mapping"] = {**_KEY_MAPPING, **(kwargs.get("key_mapping") or {})}
        if pretrained_model_name_or_path is None:  # from a config and a state dict
            return super().from_pretrained(None, *args, config=config, **kwargs)
        source = os.fspath(pretrained_model_name_or_path)
        config, kwargs = cls._pinned(source, config, kwargs)
        if getattr(config, "base_model_name_or_path", None) is not None:
            return cls._from_head_repository(source, config, kwargs)
        divided = [name for name in ("tp_plan", "tp_size", "distributed_config") if kwargs.get(name)]
        if divided and config.family != DENSE:
            raise ValueError(
                f"{', '.join(divided)}: a model of the family {config.family!r} is not divided over processes: use device_map, "
                f"or a model of the family {DENSE!r}"
            )
        cls._check_files(source, config, kwargs)
        if (note := backbone_of(config.family).note(source)) is not None:
            log.warning(note)
        kwargs |= {"use_safetensors": True, "trust_remote_code": False}  # or custom_generate/ would replace generate
        with_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(source, *args, config=config, output_loading_info=True, **kwargs)
        if gaps := {name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys") if info[name]}:
            raise ValueError(
                f"{source} does not fit its config: {gaps}. Check that it is whole, and quantized as its config says"
            )
        if not kwargs.get("subfolder"):
            local = os.path.isdir(source)
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

    @classmethod
    def check_tensors(cls, config: MRPConfig, found: dict[str, StoredTensor], prefix: str = "") -> None:
        """Compare a checkpoint's tensors with those of this prefix that its config calls for; nothing is allocated.

        Raises:
            ValueError: if they do not fit, all of which are listed; or if no tensor can have a shape that the config calls for.
        """
        try:
            with torch.device("meta"):
                model = cls(copy.deepcopy(config))
                tensors = model.state_dict()
        except (RuntimeError, TypeError, LookupError, AssertionError, OverflowError) as error:
            raise ValueError(f"the values in the config are those of no model: correct config.json ({error!r})") from error
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            if name.startswith(prefix):  # as it is, or in the parts that published checkpoints have
                shape = tuple(tensor.shape)
                known = name in found or not name.startswith("model.")
                shapes |= {name: shape} if known else model.model.published(name, shape)
        optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
        misfits = [f"missing: {name}" for name in sorted(shapes.keys() - found.keys() - optional)]
        for ours, (name, _, shape, dtype) in sorted(found.items()):
            if ours not in shapes:
                misfits.append(f"unexpected: {name}")
            elif shape != shapes[ours]:
                misfits.append(f"wrong shape: {name} is {list(shape)}, needs {list(shapes[ours])}")
            elif not dtype.startswith(("F", "BF")):
                misfits.append(f"wrong type: {name} holds {dtype} numbers")
        if misfits:
            raise ValueError(
                f"the checkpoint does not fit its config ({len(misfits)} tensors):\n  " + "\n  ".join(misfits) + "\n"
                "Check num_nextn_predict_layers (0: no head), the sizes in config.json, and that the download is whole"
            )

    def load_adapter(self, peft_model_id: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load a peft adapter as transformers does, but only from whole safetensors; `ValueError` where there are none."""
        if peft_model_id is not None:
            hub = hub_options({**(kwargs.get("adapter_kwargs") or {}), **kwargs})
            weights = cached_file(peft_model_id, ADAPTER_WEIGHTS, _raise_exceptions_for_missing_entries=False, **hub)
            if weights is None:
                raise ValueError(
                    f"no {ADAPTER_WEIGHTS} in {peft_model_id}, and no pickled weights are read: save it as safetensors"
                )
            stored_tensors([Path(weights)])  # a damaged file would be found only when the model has been changed for it
        return super().load_adapter(peft_model_id, *args, **kwargs)

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        *,
        head_only: bool = False,
        base_model_name_or_path: str | None = None,
        base_model_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save weights, both configs and the remote code as transformers does, or the head alone.

        A save that fails leaves the folder as it was, and a model may be saved into the folder it was loaded from.

        Args:
            save_directory: As in transformers, like the other arguments that are not named here.
            is_main_process: As in transformers.
            state_dict: As in transformers.
            push_to_hub: Whether to push, too, to `repo_id` or a repository of the user's own with the folder's name.
            head_only: Whether to write the head alone, which names its backbone and loads it.
            base_model_name_or_path: With `head_only`, the backbone's name (an id or an absolute path), if it is not what the
                model was loaded from.
            base_model_revision: With it, the backbone's commit, branch or tag.
            kwargs: As in transformers.

        Raises:
            ValueError: for a generation config that `generate` would refuse; with `head_only`, as from `head_to_save`; without
                it, if the backbone is named.
        """
        hub = {name: kwargs.pop(name) for name in _OF_THE_HUB if name in kwargs}
        named: dict[str, Any] = {"base_model_name_or_path": base_model_name_or_path, "base_model_revision": base_model_revision}
        folder = Path(save_directory)
        self.generation_config._from_model_config = False  # or our options would be dropped when it is read again
        self.check_options()
        if head_only:
            source = BackboneSource(base_model_name_or_path, base_model_revision) if base_model_name_or_path else None
            head, config = head_to_save(self, state_dict, source)
            if is_main_process:
                with written_beside(folder) as beside:
                    save_file(head, beside / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
                    config.save_pretrained(beside)
                    self.generation_config.save_pretrained(beside)
                    write_code(beside, config.family)
        elif any(named.values()):
            raise ValueError(f"{named}: a full checkpoint names none. Pass head_only=True, or leave them out")
        else:
            self.config.auto_map = dict(AUTO_MAP)
            self.config.base_model_name_or_path = self.config.base_model_revision = None
            kwargs |= {"is_main_process": is_main_process, "state_dict": state_dict}
            kwargs["save_original_format"] = False  # our names, also if the model came in a published layout
            if not is_main_process or kwargs.get("distributed_checkpoint"):
                super().save_pretrained(folder, **kwargs)
            else:
                with written_beside(folder) as beside:
                    super().save_pretrained(beside, **kwargs)
                    if (beside / "config.json").is_file():  # an adapter has none
                        write_code(beside, self.config.family)
        if push_to_hub and is_main_process:
            self.push_to_hub(hub.pop("repo_id", folder.name), head_only=head_only, **named, **hub)

    def push_to_hub(
        self, repo_id: str, *, tokenizer: Any = None, private: bool = True, tags: str | Sequence[str] = (), **kwargs: Any
    ) -> Any:
        """Push what `save_pretrained` saves, as transformers does, into a private repository if it is new.

        `mrp push` does it with care: a card with facts and a picture, nothing of another kind overwritten, old shards removed.

        Args:
            repo_id: "org/name", or "name" for a repository of the user's own.
            tokenizer: Is pushed beside the model.
            private: Whether a new repository is private.
            tags: Of the card, beside those of MRP models.
            kwargs: Those of `save_pretrained` for a head alone; or as in transformers, `revision`, `create_pr`, `token`, ...

        Returns:
            The commit.

        Raises:
            ValueError: as from `save_pretrained`, or if the backbone of a head has no name on the Hub.
        """
        of_head = ("head_only", "base_model_name_or_path", "base_model_revision")
        how = {name: kwargs.pop(name) for name in of_head if name in kwargs}
        base = how.get("base_model_name_or_path") or (self.backbone_source.name if self.backbone_source else None)
        if how.get("head_only") and base is not None and not is_hub_id(base):
            raise ValueError(
                f"base_model_name_or_path is {base!r}, and a head on the Hub needs a backbone that others find: push the "
                "backbone, then name it here as 'org/name'"
            )

        def save(folder: str, **options: Any) -> None:
            self.save_pretrained(folder, **how, **options)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

        pushed: Any = PushToHubMixin()
        pushed.save_pretrained = save
        kwargs.setdefault("commit_message", "Upload an MRP head" if how.get("head_only") else "Upload model")
        tags = [*model_tags(self.config.family), *([tags] if isinstance(tags, str) else tags)]
        return pushed.push_to_hub(repo_id, private=private, tags=tags, **kwargs)

    @torch.no_grad()
    def _init_weights(self: Any, module: nn.Module) -> None:
        head = self.mrp_head
        if head is not None and module is head.norm and head.predicts == "residual":
            init.zeros_(head.norm.weight)
        else:
            super()._init_weights(module)

    @classmethod
    def _pinned(cls, source: str, config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Read the config, and pin the arguments' revision to its commit: all files then come from one state."""
        path, _ = stored_json(source, **hub_options(kwargs))
        if not os.path.isdir(source) and (commit := extract_commit_hash(str(path), None)):
            kwargs = {**kwargs, "revision": commit}
        if isinstance(config, PreTrainedConfig):
            return config, kwargs
        dtypes = {name: kwargs[name] for name in ("dtype", "torch_dtype") if name in kwargs}
        others = {name: value for name, value in kwargs.items() if name not in dtypes}
        config, unused = cls.config_class.from_pretrained(config or source, return_unused_kwargs=True, **others)
        return config, {**unused, **dtypes, **hub_options(kwargs)}

    @classmethod
    def _check_files(cls, source: str, config: Any, kwargs: dict[str, Any]) -> None:
        """Compare the files' headers with the config, before a config that lies can make anything be allocated."""
        hub = hub_options(kwargs)
        if (elsewhere := getattr(config, "transformers_weights", None)) is not None:
            raise ValueError(f"the config of {source} points to weights in {elsewhere!r}: only model*.safetensors are read")
        cls._stored_options(source, hub)  # transformers would pass over damaged ones
        adapter = kwargs.get("adapter_kwargs") or {}
        if not os.path.isdir(source) and "_adapter_model_path" not in adapter and find_adapter_config_file(source, **hub):
            raise ValueError(  # transformers would load the base that adapter_config.json names, whatever that is
                f"{source} holds an adapter beside its model: load the adapter from a repository of its own with load_adapter"
            )
        if getattr(config, "quantization_config", None) is None:  # or it has the tensors that its quantizer makes
            cls.check_tensors(config, stored_tensors(weight_files(source, **hub)))

    @classmethod
    def _stored_options(cls, source: str, hub: dict[str, Any]) -> Any:
        """Read the generation config of a checkpoint, None if it has none; `ValueError` for a damaged one or a wrong value."""
        try:
            path, fields = stored_json(source, GENERATION_CONFIG_NAME, **hub)
        except OSError:
            return None
        try:
            return cls.generation_config_class.from_dict(fields)
        except (AttributeError, TypeError, ValueError) as error:  # transformers compares some fields of any type
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _from_head_repository(cls, source: str, config: Any, kwargs: dict[str, Any]) -> Any:
        """Load the backbone that a head repository names, and give it the head."""
        where = backbone_location(config.base_model_name_or_path, source)
        ours = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
        adapter, name = ours.pop("adapter_kwargs", None) or {}, ours.pop("adapter_name", None)
        if config._attn_implementation is not None:  # AutoModel has put it there
            ours.setdefault("attn_implementation", config._attn_implementation)
        if config.base_model_revision is not None and not os.path.isdir(where):
            ours["revision"] = config.base_model_revision
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
            self.generation_config = self._stored_options(os.fspath(head), hub) or self.generation_config
