"""How far the texts of two ways to decode the same prompts are the same."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from modeling_mrp.generate.output import MRPGenerateOutput


def agreement(ours: Sequence[MRPGenerateOutput], theirs: Sequence[MRPGenerateOutput]) -> dict[str, Any]:
    """The shares of texts and of tokens that are equal, and where the first difference of all is.

    Kernels round other sums than PyTorch does. A text that differs from a near-tie on is not wrong: there, both tokens have
    about the same log-probability. What follows such a token differs rightly, so the share of tokens counts it too strictly.

    Args:
        ours, theirs: Outputs of the same calls, batch by batch.

    Returns:
        `texts_equal`, `tokens_equal`; with a difference also `first_difference`, its batch, row and place among generated
        tokens, `logprobs_there`, of our token and of theirs; None behind an end; and `gap`, the largest difference between
        log-probabilities of what rows revealed in the first step in which they differ. Up to that step both saw the same, so it
        is small where both are right; infinite where only one goes on.
    """
    texts = tokens = same_texts = same_tokens = 0
    told: dict[str, Any] = {}
    gap = 0.0
    for batch, outputs in enumerate(zip(ours, theirs, strict=True)):
        (mine, said), (other, said_by_other) = (_tokens(out) for out in outputs)
        width = max(mine.shape[1], other.shape[1])
        mine, other = (pad(ids, (0, width - ids.shape[1]), value=-1) for ids in (mine, other))
        differ = mine != other
        texts, same_texts = texts + len(differ), same_texts + int((~differ.any(1)).sum())
        gap = max([gap, *_gaps(*outputs)])
        written = (mine >= 0) | (other >= 0)
        tokens, same_tokens = tokens + int(written.sum()), same_tokens + int((written & ~differ).sum())
        if not told and differ.any():
            row = int(differ.any(1).nonzero()[0])
            place = int(differ[row].nonzero()[0])
            there = [
                round(float(each[row, place]), 4) if ids[row, place] >= 0 else None
                for ids, each in ((mine, said), (other, said_by_other))
            ]
            told = {"first_difference": [batch, row, place], "logprobs_there": there}
    told |= {"gap": round(gap, 4)} if told else {}
    return {"texts_equal": round(same_texts / texts, 4), "tokens_equal": round(same_tokens / tokens, 4), **told}


def _gaps(ours: MRPGenerateOutput, theirs: MRPGenerateOutput) -> Iterator[float]:
    """By row, how far the mean log-probabilities of what is revealed in the first differing step lie apart."""
    rows = [zip(*_tokens(out), *([] if out.reveal_step is None else [out.reveal_step]), strict=True) for out in (ours, theirs)]
    for one, other in zip(*rows, strict=True):
        by_step: list[dict[int, list[tuple[int, int, float]]]] = [{}, {}]
        for found, row in zip(by_step, (one, other), strict=True):
            for place, (token, logprob, step) in enumerate(zip(*(part.tolist() for part in row), strict=True)):
                if step >= 0:
                    found.setdefault(step, []).append((place, token, logprob))
        for step in sorted(by_step[0].keys() | by_step[1].keys()):
            mine, right = (found.get(step, []) for found in by_step)
            if [each[:2] for each in mine] != [each[:2] for each in right]:
                means = [sum(each[2] for each in found) / len(found) if found else math.inf for found in (mine, right)]
                yield abs(means[0] - means[1])
                break


def without_cache(out: MRPGenerateOutput) -> MRPGenerateOutput:
    """An output that can be kept: no other call could use a cache that somebody holds."""
    return MRPGenerateOutput(**{name: value for name, value in out.items() if name != "past_key_values"})


def _tokens(out: MRPGenerateOutput) -> tuple[Tensor, Tensor]:
    """[rows, generated] tokens, -1 in padding, and their log-probabilities."""
    assert out.sequences is not None
    assert out.token_logprobs is not None
    assert out.reveal_step is not None
    ids = out.sequences[:, -out.token_logprobs.shape[1] :]
    return ids.masked_fill(out.reveal_step < 0, -1), out.token_logprobs
