"""An SGLang engine in which a seeded coin decides whether a draft is right: `sglang.launch_server`,
for `serving --shape`.

With random weights, drafts are never or always right, so the time at a published acceptance is
measured by forcing that acceptance. The networks compute as usual: only their scores of drafts are
overwritten before acceptance. The engine's processes are spawned and import this module again.
"""

import os
import random
from collections.abc import Sequence
from typing import Any

import mrp_serving.rounds
from mrp_serving.rounds import EngineDecoder

from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Frontier, Row, Scores, State

ACCEPTANCE = "MRP_FORCED_ACCEPTANCE"  # environment variable with the chance that a draft is right
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
        scores[current].odds[column] = SURE
        scores[current].token[column] = token
        if not is_right:
            return
        current = index


class ForcedDecoder(EngineDecoder):
    """An `EngineDecoder` that accepts drafts by the toss of a coin."""

    coin = random.Random(0)

    def accept(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        scores: Sequence[Sequence[Scores]],
    ) -> list[Frontier | None]:
        """See `Decoder.accept`."""
        for row, nodes, row_scores in zip(rows, drafts, scores, strict=True):
            force(nodes, row_scores, row.mask_id, float(os.environ[ACCEPTANCE]), self.coin)
        return super().accept(rows, drafts, scores)


if ACCEPTANCE in os.environ:  # in the engine's processes
    module: Any = mrp_serving.rounds
    module.EngineDecoder = ForcedDecoder

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
