"""Rows, states and scores made by hand, for tests of decisions that need no model."""

from collections.abc import Sequence
from typing import Any

from modeling_mrp.rules.state import Counts, Row, Scores, State

M = 60  # the mask
A, B, C, D = 10, 11, 12, 13  # tokens of a block's columns
EOS = 9


def row(
    text: Sequence[int] = (1, 2, 3, 4),
    new: int = 8,
    given: Sequence[int] = (),
    eos: Sequence[int] = (EOS,),
    width: int = 4,
) -> Row:
    """Make a row in blocks of 4 that drafts: the prompt `text`, given tokens, and masks up to `new`
    tokens."""
    length, limit = len(text), len(text) + new
    full = [*text, *given] + [M] * (-(-limit // 4) * 4 - length - len(given))
    given_end = length + max((at + 1 for at, token in enumerate(given) if token != M), default=0)
    open_end = max((at + 1 for at in range(limit) if full[at] == M), default=0)
    made = Row(0, full, 4, M, frozenset(eos), length, given_end, limit, open_end, given_end, 7)
    made.counts = Counts(width, True)
    return made


def state(
    ids: Sequence[int], start: int = 4, step: int | None = None, eos: Sequence[int] = (EOS,)
) -> State:
    """Make a state; its step is by default the number of revealed columns."""
    end = next((column for column, token in enumerate(ids) if token in eos), len(ids))
    masked = [column for column, token in enumerate(ids) if token == M]
    free = tuple(column for column in masked if column < end)
    return State(
        (start, tuple(ids)),
        free,
        end,
        len(masked),
        len(ids) - len(masked) if step is None else step,
    )


def says(odds: Sequence[float], token: Sequence[int] = (A, B, C, D), **others: Any) -> Scores:
    return Scores(list(token), list(odds), **others)
