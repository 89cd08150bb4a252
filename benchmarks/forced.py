"""Drafts that a seeded coin makes right or wrong.

With random weights, drafts are never or always right. So the time at a published acceptance is
measured by overwriting the networks' scores of drafts before acceptance; all else is computed as
usual.
"""

import random
from collections.abc import Sequence

from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Scores, State

SURE = 1e6  # log-odds above all others


def followed(state: State, drafted: State, mask_id: int) -> int | None:
    """Return the column whose reveal alone turns `state` into `drafted`; None if there is no such
    column."""
    if state.start != drafted.start:
        return None
    changed = []
    for column, (token, drafted_token) in enumerate(zip(state.ids, drafted.ids, strict=True)):
        if token != drafted_token:
            changed.append(column)
    if len(changed) != 1 or state.ids[changed[0]] != mask_id:
        return None
    return changed[0]


def force(
    nodes: Sequence[Node],
    scores: Sequence[Scores],
    mask_id: int,
    chance: float,
    coin: random.Random,
) -> None:
    """Overwrite the scores at a row's states so that a draft is right with probability `chance` if
    all before it are.

    Args:
        nodes: A row's next state, then its drafts.
        scores: The backbone's scores at each node's state.
        mask_id: The mask's id.
        chance: Probability that a draft is right.
        coin: Source of randomness.
    """
    current = 0
    for index in range(1, len(nodes)):
        drafted = nodes[index]
        column = (
            followed(nodes[current].state, drafted.state, mask_id) if drafted.parent < 0 else None
        )
        if column is None:
            continue
        token = drafted.state.ids[column]
        is_right = coin.random() < chance
        if not is_right:
            token = next(other_id for other_id in (1, 2, 3) if other_id not in (token, mask_id))
        scores[current].log_odds[column] = SURE
        scores[current].token[column] = token
        if not is_right:
            return
        current = index
