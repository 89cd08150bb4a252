"""How far the texts of two ways to decode the same prompts are the same."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from modeling_mrp.generate.generation import MRPGenerateOutput


def agreement(ours: Sequence[MRPGenerateOutput], theirs: Sequence[MRPGenerateOutput]) -> dict[str, Any]:
    """The shares of texts and of tokens that are equal, and where the first difference of all is.

    Kernels round other sums than PyTorch does. A text that differs from a near-tie on is not wrong: there, both tokens have
    about the same log-probability. What follows such a token differs rightly, so the share of tokens counts it too strictly.

    Args:
        ours, theirs: Outputs of the same calls, batch by batch.

    Returns:
        `texts_equal`, `tokens_equal`; with a difference also `first_difference`, its batch, row and place among generated
        tokens, and `logprobs_there`, of our token and of theirs; None behind an end.
    """
    texts = tokens = same_texts = same_tokens = 0
    told: dict[str, Any] = {}
    for batch, outputs in enumerate(zip(ours, theirs, strict=True)):
        (mine, said), (other, said_by_other) = (_tokens(out) for out in outputs)
        width = max(mine.shape[1], other.shape[1])
        mine, other = (pad(ids, (0, width - ids.shape[1]), value=-1) for ids in (mine, other))
        differ = mine != other
        texts, same_texts = texts + len(differ), same_texts + int((~differ.any(1)).sum())
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
    return {"texts_equal": round(same_texts / texts, 4), "tokens_equal": round(same_tokens / tokens, 4), **told}


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
