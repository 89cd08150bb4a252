"""Heads on models: put on, taken off, and read from the checkpoints that have one."""

import copy
import os
import weakref
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import extract_commit_hash

from .code import AUTO_MAP
from .configuration import MRPConfig
from .head import MRPHead, check_same_backbone
from .layouts import HEAD, HUB_OPTIONS, PUBLISHED_HEAD, hub_options, our_name, stored_json, weight_files
from .offloading import device_of

try:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
except ImportError:  # then no model is spread over devices
    AlignDevicesHook = add_hook_to_module = None

# The MRP model of each stock model that is still in use, and where its head came from.
_MADE: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]]" = weakref.WeakKeyDictionary()


class HeadMixin:
    """The part of an MRP model that puts a head on, and takes it off."""

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
        elif not isinstance(head, MRPHead):
            raise ValueError(
                f"head is of {type(head)}: pass an MRPHead of {MRPHead.__module__}, this model's own code, or the folder or "
                "id of a checkpoint that has one"
            )
        else:
            layers: Any = head.layers
            check_same_backbone(layers[0].self_attn.config, self.config, "another model")
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
        self.config.num_nextn_predict_layers, self.config.head_predicts = len(head.layers), head.predicts

    def detach_head(self: Any) -> MRPHead:
        """Take the head off, for another model; if `generate` would decode with it by default, it goes back to `static`.

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

    def _read_head(self: Any, source: str, hub: dict[str, Any]) -> MRPHead:
        """Read the head of a checkpoint, its files as they lie on the disk."""
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

    @classmethod
    def from_stock_model(cls: Any, stock: Any, repository: str, **download: Any) -> Any:
        """Make the MRP model of a stock model's own parameters and a repository's head, once as long as they stay.

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


class BackboneSource(NamedTuple):
    """The origin of a model's backbone: a repository's id and commit, or a folder's absolute path and None."""

    name: str
    revision: str | None


def head_to_save(
    model: Any, state_dict: dict[str, Tensor] | None, named: BackboneSource | None
) -> tuple[dict[str, Tensor], MRPConfig]:
    """Select the tensors and the config of a head repository, whose backbone is the `named` or else the loaded one.

    Raises:
        ValueError: if the model has no head, its backbone no name, or the head not just its own tensors.
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
