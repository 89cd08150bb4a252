"""The options of the algorithm: the YAML file of `--dllm-algorithm-config`, with the names of `MRPGenerationConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from modeling_mrp import MRPGenerationConfig
from modeling_mrp.generate.loop import Mode
from modeling_mrp.generate.option_table import DRAFTING, OPTIONS, closest_name
from modeling_mrp.kernels.dispatch import Dispatch
from modeling_mrp.rules.reveal import Dynamic, logit

_NOT_SERVED = {
    "seed": "the engine decodes greedily",
    "graphs": "the engine records graphs itself (--disable-cuda-graph)",
}
# Rules that ask which token ends a text.
_READ_EOS = ("cad", "eoser")
SERVED = tuple(option.name for option in OPTIONS if option.name not in _NOT_SERVED)


@dataclass(frozen=True)
class Settings:
    """The meaning of a server's options.

    Attributes:
        mode: What is revealed, refined and drafted; a threshold is rounded to float32, as the engine's own algorithms compare.
        dispatch: Kernels or PyTorch.
    """

    mode: Mode
    dispatch: Dispatch


def settings_of(given: Mapping[str, Any], defaults: Mapping[str, Any], block_size: int, has_head: bool) -> Settings:
    """Interpret the options of a server.

    Args:
        given: Those of the YAML file.
        defaults: The checkpoint's generation config; of it count those that are served.
        block_size: The checkpoint's.
        has_head: Whether it has a head.

    Raises:
        ValueError: for an unknown option, a value that cannot be honoured, or a mode that needs a head where there is none.
    """
    check_names(given)
    if given.get("block_size", block_size) != block_size:
        raise ValueError(f"block_size is {given['block_size']!r}: the checkpoint's is {block_size}. Leave it out")
    options = {"decoding": "mrp_spec"}
    options |= {name: defaults[name] for name in SERVED if defaults.get(name) is not None}
    options |= {name: value for name, value in given.items() if name != "block_size" and value is not None}
    config = MRPGenerationConfig(**options)
    config.check(block_size, has_head)
    if (rule := config.target if config.decoding in DRAFTING else config.decoding) in _READ_EOS:
        raise ValueError(
            f"the rule {rule!r} is not served: it reads the eos, which the engine keeps to itself; use one such as 'dynamic'"
        )
    mode = config.mode(block_size)
    if isinstance(mode.rule, Dynamic) and mode.refine is None:
        mode = replace(mode, rule=Dynamic(logit(float(np.float32(config.confidence_threshold)))))
    return Settings(mode, Dispatch(config.kernels))


def check_names(given: Mapping[str, Any]) -> None:
    """Refuse options that are not served, with a `ValueError` that lists all of them."""
    wrong = []
    for name in map(str, given):
        if name in _NOT_SERVED:
            wrong.append(f"{name} is not served, as {_NOT_SERVED[name]}: leave it out")
        elif name not in (*SERVED, "block_size"):
            wrong.append(f"{name} is no option of MRP{closest_name(name, SERVED)}")
    if wrong:
        raise ValueError(f"the file of --dllm-algorithm-config: {'; '.join(wrong)}. Options are {', '.join(SERVED)}")


__all__ = ["SERVED", "Settings", "check_names", "settings_of"]
