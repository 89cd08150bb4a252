"""Decode at random for a bounded time, every text in several ways that must give the same, and count what was compared.

    python -m benchmarks.soak --minutes 30 --output FILE [--seed 0]

Tiny models of random weights in float64, where nearly equal scores do not come up, so that a difference is a bug. Every case
compares a batch with
- `mode`: for what drafts may have as target a mode that drafts, for the others the same rows in another order and padding;
- `alone`: single rows of it by themselves;
- `reference`: single rows of it by the slow decoder without a cache, `tests/reference.py`, where that knows the options;
- `reuse`: its rows cut somewhere and gone on with, from `past_key_values` and without.

Cases are functions of the seed and their number: `--first N --cases 1` repeats one. The last line has the counts, with the
memory that was resident at the start, after 100 cases and at the end.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import DRAFTING, REMASK_RULES, TARGETS
from tests.reference import reference_decode

from .common import header
from .random_cases import (
    MASK,
    VOCAB,
    assert_same_text,
    decode_rows,
    random_case_model,
    random_drafting,
    random_infill,
    random_options,
)

Row = dict[str, Any]
MODES = ("static", "dynamic", *TARGETS, "mrp_direct", "mrp_remask")
UNKNOWN_TO_REFERENCE = {"stopping_criteria", "stop_strings"}
REPORT_EVERY = 60.0  # seconds


class StopsBehind(StoppingCriteria):
    """Ends a row's text behind some tokens."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See `StoppingCriteria`."""
        return torch.isin(input_ids[:, -1], self.ids)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one word for each id."""
    words = {f"w{i:02d}": i for i in range(VOCAB - 2)} | {"abcdef": VOCAB - 2, "[UNK]": VOCAB - 1}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def random_extras(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """What calls carry along now and then: criteria, stop strings, processors, other truncations."""
    some = rng.sample(range(1, 50), 6)
    kinds: list[dict[str, Any]] = [
        {"stopping_criteria": [StopsBehind(some)]},
        {"stop_strings": [f"w{id:02d}" for id in some[:2]], "tokenizer": tokenizer},
        {"repetition_penalty": 1.3},
        {"suppress_tokens": some},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[id] for id in some[:3]]},
    ]
    return rng.choice(kinds) if rng.random() < 0.25 else {}


class Case:
    """One random batch and the calls that are made of it.

    Args:
        name: Seeds everything.
        tokenizer: For stop strings.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerFast) -> None:
        self.rng = rng = random.Random(name)
        self.calls = 0
        self.model: MRPForCausalLM = random_case_model(rng)
        block = self.model.config.block_size
        self.count = rng.choice((1, 3, 12, 48, 64))
        longest = rng.choice((2 * block + 3, 9, 70))
        self.prompts = [[rng.randrange(1, 50) for _ in range(rng.randint(1, longest))] for _ in range(self.count)]
        self.options = random_options(rng, block, sampled=rng.random() < 0.5)
        if rng.random() < 0.3:
            self.options["max_new_tokens"] += rng.randint(0, 60)
        if self.options.get("do_sample") and rng.random() < 0.15:
            self.options |= rng.choice(({"min_p": 0.1}, {"typical_p": 0.8}))
        self.mode = rng.choice(MODES)
        self.options |= {
            "confidence_threshold": rng.choice((0.02, 0.1, 0.5, 0.9)),
            "entropy_threshold": rng.choice((0.35, 3.0, 9.0)),
            "mrp_steps": rng.randint(1, min(block, 3)),
            "remask_rule": rng.choice(REMASK_RULES),
            "residual_delta": rng.choice((0.2, 1.0)),
        }
        self.drafting = random_drafting(rng)
        self.infill = random_infill(rng, self.count, self.options["max_new_tokens"])
        self.extras = random_extras(rng, tokenizer)
        self.seeds = [rng.randrange(1 << 62) for _ in range(self.count)]

    def decode(
        self, order: list[int], prompts: list[list[int]], infill: Tensor | None, **options: Any
    ) -> tuple[list[Row], Any]:
        """Decode some of the rows, in an order."""
        self.calls += 1
        options = {"decoding": self.mode, **self.options, **self.extras, **options}
        given = None if infill is None else infill[order]
        side = self.rng.choice(("left", "right"))
        return decode_rows(self.model, [prompts[i] for i in order], side, given, seed=[self.seeds[i] for i in order], **options)

    def drafted(self) -> dict[str, Any]:
        """Choose a mode that drafts for this one; nothing if none does."""
        if self.mode not in TARGETS:
            return {}
        return {"decoding": self.rng.choice(DRAFTING), "target": self.mode, **self.drafting}

    def compared(self) -> Iterator[tuple[str, Row, Row]]:
        """Give the pairs of rows that must be the same, with the kind of comparison."""
        rng, every = self.rng, list(range(self.count))
        batch, out = self.decode(every, self.prompts, self.infill)
        drafted = self.drafted()
        order = every if drafted else rng.sample(every, self.count)
        again, out_again = self.decode(order, self.prompts, self.infill, **drafted)
        yield from (("mode", batch[i], row) for i, row in zip(order, again, strict=True))
        one = rng.randrange(self.count)
        (alone,), _ = self.decode([one], self.prompts, self.infill, **(drafted if rng.random() < 0.5 else {}))
        yield "alone", batch[one], alone
        if not UNKNOWN_TO_REFERENCE & {*self.options, *self.extras}:
            yield "reference", batch[one], self.by_reference(one)
        if rng.random() < 0.6:
            past = out_again if order is every and rng.random() < 0.7 else out  # a cache with the head, or without
            yield from self.reused(every, batch, past.past_key_values)

    def by_reference(self, row: int) -> Row:
        """Decode a row by the slow decoder."""
        infill = () if self.infill is None else self.infill[row].tolist()
        self.calls += 1
        given = {"decoding": self.mode, "seed": self.seeds[row], **self.options, **self.extras}
        told = reference_decode(self.model, self.prompts[row], infill, **given)
        return {"tokens": told.tokens, "steps": told.reveal_step, "logprobs": torch.tensor(told.logprobs)}

    def reused(self, every: list[int], batch: list[Row], past: Any) -> Iterator[tuple[str, Row, Row]]:
        """Go on from the cache, behind answers that are cut, and other tokens behind them."""
        rng, said = self.rng, []
        for prompt, row in zip(self.prompts, batch, strict=True):
            answer = [token for token in row["tokens"][: rng.randint(0, len(row["tokens"]))] if token != MASK]
            said.append((prompt + answer + [rng.randrange(1, 50) for _ in range(rng.randint(0, 5))])[:300])
        cached, _ = self.decode(every, said, None, past_key_values=past, **self.drafted())
        plain, _ = self.decode(every, said, None)
        yield from (("reuse", *pair) for pair in zip(plain, cached, strict=True))


def resident_mb() -> float:
    """Read how much of this process is in memory, in MB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return round(int(fields["VmRSS"].split()[0]) / 1024, 1)


def soak(minutes: float, seed: int, first: int = 0, cases: int | None = None) -> Iterator[dict[str, Any]]:
    """Compare case after case; give a line for each mismatch, one a minute, and the last with all counts."""
    begin = told = time.monotonic()
    tokenizer, tokens, pairs = word_tokenizer(), Counter[str](), Counter[str]()
    calls = mismatches = 0
    number, resident = first, [resident_mb()]

    def counts() -> dict[str, Any]:
        return {
            "tokens": tokens.total(),
            "rows": pairs.total(),
            "cases": number - first,
            "calls": calls,
            "mismatches": mismatches,
            "tokens_by_kind": dict(tokens),
            "resident_mb": [*resident, resident_mb()],
            "seconds": round(time.monotonic() - begin, 1),
            "seed": seed,
        }

    while time.monotonic() - begin < 60 * minutes and (cases is None or number < first + cases):
        case = Case(f"{seed}/{number}", tokenizer)
        kind = "decode"
        try:
            for kind, one, other in case.compared():
                assert_same_text(one, other, kind)
                tokens[kind] += sum(step >= 0 for step in one["steps"])
                pairs[kind] += 1
        except Exception as error:  # a crash is a finding like any other; the next case goes on
            mismatches += 1
            yield {"mismatch": kind, "case": number, "mode": case.mode, "error": f"{type(error).__name__}: {error}"[:500]}
        calls, number = calls + case.calls, number + 1
        if number == first + 100:
            resident.append(resident_mb())
        if time.monotonic() - told > REPORT_EVERY:
            told = time.monotonic()
            yield {"so_far": counts()}
    yield counts()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 1 if something differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines: a header, mismatches, and the counts at last")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=None, help="cases at most")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # of such small products more only wait for each other
    line: dict[str, Any] = {}
    with options.output.open("w") as file:
        file.write(json.dumps(header("soak", options)) + "\n")
        for line in soak(options.minutes, options.seed, options.first, options.cases):
            print(json.dumps(line), flush=True)
            if "so_far" not in line:
                file.write(json.dumps(line) + "\n")
                file.flush()
    return int(line["mismatches"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
