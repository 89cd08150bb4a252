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
        sampler: Picks tokens at the free columns of states, from hidden states.
    """

    sampler: Sampler

    def score(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]]) -> list[list[Scores]]:
        """Score the nodes of all rows in one backbone forward; return the scores by row and node.
        Ended rows have no nodes.

        A node's state sees the row's text before it as far as that is committed
        (`row.text[: min(state.start, row.held)]`), then the ids of its parent node's state, if it
        has a parent, and itself. Add 1 to `row.counts.forwards` of each row that has nodes.
        """

    def head(
        self,
        rows: Sequence[Row],
        queries: Sequence[Sequence[tuple[State, Hidden]]],
        residual: bool = False,
    ) -> list[list[Hidden]]:
        """Run one head pass over states of each row; return its outputs by row and state.

        The output at a state is h_A + h_C, which estimates the backbone's hidden states there, or
        the head's own output h_C alone if `residual`. The head sees the committed text of the row.
        Each block of this text enters the head with its own h_A. Add 1 to
        `row.counts.head_forwards` of each row that has states.

        Args:
            rows: All rows of the batch.
            queries: For each row, its states, each with h_A: the backbone's hidden states before
                the reveal that led to the state, or an estimate of them. Like an output, h_A is a
                pair: a tensor [n, block, hidden_size], and the index in it of the block that is
                meant.
            residual: Whether outputs leave out h_A.
        """

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep the keys, values and hidden states of accepted clean states (those without masks),
        because attention and the head need them later. Increase `row.held` by the block size for
        each of these states.

        For each row, `clean` has the indices of its accepted clean states among the nodes of the
        row in the last `score`, in order. There is at least one such state.
        """
