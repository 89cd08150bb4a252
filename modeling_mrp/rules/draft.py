"""Drafts: which states a round submits, each row's next one first, then the likeliest to follow it.

An estimate tells, for each masked column, a token and how sure it is. Which column is revealed first is far less certain than
which token it gets, so a state has several followers; orders that meet in one state add up there, and a state that the last
round scored needs no forward, since what follows it is known.

Estimates come from the last accepted state and the remembered ones, at which the backbone itself spoke, and from drafted states
that the head has read. A head pass costs nearly the same for many states as for one, so a few passes serve a round: the draft
is built a little, the head reads all of it in one pass, and it is built anew, further.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from .noise import gumbel, noise_key
from .reveal import RevealRule
from .state import Key, Row, Scores, State


class Node:
    """A state that a round submits.

    Attributes:
        state: It.
        parent: The node of the clean state that it looks at beyond the prefix, by place in the round; -1 if none.
        source: What told of it: the scores of the state before it, or an estimate of these; None if nothing did.
    """

    __slots__ = ("parent", "source", "state")

    def __init__(self, state: State, parent: int, source: Scores | None) -> None:
        self.state: Final = state
        self.parent: Final = parent
        self.source: Final = source


# A state that may be drafted: the one before it, the columns and tokens [block] that make it (none: it is that one), and what
# told of it.
Follower = tuple[State, Sequence[int], Sequence[int], Scores | None]


def growth(width: int, passes: int) -> list[int]:
    """How many of `width` states are drafted at each head pass of a round: in even steps, up to all but the last."""
    passes = min(passes, width - 1)
    return [-(-done * (width - 1) // passes) for done in range(1, passes + 1)]


def undrafted(row: Row, narrow: bool) -> list[Node]:
    """The states of a round without drafts: the row's own and, behind a clean one, the next block's; if not `narrow`."""
    nodes = [Node(row.state, -1, row.source)]
    if not row.state.masks and not narrow:
        behind = row.opened(row.state.start + row.block_size)
        if behind.masks:  # one block at a time: a given one has to wait
            nodes.append(Node(behind, 0, None))
    return nodes


def build_draft(row: Row, rule: RevealRule, size: int, branches: int, estimates: Mapping[Key, Scores]) -> list[Node]:
    """Build the draft of a round by best-first search from the row's next state.

    Args:
        row: Where it starts.
        rule: What a step is likely to reveal.
        size: States of it, at most.
        branches: Followers of a state that are considered.
        estimates: By state, what the head thinks that the backbone will say there.
    """
    node, chance = Node(row.state, -1, row.source), 1.0
    nodes, taken = [node], {row.state.key}
    chances: dict[Key | int, float] = {}  # by key; the next block's by the place of the clean state before it
    waiting: dict[Key | int, Follower] = {}
    while len(nodes) < size:
        state, place = node.state, len(nodes) - 1
        if not state.masks:
            if node.parent < 0:
                behind = row.opened(state.start + row.block_size)
                if behind.masks:  # one block at a time: a given one has to wait
                    chances[place], waiting[place] = chance, (behind, (), (), None)
        elif (said := estimates.get(state.key, node.source)) is not None and node.parent < 0:
            for key, likely, follower in followers(row, rule, state, said, branches):
                if key in chances:  # orders that meet in one state add up there
                    chances[key] += likely * chance
                elif key not in taken:
                    chances[key], waiting[key] = likely * chance, follower
        best, chance = None, 0.0
        for name, likely in chances.items():
            if likely > chance:
                best, chance = name, likely
        if best is None:
            break
        del chances[best]
        before, where, token, source = waiting.pop(best)
        if isinstance(best, int):
            node = Node(before, best, source)
        else:
            node = Node(row.after(before, where, token) if where else before, -1, source)
            taken.add(best)
        nodes.append(node)
    return nodes


def followers(row: Row, rule: RevealRule, state: State, said: Scores, branches: int) -> Iterator[tuple[Key, float, Follower]]:
    """Find the states that may follow one, each with its key and chance; not those at which the text is whole.

    A follower that the last round scored stands for the state that its path leads to.
    """
    token, odds = (said.token, said.odds) if said.likeliest is None else picked(row, state, said)
    (start, ids), memory, eos = state.key, row.memory, row.eos
    goes_on = state.end == row.block_size < row.open_end - start  # but for an eos
    for where, chance in rule.likely(state, odds, branches):
        if chance <= 0:
            continue
        revealed = list(ids)
        ends = not goes_on
        for column in where:
            revealed[column] = one = token[column]
            ends |= one in eos
        key = (start, tuple(revealed))
        if key not in memory and not ends:
            yield key, chance, (state, where, token, said)
            continue
        made, source = row.after(state, where, token), said
        while (known := memory.get(made.key)) is not None:
            source = known[1]
            made = row.after(made, rule.reveal(made, source, row.memo)[0], source.token)
        if not row.ends(made):
            yield made.key, chance, (made, (), (), source)


def picked(row: Row, state: State, said: Scores) -> tuple[Sequence[int], Sequence[float]]:
    """Pick the tokens [block] of a state from the likeliest ones with that state's noise; return them and their log-odds."""
    assert said.likeliest is not None
    free = list(state.free)
    ids, odds = (part[free] for part in said.likeliest)
    keys = [noise_key(row.seed, state.start + column, state.masks) for column in free]
    best = (-np.logaddexp(0.0, -odds) + gumbel(keys, ids)).argmax(-1)
    token, sure, at = [0] * row.block_size, [-np.inf] * row.block_size, np.arange(len(free))
    for column, one, odd in zip(free, ids[at, best].tolist(), odds[at, best].tolist(), strict=True):
        token[column], sure[column] = one, odd
    return token, sure


__all__ = ["Node", "build_draft", "growth", "undrafted"]
