"""Access to modules whose weights accelerate keeps on disk or in CPU memory and fetches for each of their forwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """Find the device of a module's weight, or the one to which its hook fetches it; `ValueError` if the weight is nowhere."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if not weight.is_meta:
        return weight.device
    if not hasattr(module, "_hf_hook"):
        raise ValueError(
            f"the weight of a {type(module).__name__} is on the meta device, and no hook of accelerate fetches it: load the "
            "model with from_pretrained, with device_map if it is to be offloaded"
        )
    hook: Any = module._hf_hook
    return torch.device(hook.execution_device)


@contextmanager
def fetched(module: nn.Module) -> Iterator[None]:
    """Keep the weight of a module on its device, for code that reads it without calling the module."""
    device_of(module)  # or says that the weight is nowhere
    hook: Any = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield
    finally:
        if hook is not None:
            hook.post_forward(module, None)
