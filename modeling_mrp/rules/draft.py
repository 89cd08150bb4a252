"""Build drafts (states that a round submits for a row), and accept the path that the rule takes
through scored states.

A draft consists of the row's next state and the states that are most likely to follow it: in the
same block and, after a clean state, in the next block.

An estimate gives a token and its log-odds for each masked column. Which column is revealed first is
far less certain than which token it gets. So a state has several *followers*: the states to which
one reveal may lead. If different orders of reveals lead to the same state, their chances add up. A
state that the last round scored needs no forward, since its scores are remembered.

Estimates are the backbone's scores of the last accepted state and of remembered states, and the
head's estimates for drafted states. A head pass costs nearly the same for many states as for one,
so a round makes few passes: a small draft is built, the head reads all of it in one pass, and a
larger draft is built from the head's estimates.

A path starts at the row's own state, which holds the row's text so far. The rule's reveal at a
state makes the next state. If this next state was scored in the present round or the last one, the
path continues there. Drafts decide how far a path leads, never where.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .reveal import RevealRule, bounded, log_sigmoid, sigmoid
from .sources import TRUST, UNKNOWN, Candidates, DraftSource, Guess, combined
from .state import Key, PendingReveal, Row, Scores, State

# Followers considered per state, at most, and the number of rows from which only one is: such a
# chain makes 0.5 to 6 % fewer tokens a forward but saves a quarter of the host's time, which adds
# up over rows (`benchmarks/NOTES.md`, The host decides).
BRANCHES, CROWD = 3, 16
# What a preview of the next block is worth, as the chance of a state that a round would score in
# its place (`benchmarks/NOTES.md`, Drafts past the end of a block).
PREVIEW = 0.02
# Log-odds of tokens are clipped to this magnitude, so that no chance is 0.
MOST_CERTAIN = 30.0
_MASK = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class Node:
    """A state that a round submits to the backbone.

    Attributes:
        state: The state.
        parent: The index, among the row's nodes, of the node whose block comes directly before the
            block of this state. It is given if that block is not in the cache yet, so that this
            state has to attend to it in the same forward. -1 if the cache has all text before this
            state's block.
        source: Scores of the state from which this one was made, or the head's estimate of these
            scores; None if there are none.
        parent_state: The state of the node `parent`; None if `parent` is -1. It has no masks,
            except if this node is a preview (`is_preview`): then it is the row's own, unfinished
            state.
        chance: The estimated chance that the rule, from the row's own state on, leads to the state.
        depth: Number of drafts on the path to the state, itself included; 0 for the row's own
            state.
        accepted: Whether the row's path reached the state. Set once the round is over.
    """

    state: State
    parent: int
    source: Scores | None
    parent_state: State | None = None
    chance: float = 1.0
    depth: int = 0
    accepted: bool = False

    @property
    def opens(self) -> bool:
        """Whether this is the first state of a block, submitted together with the block before it.
        Such a state is not a draft: it follows for certain once the block before it has no masks. A
        preview (`is_preview`) counts as such a state, too."""
        return self.parent >= 0 and self.state.step == 0

    @property
    def is_preview(self) -> bool:
        """Whether this is the first state of a block before which the row's block still has masks.
        If so, the row never accepts it: its scores only serve as estimates for later drafts."""
        return self.parent_state is not None and self.parent_state.masks > 0


# A candidate for a draft: the state before, the columns to reveal, the key of the resulting state,
# and `source` and `parent` of its `Node`. The resulting state is made only once it is drafted
# (`State.revealing`), and what a constraint says of it is asked only then, for which it has the
# log-odds by column. If no columns are given, the first entry is the candidate's own state.
Follower = tuple[State, Sequence[int], Key, Scores | None, int, Sequence[float]]


def followers(
    row: Row,
    rule: RevealRule,
    state: State,
    scores: Scores | None,
    branches: int,
    candidates: Sequence[Candidates] = (),
    parent: int = -1,
    clean: State | None = None,
) -> Iterator[tuple[Key, Follower, float]]:
    """Yield each state to which a reveal at `state` may lead, as a candidate for a draft.

    States at which the text is complete are left out. A state that the last round scored is
    replaced by the first unscored state to which the rule leads from there. If the row has a
    constraint, both happen only later (`constrained_follower`).

    Args:
        row: The row.
        rule: The rule by which the row is decoded.
        state: The state.
        scores: Scores of the state, or an estimate of them; None if there are none.
        branches: The largest number of sets of columns that are considered.
        candidates: What other sources propose at the state.
        parent: `Node.parent` of the state, which is also that of its followers.
        clean: The state of the node `parent`, which has no masks; None if there is none.

    Yields:
        Triples: the key of the new state (`State.key`), its `Follower`, and the chance that the
        reveal leads to it. A `Follower` is a tuple from which the new state is made if it is
        drafted. It has the state before the reveal, the columns to reveal there, the key of the new
        state, its `Node.source` and `Node.parent`, and the log-odds by column. If its columns are
        empty, the new state has been made already, and is the first entry.
    """
    scored: tuple[Sequence[int], Sequence[float]] | None = None
    if scores is not None and scores.drawable is None:
        scored = scores.token, scores.log_odds
    elif scores is not None:
        scored = draw_tokens(row, state, scores)
    guess = combined(state, scored, candidates, rule.left_to_right) if candidates else None
    if guess is not None:
        scored = guess.token, guess.log_odds
    if scored is None:
        return
    token, log_odds = scored
    for columns, chance in rule.likely(state, log_odds, branches):
        if not chance > 0:
            continue
        if guess is None and rule.left_to_right:  # the order is certain, but not the token
            chance *= sigmoid(bounded(log_odds[columns[0]], MOST_CERTAIN) + TRUST)
        for tokens, share in ((token, 1.0),) if guess is None else variants(columns, guess):
            candidate = follower(row, rule, state, scores, columns, tokens, log_odds, parent, clean)
            if candidate is not None:
                yield candidate[2], candidate, chance * share


def variants(columns: Sequence[int], guess: Guess) -> Iterator[tuple[Sequence[int], float]]:
    """Yield the tokens that a reveal of certain columns may give them. Each item is a pair: a
    sequence of tokens, indexed by column of the block, and the chance that the reveal gives these.

    First come the likeliest tokens. Then the least certain column takes each of its other tokens in
    turn. Nothing is yielded if the token of one of the columns is unknown.

    Args:
        columns: The columns that are revealed.
        guess: The tokens that are possible at each column of the block, and their chances.
    """
    if any(guess.token[column] == UNKNOWN for column in columns):
        return
    unsure = [column for column in columns if column in guess.rivals]
    share = math.prod([guess.rivals[column][0][1] for column in unsure])
    yield guess.token, share
    if unsure:
        column = min(unsure, key=lambda column: guess.rivals[column][0][1])
        (_, likeliest), *alternatives = guess.rivals[column]
        for rival, chance in alternatives:
            tokens = list(guess.token)
            tokens[column] = rival
            yield tokens, share * chance / likeliest


def follower(
    row: Row,
    rule: RevealRule,
    state: State,
    scores: Scores | None,
    columns: Sequence[int],
    token: Sequence[int],
    log_odds: Sequence[float],
    parent: int,
    clean: State | None = None,
) -> Follower | None:
    """Return a candidate for a draft: the state after revealing `token[column]` at each of
    `columns`.

    Args:
        row, rule, state, scores: As in `followers`.
        columns: The columns that are revealed.
        token: For each column of the block, the token that is revealed there if it is in `columns`.
        log_odds: For each column of the block, the estimated log-odds. The candidate keeps them for
            `constrained_follower`.
        parent, clean: As in `followers`.

    Returns:
        For a row with a constraint, the `Follower` of this state (see `followers`). For other rows:

        - None if the text is complete at this state;
        - if the last round scored this state, the `Follower` of the first unscored state to which
          the rule leads from there, or None if there is none (`unscored_follower`);
        - otherwise, the `Follower` of this state.
    """
    start, ids = state.key
    # Whether the text ends with the block, or with an eos in the reveal.
    ends = not state.end == row.block_size < row.open_end - start
    new_ids = list(ids)
    for column in columns:
        new_ids[column] = token[column]
        ends |= token[column] in row.eos
    key = (start, tuple(new_ids))
    if row.constraint is not None or not (ends or key in row.memory):
        return state, columns, key, scores, parent, log_odds
    return unscored_follower(row, rule, state, columns, token, scores, parent, clean)


def constrained_follower(
    row: Row, rule: RevealRule, candidate: Follower, clean: State | None
) -> Follower | None:
    """Reduce a candidate to those of its columns that the row's constraint allows. Return the
    candidate for the first unscored state after the reduced reveal (`unscored_follower`). Return
    None if the constraint allows none of the columns, or if the text is complete at that state.

    Args:
        row, rule, clean: As in `followers`.
        candidate: A `Follower` (see `followers`) that has columns to reveal.
    """
    state, columns, (_, token), scores, parent, log_odds = candidate
    columns = possible_columns(row, state, columns, token, log_odds, clean)
    if not columns:
        return None
    return unscored_follower(row, rule, state, columns, token, scores, parent, clean)


def unscored_follower(
    row: Row,
    rule: RevealRule,
    state: State,
    columns: Sequence[int],
    token: Sequence[int],
    scores: Scores | None,
    parent: int,
    clean: State | None,
) -> Follower | None:
    """Return the candidate (a `Follower`, see `followers`) for the first unscored state after
    revealing `token[column]` at each of `columns`.

    This is the state after that reveal unless the last round scored it. If it did, the rule's
    reveal at that state gives the next state, and so on until one is not scored. Return None if the
    text is complete there. The arguments are as in `follower`.
    """
    successor, source = row.successor(state, columns, token, clean), scores
    while (remembered := row.memory.get(successor.key)) is not None:
        source = remembered[1]
        revealed, _ = rule.reveal(successor, source, row.memo)
        if row.constraint is not None:
            possible = possible_columns(
                row, successor, revealed, source.token, source.log_odds, clean
            )
            revealed = possible or revealed
        successor = row.successor(successor, revealed, source.token, clean)
    return None if row.ends(successor) else (successor, (), successor.key, source, parent, ())


def build_draft(
    row: Row,
    rule: RevealRule,
    size: int,
    branches: int,
    estimates: Mapping[Key, Scores],
    sources: Sequence[DraftSource] = (),
    previews: bool = False,
) -> list[Node]:
    """Build a row's draft by best-first search from its next state; return the nodes of the draft,
    that of the next state first.

    A small draft is the beginning of a larger one. A draft of one state is the row's own state. If
    that state has no masks, the second state is always the first state of the next block.

    Args:
        row: The row to draft for.
        rule: Guesses what a step reveals (`RevealRule.likely`).
        size: The largest number of states in the draft.
        branches: The largest number of sets of columns that are considered per state.
        estimates: The head's estimates of scores, by `State.key`; empty if the head has not run.
        sources: Draft sources that are asked in addition to scores.
        previews: Whether the first state of the next block may be scored while the present block is
            unfinished, so that later drafts can continue into the next block.
    """
    if size == 1:
        return [Node(row.state, -1, row.source, None, 1.0, 0)]
    waiting: list[Follower] = [(row.state, (), row.state.key, row.source, -1, ())]
    # By candidate, the chance that the path reaches it, summed over orders, -inf once drafted; the
    # number of drafts on the way to it; and candidates' indices by parent and key.
    chances = [1.0]
    depths = [0]
    index_of = {(-1, row.state.key): 0}
    nodes: list[Node] = []
    if previews and (next_state := previewed(row)) is not None:
        waiting.append((next_state, (), next_state.key, None, 0, ()))
        chances.append(PREVIEW)
        depths.append(0)
    while len(nodes) < size and (chance := max(chances)) > 0:
        index = chances.index(chance)
        chances[index] = -math.inf
        candidate: Follower | None = waiting[index]
        parent = waiting[index][4]
        clean = nodes[parent].state if parent >= 0 else None
        if row.constraint is not None and waiting[index][1]:
            candidate = constrained_follower(row, rule, waiting[index], clean)
        if candidate is None or index_of.setdefault((parent, candidate[2]), index) != index:
            continue
        origin, columns, key, source, _, _ = candidate
        state = origin.revealing(columns, key) if columns else origin
        depth = depths[index]
        node = Node(state, parent, source, clean, min(1.0, chance), depth)
        nodes.append(node)
        if len(nodes) == size:
            break
        if node.is_preview:
            continue
        if not state.masks:
            if parent < 0:  # what is behind the next block would have to see two clean states
                next_state = row.first_state(state.start + row.block_size, state)
                if next_state.free:  # one block at a time: a given one has to wait
                    guess = row.preview[1] if row.preview[0] == next_state.key else None
                    waiting.append((next_state, (), next_state.key, guess, len(nodes) - 1, ()))
                    chances.append(chance)
                    depths.append(depth)
            continue
        scores = estimates.get(key, source)
        candidates: Sequence[Candidates] = ()
        if sources and state.free and (scores is None or rule.left_to_right):
            proposed = [draft_source.propose(row, state, clean) for draft_source in sources]
            candidates = [proposal for proposal in proposed if proposal is not None]
        if scores is None and not candidates:
            continue
        for name, candidate, share in followers(
            row, rule, state, scores, branches, candidates, parent, clean
        ):
            if (index := index_of.setdefault((parent, name), len(chances))) < len(chances):
                chances[index] += share * chance
            else:
                chances.append(share * chance)
                depths.append(depth + 1)
                waiting.append(candidate)
    return nodes


def previewed(row: Row) -> State | None:
    """Return the first state of the block after the row's present block, to be scored before the
    present block is finished (a preview).

    Return None if the present block has no masks, if the text ends in it, or if nothing can be
    revealed in the next block. Also return None if the row has a constraint, because what it allows
    there is not known yet.
    """
    state = row.state
    start = state.start + row.block_size
    if not state.masks or state.end < row.block_size or start >= row.open_end:
        return None
    if row.constraint is not None:
        return None
    next_state = row.first_state(start)
    return next_state if next_state.free else None


def draw_tokens(row: Row, state: State, scores: Scores) -> tuple[Sequence[int], Sequence[float]]:
    """Sample one of the likeliest tokens (`scores.drawable`) at each free column of a state, with
    the noise that the backbone's pick has at that state. Return two sequences [block]: the tokens
    and their log-odds, which are 0 and -inf at other columns."""
    assert scores.drawable is not None
    free = list(state.free)
    ids, numbers = np.split(scores.drawable[free], [scores.drawable.shape[1] // 2], axis=1)
    ids = ids.astype(np.int64)
    # scores of the tokens, and the log-sum-exp of all others; a NaN is never drawn
    numbers = np.where(np.isnan(numbers), -np.inf, numbers)
    keys = [noise_key(row.seed, state.start + column, state.masks) for column in free]
    best = (numbers[:, :-1] + gumbel(keys, ids)).argmax(-1)[:, None]
    drawn_score = np.take_along_axis(numbers, best, 1)[:, 0]
    np.put_along_axis(numbers, best, -np.inf, 1)
    odds = drawn_score - np.logaddexp.reduce(numbers, axis=1)
    drawn_tokens = np.take_along_axis(ids, best, 1)[:, 0]
    token = [0] * row.block_size
    log_odds = [-np.inf] * row.block_size
    for column, token_id, token_odds in zip(
        free, drawn_tokens.tolist(), odds.tolist(), strict=True
    ):
        token[column] = token_id
        log_odds[column] = token_odds
    return token, log_odds


def mix_bits(x: Any) -> Any:
    """Hash a uint32 number, or an array of them elementwise, by two multiply-xorshift rounds."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def noise_key(seed: Any, position: Any, masks: Any) -> Any:
    """Hash a seed, an absolute position and a state's number of masks to a key of sampling noise.
    Arguments are ints, or tensors that are hashed elementwise."""
    key = mix_bits(seed & _MASK)
    key = mix_bits(key ^ (seed >> 32 & _MASK))
    key = mix_bits(key ^ (position & _MASK))
    return mix_bits(key ^ (masks & _MASK) ^ 0x9E3779B9)


def gumbel(keys: list[int], tokens: Any) -> Any:
    """Compute Gumbel noise on the host. It is a function of a key (`noise_key`) and a token id, and
    equals the noise that is added on the device (`gumbel_noise`) up to rounding.

    Args:
        keys: n keys.
        tokens: int64 array [n, m], for each key, m token ids.

    Returns:
        A float64 array [n, m].
    """
    hashed = mix_bits(tokens * 0x9E3779B1 & _MASK)
    bits = mix_bits(hashed ^ np.array(keys, dtype=np.int64)[:, None])
    # -log(u) for u = (bits + 1/2) / 2^32, computed from the nearer end of the unit interval, for
    # precision.
    lower = bits < 1 << 31
    nearest = (np.where(lower, bits, _MASK - bits) + 0.5) * 2.0**-32
    return -np.log(np.where(lower, -np.log(nearest), -np.log1p(-nearest)))


class UnscoredError(ValueError):
    """The token picked at a position has no finite logit (after processors, bans and constraints),
    or the head's estimate for it is NaN. So the token cannot be revealed.

    Args:
        place: Index of the row in the call (`Row.place`).
        position: The position in the row's text.
    """

    def __init__(self, place: int, position: int) -> None:
        super().__init__(place, position)
        self.place, self.position = place, position


def accept(
    row: Row, rule: RevealRule, nodes: Sequence[Node], scores: Sequence[Scores], drafts: bool
) -> tuple[PendingReveal | None, list[int]]:
    """Accept the longest verified path of a row: follow the rule from the row's state through
    scored states, and write all reveals on the way except the last one. If the round drafted, keep
    the states that it scored (`row.memory`).

    Args:
        row: The row. Its state becomes the last accepted state or, if that one has no masks, the
            first state of the next block.
        rule: Decides what a step reveals.
        nodes: The row's nodes in the round, that of its own state first.
        scores: The backbone's scores of each node.
        drafts: Whether the round drafted. If so, the path may also continue through states that the
            last round scored (`row.memory`). At the end, states scored in this round replace these
            in `row.memory`, and the drafts are counted. If not, `row.memory` stays as it is.

    Returns:
        The pending reveal, which is not written yet (None if the path ends in a state without
        masks), and the indices in `nodes` of the accepted states without masks.

    Raises:
        UnscoredError: if the token picked at a position that is revealed has no finite logit.
    """
    # Indices in `nodes` by parent and key: a state is scored only as what follows the clean state
    # before it.
    index_of = {(node.parent, node.state.key): index for index, node in enumerate(nodes)}
    state, node_index, parent = row.state, 0, -1
    state_scores, remembered = scores[0], False
    clean: list[int] = []
    pending: PendingReveal | None = None
    length = depth = 0
    while True:
        length += 1
        depth += remembered or (node_index > 0 and not nodes[node_index].opens)
        if not state.masks:
            clean.append(node_index)
            pending, state, parent = None, row.first_state(state.start + row.block_size), node_index
            node_index = index_of.get((parent, state.key), -1)
            if node_index < 0:
                break
            nodes[node_index].accepted = True
            state_scores, remembered = scores[node_index], False
            continue
        pending = reveal_at(row, rule, state, state_scores)
        state = pending.successor
        node_index = index_of.get((parent, state.key), -1)
        if node_index >= 0:
            nodes[node_index].accepted = True
            state_scores, remembered = scores[node_index], False
        elif drafts and (entry := row.memory.get(state.key)) is not None:
            state_scores, remembered = entry[1], True
        else:
            state = pending.state
            break
        write(row, pending)
    row.state = state
    if pending is None:
        row.source = None
        row.write_filled()
    if drafts:
        count_drafts(row, nodes, state, parent, depth)
        for node, score in zip(nodes, scores, strict=True):
            if node.is_preview:  # without hidden states, whose tensor is that of the whole round
                row.preview = (node.state.key, replace(score, hidden=None, candidates=None))
        row.memory = {
            node.state.key: (node.state, score)
            for node, score in zip(nodes, scores, strict=True)
            if node.state.masks and not node.opens and node.parent in (-1, parent)
        }
    row.counts.lengths[length] += 1
    return pending, clean


def first_pending_reveal(row: Row, rule: RevealRule, scores: Scores) -> PendingReveal | None:
    """Return the pending reveal at a row's first state, given the scores of that state. Return None
    if nothing is left to reveal."""
    if row.ends(row.state) or not row.state.free:
        return None
    return reveal_at(row, rule, row.state, scores)


def possible_columns(
    row: Row,
    state: State,
    columns: Sequence[int],
    token: Sequence[int],
    log_odds: Sequence[float],
    parent: State | None = None,
) -> tuple[int, ...]:
    """Return the columns of a reveal with which the row's constraint can still be satisfied; all of
    them if the row has no constraint.

    Args:
        row: The row.
        state: The state before the reveal.
        columns: Columns that the rule reveals.
        token, log_odds: [block], for each column, the picked token and its log-odds.
        parent: The finished state of the block before, if the row's text does not hold it yet.
    """
    origin = row.origin(state.start, parent)
    if row.constraint is None or origin is None:
        return tuple(columns)
    return row.constraint.possible_part(origin, state.key, columns, token, log_odds)


def reveal_at(row: Row, rule: RevealRule, state: State, scores: Scores) -> PendingReveal:
    """Return the pending reveal at a scored state of the row's path: what the rule reveals there,
    as far as the row's bans and constraint allow it."""
    columns, memo = rule.reveal(state, scores, row.memo)
    if row.bans is not None and len(columns) > 1:
        columns = row.bans.allowed(
            row.text_at(state), state.start, columns, scores.token, scores.log_odds, row.mask_id
        )
    if row.constraint is not None and len(columns) > 1:  # none remains where no token is finite
        columns = possible_columns(row, state, columns, scores.token, scores.log_odds) or columns
    return PendingReveal(state, scores, columns, memo, row.successor(state, columns, scores.token))


def write(row: Row, pending: PendingReveal) -> None:
    """Write a pending reveal into the row's text, and move the row to the state after the reveal.

    Raises:
        UnscoredError: if the token picked at a revealed column has no finite logit.
    """
    start, scores = pending.state.key[0], pending.scores
    offset = start - row.prompt
    for column in pending.columns:
        logprob = log_sigmoid(scores.log_odds[column])
        if math.isnan(logprob):
            raise UnscoredError(row.place, start + column)
        row.text[start + column] = scores.token[column]
        row.logprob[offset + column], row.step[offset + column] = logprob, row.steps
    row.state, row.source, row.memo = pending.successor, scores, pending.memo
    row.write_filled()
    row.steps += 1
    if row.written is not None:
        row.written.append(pending)


def count_drafts(row: Row, nodes: Sequence[Node], last: State, parent: int, depth: int) -> None:
    """Add a round's drafts to `row.counts` (`Counts`).

    All drafts that the round submitted are added to `drafted`, and the accepted ones to `accepted`
    and, by depth, to `accepted_at_depth`. The same depths are added to `offered_at_depth`, and also
    the next depth if the round submitted a draft that could have followed `last`: one of the same
    block that has all tokens of `last`, and more.

    Args:
        row: The row.
        nodes: The row's nodes in the round, that of its own state first.
        last: The state at which the accepted path ends.
        parent: The index in `nodes` of the accepted state without masks whose block comes before
            that of `last`; -1 if the round accepted none.
        depth: Number of accepted drafts, including states that the last round had scored.
    """
    counts = row.counts
    drafted = [node for node in nodes[1:] if not node.opens]
    counts.drafted += len(drafted)
    counts.accepted += depth
    for index in range(depth):
        counts.accepted_at_depth[index] += 1
    offered = any(
        node.parent == parent and follows(node.state, last, row.mask_id) for node in drafted
    )
    for index in range(min(depth + offered, len(counts.offered_at_depth))):
        counts.offered_at_depth[index] += 1


def follows(state: State, last: State, mask_id: int) -> bool:
    """Return whether `state`, of the same block as `last`, contains all tokens of `last`, and
    more."""
    if state.masks >= last.masks:
        return False
    # A loop takes half the time of `all`.
    for token, last_token in zip(state.key[1], last.key[1], strict=True):
        if token != last_token != mask_id:
            return False
    return True
