"""Accuracy and cost of decoding modes on problems, with 95 % intervals.

`mrp evaluate --model FOLDER --decoding static --decoding mrp_spec --count 500` prints a table with a row per family and mode,
and with `--json` a JSON line for each; `--output FILE` keeps the lines. `--prompts FILE` asks a file of prompts with answers
instead (`questions`). Intervals are fields NAME_95, [low, high]: Wilson's for shares of problems, a
bootstrap over problems for all else (`intervals`). What is counted by
depth of a draft is defined in `acceptance`.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.model.configuration import MRPConfig

from ..data.problems import encode
from ..data.tasks import Family, Split, judge, problems
from ..loading import load_config, load_generation_fields, load_model, load_tokenizer
from .acceptance import acceptance_by_depth, mean_accepted_length
from .cost import charged_as
from .decoded import NEW_TOKENS, Decoded, Judge, decode_prompts
from .intervals import Interval, ratio_of_sums, wilson
from .options import FILE_NEW_TOKENS, EvaluateOptions, check_names, generate_options
from .provenance import header
from .questions import JUDGES, prompt_ids, read_questions
from .results import ResultsFile
from .table import printing


@dataclass
class ProblemSet:
    """Problems of one kind, ready to be asked.

    Attributes:
        name: The field of a line that says which: {"family": ...} or {"file": ...}.
        shown: What was asked, as text.
        prompts: As ids.
        judge: Judges the answers to all of them.
        max_new_tokens: Per prompt.
        answers: The right answers, only to tell sets apart.
        where: What errors call each; by default its number.
    """

    name: dict[str, str]
    shown: list[str]
    prompts: list[list[int]]
    judge: Judge
    max_new_tokens: int
    answers: list[str | None] = field(default_factory=list)
    where: list[str] = field(default_factory=list)

    def check_room(self, max_positions: int) -> None:
        """Raises `ValueError` for the first prompt that leaves no room for the text behind it."""
        for number, prompt in enumerate(self.prompts):
            if len(prompt) + self.max_new_tokens > max_positions:
                where = self.where[number] if self.where else f"problem {number}"
                raise ValueError(
                    f"{where}: a prompt of {len(prompt)} tokens and {self.max_new_tokens} new ones exceed the model's "
                    f"{max_positions} positions: shorten it, or lower --max-new-tokens"
                )

    def digest(self) -> str:
        """Changes with anything that is asked."""
        return hashlib.sha256(json.dumps([self.prompts, self.answers, self.max_new_tokens]).encode()).hexdigest()[:16]


def family_set(
    family: Family, split: Split, count: int, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int | None = None
) -> ProblemSet:
    """The first problems of a synthetic family."""
    asked = problems(family, split, count)
    return ProblemSet(
        {"family": family},
        [problem.prompt for problem in asked],
        [encode(problem, tokenizer)[0] for problem in asked],
        partial(judge, asked),
        max_new_tokens or NEW_TOKENS[family],
        [problem.answer for problem in asked],
    )


def file_set(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    judge: str = "exact",
    chat: bool = False,
    limit: int | None = None,
    max_new_tokens: int | None = None,
) -> ProblemSet:
    """The questions of a file.

    Raises:
        ValueError: for a malformed record, with file, line and field.
    """
    questions = read_questions(path, judge, limit)

    def judged(texts: list[str]) -> list[bool | None]:
        pairs = zip(questions, texts, strict=True)
        return [None if one.answer is None else JUDGES[judge](one.answer, text) for one, text in pairs]

    return ProblemSet(
        {"file": path},
        [question.shown for question in questions],
        [prompt_ids(question, tokenizer, chat) for question in questions],
        judged,
        max_new_tokens or FILE_NEW_TOKENS,
        [question.answer for question in questions],
        [question.where for question in questions],
    )


def measurements(decoded: Decoded, first: Decoded) -> dict[str, Any]:
    """The fields of a line, of one setting beside the first."""
    line: dict[str, Any] = {"accuracy": _rounded(decoded.accuracy, 1)}
    if decoded.judged:
        line["accuracy_95"] = _percent(wilson(sum(decoded.judged), len(decoded.judged)))
    speed = ratio_of_sums(decoded.tokens, decoded.row_forwards)
    assert speed is not None, "every prompt takes a forward"
    line |= {
        "tokens_per_forward": round(decoded.tokens_per_forward, 3),
        "tokens_per_forward_95": speed.rounded(),
        "head_per_token": round(decoded.head_forwards_per_token, 3),
        "identical_to_first": round(decoded.identical(first), 1),
        "identical_to_first_95": _percent(wilson(decoded.equal(first), len(decoded.ids))),
    }
    length = mean_accepted_length(decoded)
    if decoded.offered_at_depth.shape[1] and length is not None:
        depths = acceptance_by_depth(decoded)
        line |= {
            "mean_accepted_length": round(length.value, 3),
            "mean_accepted_length_95": length.rounded(),
            "acceptance_by_depth": [round(100 * rate.value, 1) for _, rate in depths],
            "acceptance_by_depth_95": [_percent(rate) for _, rate in depths],
            "offered_by_depth": [offered for offered, _ in depths],
        }
    return {**line, "seconds": round(decoded.seconds, 1), **decoded.forwards}


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _percent(interval: Interval) -> list[float]:
    return [round(100 * interval.low, 1), round(100 * interval.high, 1)]


def evaluate(options: EvaluateOptions) -> None:
    """Prints a row or a JSON line per problem set and setting. Everything is checked before the model's weights are read.

    Raises:
        ValueError: for a malformed file, a prompt that leaves no room for an answer, options that `generate` refuses, or a
            checkpoint that cannot be loaded.
        OSError: if there is no such checkpoint.
    """
    options = options.of_checkpoint(load_generation_fields(options.model))
    every = options.settings()
    config = load_config(options.model)
    for setting in every:
        check_setting(setting, config)
    results = ResultsFile(options.output, "asked") if options.output else None
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    sets = problem_sets(options, tokenizer)
    for asked in sets:
        asked.check_room(config.max_position_embeddings)
    model: Any = load_model(options.model, options.dtype)
    model = model.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if results is not None:
        results.begin(header("mrp evaluate", options, model))
    report(model, tokenizer, options, sets, results)


def check_setting(setting: Mapping[str, Any], config: MRPConfig) -> None:
    """Raises `ValueError` for an option that `generate` does not know, or would refuse of a model with this config."""
    check_names(setting)
    MRPGenerationConfig(**generate_options(setting)).check(config.block_size, config.has_head)


def problem_sets(options: EvaluateOptions, tokenizer: PreTrainedTokenizerBase) -> list[ProblemSet]:
    """What is asked.

    Raises:
        ValueError: for a malformed file.
    """
    count = min(options.count, options.limit or options.count)
    return [
        *(
            family_set(cast(Family, family), cast(Split, options.split), count, tokenizer, options.max_new_tokens)
            for family in options.families
        ),
        *(
            file_set(path, tokenizer, options.judge, options.chat, options.limit, options.max_new_tokens)
            for path in options.prompts
        ),
    ]


def report(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: EvaluateOptions,
    sets: Sequence[ProblemSet],
    results: ResultsFile | None = None,
) -> None:
    """Prints the measurements that are asked for, and adds them to the file of results. Of those that are there already only
    a table has rows."""
    every = options.settings()
    with printing(options.json) as (print_line, print_text):
        for asked in sets:
            question, first = _question(options, model, asked), None
            given = (model, tokenizer, asked.prompts, asked.judge, asked.max_new_tokens, options.batch_size)
            for setting in every:
                identity = {**asked.name, **setting, "set": setting.get("set"), "asked": question}
                known = None if results is None else results.find(**identity, first=every[0])
                if known is not None:
                    print(f"{asked.name} {setting}: in {options.output} already", file=sys.stderr)
                    if not options.json:
                        print_line(known)
                    continue
                first = first or decode_prompts(*given, **generate_options(every[0]))
                decoded = first if setting is every[0] else decode_prompts(*given, **generate_options(setting))
                line = {**asked.name, **setting, **measurements(decoded, first)}
                line |= {"charged_as": charged_as(model.config.hidden_size), "first": every[0], "asked": question}
                print_line(line)
                if results is not None:
                    results.add(line)
                for shown, text, right in list(zip(asked.shown, decoded.texts, decoded.right, strict=True))[: options.show]:
                    print_text(f"--- {shown}\n{text}\n[{'not judged' if right is None else 'right' if right else 'wrong'}]")


def _question(options: EvaluateOptions, model: Any, asked: ProblemSet) -> dict[str, Any]:
    """List what identifies a measurement: the model, the problems and the options that change results."""
    names = ("model", "tokenizer", "split", "judge", "chat", "batch_size")
    of_model = {"dtype": str(model.dtype), "device": str(model.device)}
    of_set = {"problems": len(asked.prompts), "max_new_tokens": asked.max_new_tokens, "digest": asked.digest()}
    return {**{name: getattr(options, name) for name in names}, **of_model, **of_set}


__all__ = ["ProblemSet", "check_setting", "evaluate", "family_set", "file_set", "measurements"]
