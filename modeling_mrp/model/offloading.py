"""Access to modules whose weights accelerate keeps on disk or in CPU memory and fetches for each of their forwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def device_of(module: Any) -> torch.device:
    """Find the device of a module's weight, or the one to which its hook fetches it; `ValueError` if the weight is nowhere."""
    device = module.weight.device
    if device.type == "meta":
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if device is None:
        raise ValueError(
            f"the weight of a {type(module).__name__} is on the meta device, and no hook of accelerate fetches it: load the "
            "model with from_pretrained, with device_map if it is to be offloaded"
        )
    return torch.device(device)


@contextmanager
def fetched(module: Any) -> Iterator[None]:
    """Keep the weight of a module on its device, for code that reads it without calling the module."""
    device_of(module)  # or says that the weight is nowhere
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield
    finally:
        if hook is not None:
            hook.post_forward(module, None)
