"""What a decode knows of its rows' texts: where each row stands, what ends it, and how reveals become text."""

from dataclasses import replace

import torch
from torch import Tensor

from .rows import Rows
from .states import Reveal, States, whole_text
from .stopping import Stopping


class Texts:
    """The part of a `Decoder` that runs no network.

    Attributes:
        rows: What is known of every row.
        block: The block size.
        mask_id: The mask's id.
        eos: [n] long, ids that end a row.
        offsets: [block] long, 0, 1, ...
        all_rows: [rows] long, 0, 1, ...
        stopping: Asks the stopping criteria; or None.
    """

    rows: Rows
    block: int
    mask_id: int
    eos: Tensor
    offsets: Tensor
    all_rows: Tensor
    stopping: Stopping | None

    def current(self) -> States:
        """Each row's next state [rows], as its tokens show it."""
        ids = self.rows.tokens.gather(1, (self.rows.start[:, None] + self.offsets).clamp(max=self.rows.capacity))
        return States(ids, self.rows.start, self.rows.step, self.all_rows, self.rows.active)

    def _record(self, states: States, reveal: Reveal, which: Tensor, tick: Tensor) -> None:
        """Writes what states [rows, n] revealed: text, log-confidence and step, `tick` steps after the row's clock."""
        written = reveal.where & which[..., None]
        position = torch.where(written, states.start[..., None] + self.offsets, self.rows.capacity).flatten(1)
        step = (self.rows.clock[:, None] + tick)[..., None].expand_as(written)
        self.rows.tokens.scatter_(1, position, reveal.token.flatten(1))
        self.rows.logprob.scatter_(1, position, reveal.logprob.float().flatten(1))
        self.rows.reveal_step.scatter_(1, position, step.flatten(1))

    def _stop_finished(self) -> None:
        """Rows whose text is complete leave; a stopping criterion is asked at every newly final token."""
        states = self.current()
        eos = self.eos_column(states)
        end = torch.where(eos < self.block, states.start + eos + 1, self.rows.limit).minimum(self.rows.limit)
        done = self._done(states, eos)
        if self.stopping is not None:
            self.stopping.ask(self.rows, end, done)
        self.rows.stop = torch.where(self.rows.active & done, end, self.rows.stop)
        self.rows.active = self.rows.active & ~done

    def _clean(self, states: States) -> Tensor:
        return ~(states.ids == self.mask_id).any(-1)

    def eos_column(self, states: States) -> Tensor:
        """[n] the first column of an eos that ends the text, `block_size` if the block has none."""
        ends = states.start[:, None] + self.offsets >= self.rows.given_end[states.row, None]
        return torch.where(self.is_eos(states.ids) & ends, self.offsets, self.block).amin(-1)

    def is_eos(self, ids: Tensor) -> Tensor:
        """[...] bool of ids [...]."""
        return (ids[..., None] == self.eos).any(-1)

    def _done(self, states: States, eos: Tensor) -> Tensor:
        """[n] bool: everything before the eos, in column `eos` [n], or before the limit, is revealed or given."""
        return whole_text(states.ids, eos, self.rows.open_end[states.row] - states.start, self.mask_id)

    def next_block(self, states: States) -> States:
        """The first state of the block that follows: masks, and given tokens if there are any."""
        start = states.start + self.block
        at = (start[..., None] + self.offsets).clamp(max=self.rows.capacity)
        return replace(states, ids=self.rows.tokens[states.row[..., None], at], start=start, step=torch.zeros_like(states.step))

    @staticmethod
    def _stepped(states: States, reveal: Reveal) -> States:
        return replace(reveal.applied_to(states), step=states.step + 1)

    @staticmethod
    def _where(condition: Tensor, a: States, b: States) -> States:
        return replace(
            b,
            ids=torch.where(condition[..., None], a.ids, b.ids),
            start=torch.where(condition, a.start, b.start),
            step=torch.where(condition, a.step, b.step),
        )


__all__ = ["Texts"]
