"""Build drafts (states that a round submits for a row), and accept the path that the rule takes
through scored states.

A draft is the row's next state and the states most likely to follow it.

An estimate gives a token and its log-odds for each masked column. Which column is revealed first is
far less certain than which token it gets, so a state has several *followers*, the states that one
reveal may lead to. The chances of different orders that lead to the same state add up. A state that
the last round scored needs no forward, since its scores are remembered.

Estimates are the backbone's scores of the last accepted state and of remembered states, and the
head's estimates for drafted states. A head pass costs nearly the same for many states as for one,
so a round makes few passes: a small draft is built, the head reads all of it in one pass, and a
larger draft is built from the head's estimates.

A path starts at the row's own state, which holds the row's text so far. The rule's reveal at a
state makes the next state; if that was scored in this round or the last one, the path continues
there. Drafts decide how far a path leads, never where.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .reveal import RevealRule, log_sigmoid
from .state import Frontier, Key, Row, Scores, State

# Followers considered per state, at most, and the number of rows from which only one is: such a
# chain makes 0.5 to 6 % fewer tokens a forward but saves a quarter of the host's time, which adds
# up over rows (`benchmarks/NOTES.md`, The host decides).
BRANCHES, CROWD = 3, 16
_MASK = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class Node:
    """A state that a round submits to the backbone.

    Attributes:
        state: The state.
        parent: Index, among the row's nodes, of the uncommitted clean state that it attends to
            besides the prefix; -1 if none.
        source: Scores, or the head's estimate of them, of the state before, from which this one was
            made; None if it has none.
    """

    state: State
    parent: int
    source: Scores | None


# A candidate for a draft: the state before, the columns to reveal, the key of the resulting state,
# and `source` and `parent` of its `Node`. The resulting state is made only once it is drafted
# (`State.revealing`). If no columns are given, the first entry is the candidate's own state.
Follower = tuple[State, Sequence[int], Key, Scores | None, int]


def followers(
    row: Row, rule: RevealRule, state: State, said: Scores, branches: int
) -> Iterator[tuple[Key, Follower, float]]:
    """Yield key, candidate and chance of each state that a reveal at `state` may lead to, given its
    scores `said`.

    States at which the text is whole are left out. A state that the last round scored is replaced
    by the first unscored state to which the rule leads from there.
    """
    token, odds = (
        (said.token, said.odds) if said.likeliest is None else draw_tokens(row, state, said)
    )
    (start, ids), memory, eos = state.key, row.memory, row.eos
    # Whether the text continues in the next block, unless the reveal holds an eos.
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
    """List the number of states in the draft at each head pass of a round, rising evenly to `width`
    - 1."""
    passes = min(passes, width - 1)
    return [-(-done * (width - 1) // passes) for done in range(1, passes + 1)]


def target_nodes(row: Row, narrow: bool) -> list[Node]:
    """List a row's nodes in a round without drafts: its own state and, if that is clean, the next
    block's first state.

    If `narrow`, only the row's own state is listed, and the next block begins a round later.
    """
    nodes = [Node(row.state, -1, row.source)]
    if not row.state.masks and not narrow:
        behind = row.opened(row.state.start + row.block_size)
        if behind.masks:  # one block at a time: a given one has to wait
            nodes.append(Node(behind, 0, None))
    return nodes


def build_draft(
    row: Row, rule: RevealRule, size: int, branches: int, estimates: Mapping[Key, Scores]
) -> list[Node]:
    """Build a row's draft by best-first search from its next state, and return its nodes, the next
    state first.

    Args:
        row: The row to draft for.
        rule: Guesses what a step reveals (`RevealRule.likely`).
        size: States of the draft, at most.
        branches: Followers considered per state, at most.
        estimates: The head's estimates of scores, by the state's key.
    """
    waiting: list[Follower] = [(row.state, (), row.state.key, row.source, -1)]
    # By candidate, the chance that the path reaches it, summed over orders, -inf once drafted; and
    # candidates' indices by key.
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
    """Sample at each free column one of its likeliest tokens, with the state's noise; return tokens
    and log-odds [block]."""
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
    """Hash a uint32 number, or an array of them elementwise, by two multiply-xorshift rounds."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def noise_key(seed: Any, position: Any, masks: Any) -> Any:
    """Hash seed, absolute position and a state's number of masks to a key of sampling noise; ints,
    or tensors elementwise."""
    key = mix_bits(seed & _MASK)
    key = mix_bits(key ^ (seed >> 32 & _MASK))
    key = mix_bits(key ^ (position & _MASK))
    return mix_bits(key ^ (masks & _MASK) ^ 0x9E3779B9)


def gumbel(keys: list[int], tokens: Any) -> Any:
    """Compute on the host the Gumbel noise of `kernels.pick`: [n, m] float64, for n keys and token
    ids [n, m] int64."""
    hashed = mix_bits(tokens * 0x9E3779B1 & _MASK)
    bits = mix_bits(hashed ^ np.array(keys, dtype=np.int64)[:, None])
    # -log(u) for u = (bits + 1/2) / 2^32, computed from the nearer end of the unit interval, for
    # precision.
    lower = bits < 1 << 31
    nearest = (np.where(lower, bits, _MASK - bits) + 0.5) * 2.0**-32
    return -np.log(np.where(lower, -np.log(nearest), -np.log1p(-nearest)))


class UnscoredError(ValueError):
    """No token has a finite score at `position` of the row at `place` in the batch."""

    def __init__(self, place: int, position: int) -> None:
        super().__init__(place, position)
        self.place, self.position = place, position


def accept(
    row: Row, rule: RevealRule, nodes: Sequence[Node], scores: Sequence[Scores], drafts: bool
) -> tuple[Frontier | None, list[int]]:
    """Accept the longest verified path of a row: write all its reveals but the last, and remember
    the scored states.

    Args:
        row: The row. Its state becomes the frontier's or, if the path ends in a clean block, the
            next block's first state.
        rule: Decides what a step reveals.
        nodes: The row's nodes in the round, its own state's first.
        scores: The backbone's scores of each node.
        drafts: Whether the round drafted. If so, the path may continue through remembered states,
            the states scored in this round then replace those in `row.memory`, and drafts are
            counted.

    Returns:
        The frontier, whose reveal is not written yet (None if the path ends in a clean block), and
        the indices in `nodes` of the accepted clean states.

    Raises:
        UnscoredError: if no token had a finite score at a position that is revealed.
    """
    # Indices in `nodes`: of states by their keys, and of next blocks' first states by the index of
    # the clean state before.
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
    """Make the frontier of a row at its first state from the state's scores; return None if nothing
    is left to reveal."""
    return None if row.ends(row.state) else reveal_at(row, rule, row.state, scores)


def reveal_at(row: Row, rule: RevealRule, state: State, scores: Scores) -> Frontier:
    """Make the frontier at a scored state of the row's path: the rule's reveal there, within the
    row's bans."""
    where, memo = rule.reveal(state, scores, row.memo)
    if row.bans is not None and len(where) > 1:
        where = row.bans.allowed(
            row.text_at(state), state.start, where, scores.token, scores.odds, row.mask_id
        )
    return Frontier(state, scores, where, memo, row.after(state, where, scores.token))


def write(row: Row, frontier: Frontier) -> None:
    """Write a frontier's reveal into the row's text, and move the row to the frontier's successor.

    Raises:
        UnscoredError: if no token had a finite score at a revealed column.
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
    """Add a round's drafts to the row's counts; `depth` of them led to the state `last`."""
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
    """Tell if `state` is of the same block as `last` and reveals all that `last` does, and more."""
    if state.start != last.start or state.masks >= last.masks:
        return False
    # A loop takes half the time of `all`.
    for own, other in zip(state.key[1], last.key[1], strict=True):
        if own != other != mask_id:
            return False
    return True
