"""Drafts and their acceptance: which states a round submits of a row, and how far the path leads through what was scored.

A draft is the row's next state, and then the likeliest to follow it.

An estimate tells, for each masked column, a token and how sure it is. Which column is revealed first is far less certain than
which token it gets, so a state has several followers; orders that meet in one state add up there, and a state that the last
round scored needs no forward, since what follows it is known.

Estimates come from the last accepted state and the remembered ones, at which the backbone itself spoke, and from drafted states
that the head has read. A head pass costs nearly the same for many states as for one, so a few passes serve a round: the draft
is built a little, the head reads all of it in one pass, and it is built anew, further.

A path starts at the row's own state, which is its text. What the rule reveals at a state makes the next one; where that was
scored too, in this round or the last one, the path goes on there. What was drafted decides how far a path leads, never where.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .reveal import RevealRule, log_sigmoid
from .state import Frontier, Key, Row, Scores, State

# Followers of a state that are considered, and from how many rows on it is one: a chain comes to 0.5 to 6 % fewer tokens a
# forward, and what the host decides takes a quarter less, which adds up over the rows (`benchmarks/NOTES.md`).
BRANCHES, CROWD = 3, 16
_MASK = 0xFFFFFFFF


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
            while (met := memory.get(before.key)) is not None:
                source = met[1]
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


def mix_bits(x: Any) -> Any:
    """Hash uint32 numbers, an int or an array, by two multiply-xorshift rounds."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def noise_key(seed: Any, position: Any, masks: Any) -> Any:
    """The key of the noise at a position of a state with so many masks left: of ints, or elementwise of tensors of them."""
    key = mix_bits(seed & _MASK)
    key = mix_bits(key ^ (seed >> 32 & _MASK))
    key = mix_bits(key ^ (position & _MASK))
    return mix_bits(key ^ (masks & _MASK) ^ 0x9E3779B9)


def gumbel(keys: list[int], tokens: Any) -> Any:
    """Standard Gumbel noise [n, m] float64 for token ids [n, m] int64 of n keys: that of `kernels/pick.py`, on the host."""
    hashed = mix_bits(tokens * 0x9E3779B1 & _MASK)
    bits = mix_bits(hashed ^ np.array(keys, dtype=np.int64)[:, None])
    # -log(u) for u = (bits + 1/2) / 2^32, from whichever end of the unit interval keeps the precision.
    lower = bits < 1 << 31
    nearest = (np.where(lower, bits, _MASK - bits) + 0.5) * 2.0**-32
    return -np.log(np.where(lower, -np.log(nearest), -np.log1p(-nearest)))


class UnscoredError(ValueError):
    """No token has a finite score at a position: `position` of the row at `place`."""

    def __init__(self, place: int, position: int) -> None:
        super().__init__(place, position)
        self.place, self.position = place, position


def accept(
    row: Row, rule: RevealRule, nodes: Sequence[Node], scores: Sequence[Scores], drafts: bool
) -> tuple[Frontier | None, list[int]]:
    """Accept the longest verified path of a row: write what it reveals but the last, and remember what was scored.

    Args:
        row: It; it is left at the frontier, or behind a clean block whose successor was not scored.
        rule: What a step reveals.
        nodes: The states of the round, the row's own first.
        scores: What the backbone said at each.
        drafts: Whether this round drafted: then paths go on through remembered states, its own replace these, and drafts are
            counted.

    Returns:
        The frontier, whose reveal is not written yet (None behind a clean block), and the nodes of accepted clean states.

    Raises:
        UnscoredError: if no token had a finite score at a position that is revealed.
    """
    places: dict[Key, int] = {}
    next_blocks: dict[int, int] = {}  # by clean states
    for place, node in enumerate(nodes):
        if node.parent < 0:
            places[node.state.key] = place
        else:
            next_blocks[node.parent] = place
    state, at = row.state, 0
    said, remembered = scores[0], False
    clean: list[int] = []
    frontier: Frontier | None = None
    length = depth = 0
    while True:
        length += 1
        depth += remembered or (at > 0 and nodes[at].parent < 0)
        if not state.masks:
            clean.append(at)
            frontier, state = None, row.opened(state.start + row.block_size)
            at = next_blocks.get(at, -1)
            if at < 0:
                break
            said, remembered = scores[at], False
            continue
        frontier = reveal_at(row, rule, state, said)
        state = frontier.successor
        at = places.get(state.key, -1)
        if at >= 0:
            said, remembered = scores[at], False
        elif drafts and (met := row.memory.get(state.key)) is not None:
            said, remembered = met[1], True
        else:
            state = frontier.state
            break
        write(row, frontier)
    row.state = state
    if frontier is None:
        row.source = None
    if drafts:
        count_drafts(row, nodes, state, depth)
        row.memory = {
            node.state.key: (node.state, score)
            for node, score in zip(nodes, scores, strict=True)
            if node.parent < 0 and node.state.masks
        }
    row.counts.lengths[length] += 1
    return frontier, clean


def first_frontier(row: Row, rule: RevealRule, scores: Scores) -> Frontier | None:
    """The frontier of a row of which nothing was revealed yet; None where nothing is left to reveal."""
    return None if row.ends(row.state) else reveal_at(row, rule, row.state, scores)


def reveal_at(row: Row, rule: RevealRule, state: State, scores: Scores) -> Frontier:
    """What a step reveals at a scored state of a row's path."""
    where, memo = rule.reveal(state, scores, row.memo)
    if row.bans is not None and len(where) > 1:
        where = row.bans.allowed(row.text_at(state), state.start, where, scores.token, scores.odds, row.mask_id)
    return Frontier(state, scores, where, memo, row.after(state, where, scores.token))


def write(row: Row, frontier: Frontier) -> None:
    """Write the reveal of a scored state into the row's text, and stand at the state that it makes.

    Raises:
        UnscoredError: if no token had a finite score at one of its columns.
    """
    start, scores = frontier.state.key[0], frontier.scores
    behind = start - row.prompt
    for column in frontier.where:
        logprob = log_sigmoid(scores.odds[column])
        if math.isnan(logprob):
            raise UnscoredError(row.place, start + column)
        row.text[start + column] = scores.token[column]
        row.logprob[behind + column], row.step[behind + column] = logprob, row.steps
    row.steps += 1
    row.state, row.source, row.memo = frontier.successor, scores, frontier.memo
    if row.written is not None:
        row.written.append(frontier)


def count_drafts(row: Row, nodes: Sequence[Node], last: State, depth: int) -> None:
    """Count what a round's drafts came to: `depth` of them led to the `last` accepted state."""
    counts = row.counts
    drafted = [node.state for node in nodes[1:] if node.parent < 0]
    counts.drafted += len(drafted)
    counts.accepted += depth
    for place in range(depth):
        counts.accepted_at_depth[place] += 1
    offered = any(follows(state, last, row.mask_id) for state in drafted)
    for place in range(min(depth + offered, len(counts.offered_at_depth))):
        counts.offered_at_depth[place] += 1


def follows(state: State, last: State, mask_id: int) -> bool:
    """Tell if a state keeps all that is revealed at another one of its block, and reveals more."""
    if state.start != last.start or state.masks >= last.masks:
        return False
    for own, other in zip(state.key[1], last.key[1], strict=True):  # noqa: SIM110  half the time of `all`
        if own != other != mask_id:
            return False
    return True
