"""Access to modules whose weights accelerate keeps on disk or in CPU memory and fetches for each of their forwards."""

from contextlib import nullcontext
from typing import Any

import torch

try:
    from accelerate.utils import align_module_device as fetched
except ImportError:  # then all weights are where they are used
    fetched = nullcontext


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
