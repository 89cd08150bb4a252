"""Loading and saving of MRP models in all layouts; attaching, detaching and saving of heads."""

import copy
import logging
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, extract_commit_hash

from .code import AUTO_MAP, write_code
from .configuration import MRPConfig
from .families.registry import backbone_of
from .head import MRPHead, check_same_backbone
from .layouts import HEAD, HUB_OPTIONS, PUBLISHED_HEAD, backbone_location, hub_options, our_name, stored_json, weight_files
from .offloading import device_of

try:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
except ImportError:  # then no model is spread over devices
    AlignDevicesHook = add_hook_to_module = None

log = logging.getLogger(__name__)

_OF_PUSHES = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")
_KEY_MAPPING = {r"^mrp_modules\.0\.model\.": HEAD}  # transformers renames by it while it loads
# The MRP model of each stock model that is still in use, and where its head came from.
_MADE: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]]" = weakref.WeakKeyDictionary()


class BackboneSource(NamedTuple):
    """The origin of a model's backbone: a repository's id and commit, or a folder's absolute path and None."""

    name: str
    revision: str | None


class MRPPreTrainedModel(PreTrainedModel):
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
        """Load a backbone and a head from different places.

        Args:
            backbone: A folder or id that `from_pretrained` takes, except a head repository; or that of an autoregressive Qwen3
                checkpoint, which becomes a block-diffusion model only by training.
            head: What `attach_head` takes; it replaces a head that the backbone has. None: the model is loaded as it is.
            head_revision: The commit, branch or tag of `head`.
            kwargs: As for `from_pretrained`; `revision` is the backbone's. A Qwen3 checkpoint takes `block_size` and
                `mask_token_id`, an id that no text holds.

        Raises:
            ValueError: as from `from_pretrained` and `attach_head`.
        """
        model = cls._open_backbone(os.fspath(backbone), kwargs)
        if head is not None:
            model._take_head(head, hub_options({**kwargs, "revision": head_revision, "subfolder": None}), kwargs)
        return model

    def attach_head(self: Any, head: Any, **hub: Any) -> None:
        """Give the model a head, in place of its own if it has one. The backbone stays as it is.

        Args:
            head: A folder or id of a head repository, of a full checkpoint, or in the published layout: its head is read, and
                nothing else. Or an `MRPHead`, which becomes part of this model.
            hub: `revision`, `token`, `cache_dir`, `local_files_only`, ... for an id.

        Raises:
            ValueError: if the head was made for another backbone (with both values of all that differs), or its tensors do not
                fit, or there is none; the model is then as before.
        """
        if unknown := sorted(hub.keys() - set(HUB_OPTIONS)):
            raise ValueError(f"{', '.join(unknown)}: attach_head takes {', '.join(HUB_OPTIONS)}. Check the spelling")
        if isinstance(head, str | os.PathLike):
            head = self._read_head(os.fspath(head), hub_options(hub))
        else:
            check_same_backbone(head.layers[0].self_attn.config, self.config, "another model")
        if (processes := getattr(self, "_tp_size", None) or 1) > 1:
            raise ValueError(
                f"the model's layers are divided among {processes} processes, those of a head that is attached are not: attach "
                "it in one process, save_pretrained the whole model, and load that with tensor parallelism"
            )
        device = device_of(self.lm_head)
        head.to(device, self.lm_head.weight.dtype)
        if hasattr(self.lm_head, "_hf_hook"):  # the model is spread over devices
            add_hook_to_module(head, AlignDevicesHook(device))
            self.hf_device_map["mrp_head"] = device
        for index, layer in enumerate(head.layers):
            layer.self_attn.layer_idx = self.config.num_hidden_layers + index
            layer.self_attn.config = self.config
        self.mrp_head = head.train(self.training)
        self.config.num_nextn_predict_layers = len(head.layers)

    def detach_head(self: Any) -> MRPHead:
        """Remove and return the head; if `generate` would use it by default, the default becomes `static`.

        Raises:
            ValueError: if the model has none.
        """
        if self.mrp_head is None:
            raise ValueError("the model has no MRP head to detach: attach one with attach_head, or load one with from_backbone")
        head, self.mrp_head = self.mrp_head, None
        self.config.num_nextn_predict_layers = 0
        if str(getattr(self.generation_config, "decoding", None)).startswith("mrp_"):
            self.generation_config.decoding = None
        return head

    @classmethod
    def from_stock_model(cls: Any, stock: Any, repository: str, **download: Any) -> Any:
        """Make an MRP model that shares a stock model's parameters, with a repository's head; later calls reuse it.

        Args:
            stock: A model with a Qwen3 decoder's parameters under `model.` and `lm_head.`, such as SDAR's own class.
            repository: What `attach_head` takes.
            download: `revision`, `token` and the like.

        Raises:
            ValueError: if the stock model is not such a decoder, or the head was made for another backbone.
        """
        parameters = dict(stock.named_parameters(remove_duplicate=False))
        like = parameters["lm_head.weight"]
        source = (repository, download.get("revision"), like.dtype, like.device)
        known, model = _MADE.get(stock, (None, None))
        if known == source and all(dict(model.named_parameters())[name] is value for name, value in parameters.items()):
            return model
        head = cls.config_class.from_pretrained(repository, **download)
        fields = {"block_size": head.block_size, "mask_token_id": head.mask_token_id, **stock.config.to_dict()}
        config = cls.config_class.from_dict({**fields, "model_type": "sdar", "num_nextn_predict_layers": 0})
        with torch.device("meta"):
            model = cls(config).eval()
        try:
            model.load_state_dict(parameters, assign=True)
        except RuntimeError as error:
            raise ValueError(
                f"this {type(stock).__name__} is no Qwen3 decoder that a head can be put on: load the checkpoint with "
                f"MRPForCausalLM.from_backbone instead ({error})"
            ) from error
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(like.device)  # no checkpoint holds its buffers
        model._take_head(repository, download, {})
        model.mrp_head.requires_grad_(False)
        _MADE[stock] = source, model
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
            ValueError: for an option of the generation config that is out of range; with `head_only`, as from `head_to_save`,
                or for `push_to_hub`; without it, if the backbone is named.
        """
        named: dict[str, Any] = {"base_model_name_or_path": base_model_name_or_path, "base_model_revision": base_model_revision}
        folder, pushed = Path(save_directory), kwargs.pop("push_to_hub", False)
        hub = {name: kwargs.pop(name) for name in _OF_PUSHES if name in kwargs}
        self.generation_config._from_model_config = False  # or our options would be dropped when it is read again
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
        if head is not None and module is head.norm:
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
        """Load a model that a head will be attached to; an autoregressive Qwen3 checkpoint gets a config of ours."""
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
        """Attach a head, and take over its repository's options unless others were given."""
        self.attach_head(head, **hub)
        if not isinstance(head, MRPHead) and "generation_config" not in kwargs:
            try:
                stored = GenerationConfig.from_pretrained(head, **hub)
            except OSError:  # it comes with none
                return
            self.generation_config = self.generation_config_class.from_dict(stored.to_dict())

    def _read_head(self: Any, source: str, hub: dict[str, Any]) -> MRPHead:
        """Read the head of a checkpoint from its files."""
        path, _ = stored_json(source, **hub)
        if not os.path.isdir(source) and (commit := extract_commit_hash(str(path), None)):
            hub = {**hub, "revision": commit}
        config: Any = MRPConfig.from_pretrained(source, **hub)
        if not config.has_head:
            raise ValueError(f"{source} has no MRP head (num_nextn_predict_layers is 0): name a checkpoint that has one")
        check_same_backbone(config, self.config, source)
        with torch.device("meta"):
            head = MRPHead(config)
        state: dict[str, Tensor] = {}
        try:
            for file in weight_files(source, prefixes=(HEAD, PUBLISHED_HEAD), **hub):
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118  not a dict: it has no iterator
                        if (ours := our_name(name)).startswith(HEAD):
                            state[ours.removeprefix(HEAD)] = tensors.get_tensor(name)
            head.load_state_dict(state, assign=True)
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(f"the head of {source} is not whole, or does not fit its config: {error}") from error
        return head


def head_to_save(
    model: Any, state_dict: dict[str, Tensor] | None, named: BackboneSource | None
) -> tuple[dict[str, Tensor], MRPConfig]:
    """Select the tensors and the config of a head repository; its backbone is the `named` one, or else the loaded one.

    Raises:
        ValueError: if the model has no head, its backbone no name, or the head has other tensors than its own.
    """
    backbone = named or model.backbone_source
    if model.mrp_head is None or backbone is None:
        raise ValueError(
            "head_only=True needs a head, and a checkpoint that it can name as its backbone: the model has "
            f"{'no MRP head' if model.mrp_head is None else 'one, and was not loaded from any'}. Give it one with attach_head, "
            "pass base_model_name_or_path (and base_model_revision), or save it whole"
        )
    state = model.state_dict() if state_dict is None else state_dict
    head = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items() if name.startswith(HEAD)}
    with torch.device("meta"):
        own = {HEAD + name for name in MRPHead(model.config).state_dict()}
    if others := (head.keys() ^ own) | {name for name, tensor in head.items() if type(tensor) is not Tensor}:
        raise ValueError(
            f"the head holds other tensors than its own, or lacks some: {sorted(others)[:4]}, ... Merge adapters first "
            "(merge_and_unload), or save them with peft; save a quantized head with the whole model, or quantize the rest only"
        )
    config = copy.deepcopy(model.config)
    config.auto_map, config.architectures = dict(AUTO_MAP), [type(model).__name__]
    config.dtype = next(tensor.dtype for tensor in head.values() if tensor.is_floating_point())
    config.base_model_name_or_path, config.base_model_revision = backbone
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the backbone's
    return head, config
