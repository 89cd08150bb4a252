"""Where a decode's time goes, and how much each of its forwards computes, measured from outside.

`metered` wraps the model's backbone and head, the vocabulary step and the cache's commits while it is open; it counts calls of
`generate` only, and of these the rounds: the prompt's forwards and the first pick are left out.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from modeling_mrp.generate.generation import MRPGenerateOutput
from modeling_mrp.generate.sampling import Sampler
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.runner.cache import BlockCache

KINDS = ("backbone", "head", "vocabulary", "commit")


@dataclass(frozen=True)
class Call:
    """One call of a wrapped function: the tokens it computes per row (for the vocabulary step its positions), and its time."""

    kind: str
    length: int
    began: float
    ended: float


@dataclass
class Meter:
    """Sums over the rounds of all `generate` calls.

    Attributes:
        block_size: Tokens of a state.
        calls: Calls by kind; vocabulary steps over no position at all do not count.
        lengths: Tokens per row, summed over these calls; for the vocabulary step its positions, of all rows.
        seconds: Wall clock by kind.
        round_seconds: Wall clock of the rounds, everything included.
    """

    block_size: int
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    lengths: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    round_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """Backbone forwards behind the prompt's."""
        return self.calls["backbone"]

    def per_round(self) -> dict[str, float]:
        """What a round computes; states count as they are packed, so a row shorter than the batch's longest counts padding.

        Keys: `states_per_forward`, `head_passes_per_round`, `states_per_head_pass`, `draft_picks_per_round` (vocabulary steps
        beside the one over the scored states) and `picked_per_round` (positions that got a pick, of all rows).
        """
        rounds, passes = max(1, self.rounds), max(1, self.calls["head"])
        measured = {
            "states_per_forward": self.lengths["backbone"] / self.block_size / rounds,
            "head_passes_per_round": self.calls["head"] / rounds,
            "states_per_head_pass": self.lengths["head"] / self.block_size / passes,
            "draft_picks_per_round": max(0.0, self.calls["vocabulary"] / rounds - 1),
            "picked_per_round": self.lengths["vocabulary"] / rounds,
        }
        return {name: round(value, 3) for name, value in measured.items()}

    def shares(self) -> dict[str, float]:
        """Share of the rounds' time by kind, in percent; `bookkeeping` is all that is none of them."""
        shares = {kind: 100 * self.seconds[kind] / self.round_seconds for kind in KINDS}
        return {name: round(share, 1) for name, share in {**shares, "bookkeeping": 100 - sum(shares.values())}.items()}

    def add(self, calls: list[Call], prompt_forwards: int, ended: float) -> None:
        """Adds one `generate`: of its calls, in order, those that belong to rounds, and the time from the first of these on."""
        skipped = {"backbone": prompt_forwards, "head": prompt_forwards, "vocabulary": 1, "commit": 0}
        began = calls[0].began if calls else ended
        for call in calls:
            if skipped[call.kind] > 0:
                skipped[call.kind] -= 1
                began = max(began, call.ended)
                continue
            self.calls[call.kind] += 1
            self.lengths[call.kind] += call.length
            self.seconds[call.kind] += call.ended - call.began
        self.round_seconds += ended - began


@contextmanager
def metered(block_size: int) -> Iterator[Meter]:
    """Measures every `generate` of an `MRPForCausalLM` in the body; needs `return_dict_in_generate=True` there."""
    meter = Meter(block_size)
    calls: list[Call] = []

    def clock() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def watch(owner: type, name: str, kind: str, length: Callable[..., int]) -> Any:
        inner = getattr(owner, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = clock()
            result = inner(self, *args, **kwargs)
            if kind != "vocabulary" or length(*args) > 0:
                calls.append(Call(kind, length(*args), began, clock()))
            return result

        return patch.object(owner, name, wrapped)

    generate = MRPForCausalLM.generate

    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.clear()
        out = generate(self, *args, **kwargs)
        assert isinstance(out, MRPGenerateOutput), "metering needs return_dict_in_generate=True"
        assert out.stats is not None
        assert out.stats.forwards is not None
        meter.add(calls, out.stats.forwards["prefill"], clock())
        return out

    def tokens(ids: torch.Tensor, *_: Any) -> int:
        return ids.shape[1]

    def positions(hidden: torch.Tensor, *_: Any) -> int:
        return hidden.shape[0]

    with ExitStack() as stack:
        stack.enter_context(watch(MRPForCausalLM, "backbone", "backbone", tokens))
        stack.enter_context(watch(MRPForCausalLM, "residual", "head", tokens))
        stack.enter_context(watch(Sampler, "__call__", "vocabulary", positions))
        stack.enter_context(watch(Sampler, "token_log_odds", "vocabulary", positions))
        stack.enter_context(watch(BlockCache, "commit", "commit", lambda rows, *_: len(rows)))
        stack.enter_context(patch.object(MRPForCausalLM, "generate", whole))
        yield meter
