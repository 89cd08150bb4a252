"""Two capabilities in one call: the text has to be that of the call without what may not change it,
or the slow reference's.

`tests/support/capabilities.py` has the registry. A case of a pair is a tiny random model and a
call, made of a name; in float64 texts have no near ties, so that each difference is a fault.
"""

import copy
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from modeling_mrp.generate.option_table import TARGETS
from tests.support.random_cases import (
    MASK,
    Row,
    StopsBehind,
    assert_same_text,
    make_model,
    of_slow,
    random_prompts,
    word_tokenizer,
)
from tests.support.reference import reference_decode

PAD = 0
Options = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """A decode: by row, its prompt, and what came of it; the whole output, its arguments, and the
    columns of the prompts."""

    prompts: list[list[int]]
    rows: list[Row]
    out: Any
    given: Options
    width: int


Run = Callable[..., Result]  # of prompts, and of further arguments of `Trial.decode`


@dataclass(frozen=True)
class Capability:
    """A thing that a user may ask for, and what it changes about a case. Functions take the `Trial`
    first.

    Attributes:
        name: Its name, of one registry.
        slot: What it decides; two of one slot have no meaning together, nor has it with those named
            in `apart`.
        shape: Fields of the config; these and the next three change the text.
        weights: Changes the model; returns it.
        begin: Changes the trial before the call.
        options: Returns options that change the text.
        model: Makes another model of a copy, with the same texts.
        arguments: Returns arguments that leave the text, of the prompts and the number of rows.
        around: Makes a context for the call.
        call: Makes another way to decode of a way to decode.
        check: Looks at a result within the context; returns a function that compares it with the
            rows that were expected.
        without: By name, those with which it is refused, and the error's message, a regular
            expression.
    """

    name: str
    slot: str = ""
    apart: tuple[str, ...] = ()
    shape: Mapping[str, Any] = field(default_factory=dict)
    weights: Callable[["Trial", Any], Any] | None = None
    begin: Callable[["Trial"], None] | None = None
    options: Callable[["Trial"], Options] | None = None
    model: Callable[["Trial", Any], Any] | None = None
    arguments: Callable[["Trial", list[list[int]], int], Options] | None = None
    around: Callable[["Trial"], AbstractContextManager[Any]] | None = None
    call: Callable[["Trial", Run], Run] | None = None
    check: Callable[["Trial", Result], Callable[[list[Row]], None]] | None = None
    without: Mapping[str, str] = field(default_factory=dict)


Pair = tuple[Capability, Capability]


def pairs_of(registry: Sequence[Capability]) -> list[Pair]:
    """List the pairs that have a meaning, refused ones too."""

    def meet(a: Capability, b: Capability) -> bool:
        apart = {a.name, a.slot} & {*b.apart} or {b.name, b.slot} & {*a.apart}
        return not apart and not (a.slot and a.slot == b.slot)

    return [(a, b) for a, b in combinations(registry, 2) if meet(a, b)]


def refusal_of(pair: Pair) -> str | None:
    """Return the message with which a pair is refused, a regular expression; None for one that
    works."""
    a, b = pair
    return (
        a.without.get(b.name)
        or a.without.get(b.slot)
        or b.without.get(a.name)
        or b.without.get(a.slot)
    )


def base_of(model: Any) -> Any:
    """Return the MRP model below peft's."""
    return model.base_model.model if isinstance(model, PeftModel) else model


def padded(prompts: Sequence[list[int]], side: str) -> dict[str, Tensor]:
    """Make ids and attention mask of prompts, padded on a side, or on `both`."""
    width = max(map(len, prompts)) + 3 * (side == "both")
    ids, mask = (
        torch.full((len(prompts), width), PAD),
        torch.zeros(len(prompts), width, dtype=torch.long),
    )
    for row, prompt in enumerate(prompts):
        begin = {
            "left": width - len(prompt),
            "right": 0,
            "both": min(row + 1, width - len(prompt)),
        }[side]
        ids[row, begin : begin + len(prompt)] = torch.tensor(prompt)
        mask[row, begin : begin + len(prompt)] = 1
    return {"input_ids": ids, "attention_mask": mask}


class Trial:
    """A case of a pair: all of it follows from a name.

    Attributes:
        rng: The source of all choices.
        names, slots: Of the pair.
        plain, tested: The model whose texts are right, and the one that the pair makes.
        prompts, infill, seeds, adapters: Of each row; infill and the names of adapters are None
            mostly.
        copies: Rows for each prompt.
        mode: The mode that decides the text.
        options: Further options that change it; `stops` are a kind, and ids that end a text.
        side: Where padding is.
        slow: Whether the slow reference covers the case.
        folder: A place for files.
    """

    def __init__(self, name: str, pair: Pair) -> None:
        self.rng = rng = random.Random(name)
        self.pair, self.names, self.slots = (
            pair,
            {one.name for one in pair},
            {one.slot for one in pair},
        )
        self.shape: Options = {
            "block_size": rng.choice((4, 4, 8)),
            "num_hidden_layers": rng.choice((1, 2)),
        }
        self.shape["num_nextn_predict_layers"] = rng.choice((1, 2))
        for one in pair:
            self.shape |= one.shape
        self.block: int = self.shape["block_size"]
        self.prompts = random_prompts(rng, rng.choice((1, 2, 3)), rng.choice((5, self.block + 3)))
        self.infill: list[list[int]] | None = None
        self.adapters: list[str] | None = None
        self.copies, self.side, self.slow = 1, "left", True
        self.seeds = [rng.randrange(1 << 62) for _ in range(2 * len(self.prompts))]
        self.generate: Callable[[Options], Any]
        self.mode = rng.choice(("static", "dynamic", "sequential", "entropy_bound", *TARGETS))
        self.options = self.background()
        for one in pair:
            self.options |= one.options(self) if one.options else {}
        self.mode = self.options.pop("decoding", self.mode)
        for one in pair:
            if one.begin:
                one.begin(self)
        self.drafts = self.background_drafts()

    def background(self) -> Options:
        """Draw options that a pair may change."""
        rng = self.rng
        lively: Options = {
            "confidence_threshold": rng.choice((0.02, 0.1, 0.9)),
            "low_threshold": rng.choice((None, 0.03)),
        }
        lively |= {
            "entropy_threshold": rng.choice((0.3, 5.0)),
            "factor": rng.choice((1.0, 4.0)),
            "residual_delta": 0.3,
        }
        lively |= {
            "max_new_tokens": rng.randint(2, self.block + 4),
            "remask_rule": "reread",
            "top_k": 0,
        }
        lively |= {"eos_token_id": rng.choice((None, rng.sample(range(1, 50), 8)))}
        return lively | rng.choice(({}, {"do_sample": True}))

    def background_drafts(self) -> Options:
        """Draw what drafts for the case's mode; nothing where the pair decides that, and half of
        the time."""
        rng = self.rng
        if "drafts" in self.slots or self.mode not in TARGETS or rng.random() < 0.4:
            return {}
        drafter = (
            "mrp_spec"
            if self.shape["num_nextn_predict_layers"] and rng.random() < 0.7
            else "self_spec"
        )
        return {"decoding": drafter, "target": self.mode, "num_draft_states": rng.randint(2, 5)}

    def decode(
        self,
        prompts: list[list[int]],
        copies: int | None = None,
        criteria: Sequence[Any] = (),
        **more: Any,
    ) -> Result:
        """Decode prompts by the tested model, as the pair says; further arguments go before it."""
        copies = copies or self.copies
        rows = len(prompts) * copies
        given: Options = {
            "decoding": self.mode,
            **self.called(self.options),
            "seed": self.seeds[:rows],
            "pad_token_id": PAD,
        }
        given |= {
            "return_dict_in_generate": True,
            "num_return_sequences": copies,
            **self.drafts,
            **padded(prompts, self.side),
        }
        given |= {"infill_ids": torch.tensor(self.infill)} if self.infill else {}
        given |= (
            {"adapter_names": [name for name in self.adapters for _ in range(copies)]}
            if self.adapters
            else {}
        )
        asked = [*given.pop("stopping_criteria", []), *criteria]
        for one in self.pair:
            given |= one.arguments(self, prompts, rows) if one.arguments else {}
        given |= more
        if asked := [*asked, *given.pop("stopping_criteria", [])]:
            given["stopping_criteria"] = asked
        width = given["input_ids"].shape[1]
        out = self.generate(given)
        return Result(
            [prompts[row // copies] for row in range(rows)],
            self.rows_of(out, width),
            out,
            given,
            width,
        )

    def rows_of(self, out: Any, width: int) -> list[Row]:
        """Read rows from an output; those of an output of ids alone have tokens alone."""
        if isinstance(out, Tensor):
            return [{"tokens": row[width:]} for row in out.tolist()]
        parts = zip(
            out.sequences.tolist(),
            out.reveal_step.tolist(),
            out.token_logprobs.tolist(),
            strict=True,
        )
        return [
            {
                "tokens": ids[width:],
                "steps": steps,
                "logprobs": torch.tensor(logprobs, dtype=torch.float64),
            }
            for ids, steps, logprobs in parts
        ]

    def called(self, options: Options) -> Options:
        """Return options as `generate` takes them."""
        given = {name: value for name, value in options.items() if name != "stops"}
        kind, ids = options.get("stops", (None, []))
        if kind == "strings":
            given |= {"stop_strings": [f"w{id:02d}" for id in ids], "tokenizer": word_tokenizer()}
        return given | ({"stopping_criteria": [StopsBehind(ids)]} if kind == "criterion" else {})

    def expected(self, prompt: list[int], row: int, slowly: bool) -> Row:
        """Decode a row by itself without what may not change its text, or by the slow reference."""
        infill, seed = (
            (self.infill or [[]] * len(self.prompts))[row // self.copies],
            self.seeds[row],
        )
        if slowly:
            options = {name: value for name, value in self.options.items() if name != "stops"}
            _, ids = self.options.get("stops", (None, []))
            options |= {"stop": lambda text: text[-1] in ids} if ids else {}
            model = base_of(self.plain)
            return of_slow(
                reference_decode(model, prompt, infill, decoding=self.mode, seed=seed, **options)
            )
        given: Options = {
            "decoding": self.mode,
            **self.called(self.options),
            "seed": [seed],
            "pad_token_id": PAD,
        }
        given |= {
            "return_dict_in_generate": True,
            "kernels": False,
            "graphs": False,
            **padded([prompt], "left"),
        }
        given |= {"infill_ids": torch.tensor([infill])} if infill else {}
        given |= {"adapter_names": [self.adapters[row // self.copies]]} if self.adapters else {}
        return self.rows_of(self.plain.generate(**given), len(prompt))[0]

    def compare(self) -> int:
        """Decode, and compare all rows with what they should be; return the number of tokens.

        Raises:
            AssertionError: where something differs.
        """
        with tempfile.TemporaryDirectory() as folder, ExitStack() as contexts:
            self.folder = Path(folder)
            model: Any = make_model(self.rng.randrange(1 << 16), **self.shape)
            for one in self.pair:
                model = one.weights(self, model) if one.weights else model
            self.plain = self.tested = model
            makers = [one.model for one in self.pair if one.model]
            if makers:
                self.tested = copy.deepcopy(model)
            for maker in makers:
                self.tested = maker(self, self.tested)
            self.generate = lambda given: self.tested.generate(**given)
            run: Run = self.decode
            for one in self.pair:
                run = one.call(self, run) if one.call else run
            for one in self.pair:
                if one.around:
                    contexts.enter_context(one.around(self))
            result = run(self.prompts)
            checks = [one.check(self, result) for one in self.pair if one.check]
            contexts.close()
            return self.compared(result, checks)

    def compared(self, result: Result, checks: Sequence[Callable[[list[Row]], None]]) -> int:
        exact = base_of(self.plain).dtype == torch.float64
        slow_row = self.rng.randrange(len(result.rows)) if exact and self.slow else -1
        rows = [
            self.expected(prompt, row, row == slow_row) for row, prompt in enumerate(result.prompts)
        ]
        for got, row in zip(result.rows, rows, strict=True):
            length = len(row["tokens"])
            if "steps" in got:
                assert_same_text(got, row, sorted(self.names), 1e-5 if exact else 1e-2)
            assert (
                got["tokens"]
                == (row["tokens"] + [PAD] * len(got["tokens"]))[: max(length, len(got["tokens"]))]
            )
        for check in checks:
            check(rows)
        return sum(len(row["tokens"]) for row in rows)


def tried(name: str, pair: Pair) -> int:
    """Compare one case of a pair; return the number of tokens, 0 for a pair that is refused, as it
    has to be.

    Raises:
        AssertionError: where something differs, or for a pair that is not refused, or in other
            words.
    """
    message = refusal_of(pair)
    if message is None:
        return Trial(name, pair).compare()
    said = ""
    try:
        Trial(name, pair).compare()
    except ValueError as error:
        said = str(error)
    assert re.search(message, said, re.DOTALL), (
        f"{message!r} should refuse this, and {said or 'nothing'!r} did"
    )
    return 0


def drawn(
    registry: Sequence[Capability], seed: int, first: int, count: int
) -> Iterator[tuple[str, Pair]]:
    """Yield cases by number: their names and pairs, each pair once, in an order of the seed, before
    any comes again."""
    pairs = pairs_of(registry)
    for number in range(first, first + count):
        turn, place = divmod(number, len(pairs))
        order = list(range(len(pairs)))
        random.Random(f"{seed}/{turn}").shuffle(order)
        yield f"{seed}/{number}", pairs[order[place]]


__all__ = [
    "MASK",
    "PAD",
    "Capability",
    "Options",
    "Pair",
    "Result",
    "Run",
    "Trial",
    "base_of",
    "drawn",
    "padded",
    "pairs_of",
    "tried",
]
