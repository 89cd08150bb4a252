"""The time of the host's decisions alone: drafts, acceptance and ends of text, in microseconds a
row and round.

    python -m benchmarks.host --batches 1 4 16 64 --states 1 4 8 --blocks 4 16

A decode is recorded: the results of the networks, in order. Then it is run again with the recording
in place of the networks, so that only the host's work is left. Microseconds are scaled to a machine
whose bare loop (`s += i` in a function) takes 27 ns an iteration; `loop_ns` is the time here,
measured just before and after. Packing of ids and the device's work are excluded.
"""

import gc
import time
import timeit
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from mrp_trainer.data.tasks import problems

from modeling_mrp.generate.loop import Decoder, Drafting, Mode
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Networks
from modeling_mrp.rules.draft import BRANCHES, CROWD
from modeling_mrp.rules.gain import Fixed
from modeling_mrp.rules.reveal import RevealRule

from .common import TINY, emit, encode_prompts, greedy_decode, header, load, parser_of
from .frontier import rule_of

NEW, LOOP_NS = 64, 27.0
RECORDED = ("prefill", "score", "head")  # methods of networks whose results are recorded


class Recording:
    """A wrapper of networks that appends the results of their methods `RECORDED`, and of their
    sampler's `estimate`, to the list `results`, in order."""

    def __init__(self, networks: Networks) -> None:
        self.networks = networks
        self.results: list[Any] = []
        self.sampler = SimpleNamespace(estimate=self._noting(networks.sampler.estimate))

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.networks, name)
        return self._noting(real) if name in RECORDED else real

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **named: Any) -> Any:
            self.results.append(method(*arguments, **named))
            return self.results[-1]

        return noting


def replayed(results: Sequence[Any]) -> SimpleNamespace:
    """Make networks whose methods return the recorded results `results` of a decode, one after the
    other."""
    remaining = iter(results)

    def following(*_: Any, **__: Any) -> Any:
        return next(remaining)

    def nothing(*_: Any) -> None:
        pass

    return SimpleNamespace(
        sampler=SimpleNamespace(estimate=following),
        commit=nothing,
        restore_batch=nothing,
        **dict.fromkeys(RECORDED, following),
    )


def loop_ns(count: int = 1_000_000) -> float:
    """Time a bare loop of `count` iterations; return nanoseconds per iteration."""
    loop = "for one in range(count): total += one"
    return timeit.timeit(loop, f"total, count = 0, {count}", time.process_time, 1) / count * 1e9


def measured(
    model: MRPForCausalLM, rule: RevealRule, prompts: list[list[int]], states: int, repeats: int
) -> float:
    """Record a decode, then time the host alone; return seconds per row and round, the least of
    `repeats` runs.

    Args:
        model: The embedded checkpoint.
        rule: The target's reveal rule.
        prompts: Ids by row.
        states: K; with 1 the target decodes alone, with more the head drafts in one pass.
        repeats: Number of timed runs.
    """
    mode = Mode(rule)
    amount = Fixed()
    if states > 1:
        branches = 1 if len(prompts) >= CROWD and states <= 4 else BRANCHES  # as by default
        mode = Mode(rule, drafting=Drafting(states, branches, 1))
        amount = Fixed(states, 1)

    def decoder(networks: Any) -> Decoder:
        return Decoder(mode, networks, amount, least_rows=len(prompts))

    networks, rows = greedy_decode(model, mode, prompts, NEW, [], max(2, states))
    recording = Recording(networks)
    with torch.inference_mode():
        decoder(recording).decode(rows, [0] * len(rows))
    rounds = sum(row.counts.forwards for row in rows) - len(rows)
    texts = [row.text for row in rows]
    best = float("inf")
    for _ in range(repeats):
        _, rows = greedy_decode(model, mode, prompts, NEW, [], max(2, states))
        replay = decoder(replayed(recording.results))
        gc.collect()
        start_time = time.process_time()
        replay.decode(rows, [0] * len(rows))
        best = min(best, time.process_time() - start_time)
        assert [row.text for row in rows] == texts
    return best / rounds


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: print a JSON line for each block size, batch and number of states."""
    parser = parser_of("host", __doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--states", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    emit(header("host", options))
    for block in options.blocks:
        model, tokenizer = load(TINY)
        model.config.block_size = block
        prompts = encode_prompts(problems("math", "tune", max(options.batches)), tokenizer)
        for batch in options.batches:
            for states in options.states:
                loop_before = loop_ns()
                seconds_by_rule = {}
                for name in ("static", "dynamic", "sequential"):
                    seconds_by_rule[name] = measured(
                        model, rule_of(name), prompts[:batch], states, options.repeats
                    )
                speed = min(loop_before, loop_ns())
                microseconds = {}
                for name, seconds in seconds_by_rule.items():
                    microseconds[name] = round(seconds * 1e6 * LOOP_NS / speed, 1)
                emit(
                    {
                        "block": block,
                        "batch": batch,
                        "states": states,
                        "loop_ns": round(speed, 1),
                        "microseconds": microseconds,
                    }
                )


if __name__ == "__main__":
    main()
