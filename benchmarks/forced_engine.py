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
from modeling_mrp.rules.state import PendingReveal, Row, Scores

from .forced import force

ACCEPTANCE = "MRP_FORCED_ACCEPTANCE"  # environment variable with the chance that a draft is right


class ForcedDecoder(EngineDecoder):
    """An `EngineDecoder` that accepts drafts by the toss of a coin."""

    coin = random.Random(0)

    def accept(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        scores: Sequence[Sequence[Scores]],
    ) -> list[PendingReveal | None]:
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
