"""The interface through which a round runs the networks."""

from collections.abc import Sequence
from typing import Protocol

from ..rules.draft import Node
from ..rules.state import Row, Scores, State
from .sampler import Hidden, Sampler


class Runner(Protocol):
    """Runs backbone and head for the rounds of a batch. Implementations are `Networks` in this
    package, and `EngineNetworks` in the plugin of a serving engine.

    Attributes:
        sampler: Picks tokens from hidden states.
    """

    sampler: Sampler

    def score(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]]) -> list[list[Scores]]:
        """Score the nodes of all rows in one backbone forward; return the scores by row and node.
        Ended rows have no nodes."""

    def head(
        self,
        rows: Sequence[Row],
        asked: Sequence[Sequence[tuple[State, Hidden]]],
        residual: bool = False,
    ) -> list[list[Hidden]]:
        """Run one head pass over states of each row; return its outputs by row and state.

        In `asked`, each row has its states, each paired with the hidden states h_A from which the
        head starts. The output at a state is h_A + h_C, or h_C alone if `residual`.
        """

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep the keys, values and hidden states of accepted clean states, because attention and
        the head need them later.

        For each row, `clean` has the indices of these states among the nodes of the row in the last
        `score`, in order. There is at least one such state.
        """
