"""Acceptance: the longest verified path of a row.

A path starts at the row's own state, which is its text. What the rule reveals at a state makes the next one; where that was
scored too, in this round or the last one, the path goes on there. What was drafted decides how far a path leads, never where.
"""

import math
from collections.abc import Sequence

from .draft import Node
from .reveal import RevealRule, log_sigmoid
from .state import Frontier, Key, Row, Scores, State


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
    known: dict[Key, int] = {}
    behind: dict[int, int] = {}  # next blocks, by clean states
    for place, node in enumerate(nodes):
        if node.parent < 0:
            known[node.state.key] = place
        else:
            behind[node.parent] = place
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
            at = behind.get(at, -1)
            if at < 0:
                break
            said, remembered = scores[at], False
            continue
        frontier = reveal_at(row, rule, state, said)
        state = frontier.successor
        at = known.get(state.key, -1)
        if at >= 0:
            said, remembered = scores[at], False
        elif drafts and (before := row.memory.get(state.key)) is not None:
            said, remembered = before[1], True
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
    if row.bans is not None:
        where = row.bans.allowed(row, state, scores, where)
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
