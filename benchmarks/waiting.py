"""Compare padded batches with a batch that rows join: idle places, forwards and wall clock.

    python -m benchmarks.waiting --count 200 --turns 5

Held-out problems of the embedded checkpoint of three kinds, shuffled: math and code, whose answers
end behind some 20 to 80 tokens, and source text, which goes on to the limit of 256 new tokens if it
is not done before. Greedy, in float64; all ways give the same texts, which is checked.

*Padded* batches are those of 16 prompts in their order, each decoded to the end of its longest
text, with places for all 16 until then, as in transformers' own loop. *Halved* ones are this
package's without `max_batch_size`: the batch is halved as its rows end. Rows *join* as others end
with `max_batch_size=16`. All run in one process, in turns; a ratio of times is the median over
turns, with their range. The result is a table of Markdown.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from mrp_trainer.data.tasks import Family
from mrp_trainer.evaluate.decoded import pad_left
from mrp_trainer.evaluate.problem_sets import family_set

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.loop import Decoder, Mode, draft_amount
from modeling_mrp.generate.options import resolved
from modeling_mrp.rules.state import Row

from .common import TINY, deciding, greedy_decode, load, parser_of

FAMILIES: tuple[Family, ...] = ("math", "code", "source")
MODES: tuple[dict[str, Any], ...] = (
    {"decoding": "sequential"},
    {"decoding": "mrp_spec", "target": "sequential", "num_draft_states": 4},
)
COLUMNS = (
    *("mode", "idle places: padded", "halved", "joined", "forwards: padded, halved", "joined"),
    *("wall clock of joined over padded", "over halved", "CPU time over padded", "over halved"),
)


class Counted:
    """Texts of prompts, and what they cost: forwards of the batch, places of its rows in these, and
    those in which a row took part; seconds of wall clock and of the CPU."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self.forwards = self.places = self.taken = 0
        self.wall = self.cpu = 0.0

    @property
    def idle(self) -> float:
        """Return the share of places in which no row took part."""
        return 1 - self.taken / self.places

    def add(
        self, model: MRPForCausalLM, prompts: Sequence[Sequence[int]], **options: Any
    ) -> "Counted":
        """Decode prompts in one call of `generate`, and add what it took; return this."""
        wall = time.perf_counter()
        cpu = time.process_time()
        inputs: dict[str, Any] = {**pad_left(prompts, 0)}
        out: Any = model.generate(**inputs, return_dict_in_generate=True, **options)
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        width = inputs["input_ids"].shape[1]
        lengths = (out.reveal_step >= 0).sum(1).tolist()
        for ids, length in zip(out.sequences[:, width:].tolist(), lengths, strict=True):
            self.texts.append(ids[:length])
        stats = out.stats
        self.forwards += sum(stats.forwards[role] for role in ("prefill", "denoise", "verify"))
        self.places += stats.slot_forwards
        self.taken += int(stats.row_forwards.sum())
        return self

    def add_kept(
        self,
        model: MRPForCausalLM,
        mode: Mode,
        prompts: list[list[int]],
        new_tokens: int,
        eos: list[int],
    ) -> None:
        """Decode prompts in one batch that keeps all rows to its end, and add what it took."""
        wall = time.perf_counter()
        cpu = time.process_time()
        with torch.no_grad():
            networks, rows = greedy_decode(model, mode, prompts, new_tokens, eos, mode.width)
            running = [len(rows)]  # before each forward, and at the end

            def count(batch: Sequence[Row]) -> None:
                running.append(sum(row.stop is None for row in batch))

            amount = draft_amount(mode, networks.picker, model.config, None)
            decoder = Decoder(mode, networks, amount, [count], len(rows))
            decoder.decode(rows, [0] * len(rows))
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        for row in rows:
            self.texts.append(row.text[row.prompt : row.stop])
        self.forwards += len(running) - 1
        self.places += len(rows) * (len(running) - 1)
        self.taken += sum(running[:-1])


def padded(
    model: MRPForCausalLM, prompts: Sequence[Sequence[int]], at_once: int, **options: Any
) -> Counted:
    """Decode prompts in batches of `at_once`, each to its end, with all its rows until then."""
    counted = Counted()
    config, _ = resolved(model, None, dict(options))
    mode = config.mode(model.config.block_size, at_once)
    for begin in range(0, len(prompts), at_once):
        batch = list(map(list, prompts[begin : begin + at_once]))
        counted.add_kept(model, mode, batch, config.max_new_tokens, config.eos_ids())
    return counted


def halved(
    model: MRPForCausalLM, prompts: Sequence[Sequence[int]], at_once: int, **options: Any
) -> Counted:
    """Decode prompts in batches of `at_once`, each to its end, halved as its rows end."""
    counted = Counted()
    for begin in range(0, len(prompts), at_once):
        counted.add(model, prompts[begin : begin + at_once], **options)
    return counted


def joined(
    model: MRPForCausalLM, prompts: Sequence[Sequence[int]], at_once: int, **options: Any
) -> Counted:
    """Decode prompts in a batch of `at_once`, which each joins as another ends."""
    return Counted().add(model, prompts, max_batch_size=at_once, **options)


def spread(values: Sequence[float]) -> str:
    """Write the median of some ratios, and their range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def row_of(
    model: MRPForCausalLM, prompts: Sequence[Sequence[int]], at_once: int, turns: int, mode: Any
) -> list[str]:
    """Decode prompts in all ways, in turns; return the cells of a mode."""
    ratios: dict[str, list[float]] = {}
    for _ in range(turns):
        joining = joined(model, prompts, at_once, **mode)
        counterparts = {
            "padded": padded(model, prompts, at_once, **mode),
            "halved": halved(model, prompts, at_once, **mode),
        }
        for name, counterpart in counterparts.items():
            if joining.texts != counterpart.texts:
                raise AssertionError(f"{mode} gave other texts where rows join")
            ratios.setdefault(f"wall, {name}", []).append(joining.wall / counterpart.wall)
            ratios.setdefault(f"CPU, {name}", []).append(joining.cpu / counterpart.cpu)
    if counterparts["padded"].forwards != counterparts["halved"].forwards:
        raise AssertionError(f"{mode} took other forwards where the batch is halved")
    return [
        " ".join(map(str, (mode["decoding"], mode.get("num_draft_states", "")))).strip(),
        f"{counterparts['padded'].idle:.1%}",
        f"{counterparts['halved'].idle:.1%}",
        f"{joining.idle:.1%}",
        str(counterparts["padded"].forwards),
        f"{joining.forwards} ({joining.forwards / counterparts['padded'].forwards:.2f})",
        spread(ratios["wall, padded"]),
        spread(ratios["wall, halved"]),
        spread(ratios["CPU, padded"]),
        spread(ratios["CPU, halved"]),
    ]


def main() -> None:
    """Print the table."""
    parser = parser_of("waiting", __doc__ or "")
    parser.add_argument("--count", type=int, default=200, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of a text, at most")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts at once")
    parser.add_argument("--turns", type=int, default=5, help="repetitions of both ways")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(TINY)
    model.double()
    prompts: list[Sequence[int]] = []
    limit = options.max_new_tokens
    for family in FAMILIES:
        problems = family_set(family, "heldout", tokenizer, -(-options.count // len(FAMILIES)))
        prompts += problems.prompts
    random.Random(0).shuffle(prompts)
    prompts = prompts[: options.count]
    print(
        f"deciding code {deciding()}, {len(prompts)} prompts of {min(map(len, prompts))} to "
        f"{max(map(len, prompts))} tokens, at most {limit} new ones, {options.batch_size} at once, "
        f"{options.threads} threads, {options.turns} turns\n"
    )
    print("| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n")
    for mode in MODES:
        settings = {**mode, "max_new_tokens": limit}
        fields = row_of(model, prompts, options.batch_size, options.turns, settings)
        print("| " + " | ".join(fields) + " |", flush=True)


if __name__ == "__main__":
    main()
