"""The amount of drafting of each round: fixed, or as much as measured time and acceptance so far say pays.

Drafts never change the text, so that how much is drafted is free to follow the clock.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from ..rules.state import Row

# States a row may submit, of which one is chosen; each has its own recording on CUDA.
WIDTHS = (1, 2, 3, 4, 6, 8)
# As many where nothing follows the clock: several processes decide alike so, and counts can be repeated.
UNTIMED_STATES = 4


@dataclass(frozen=True)
class Amount:
    """An amount of drafting in one round.

    Attributes:
        states: States that a row may submit; 1: it drafts nothing.
        passes: Head passes of the round; 0: drafts come from stale logits, and the head rests.
        narrow: Each row submits one state, whatever that is: behind a clean one the next block begins a round later.
    """

    states: int = 1
    passes: int = 0
    narrow: bool = False


class Budget(Protocol):
    """Chooses how much each round drafts."""

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Choose for the next round of a batch, of which rows with a `stop` have ended."""
        ...

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """Learn from a round what it took, and by row how many denoising steps it came to."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same amount in every round.

    Attributes:
        amount: It.
    """

    amount: Amount

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Choose it."""
        return self.amount

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """Learn nothing."""


def budget_of(model: nn.Module, mode: Hashable, states: int, passes: int, paced: bool) -> Budget:
    """Give what chooses the amounts of a call; what was learnt stays with the model, for the calls that follow."""
    states = min(states, UNTIMED_STATES) if paced else states
    return Fixed(Amount(states, min(passes, states - 1)))


__all__ = ["UNTIMED_STATES", "WIDTHS", "Amount", "Budget", "Fixed", "budget_of"]
