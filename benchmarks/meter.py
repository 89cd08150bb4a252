"""States and head passes of a round, and where its time goes, measured from outside: by forward hooks and by Python's profiler.

Both see forwards that are called. Where rounds are replayed or layers fused they are not, so `Meter` asks for `graphs=False`,
and a hooked module is called.
"""

import cProfile
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor, nn

from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.modeling import MRPForCausalLM

from .engine import code_of_parts


class Meter:
    """A model for whoever calls `generate`, and sums over the rounds of all calls: the prompts' forwards are left out.

    Args:
        model: A call of its `generate` needs `return_dict_in_generate=True` here.

    Attributes:
        calls: Forwards of `backbone` and `head`.
        lengths: Tokens per row, summed over these.
    """

    def __init__(self, model: MRPForCausalLM) -> None:
        self.model = model
        self.calls, self.lengths = {"backbone": 0, "head": 0}, {"backbone": 0, "head": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, *args: Any, **kwargs: Any) -> MRPGenerateOutput:
        """Decode as the model does, and add what the rounds computed."""
        seen: dict[str, list[int]] = {"backbone": [], "head": []}
        modules = {"backbone": self.model.model, "head": self.model.mrp_head}
        hooks = [
            module.register_forward_pre_hook(_noting(seen[name]), with_kwargs=True)
            for name, module in modules.items()
            if module is not None
        ]
        try:
            out = self.model.generate(*args, **{**kwargs, "graphs": False})
        finally:
            for hook in hooks:
                hook.remove()
        assert isinstance(out, MRPGenerateOutput), "metering needs return_dict_in_generate=True"
        assert out.stats is not None
        assert out.stats.forwards is not None
        for name, lengths in seen.items():
            of_rounds = lengths[out.stats.forwards["prefill"] :]
            self.calls[name] += len(of_rounds)
            self.lengths[name] += sum(of_rounds)
        return out

    @property
    def rounds(self) -> int:
        """Backbone forwards behind the prompts'."""
        return self.calls["backbone"]

    def per_round(self) -> dict[str, float]:
        """Give `states_per_forward`, `head_passes_per_round` and `states_per_head_pass`.

        States count as they are packed, so a row shorter than the batch's longest counts padding.
        """
        rounds, passes = max(1, self.rounds), max(1, self.calls["head"])
        block_size = self.model.config.block_size
        measured = {
            "states_per_forward": self.lengths["backbone"] / block_size / rounds,
            "head_passes_per_round": self.calls["head"] / rounds,
            "states_per_head_pass": self.lengths["head"] / block_size / passes,
        }
        return {name: round(value, 3) for name, value in measured.items()}


def _noting(lengths: list[int]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """A forward pre-hook that notes [batch, length, ...] of its first tensor."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lengths.append(next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)).shape[1])

    return note


def seconds_by_part(call: Callable[[], Any]) -> dict[str, float]:
    """Profile a call: seconds of `backbone`, `head`, `vocabulary` and `commit`, and of its `whole`.

    It costs time at each call of a Python function, which shows at small sizes, in bookkeeping most of all. Where a device
    works on while Python has gone on, the times are those of launches.
    """
    parts = code_of_parts()
    profile = cProfile.Profile()
    profile.runcall(call)
    seconds = dict.fromkeys((*parts.values(), "whole"), 0.0)
    for entry in profile.getstats():
        if isinstance(entry.code, CodeType) and entry.code in parts:  # a string: a function in C
            seconds[parts[entry.code]] += entry.totaltime
        seconds["whole"] += entry.inlinetime
    return seconds
