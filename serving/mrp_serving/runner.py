"""The runner of a round on the engine: forwards over the engine's pools, in place of a cache of its own."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.rules.states import States
from modeling_mrp.runner.runner import Held, Scratch

from .packing import Own, packed_batch, place_states, share_prefixes
from .scratch import Borrowed


class EngineRunner:
    """Runs the forwards of one round of a batch of the engine: a `RoundRunner`.

    The head's keys and values lie in the same slots as the backbone's, in layers of their own, and are there for every
    committed block as soon as it is: whoever shares a prefix by the engine's cache shares the head's view of it.

    Args:
        engine: The engine's `ModelRunner`.
        batch: Its `ForwardBatch` of the rows.
        own: The rows.
        lent: What is borrowed for the round.
        with_head: Whether the head takes part.
        sees_new: Whether attention sees keys and values that the same forward writes in another row. Else no state looks at a
            clean block of its round.

    Attributes:
        graph_ran: Whether the last forward of the backbone was a CUDA graph's.
    """

    def __init__(self, engine: Any, batch: Any, own: Own, lent: Borrowed, with_head: bool, sees_new: bool) -> None:
        self.engine, self.batch, self.own, self.lent = engine, batch, own, lent
        self.with_head, self.sees_new = with_head, sees_new
        self.rests, self.block, self.graph_ran = False, own.slots.shape[1], False
        share_prefixes(self._table, own, lent)

    @property
    def _table(self) -> Tensor:
        return self.engine.req_to_token_pool.req_to_token

    def score(self, states: States, held: Held, used: int | None, taking_part: Tensor) -> tuple[Scratch, Held]:
        """See `Runner.score`."""
        if not self.sees_new:
            states = states.only(states.parent < 0)
        cells = place_states(self._table, self.own, self.lent, states, held.committed, parents=True)
        batch = packed_batch(self.batch, self.own, cells, states, self.engine.kv_index_translator)
        output = self.engine.forward(batch, pp_proxy_tensors=None)
        self.graph_ran = bool(output.can_run_graph)
        hidden = cells.spread(output.logits_output.hidden_states, states.valid.shape)
        return Scratch(states, hidden, range(0), 0), replace(held, row_forwards=held.row_forwards + taking_part)

    def head_pass(
        self, states: States, hidden: Tensor, held: Held, used: int | None, late: bool, blocked: Tensor | None = None
    ) -> tuple[Tensor, Held]:
        """See `Runner.head_pass`; no block is late here."""
        cells = place_states(self._table, self.own, self.lent, states, held.committed, parents=False)
        if not cells.prefix:
            return torch.zeros_like(hidden), held
        batch = packed_batch(self.batch, self.own, cells, states, self.engine.kv_index_translator)
        residual = self.engine.model.run_head(self.engine, batch, hidden[cells.row, cells.place].flatten(0, 1))
        held = replace(held, row_head_forwards=held.row_head_forwards + states.valid.any(1))
        return cells.spread(residual, states.valid.shape), held

    def commit_clean(self, scored: Scratch, slot: Tensor, held: Held, for_head: bool = True) -> Held:
        """Keep the accepted clean state of each row, in `slot` [rows] long, -1 for none, and have the head read it.

        A clean state that was drafted lies in borrowed slots: they become the row's, whose own are given back in their place.
        """
        (drafted,) = torch.where(slot > 0)
        if len(drafted):
            taken = self.lent.swap(drafted, slot[drafted] - 1, self.own.slots[drafted])
            self.own.slots[drafted] = taken
            positions = held.committed[drafted, None] + torch.arange(self.block, device=slot.device)
            self._table[self.own.rows[drafted, None], positions] = taken.to(self._table.dtype)
        clean = slot >= 0
        if self.with_head:
            rows = torch.arange(len(slot), device=slot.device)
            at = slot.clamp(min=0)
            states = scored.states.map(lambda t: t[rows, at][:, None]).only(clean[:, None])
            _, held = self.head_pass(states, scored.hidden[rows, at][:, None], held, None, False)
        return replace(held, committed=held.committed + self.block * clean)


__all__ = ["EngineRunner"]
