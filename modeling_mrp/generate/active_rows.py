"""The rows of a batch that go on: those that have ended leave it by halves, so that later rounds cost nothing for them."""

from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..runner.runner import Runner
from .decode_state import DecodeState, Remasked, Request


class ActiveRows:
    """The rows that a `DecodeState` still holds, of all rows of a call.

    A row's text does not depend on its neighbours, so that it may change its place. Halves are all there is: each size of a
    batch is recorded and timed for itself.

    Args:
        state: That of all rows.
        least: A batch that would be smaller stays as it is.

    Attributes:
        rows: Which of the call's rows the places of the state stand for.
        slots: Rows of all rounds so far added up, those that have ended included.
    """

    def __init__(self, state: DecodeState, least: int) -> None:
        self.rows = list(range(len(state.has_seed)))
        self.slots = 0
        self._least = least
        self._whole: DecodeState | None = None
        self._at: Tensor | None = None  # `rows` on the device
        self._count = len(self.rows)

    def smaller(self, active: int) -> int:
        """Halve the size of the batch as long as `active` rows have room in it."""
        size = len(self.rows)
        while size > 1 and (half := (size + 1) // 2) >= max(active, self._least):
            size = half
        return size

    def shrink(
        self, state: DecodeState, request: Request, runner: Runner, going: tuple[bool, ...], size: int
    ) -> tuple[DecodeState, Request]:
        """Let ended rows leave.

        Args:
            state: Where the decode stands.
            request: What was asked of its rows.
            runner: Whose keys and values follow.
            going: Of each row, whether it goes on.
            size: Rows that stay, as `smaller` gave it.

        Returns:
            The state and the request of the rows that stay.
        """
        self._whole = self.all_of(state)
        places = list(range(size))
        ended = [place for place in places if not going[place]]
        behind = [place for place in range(size, len(self.rows)) if going[place]]
        for place, other in zip(ended, behind, strict=False):  # there may be more room than rows
            places[place] = other
        runner.narrow(places)
        self.rows = [self.rows[place] for place in places]
        at = torch.tensor(places, device=state.has_seed.device)
        self._at = at if self._at is None else self._at[at]
        return tree_map(lambda t: t[at] if t.dim() else t, state), request_of(request, at)

    def all_of(self, state: DecodeState) -> DecodeState:
        """Put a state beside those of the rows that left before it: that of all rows of the call."""
        if (at := self._at) is None:
            return state
        return tree_map(lambda whole, t: whole.index_copy(0, at, t) if t.dim() else t, self._whole, state)

    def all_remasked(self, remasked: Remasked) -> Remasked:
        """Copy what a step put back, with nothing for rows that have left."""
        if (at := self._at) is None:
            return tree_map(torch.clone, remasked)

        def spread(part: Tensor) -> Tensor:
            return part.new_zeros(self._count, *part.shape[1:]).index_copy_(0, at, part)

        return tree_map(spread, remasked)


def request_of(request: Request, at: Tensor) -> Request:
    """Select the request of the rows `at` [n] long."""
    shared = {"schedule", "eos"}
    names = [field.name for field in fields(request) if field.name not in shared]
    return replace(request, **{name: getattr(request, name)[at] for name in names})


__all__ = ["ActiveRows", "request_of"]
