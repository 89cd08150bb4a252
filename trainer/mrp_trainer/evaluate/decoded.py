"""Decoding of lists of prompts with one set of `generate` options, and the cost of each prompt."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data.problems import encode
from ..data.tasks import Family, Problem, judge

NEW_TOKENS: dict[Family, int] = {"math": 64, "code": 80, "source": 64}
Judge = Callable[[list[str]], list[bool | None]]


@dataclass
class Decoded:
    """The results of one mode on a list of problems. Lists have one item for each problem.

    Attributes:
        texts: The decoded answers.
        ids: The generated ids, without padding.
        verdicts: For each text, whether it is right; None if this is unknown, because there is no
            judge or the problem has no known answer.
        seconds: Wall-clock time of decoding.
        forwards: Counts over all problems, by name. `prefill` (over prompts), `verify` (rounds with
            drafts) and `denoise` (rounds without drafts) are numbers of backbone forwards; `head`
            is the number of head passes. A forward of the whole batch counts once. `drafted` and
            `accepted` are numbers of drafted states, and `revoked` is the number of reveals that
            were masked again.
        row_forwards, row_head_forwards: Number of forwards of the backbone, and of passes of the
            head, in which the problem's row took part.
        row_states: Number of states that these forwards of the backbone scored; a forward over a
            prompt counts as one.
        rounds: Number of backbone forwards that were rounds (all but the prompt's).
        accepted: Number of drafted states that were accepted.
        offered_at_depth: int64 [problems, depths]. For each depth k = 1, 2, ..., the number of
            rounds that accepted at least k - 1 drafts and offered a k-th one, which is a draft that
            could follow the (k - 1)-th.
        accepted_at_depth: int64 [problems, depths]. For each depth k, the number of the rounds in
            `offered_at_depth` that accepted the k-th draft.
    """

    texts: list[str]
    ids: list[list[int]]
    verdicts: list[bool | None]
    seconds: float
    forwards: dict[str, int]
    row_forwards: list[int]
    row_head_forwards: list[int]
    row_states: list[int]
    rounds: list[int]
    accepted: list[int]
    offered_at_depth: np.ndarray
    accepted_at_depth: np.ndarray

    @property
    def tokens(self) -> list[int]:
        """Count the generated tokens of each problem."""
        return [len(ids) for ids in self.ids]

    @property
    def tokens_per_forward(self) -> float:
        """Divide generated tokens by backbone forwards, both summed over rows."""
        return sum(self.tokens) / sum(self.row_forwards)

    @property
    def head_forwards_per_token(self) -> float:
        """Divide head forwards by generated tokens, both summed over rows."""
        return sum(self.row_head_forwards) / sum(self.tokens)

    @property
    def states_per_forward(self) -> float:
        """Divide the scored states by backbone forwards, both summed over rows."""
        return sum(self.row_states) / sum(self.row_forwards)

    def costs(self) -> dict[str, float]:
        """Return the fields of a result line by which its forwards are charged
        (`cost.units_per_forward`)."""
        return {
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "head_per_token": round(self.head_forwards_per_token, 3),
            "states_per_forward": round(self.states_per_forward, 3),
        }

    @property
    def judged(self) -> list[bool]:
        """List the verdicts that are not None."""
        return [verdict for verdict in self.verdicts if verdict is not None]

    @property
    def accuracy(self) -> float | None:
        """Compute the percentage of problems that were solved, among those with a known answer;
        None if there are none."""
        return 100 * sum(self.judged) / len(self.judged) if self.judged else None

    def equal(self, reference: "Decoded") -> int:
        """Count the problems whose generated ids are the same as in `reference`."""
        return sum(a == b for a, b in zip(self.ids, reference.ids, strict=True))


def pad_left(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Pad prompts on the left to the length of the longest; return `input_ids` and
    `attention_mask`, int64 [rows, length] each."""
    width = max(map(len, rows))
    input_ids = []
    attention_mask = []
    for row in rows:
        padding = width - len(row)
        input_ids.append([pad_token_id] * padding + list(row))
        attention_mask.append([0] * padding + [1] * len(row))
    return {
        "input_ids": torch.tensor(input_ids),
        "attention_mask": torch.tensor(attention_mask),
    }


def decode_problems(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    batch_size: int = 32,
    **options: Any,
) -> Decoded:
    """Decode problems of one synthetic family, and judge the answers.

    Args:
        model: An `MRPForCausalLM`.
        tokenizer: Its tokenizer.
        problems: The problems, at least one. Their family gives the maximum number of new tokens in
            each text (`NEW_TOKENS`): 80 for "code", 64 for "math" and "source".
        batch_size: The largest number of rows in the batch.
        options: Further options of `generate`, as in `decode_prompts`.

    Returns:
        The decoded texts with their verdicts and costs.

    Raises:
        ValueError: for options that `generate` refuses.
    """
    prompts = [encode(problem, tokenizer)[0] for problem in problems]
    limit = NEW_TOKENS[problems[0].family]
    return decode_prompts(
        model, tokenizer, prompts, partial(judge, problems), limit, batch_size, **options
    )


def decode_prompts(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    judge_texts: Judge | None,
    max_new_tokens: int,
    batch_size: int = 32,
    **options: Any,
) -> Decoded:
    """Decode prompts, given as ids, in a batch of up to `batch_size` rows. Whenever a text ends,
    the next prompt takes its place in the batch.

    Args:
        model: An `MRPForCausalLM`.
        tokenizer: Its tokenizer.
        prompts: The ids of each prompt.
        judge_texts: A function that takes the list of decoded texts, and returns for each whether
            it is right, or None where that is unknown. Without this function, all verdicts are
            None.
        max_new_tokens: The maximum number of new tokens in each text.
        batch_size: The largest number of rows.
        options: Further options of `generate`. If `seed` is an int, prompt i has the seed
            `seed + i % batch_size`.

    Returns:
        The decoded texts with their verdicts and costs.

    Raises:
        ValueError: without a prompt, and for options that `generate` refuses.
    """
    if not prompts:
        raise ValueError("no prompt to decode: give at least one")
    inputs = pad_left(prompts, padding_id(tokenizer))
    if isinstance(seed := options.get("seed"), int):
        # the seeds of padded batches, in which earlier results were decoded
        options["seed"] = [seed + index % batch_size for index in range(len(prompts))]
    started = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            **{name: value.to(model.device) for name, value in inputs.items()},
            **{
                "max_new_tokens": max_new_tokens,
                "max_batch_size": batch_size,
                "return_dict_in_generate": True,
                **options,
            },
        )
    seconds = time.perf_counter() - started
    ids = _generated_ids(out, inputs["input_ids"].shape[1])
    eos = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    if isinstance(eos, int):
        ends.add(eos)
    else:
        ends.update(eos or [])
    texts = []
    for row in ids:
        texts.append(tokenizer.decode([token for token in row if token not in ends]))
    verdicts: list[bool | None] = judge_texts(texts) if judge_texts else [None] * len(texts)
    stats = out.stats
    forwards = dict(stats.forwards)
    for name in ("drafted", "accepted", "revoked"):
        forwards[name] = int(getattr(stats, name).sum())
    return Decoded(
        texts,
        ids,
        verdicts,
        seconds,
        forwards,
        row_forwards=stats.row_forwards.tolist(),
        row_head_forwards=stats.row_head_forwards.tolist(),
        row_states=stats.row_states.tolist(),
        rounds=stats.accepted_lengths.sum(1).tolist(),
        accepted=stats.accepted.tolist(),
        offered_at_depth=stats.offered_at_depth.cpu().numpy(),
        accepted_at_depth=stats.accepted_at_depth.cpu().numpy(),
    )


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id to pad with: that of the tokenizer for padding, or else for eos, or else 0. Any
    id would do, as padding is masked."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def _generated_ids(out: Any, width: int) -> list[list[int]]:
    lengths = (out.reveal_step >= 0).sum(1).tolist()
    return [
        row[:length] for row, length in zip(out.sequences[:, width:].tolist(), lengths, strict=True)
    ]
