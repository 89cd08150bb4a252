"""The interface through which a round runs the networks."""

from collections.abc import Sequence
from typing import Protocol

from ..rules.draft import Node
from ..rules.state import Row, Scores, State
from .sampler import Hidden, Sampler


class Runner(Protocol):
    """Runs backbone and head for the rounds of a batch: `Networks` in this package,
    `EngineNetworks` in the plugin of a serving engine.

    Attributes:
        sampler: Picks tokens from hidden states.
    """

    sampler: Sampler

    def score(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]]) -> list[list[Scores]]:
        """Score all rows' nodes (ended rows have none) in one backbone forward; return the scores
        by row and node."""

    def head(
        self,
        rows: Sequence[Row],
        asked: Sequence[Sequence[tuple[State, Hidden]]],
        residual: bool = False,
    ) -> list[list[Hidden]]:
        """Run one head pass over states of each row, each paired with the hidden states h_A that it
        starts from. Return, by row, h_A + h_C at each state, or h_C alone if `residual`."""

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep the keys, values and hidden states of accepted clean states, which attention and the
        head need later. `clean` has, by row, their indices among the row's nodes of the last
        `score`, in order; at least one."""
