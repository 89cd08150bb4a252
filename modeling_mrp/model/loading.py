"""Loading and saving of MRP models in all layouts of checkpoints; attaching, detaching and saving
of heads."""

import contextlib
import copy
import os
import re
import reprlib
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from ..versions import tested_versions
from .compat import CACHE_NAME, check_saved_modules
from .configuration import AUTOREGRESSIVE, MRPConfig, as_block_diffusion, is_autoregressive
from .families.sdar import backbone_of
from .head import MRPHead, check_same_backbone
from .layouts import (
    HEAD,
    HUB_OPTIONS,
    PUBLISHED_HEAD,
    backbone_location,
    check_depth,
    hub_options,
    json_object,
    our_name,
    read_gguf,
    stored_json,
    stored_names,
    weight_files,
)

try:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    # loads offloaded weights, from disk or another memory, while its context is open
    from accelerate.utils import align_module_device as weights_on_device
except ImportError:  # without accelerate, no model is spread over devices
    AlignDevicesHook = None
    add_hook_to_module = None
    weights_on_device = contextlib.nullcontext

logger = transformers_logging.get_logger(__name__)

# transformers renames tensors by this mapping while it loads
_KEY_MAPPING = {f"^{re.escape(PUBLISHED_HEAD)}": HEAD}
# By stock transformers model, while it is in use: the source of a head, and the MRP model that
# shares its parameters.
_SHARED_MODELS: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]]" = (
    weakref.WeakKeyDictionary()
)
_SHARED_MODELS_LOCK = threading.Lock()
_WEIGHTS = (".safetensors", ".bin")  # suffixes of a checkpoint's files


class MRPPreTrainedModel(PreTrainedModel):
    """The base class of MRP models, which loads, saves and initialises them.

    Attributes:
        backbone_source: The checkpoint from which the backbone was loaded: a pair of a repository's
            id and its commit, or of the absolute path of a folder and None. `save_pretrained` with
            `head_only` writes it to the head's config. None if there is no such checkpoint, for
            example if the backbone was trained since.
    """

    config_class = MRPConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Qwen3DecoderLayer", "MRPHead"]
    _skip_keys_device_placement = [CACHE_NAME]
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_flex_attn = True  # for the packed pass of training; decoding is faster with SDPA
    # Source of the backbone, as a head saved alone names it: a repository's id and commit, or a
    # folder's absolute path and None.
    backbone_source: tuple[str, str | None] | None = None

    def load_adapter(
        self,
        peft_model_id: str | None = None,
        adapter_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load an adapter as transformers does. Raise `ImportError` if the installed version of
        transformers leaves out a part of the adapter."""
        info = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
        check_saved_modules(self, adapter_name or "default")
        return info

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True, to allow the argument `experts_implementation`. The method of transformers
        would look for experts only in the file that defines the model."""
        return True

    @classmethod
    @tested_versions()
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """Load a checkpoint as transformers does: a full checkpoint of this package, a checkpoint
        in a published layout, or a head repository, which holds a head alone.

        The config of a head repository names the backbone to load and the backbone's revision; the
        arguments `revision` and `subfolder` are those of the head. Only safetensors files are read,
        and only this package's code runs. `ValueError` is raised for another kind of model, for
        tensors that do not fit the config (all are listed), or for a backbone that the config may
        not name (`backbone_location`).
        """
        kwargs["key_mapping"] = {**_KEY_MAPPING, **(kwargs.get("key_mapping") or {})}
        # the model is made from a config and a state dict
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, config=config, **kwargs)
        source = os.fspath(pretrained_model_name_or_path)
        fields, commit = stored_json(source, **hub_options(kwargs))
        if commit is not None:
            kwargs["revision"] = commit  # all files come from one state
        if (backbone_name := fields.get("base_model_name_or_path")) is not None:
            backbone_kwargs = {
                **kwargs,
                "revision": fields.get("base_model_revision") or "main",
                "subfolder": "",
            }
            adapter = backbone_kwargs.pop("adapter_kwargs", None) or {}
            adapter_name = backbone_kwargs.pop("adapter_name", None)
            # AutoModel has set it in the config
            if (attention := getattr(config, "_attn_implementation", None)) is not None:
                backbone_kwargs.setdefault("attn_implementation", attention)
            model = loaded = cls.from_backbone(
                backbone_location(backbone_name, source), **backbone_kwargs
            )
            if isinstance(loaded, tuple):  # with `output_loading_info`
                model = loaded[0]
            model._take_head(source, hub_options(kwargs), kwargs)
            model.name_or_path = model.config.name_or_path = source
            if (adapter_path := adapter.pop("_adapter_model_path", None)) is not None:
                model.load_adapter(adapter_path, adapter_name=adapter_name, adapter_kwargs=adapter)
            return loaded
        if "generation_config" not in kwargs:
            # transformers' own error names neither file nor field
            cls._stored_generation_config(source, hub_options(kwargs))
        check_quantization(fields.get("quantization_config"))
        if not kwargs.get("variant") and len(kwargs["key_mapping"]) == len(_KEY_MAPPING):
            if isinstance(config, MRPConfig):
                expected = config
            else:
                expected = MRPConfig.from_dict(dict(fields))
            check_depth(expected, stored_names(source, **hub_options(kwargs)), source)
        # otherwise custom_generate/ would replace generate
        kwargs |= {"use_safetensors": True, "trust_remote_code": False}
        with_info = kwargs.pop("output_loading_info", False)
        # mismatches are reported below
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = super().from_pretrained(source, *args, config=config, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"a safetensors file of {source} is not whole: download it again ({error})"
            ) from error
        except (AttributeError, KeyError, TypeError) as error:
            if "quantization_config" not in fields:
                raise
            raise ValueError(
                f"quantization_config of {source} cannot be read: correct it in config.json "
                f"({error})"
            ) from error
        misfits = {
            name: sorted(keys) for name, keys in info.items() if name.endswith("_keys") and keys
        }
        if misfits:
            raise ValueError(
                f"{source} does not fit its config: {misfits}. Check num_nextn_predict_layers (0: "
                "no head), the sizes in config.json, that the download is whole, and that it is "
                "quantized as its config says"
            )
        if not kwargs.get("subfolder"):
            model.backbone_source = (
                os.path.abspath(source) if os.path.isdir(source) else source,
                commit,
            )
        return (model, info) if with_info else model

    @classmethod
    def from_backbone(cls, backbone: Any, head: Any = None, **kwargs: Any) -> Any:
        """Load a backbone and a head from different places.

        Args:
            backbone: The folder or id of a checkpoint that `from_pretrained` takes and that has a
                backbone; or the folder or id of an autoregressive checkpoint, for which
                `block_size` and `mask_token_id` are passed as well. An autoregressive checkpoint of
                Qwen2, Qwen2.5 or Llama becomes a shifted family: its hidden states still predict
                the next token, so the mode `sequential` in small blocks writes text before any
                training. A Qwen3 checkpoint does so with `shifted=True`; otherwise it has SDAR's
                form, and its hidden states learn to predict their own position only by training.
            head: A head, as `attach_head` takes it; it replaces the checkpoint's own.
            kwargs: As for `from_pretrained`. `revision` is that of the backbone (for a revision of
                the head, call `attach_head`). `gguf_file` names a GGUF file of an autoregressive
                checkpoint, which transformers reads with the package `gguf`. Reading it takes
                minutes, so save the model afterwards.

        Example:
            >>> from modeling_mrp import MRPForCausalLM
            >>> from mrp_trainer import embedded_checkpoint
            >>> backbone = head = embedded_checkpoint()  # or folders and ids of their own
            >>> model = MRPForCausalLM.from_backbone(backbone, head=head)
            >>> model.backbone_source == (backbone, None)
            True
        """
        source = os.fspath(backbone)
        shifted = kwargs.pop("shifted", None)
        gguf_file = kwargs.pop("gguf_file", None)
        if gguf_file is None:
            fields, _ = stored_json(source, **hub_options(kwargs))
        else:
            fields, kwargs["state_dict"] = read_gguf(
                source, gguf_file, kwargs.get("dtype"), **hub_options(kwargs)
            )
            if fields["model_type"] not in AUTOREGRESSIVE:
                raise ValueError(
                    f"{gguf_file} is of the model type {fields['model_type']!r}: what is read from "
                    f"GGUF is {', '.join(AUTOREGRESSIVE)}. Name a folder of safetensors"
                )
        if (backbone_name := fields.get("base_model_name_or_path")) is not None:
            remedy = "use that"
            if os.path.isabs(backbone_name) and not os.path.isdir(backbone_name):
                remedy = "name the folder where that is now, as it is gone"
            raise ValueError(
                f"{source} is a head repository and has no backbone; its own is {backbone_name!r}: "
                f"{remedy}"
            )
        opens = is_autoregressive(fields) and kwargs.get("config") is None
        if shifted is not None and not opens:
            raise ValueError(
                f"shifted is {shifted!r}, and {source} is no autoregressive checkpoint that this "
                "call converts: its config says how it predicts. Leave shifted out"
            )
        if opens:
            for name in {"block_size", "mask_token_id"} & kwargs.keys():
                fields[name] = kwargs.pop(name)
            kwargs["config"] = config = MRPConfig.from_dict(as_block_diffusion(fields, shifted))
            fluent = (
                "only the target sequential writes text, best in blocks of 4"
                if backbone_of(config.family).shifted
                else "it generates nonsense"
            )
            logger.warning(
                f"{source} is an autoregressive {fields['model_type']} checkpoint: until it is "
                f"trained with the block-diffusion loss, in blocks of {config.block_size} with the "
                f"mask {config.mask_token_id}, {fluent}"
            )
        model = cls.from_pretrained(source if gguf_file is None else None, **kwargs)
        if head is not None:
            model._take_head(
                head, hub_options({**kwargs, "revision": None, "subfolder": None}), kwargs
            )
        return model

    def attach_head(self: Any, head: Any, **hub: Any) -> None:
        """Attach a head, which replaces the one that the model may have. If the head does not fit,
        raise `ValueError` and leave the model as it is.

        Args:
            head: The folder or repository id of a checkpoint in any layout, from which only the
                head is read; or an `MRPHead`.
            hub: Options of the Hub for a repository id, such as `revision` and `token`.
        """
        if unknown := sorted(hub.keys() - set(HUB_OPTIONS)):
            raise ValueError(
                f"{', '.join(unknown)}: attach_head takes {', '.join(HUB_OPTIONS)}. Check the "
                "spelling"
            )
        if isinstance(head, str | os.PathLike):
            head = self._read_head(os.fspath(head), hub)
        else:
            check_same_backbone(head.layers[0].self_attn.config, self.config, "another model")
        if (processes := self.tp_size or 1) > 1:
            raise ValueError(
                f"the layers are divided among {processes} processes, those of an attached head "
                "would not be: attach it in one process, save_pretrained the whole model, and load "
                "that with tensor parallelism"
            )
        check_lm_head(self.lm_head)
        device = device_of(self.lm_head)
        head.to(device, self.lm_head.weight.dtype)
        if hasattr(self.lm_head, "_hf_hook"):  # the model is spread over devices
            add_hook_to_module(head, AlignDevicesHook(device))
        head.place_behind(self.config)
        self.mrp_head = head.train(self.training)
        self.config.num_nextn_predict_layers = len(head.layers)

    def detach_head(self: Any) -> MRPHead | None:
        """Remove the head and return it, or None if there is none. If `generate` would use the head
        by default, the default mode becomes `static`."""
        head = self.mrp_head
        self.mrp_head = None
        self.config.num_nextn_predict_layers = 0
        if str(getattr(self.generation_config, "decoding", None)).startswith("mrp_"):
            self.generation_config.decoding = None
        return head

    @classmethod
    def from_stock_model(cls: Any, stock: Any, repository: str, **download: Any) -> Any:
        """Make an MRP model that shares the parameters of a stock Qwen3 model and has the head of a
        repository. Return the model of an earlier call if repository, revision and parameters are
        still the same.

        Args:
            stock: The stock model, such as a `Qwen3ForCausalLM` of transformers.
            repository: The id of the head's repository, or a folder.
            download: Options for fetching the head from the Hub, such as `revision` and `token`.
        """
        # concurrent threads share one model, since their caches belong to it
        with _SHARED_MODELS_LOCK:
            return cls._shared_model(stock, repository, download)

    @classmethod
    def _shared_model(cls: Any, stock: Any, repository: str, download: dict[str, Any]) -> Any:
        """Do the work of `from_stock_model`, whose lock is held: return the MRP model that was last
        made for `stock` if its head and parameters are still the right ones; otherwise, make a new
        one."""
        parameters = dict(stock.named_parameters(remove_duplicate=False))
        lm_head_weight = parameters["lm_head.weight"]
        source = (
            repository,
            download.get("revision"),
            lm_head_weight.dtype,
            lm_head_weight.device,
            *map(id, parameters.values()),
        )
        cached_source, model = _SHARED_MODELS.get(stock, (None, None))
        if cached_source == source:
            return model
        head = cls.config_class.from_pretrained(repository, **download)
        fields = {
            "block_size": head.block_size,
            "mask_token_id": head.mask_token_id,
            **stock.config.to_dict(),
        }
        config = cls.config_class.from_dict(
            {**fields, "model_type": "sdar", "num_nextn_predict_layers": 0}
        )
        with torch.device("meta"):
            model = cls(config).eval()
        try:
            model.load_state_dict(parameters, assign=True)
        except RuntimeError as error:
            raise ValueError(
                f"this {type(stock).__name__} is no Qwen3 decoder that a head can be put on: load "
                f"the checkpoint with MRPForCausalLM.from_backbone instead ({error})"
            ) from error
        # no checkpoint holds the buffers of rotary_emb
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(lm_head_weight.device)
        model._take_head(repository, download, {})
        _SHARED_MODELS[stock] = (source, model)
        return model

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        *,
        head_only: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the weights, the config, the generation config and the remote code, as transformers
        does. With `head_only`, save only the weights of the head, and a config that names the
        backbone to load: that of the attribute `backbone_source`, which is the checkpoint from
        which this model's backbone was loaded.

        Raises:
            ValueError: if layers were made by `quantize_dynamic`; with `head_only`, if the head
                cannot be saved alone or the folder holds a checkpoint other than a head; otherwise,
                if the folder holds shards of another variant.
        """
        folder = Path(save_directory)
        if dynamically_quantized(self):
            raise ValueError(
                "layers made by quantize_dynamic have no tensors to save: save the model, and "
                "quantize it once loaded"
            )
        # otherwise this package's options would be dropped when the file is read again
        self.generation_config._from_model_config = False
        # as transformers does when it saves this config, which is after the model's config
        self.generation_config.validate(strict=True)
        if head_only:
            if kwargs.get("push_to_hub"):
                raise ValueError(
                    "push_to_hub with head_only=True: save the head to a folder, and push that "
                    "with `mrp push`"
                )
            head, config = head_to_save(self, state_dict)
            if is_main_process:
                check_head_folder(folder)
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / f".{SAFE_WEIGHTS_NAME}.partial"
                # the largest file comes first: if there is no room for it, an earlier head stays
                # complete
                try:
                    save_file(head, partial, metadata={"format": "pt"})
                    config.save_pretrained(folder)
                    self.generation_config.save_pretrained(folder)
                    partial.replace(folder / SAFE_WEIGHTS_NAME)
                finally:
                    partial.unlink(missing_ok=True)
        else:
            # this package's names, also if the model was loaded from a published layout
            kwargs["save_original_format"] = False
            check_other_variants(folder, kwargs.get("variant"))
            super().save_pretrained(folder, is_main_process, state_dict, **kwargs)
        names = (
            variant_of(SAFE_WEIGHTS_NAME, kwargs.get("variant")),
            variant_of(SAFE_WEIGHTS_INDEX_NAME, kwargs.get("variant")),
        )
        weights = [path for path in map(folder.joinpath, names) if path.is_file()]
        # transformers keeps the weights of an earlier save, and would load those first
        if is_main_process and len(weights) == 2:
            min(weights, key=lambda path: path.stat().st_mtime_ns).unlink()

    def _init_weights(self: Any, module: nn.Module) -> None:
        super()._init_weights(module)
        if self.mrp_head is not None and module is self.mrp_head.norm:
            init.zeros_(module.weight)

    def _take_head(self: Any, head: Any, hub: dict[str, Any], kwargs: dict[str, Any]) -> None:
        """Attach a head, and adopt the generation config of the head's repository. The model keeps
        its own generation config if the repository has none, if `head` is an `MRPHead`, or if
        `kwargs` contain a generation config."""
        self.attach_head(head, **hub)
        if not isinstance(head, MRPHead) and "generation_config" not in kwargs:
            self.generation_config = (
                self._stored_generation_config(os.fspath(head), hub) or self.generation_config
            )

    @classmethod
    def _stored_generation_config(cls: Any, source: str, hub: dict[str, Any]) -> Any:
        """Return the generation config of a checkpoint, or None if it has none. Raise `ValueError`
        for options that a generation config cannot hold."""
        with contextlib.suppress(OSError):
            return cls.generation_config_class.from_dict(
                stored_json(source, GENERATION_CONFIG_NAME, **hub)[0]
            )
        return None

    def _read_head(self: Any, source: str, hub: dict[str, Any]) -> MRPHead:
        """Read the head of a checkpoint from the checkpoint's files. Raise `ValueError` if there is
        none, or if it is damaged or does not fit this model."""
        hub = {**hub, "revision": stored_json(source, **hub)[1] or hub.get("revision", "main")}
        config: Any = MRPConfig.from_pretrained(source, **hub)
        if not config.has_head:
            raise ValueError(
                f"{source} has no MRP head (num_nextn_predict_layers is 0): name a checkpoint that "
                "has one"
            )
        check_same_backbone(config, self.config, source)
        state: dict[str, Tensor] = {}
        try:
            check_depth(config, stored_names(source, **hub), source)
            with torch.device("meta"):
                head = MRPHead(config)
            for file in weight_files(source, prefixes=(HEAD, PUBLISHED_HEAD), **hub):
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118  not a dict: it has no iterator
                        if (key := our_name(name)).startswith(HEAD):
                            state[key.removeprefix(HEAD)] = tensors.get_tensor(name)
            head.load_state_dict(state, assign=True)
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(
                f"the head of {source} is not whole, or does not fit its config: {error}"
            ) from error
        return head


def device_of(module: Any) -> torch.device:
    """Return the device of a module's weight. For an offloaded weight, return the device to which a
    hook moves it; raise `ValueError` if there is no such hook."""
    # packed by quantize_dynamic
    weight = module.weight() if callable(module.weight) else module.weight
    device = weight.device
    if device.type == "meta":
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        raise ValueError(
            f"the weight of a {type(module).__name__} is on the meta device, and no hook of "
            "accelerate fetches it: load the model with from_pretrained, with device_map if it is "
            "to be offloaded"
        )
    return torch.device(device)


def variant_of(name: str, variant: str | None) -> str:
    """Return the name that transformers gives to a weight file of a variant: `name`, with `variant`
    inserted before the last suffix."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}.{variant}{suffix}" if variant else name


def check_other_variants(folder: Path, variant: str | None) -> None:
    """Raise `ValueError` if a folder holds shards of a variant other than `variant`, which
    transformers would delete when it saves there."""
    stem = variant_of(SAFE_WEIGHTS_NAME, variant).removesuffix(".safetensors")
    shards = sorted(path.name for path in folder.glob(f"{stem}.*-?????-of-?????.safetensors"))
    if shards:
        raise ValueError(
            f"{folder} holds {shards[0]} of another variant, which would be deleted: save to "
            "another folder, or save this one before the variant"
        )


def check_head_folder(folder: Path) -> None:
    """Raise `ValueError` if a head cannot be saved alone to this folder: because that would
    overwrite another checkpoint, such as the head's own backbone, or because the path exists and is
    no folder."""
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise ValueError(f"{folder} is no folder: name one")
        return
    files = sorted(
        path.name
        for path in folder.iterdir()
        if path.name == "config.json" or path.suffix in _WEIGHTS
    )
    fields = json_object(folder / "config.json") if "config.json" in files else {}
    if files and not fields.get("base_model_name_or_path"):
        raise ValueError(
            f"head_only=True: {folder} holds {files[-1]} of another checkpoint than a head's, "
            "which would be overwritten: name another folder"
        )


def check_quantization(fields: Any) -> None:
    """Raise `ValueError` if `fields`, the `quantization_config` stored in a checkpoint (None if it
    has none), is one that transformers would ignore with a warning, or could not read."""
    if fields is None:
        return
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if method is None or str(method) not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ValueError(
            f"quantization_config is {reprlib.repr(fields)}: its quant_method must be one that "
            f"transformers loads ({', '.join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))}). Correct "
            "config.json, or remove it"
        )


def check_lm_head(lm_head: Any) -> None:
    """Raise `ValueError` if the weight of an `lm_head` is not a tensor, since rows of it are read.
    After torch's `quantize_dynamic`, for instance, it is not."""
    if not isinstance(lm_head.weight, Tensor):
        raise ValueError(
            f"the lm_head is a {type(lm_head).__module__}.{type(lm_head).__name__}, whose weight "
            "(rows of it are read) is no tensor: leave it as it was. With quantize_dynamic name "
            "what to quantize, {'model.layers', 'mrp_head.layers'}"
        )


def dynamically_quantized(model: nn.Module) -> bool:
    """Return whether torch's `quantize_dynamic` made any of a model's layers. Such a layer has
    packed weights, and one scale for the activations of all tokens."""
    return any(
        type(module).__module__.startswith("torch.ao.nn.quantized.dynamic")
        for module in model.modules()
    )


def describe_token_mixing(quantization: Any, model: Any = None) -> str | None:
    """Return a warning if the quantization of a model lets the tokens of a forward change each
    other's results; otherwise, return None.

    Args:
        quantization: The `quantization_config` of the model, or None.
        model: The model, whose layers are then examined, too; or None.
    """
    # a scheme of torchao
    scales = getattr(scheme := getattr(quantization, "quant_type", None), "granularity", None)
    of_activations = scales[0] if isinstance(scales, list | tuple) else scales
    if getattr(quantization, "load_in_8bit", False) and quantization.llm_int8_threshold > 0:
        remedy = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
    elif (
        "DynamicActivation" in type(scheme).__name__
        and type(of_activations).__name__ == "PerTensor"
    ):
        remedy = "granularity=PerRow()"
    elif model is not None and dynamically_quantized(model):
        remedy = "torchao's Int8DynamicActivationInt8WeightConfig() in place of quantize_dynamic"
    else:
        return None
    return (
        "the tokens of a forward change how each other's activations are quantized: drafted text "
        "may differ from its target's, and the text of a row from what it is in another batch. "
        f"Load with {remedy} for the same text"
    )


def head_to_save(
    model: Any, state_dict: dict[str, Tensor] | None
) -> tuple[dict[str, Tensor], MRPConfig]:
    """Return what a head repository stores: the tensors of the head, by name, and the config. Raise
    `ValueError` if the head cannot be saved alone.

    Args:
        model: The model with the head.
        state_dict: The tensors of the whole model, by name; None to read them from the model.
    """
    if model.mrp_head is None:
        raise ValueError(
            "head_only=True: the model has no MRP head. Give it one with attach_head, or save it "
            "whole"
        )
    if model.backbone_source is None:
        raise ValueError(
            "head_only=True: a head names its backbone, and this model was not loaded from a "
            "checkpoint, or trained since. Set model.backbone_source = (name or path, revision or "
            "None), or save it whole"
        )
    state = model.state_dict() if state_dict is None else state_dict
    head = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in state.items()
        if name.startswith(HEAD)
    }
    with torch.device("meta"):
        expected = {HEAD + name for name in MRPHead(model.config).state_dict()}
    unexpected = head.keys() ^ expected
    unexpected |= {name for name, tensor in head.items() if type(tensor) is not Tensor}
    if unexpected:
        raise ValueError(
            f"the head holds other tensors than its own, or lacks some: {sorted(unexpected)[:4]}, "
            "... Merge adapters first (merge_and_unload), or save them with peft; save a quantized "
            "head with the whole model, or quantize the rest only"
        )
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(tensor.dtype for tensor in head.values() if tensor.is_floating_point())
    config.base_model_name_or_path, config.base_model_revision = model.backbone_source
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the backbone's
    return head, config
