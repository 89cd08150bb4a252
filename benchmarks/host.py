"""The time of the host's decisions alone: drafts, acceptance and ends of text, in microseconds a row and round.

    python -m benchmarks.host --batches 1 4 16 64 --states 1 4 8 --blocks 4 16

A decode is recorded: the results of the networks, in order. Then it is run again with the recording in place of the networks,
so that only the host's work is left. Microseconds are scaled to a machine whose bare loop (`s += i` in a function) takes 27 ns
an iteration; `loop_ns` is the time here, measured just before and after. Packing of ids and the device's work are excluded.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems

from modeling_mrp.generate.budget import Amount, Fixed
from modeling_mrp.generate.loop import Decoder, Drafting, Mode
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Networks
from modeling_mrp.rules.draft import BRANCHES, CROWD
from modeling_mrp.rules.reveal import Dynamic, RevealRule, Sequential, Static, logit, schedule_of
from modeling_mrp.rules.state import Row

from .common import TINY, emit, greedy_decode, header, load, parser_of

NEW, LOOP_NS = 64, 27.0
SAID = ("prefill", "score", "head", "pick")  # methods of networks whose results are recorded


class Recording:
    """The networks of a decode, recording their results.

    Args:
        networks: The real ones.
        said: Their results so far, in order.
    """

    def __init__(self, networks: Networks, said: list[Any]) -> None:
        self.networks, self.said = networks, said

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.networks, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            self.said.append(real(*arguments, **named))
            return self.said[-1]

        return noting if name in SAID else real


class Replay:
    """Networks that return the recorded results of a decode.

    Args:
        said: The results, in order.
    """

    picker = drafter = None

    def __init__(self, said: Sequence[Any]) -> None:
        again = iter(said)
        self.prefill = self.score = self.head = self.pick = lambda *_, **__: next(again)
        self.commit = self.widen = lambda *_: None

    def narrow(self, rows: list[Row], size: int) -> list[Row]:
        """See `Networks`."""
        return sorted(rows, key=lambda row: row.stop is not None)[:size]


def loop_ns(count: int = 1_000_000) -> float:
    """Time an iteration of a bare loop, in nanoseconds."""

    def bare(count: int) -> None:
        total = 0
        for one in range(count):
            total += one

    begun = time.process_time()
    bare(count)
    return (time.process_time() - begun) / count * 1e9


def measured(model: MRPForCausalLM, rule: RevealRule, prompts: list[list[int]], states: int, repeats: int) -> float:
    """Decode once for the recording, then time the host alone: seconds a row and round, the least of `repeats` runs.

    Args:
        model: The embedded checkpoint.
        rule: The target's.
        prompts: Ids by row.
        states: K; 1: the target alone; more: drafted with one head pass.
        repeats: Number of timed runs.
    """
    mode, amount = (Mode(rule), Amount())
    if states > 1:
        branches = BRANCHES if len(prompts) < CROWD else 1
        mode, amount = Mode(rule, drafting=Drafting(states, branches, 1)), Amount(states, 1)

    def decoder(networks: Any) -> Decoder:
        return Decoder(mode, networks, Fixed(amount), least_rows=len(prompts))

    networks, rows = greedy_decode(model, mode, prompts, NEW, [], max(2, states))
    said: list[Any] = []
    with torch.inference_mode():
        decoder(Recording(networks, said)).decode(rows, [0] * len(rows))
    rounds, texts = sum(row.counts.forwards for row in rows) - len(rows), [row.text for row in rows]
    best = float("inf")
    for _ in range(repeats):
        _, rows = greedy_decode(model, mode, prompts, NEW, [], max(2, states))
        again = decoder(Replay(said))
        gc.collect()
        begun = time.process_time()
        again.decode(rows, [0] * len(rows))
        best = min(best, time.process_time() - begun)
        assert [row.text for row in rows] == texts
    return best / rounds


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line for each block size, batch and number of states."""
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
        asked = [encode(problem, tokenizer)[0] for problem in problems("math", "tune", max(options.batches))]
        rules: dict[str, RevealRule] = {
            "static": Static(schedule_of(block, None)),
            "dynamic": Dynamic(logit(0.9)),
            "sequential": Sequential((1,)),
        }
        for batch in options.batches:
            for states in options.states:
                before = loop_ns()
                taken = {name: measured(model, rule, asked[:batch], states, options.repeats) for name, rule in rules.items()}
                speed = min(before, loop_ns())
                stated = {name: round(seconds * 1e6 * LOOP_NS / speed, 1) for name, seconds in taken.items()}
                emit({"block": block, "batch": batch, "states": states, "loop_ns": round(speed, 1), "microseconds": stated})


if __name__ == "__main__":
    main()
