"""Heads on models: made, put on, taken off, and read from the checkpoints that have one."""

import copy
import os
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .head import MRPHead, check_draft_tokens, check_same_backbone, shapes_of_head, start_head
from .layouts import HEAD, HUB_OPTIONS, PUBLISHED_HEAD, check_fit, hub_options, stored_tensors, weight_files
from .offloading import device_of

try:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
except ImportError:  # then no model is spread over devices
    AlignDevicesHook = add_hook_to_module = None


class HeadMixin:
    """The part of an MRP model that puts a head on, and takes it off."""

    def new_head(self: Any, head_layers: int = 3, head_init: str = "identity") -> MRPHead:
        """Make a head for this model's backbone, on its device and in its type; torch's generator draws the random part.

        Raises:
            ValueError: if `head_layers` is not a positive int, or `start_head` refuses.
        """
        if not isinstance(head_layers, int) or isinstance(head_layers, bool) or head_layers < 1:
            raise ValueError(f"head_layers is {head_layers!r}: a head has 1 layer or more (3 are published)")
        weight = self.lm_head.weight
        with torch.device(device_of(self.lm_head)):
            config = copy.deepcopy(self.config)
            config.num_nextn_predict_layers, config.draft_vocab_size = head_layers, 0
            head = MRPHead(config).to(weight.dtype)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        start_head(head, self.model.layers, head_init)
        return head

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
        _place(head, self)
        for index, layer in enumerate(head.layers):
            layer.self_attn.layer_idx = self.config.num_hidden_layers + index
            layer.self_attn.config = self.config
        self.mrp_head = head.train(self.training)
        self.config.num_nextn_predict_layers, self.config.head_predicts = len(head.layers), head.predicts
        self.config.draft_vocab_size = 0 if head.draft_token_ids is None else len(head.draft_token_ids)

    def detach_head(self: Any) -> MRPHead:
        """Take the head off; if `generate` would decode with it by default, it goes back to `static`.

        Returns:
            The head, which can be attached to another model.

        Raises:
            ValueError: if the model has none.
        """
        if self.mrp_head is None:
            raise ValueError("the model has no MRP head to detach: attach one with attach_head, or load one with from_backbone")
        head, self.mrp_head = self.mrp_head, None
        self.config.num_nextn_predict_layers = self.config.draft_vocab_size = 0
        if str(getattr(self.generation_config, "decoding", None)).startswith("mrp_"):
            self.generation_config.decoding = None
        return head

    def _read_head(self: Any, source: str, hub: dict[str, Any]) -> MRPHead:
        """Read the head of a checkpoint, its files as they lie on the disk."""
        config, hub = type(self)._pinned(source, None, hub)
        if not config.has_head:
            raise ValueError(f"{source} has no MRP head (num_nextn_predict_layers is 0): name a checkpoint that has one")
        check_same_backbone(config, self.config, source)
        found = stored_tensors(weight_files(source, prefixes=(HEAD, PUBLISHED_HEAD), **hub))
        if config.base_model_name_or_path is None:  # it holds the backbone too
            found = {name: tensor for name, tensor in found.items() if name.startswith(HEAD)}
        check_fit(found, shapes_of_head(config))
        with torch.device("meta"):
            head = MRPHead(config)
        state: dict[str, Tensor] = {}
        for name, stored in found.items():
            with safe_open(stored.file, framework="pt") as tensors:
                state[name.removeprefix(HEAD)] = tensors.get_tensor(stored.name)
        head.load_state_dict(state, assign=True)
        check_draft_tokens(head, config, source)
        return head


def _place(head: nn.Module, model: Any) -> None:
    """Put a head where the model's logits are made, in their type, also if the model is spread over devices."""
    device = device_of(model.lm_head)
    head.to(device, model.lm_head.weight.dtype)
    if hasattr(model.lm_head, "_hf_hook"):
        add_hook_to_module(head, AlignDevicesHook(device))
        model.hf_device_map["mrp_head"] = device


__all__ = ["HeadMixin"]
