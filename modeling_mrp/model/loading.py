"""Loading and saving of MRP models: the layouts that are read, backbones with heads from elsewhere, heads on their own."""

import copy
import logging
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
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
from .head import MRPHead, ResidualNorm, check_draft_tokens, first_tokens
from .layouts import (
    KEY_MAPPING,
    StoredTensor,
    backbone_location,
    check_fit,
    hub_options,
    is_hub_id,
    raise_misfits,
    stored_json,
    stored_tensors,
    weight_files,
)
from .saving import AUTO_MAP, TAGS, BackboneSource, head_to_save, write_code, written_beside
from .stock import StockMixin

log = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
QWEN3_VOCABULARY = 151936  # the one in which MRPConfig's default mask id is free
_OF_THE_HUB = ("repo_id", "commit_message", "commit_description", "private", "token", "create_pr", "revision", "tags")


class MRPPreTrainedModel(HeadMixin, StockMixin, PreTrainedModel):
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
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Load as transformers does, from a folder or a repository on the Hub of any of four kinds.

        These are a full checkpoint of this package; one in the published SDAR layout (no head); one in the published layout
        with a head; and a head repository, whose backbone is loaded by the name and revision in its config, and given the head.
        Only safetensors are read, and no code but this package's runs, whatever else the repositories hold. A checkpoint that
        does not fit its config is an error, raised before any weights are read.

        Args:
            pretrained_model_name_or_path: A folder, or a repository's id.
            args: As in transformers.
            config: As in transformers.
            kwargs: As in transformers: `dtype`, `device_map`, `revision`, `token`, ... With a head repository, `revision` and
                `subfolder` are the head's.

        Raises:
            ValueError: if the checkpoint lacks a tensor, has one too many, or one of another shape (all are listed), has no
                safetensors, or is of another kind of model; if the backbone of a head repository may not be followed or does
                not suit the head.
        """
        if kwargs.get("gguf_file") is not None or kwargs.get("use_safetensors") is False:
            raise ValueError("only safetensors are read: leave out gguf_file and use_safetensors=False")
        if pretrained_model_name_or_path is None:  # from a config and a state dict
            return cls._load(None, *args, config=config, **kwargs)
        source = os.fspath(pretrained_model_name_or_path)
        config, kwargs = cls._pinned(source, config, kwargs)
        if getattr(config, "base_model_name_or_path", None) is not None:
            return cls._from_head_repository(source, config, kwargs)
        return cls._load(source, *args, config=config, **kwargs)

    @classmethod
    def from_backbone(
        cls,
        backbone: Any,
        head: Any = None,
        head_layers: int = 3,
        head_init: str = "identity",
        head_revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load a backbone and a head that lie in different places, or a backbone and a new head.

        Args:
            backbone: A folder or id of any kind that `from_pretrained` takes but a head repository, or of an autoregressive
                Qwen3 checkpoint, which becomes a block-diffusion model only by training; or a loaded model, which is given the
                head. A head that it has already is dropped.
            head: A folder or id of a head repository, of a full checkpoint, or in the published layout, whose head is taken; an
                `MRPHead`; or None for a new one.
            head_layers: Decoder layers of a new head.
            head_init: How a new head starts: `identity`, `backbone` or `published` (see `start_head`).
            head_revision: The commit, branch or tag of `head`.
            kwargs: As for `from_pretrained`; `revision` is the backbone's. A Qwen3 checkpoint of another vocabulary than the
                published one needs `mask_token_id`; it also takes `block_size`.

        Returns:
            The model.

        Raises:
            ValueError: as from `from_pretrained` and `attach_head`; for a bad `head_layers` or `head_init`; for a Qwen3
                checkpoint of another vocabulary without `mask_token_id`.
        """
        if isinstance(backbone, str | os.PathLike):
            model = cls._open_backbone(os.fspath(backbone), kwargs)
        elif hasattr(backbone, "attach_head"):
            model = backbone
        else:
            raise ValueError(f"backbone is {backbone!r}: pass the folder or id of a checkpoint, or a loaded MRP model")
        if head is None:
            model.attach_head(model.new_head(head_layers, head_init))
        else:
            model._take_head(head, hub_options({**kwargs, "revision": head_revision, "subfolder": None}), kwargs)
        return model

    @classmethod
    def check_tensors(cls, config: MRPConfig, found: dict[str, StoredTensor]) -> None:
        """Compare a full checkpoint's tensors with those that its config calls for; nothing is allocated.

        Raises:
            ValueError: if they do not fit, all of which are listed; or if no tensor can have a shape that the config calls for.
        """
        try:
            with torch.device("meta"):
                shapes = {name: tuple(value.shape) for name, value in cls(copy.deepcopy(config)).state_dict().items()}
        except (RuntimeError, TypeError, LookupError, AssertionError, OverflowError) as error:
            raise ValueError(f"the values in the config are those of no model: correct config.json ({error!r})") from error
        check_fit(found, shapes, {"lm_head.weight"} if config.tie_word_embeddings else ())

    def load_adapter(self, peft_model_id: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load a peft adapter as transformers does, but only from safetensors.

        Raises:
            ValueError: if the adapter has none, or they are damaged; the model is then as before.
        """
        if peft_model_id is not None:
            hub = hub_options({**(kwargs.get("adapter_kwargs") or {}), **kwargs})
            weights = cached_file(peft_model_id, ADAPTER_WEIGHTS, _raise_exceptions_for_missing_entries=False, **hub)
            if weights is None:
                raise ValueError(
                    f"no {ADAPTER_WEIGHTS} in {peft_model_id}: only safetensors are read, never pickled weights. Save the "
                    "adapter with safetensors"
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
        """Save weights, both configs and real copies of the remote code, so that the folder loads anywhere.

        Everything is written beside what the folder holds and then moved into place: a save that fails leaves it as it was,
        and a model may be saved into the folder it was loaded from.

        Args:
            save_directory: The folder, made if needed. Its other files stay.
            is_main_process: As in transformers.
            state_dict: As in transformers.
            push_to_hub: As in transformers; pushes with `push_to_hub` once the folder is written, to `repo_id` or a repository
                of the user's own with the folder's name.
            head_only: Whether to write the head alone. The folder names the backbone, and loads it when it is loaded.
            base_model_name_or_path: With `head_only`, the backbone's name (an id or an absolute path) instead of what the model
                was loaded from (`backbone_source`). Needed if the backbone was changed since, or made from a config.
            base_model_revision: With it, the backbone's commit, branch or tag.
            kwargs: As in transformers.

        Raises:
            ValueError: for a generation config that `generate` would refuse; with `head_only`, if there is no head, it carries
                adapters, or the backbone has no name, or since it was loaded got other weights and no other name; without it,
                if the backbone is named.
        """
        hub = {name: kwargs.pop(name) for name in _OF_THE_HUB if name in kwargs}
        folder = Path(save_directory)
        self.generation_config._from_model_config = False  # or our options would be dropped when it is read again
        self.check_options()
        if head_only:
            named = BackboneSource(base_model_name_or_path, base_model_revision) if base_model_name_or_path else None
            head, config = head_to_save(self, state_dict, named)
            if is_main_process:
                with written_beside(folder) as beside:
                    save_file(head, beside / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
                    config.save_pretrained(beside)
                    self.generation_config.save_pretrained(beside)
                    write_code(beside)
        elif base_model_name_or_path is not None or base_model_revision is not None:
            raise ValueError(
                f"base_model_name_or_path={base_model_name_or_path!r}, base_model_revision={base_model_revision!r}: a full "
                "checkpoint carries its backbone and names none. Pass head_only=True, or leave them out"
            )
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
                        write_code(beside)
        if push_to_hub and is_main_process:
            hub |= {"base_model_name_or_path": base_model_name_or_path, "base_model_revision": base_model_revision}
            self.push_to_hub(hub.pop("repo_id", folder.name), head_only=head_only, **hub)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        head_only: bool = False,
        base_model_name_or_path: str | None = None,
        base_model_revision: str | None = None,
        tokenizer: Any = None,
        private: bool = True,
        tags: str | list[str] | None = None,
        **kwargs: Any,
    ) -> CommitInfo:
        """Push the model as transformers does, whole or its head alone, into a private repository if it is new.

        `mrp push` does it with care: a card with facts and a picture, nothing of another kind overwritten, old shards removed.

        Args:
            repo_id: "org/name", or "name" for a repository of the user's own.
            head_only: Whether to push the head alone, which names its backbone.
            base_model_name_or_path: With `head_only`, the backbone's name on the Hub, if it was not loaded from there.
            base_model_revision: With it, the backbone's commit, branch or tag.
            tokenizer: Is pushed beside the model.
            private: Whether a new repository is private.
            tags: Of the card, beside those of MRP models.
            kwargs: As in transformers: `revision`, `create_pr`, `commit_message`, `max_shard_size`, `token`, ...

        Returns:
            The commit.

        Raises:
            ValueError: as from `save_pretrained`, or if the backbone of a head has no name on the Hub.
        """
        named: dict[str, Any] = {"base_model_name_or_path": base_model_name_or_path, "base_model_revision": base_model_revision}
        base = base_model_name_or_path or (self.backbone_source.name if self.backbone_source else None)
        if head_only and base is not None and not is_hub_id(base):
            raise ValueError(
                f"base_model_name_or_path is {base!r}, and a head on the Hub needs a backbone that others find: push the "
                "backbone, then name it here as 'org/name'"
            )

        def save(folder: str, **how: Any) -> None:
            self.save_pretrained(folder, head_only=head_only, **named, **how)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

        pushed: Any = PushToHubMixin()
        pushed.save_pretrained = save
        kwargs.setdefault("commit_message", "Upload an MRP head" if head_only else "Upload model")
        more = [tags] if isinstance(tags, str) else tags or []
        return pushed.push_to_hub(repo_id, private=private, tags=[*TAGS, *more], **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ResidualNorm):
            init.zeros_(module.weight)
        elif isinstance(module, MRPHead) and module.draft_token_ids is not None:
            init.copy_(module.draft_token_ids, first_tokens(self.config))
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
        kept = hub_options(kwargs) | {name: kwargs[name] for name in ("dtype", "torch_dtype") if name in kwargs}
        others = {name: value for name, value in kwargs.items() if name not in ("dtype", "torch_dtype")}
        config, unused = cls.config_class.from_pretrained(config or source, return_unused_kwargs=True, **others)
        return config, {**unused, **kept}

    @classmethod
    def _load(cls, source: str | None, *args: Any, **kwargs: Any) -> Any:
        """Load a model with its own backbone by transformers' `from_pretrained`."""
        with_info = kwargs.pop("output_loading_info", False)
        if source is not None:
            cls._check_files(source, kwargs)
            kwargs |= {"use_safetensors": True, "trust_remote_code": False}  # or custom_generate/ would replace generate
        kwargs["key_mapping"] = {**KEY_MAPPING, **(kwargs.get("key_mapping") or {})}
        model, info = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        misfits = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"]}
        raise_misfits([f"{kind}: {name}" for kind, names in misfits.items() for name in sorted(names)])
        if model.mrp_head is not None:
            check_draft_tokens(model.mrp_head, model.config, str(source))
        if source is not None and not kwargs.get("subfolder"):
            local = os.path.isdir(source)
            model.backbone_source = BackboneSource(
                os.path.abspath(source) if local else source, None if local else kwargs.get("revision")
            )
        return (model, info) if with_info else model

    @classmethod
    def _check_files(cls, source: str, kwargs: dict[str, Any]) -> None:
        """Compare the files' headers with the config, before a config that lies can make anything be allocated."""
        config, hub = kwargs["config"], hub_options(kwargs)
        if (elsewhere := getattr(config, "transformers_weights", None)) is not None:
            raise ValueError(f"the config of {source} points to weights in {elsewhere!r}: only model*.safetensors are read")
        _check_generation_config(source, cls.generation_config_class, hub)
        adapter = kwargs.get("adapter_kwargs") or {}
        if not os.path.isdir(source) and "_adapter_model_path" not in adapter and find_adapter_config_file(source, **hub):
            raise ValueError(  # transformers would load the base that adapter_config.json names, whatever that is
                f"{source} holds an adapter beside its model: load the adapter from a repository of its own with load_adapter"
            )
        if getattr(config, "quantization_config", None) is None:  # or it has the tensors that its quantizer makes
            cls.check_tensors(config, stored_tensors(weight_files(source, **hub)))

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
        try:
            loaded = cls._open_backbone(where, ours)
        except OSError as error:
            raise OSError(f"the backbone {where!r} of the head {source} could not be loaded: {error}") from error
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
            kwargs = _as_block_diffusion(source, found, kwargs)
        return cls.from_pretrained(source, **kwargs)

    def _take_head(self, head: Any, hub: dict[str, Any], kwargs: dict[str, Any]) -> None:
        """Attach a head; take over the options that its repository comes with, unless others were given."""
        self.attach_head(head, **hub)
        if isinstance(head, MRPHead) or "generation_config" in kwargs:
            return
        if _check_generation_config(source := os.fspath(head), self.generation_config_class, hub):
            self.generation_config = self.generation_config_class.from_pretrained(source, **hub)


def _check_generation_config(source: str, kind: type, hub: dict[str, Any]) -> bool:
    """Refuse a `generation_config.json` that transformers would trip over or silently pass over; tell if there is one.

    Raises:
        ValueError: for a damaged file, and for a field with a wrong value, which `kind`, the class of the configs, names.
    """
    try:
        path, fields = stored_json(source, GENERATION_CONFIG_NAME, **hub)
    except OSError:
        return False
    try:
        kind(**fields)
    except (AttributeError, TypeError, ValueError) as error:  # transformers compares some fields of any type
        raise ValueError(f"{path}: {error}") from error
    return True


def _as_block_diffusion(source: str, found: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add a config of ours, made from that of an autoregressive Qwen3 checkpoint, to the arguments."""
    kwargs = dict(kwargs)
    given: dict[str, Any] = {name: kwargs.pop(name) for name in ("block_size", "mask_token_id") if name in kwargs}
    if "mask_token_id" not in given and found.get("vocab_size") != QWEN3_VOCABULARY:
        raise ValueError(
            f"{source} has a vocabulary of {found.get('vocab_size')}, not Qwen3's of {QWEN3_VOCABULARY}, so that its mask "
            "token is not known: pass mask_token_id=..., an id that no text holds"
        )
    config = MRPConfig.from_dict({**found, "model_type": "sdar", **given})
    log.warning(
        "%s is an autoregressive Qwen3 checkpoint: until it is trained with the block-diffusion loss (blocks of %d, mask id "
        "%d) it generates nonsense",
        source,
        config.block_size,
        config.mask_token_id,
    )
    return {**kwargs, "config": config}


__all__ = ["MRPPreTrainedModel"]
