"""Access to modules whose weights accelerate keeps on disk or in CPU memory and fetches for each of their forwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """Find the device on which a module computes: that of its weight, or the one to which its hook fetches the weight.

    Raises:
        ValueError: if the weight is nowhere, and no hook fetches it.
    """
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if not weight.is_meta:
        return weight.device
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        if (device := getattr(one, "execution_device", None)) is not None:
            return torch.device(device)
    raise ValueError(
        f"the weight of a {type(module).__name__} is on the meta device, and no hook of accelerate fetches it: load the model "
        "with from_pretrained, with device_map if it is to be offloaded"
    )


@contextmanager
def fetched(module: nn.Module) -> Iterator[None]:
    """Keep the weights of a module on its device, for code that reads its `weight` without calling it."""
    device_of(module)  # or says that its weight is nowhere
    hook = getattr(module, "_hf_hook", None)
    if hook is None or not any(weight.is_meta for weight in module.parameters()):
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)
