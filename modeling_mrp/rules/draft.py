"""Drafts: which states a round submits, each row's next one first, then the likeliest to follow it.

An estimate tells, for each masked column, a token and how sure it is. Which column is revealed first is far less certain than
which token it gets, so a state has several followers; orders that meet in one state add up there, and a state that the last
round scored needs no forward, since what follows it is known.

Estimates come from the last accepted state and the remembered ones, at which the backbone itself spoke, and from drafted states
that the head has read. A head pass costs nearly the same for many states as for one, so a few passes serve a round: the draft
is built a little, the head reads all of it in one pass, and it is built anew, further.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .noise import gumbel, noise_key
from .reveal import RevealRule
from .state import Key, Row, Scores, State

# Followers of a state that are considered, and from how many rows on it is one: a chain comes to 0.5 to 6 % fewer tokens a
# forward, and what the host decides takes a quarter less, which adds up over the rows (`benchmarks/NOTES.md`).
BRANCHES, CROWD = 3, 16


@dataclass(slots=True, eq=False)
class Node:
    """A state that a round submits.

    Attributes:
        state: It.
        parent: The node of the clean state that it looks at beyond the prefix, by place in the round; -1 if none.
        source: What told of it: the scores of the state before it, or an estimate of these; None if nothing did.
    """

    state: State
    parent: int
    source: Scores | None


# A state that may be drafted, and is made once it is (`State.revealing`): the state before it; the columns revealed there; the
# key of the state that they make; `source` and `parent` of its `Node`. Without columns the first is the state itself.
Follower = tuple[State, Sequence[int], Key, Scores | None, int]


def followers(row: Row, rule: RevealRule, state: State, said: Scores, branches: int) -> Iterator[tuple[Key, Follower, float]]:
    """Iterate over the states to which a reveal may lead, by name and with its chance; not those at which the text is whole.

    One that the last round scored stands for the state that its path leads to.
    """
    token, odds = (said.token, said.odds) if said.likeliest is None else draw_tokens(row, state, said)
    (start, ids), memory, eos = state.key, row.memory, row.eos
    goes_on = state.end == row.block_size < row.open_end - start  # but for an eos
    for where, likely in rule.likely(state, odds, branches):
        if not likely > 0:
            continue
        revealed = list(ids)
        ends = not goes_on
        for column in where:
            revealed[column] = one = token[column]
            ends |= one in eos
        key = (start, tuple(revealed))
        before, source = state, said
        if ends or key in memory:
            before = row.after(state, where, token)
            while (known := memory.get(before.key)) is not None:
                source = known[1]
                before = row.after(before, rule.reveal(before, source, row.memo)[0], source.token)
            if row.ends(before):
                continue
            key, where = before.key, ()
        yield key, (before, where, key, source, -1), likely


def draft_sizes(width: int, passes: int) -> list[int]:
    """How many of `width` states are drafted at each head pass of a round: in even steps, up to all but the last."""
    passes = min(passes, width - 1)
    return [-(-done * (width - 1) // passes) for done in range(1, passes + 1)]


def target_nodes(row: Row, narrow: bool) -> list[Node]:
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
    waiting: list[Follower] = [(row.state, (), row.state.key, row.source, -1)]
    # How likely the path comes to each, orders that meet in one added up, -inf once it is drafted; and their places by name.
    chances, met = [1.0], {row.state.key: 0}
    nodes: list[Node] = []
    while len(nodes) < size and (chance := max(chances)) > 0:
        at = chances.index(chance)
        chances[at] = -math.inf
        before, where, key, source, parent = waiting[at]
        state = before.revealing(where, key) if where else before
        nodes.append(Node(state, parent, source))
        if len(nodes) == size or parent >= 0:
            continue
        if not state.masks:
            behind = row.opened(state.start + row.block_size)
            if behind.masks:  # one block at a time: a given one has to wait
                waiting.append((behind, (), behind.key, None, len(nodes) - 1))
                chances.append(chance)
        elif (said := estimates.get(key, source)) is not None:
            for name, follower, likely in followers(row, rule, state, said, branches):
                if (at := met.setdefault(name, len(chances))) < len(chances):
                    chances[at] += likely * chance
                else:
                    chances.append(likely * chance)
                    waiting.append(follower)
    return nodes


def draw_tokens(row: Row, state: State, said: Scores) -> tuple[Sequence[int], Sequence[float]]:
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
