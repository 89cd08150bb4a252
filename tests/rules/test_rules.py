"""What a row decides, by hand and without a model: what rules reveal and guess, what is drafted, and how far a path leads."""

import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from modeling_mrp.kernels.noise import gumbel_noise, noise_keys
from modeling_mrp.rules.accept import UnscoredError, accept, first_frontier, write
from modeling_mrp.rules.draft import Node, build_draft, growth, undrafted
from modeling_mrp.rules.memory import BoundedAdaptive, Coherent, Credit, Klass, SlowFast
from modeling_mrp.rules.noise import gumbel, noise_key
from modeling_mrp.rules.published import (
    ConfidenceAdaptive,
    EBSampler,
    EosRejection,
    FastDLLM,
    Hierarchy,
    LocalLeap,
    Prophet,
    factor_thresholds,
)
from modeling_mrp.rules.reveal import (
    ORDER_SHARPNESS,
    Columns,
    Dynamic,
    EntropyBound,
    Guesses,
    RevealRule,
    Sequential,
    Static,
    log_sigmoid,
    logit,
    schedule_of,
)
from modeling_mrp.rules.state import Counts, Row, Scores, State

M = 60  # the mask
A, B, C, D = 10, 11, 12, 13  # what the columns of a block get
EOS = 9


def row(
    text: Sequence[int] = (1, 2, 3, 4), new: int = 8, given: Sequence[int] = (), eos: Sequence[int] = (EOS,), width: int = 4
) -> Row:
    """A row of blocks of 4 behind a prompt, which drafts."""
    length, limit = len(text), len(text) + new
    full = [*text, *given] + [M] * (-(-limit // 4) * 4 - length - len(given))
    given_end = length + max((at + 1 for at, token in enumerate(given) if token != M), default=0)
    open_end = max((at + 1 for at in range(limit) if full[at] == M), default=0)
    made = Row(0, full, 4, M, frozenset(eos), length, given_end, limit, open_end, given_end, 7)
    made.counts = Counts(width, True)
    return made


def state(ids: Sequence[int], start: int = 4, step: int | None = None, eos: Sequence[int] = (EOS,)) -> State:
    """A state at the step that reveals of one column at a time lead to."""
    end = next((column for column, token in enumerate(ids) if token in eos), len(ids))
    masked = [column for column, token in enumerate(ids) if token == M]
    free = tuple(column for column in masked if column < end)
    return State((start, tuple(ids)), free, end, len(masked), len(ids) - len(masked) if step is None else step)


def says(odds: Sequence[float], token: Sequence[int] = (A, B, C, D), **others: Any) -> Scores:
    return Scores(list(token), list(odds), **others)


def weights(*values: float) -> list[float]:
    """Log-odds whose power `ORDER_SHARPNESS` is in these proportions."""
    return [math.log(value) / ORDER_SHARPNESS for value in values]


def ids_of(nodes: Sequence[Node]) -> list[list[int]]:
    return [list(node.state.ids) for node in nodes]


# -------------------------------------------------------------------------------------------------- what rules reveal

EMPTY = state([M, M, M, M])
SOME = state([M, 5, M, M])
AT_ONCE = Static((4,))
REVEALS: list[tuple[RevealRule, State, list[float], Columns]] = [
    (Static((1, 1, 1, 1)), EMPTY, [0, 3, 2, 1], (1,)),
    (Static((1, 1, 1, 1)), EMPTY, [2, 3, 3, 1], (1,)),  # of equals the leftmost
    (Static((1, 1, 1, 1)), SOME, [0, 9, 2, 1], (2,)),  # what is shown plays no part
    (Static((2, 1, 1)), EMPTY, [0, 3, 1, 2], (1, 3)),
    (Static((2, 1, 1)), EMPTY, [3, 2, 2, 2], (0, 1)),
    (Static((2, 1, 1)), SOME, [0, 9, 2, 1], (2,)),  # its second step
    (AT_ONCE, SOME, [0, 9, 2, 1], (0, 2, 3)),
    (Static((2,)), state([M, M, M, 5], step=3), [1, 2, 3, 0], (1, 2)),  # behind the last step as the last
    (Sequential((1, 1, 1, 1)), SOME, [0, 9, 2, 1], (0,)),
    (Sequential((2, 2)), SOME, [0, 9, 2, 1], (0, 2)),
    (Sequential((3, 1)), state([M, M, EOS, M], step=0), [0, 1, 2, 3], (0, 1)),  # nothing behind the end
    (Dynamic(1.0), EMPTY, [0, 3, 1, 2], (1, 3)),  # above, not at
    (Dynamic(5.0), EMPTY, [0, 3, 1, 2], (1,)),
    (Dynamic(math.inf), EMPTY, [0, math.inf, 1, 2], (1,)),
    (Dynamic(-math.inf), SOME, [0, 9, 1, 2], (0, 2, 3)),
    (Dynamic(1.0), state([M, M, EOS, M]), [0, 3, 9, 9], (1,)),
]


@pytest.mark.parametrize(("rule", "at", "odds", "where"), REVEALS)
def test_what_a_rule_reveals(rule: RevealRule, at: State, odds: list[float], where: Columns) -> None:
    assert rule.reveal(at, says(odds), "memo") == (where, "memo")


@pytest.mark.parametrize(
    ("bound", "entropy", "where"),
    [
        (1.0, [0.5, 0.1, 0.2, 0.3], (1, 2, 3)),  # 0.1, 0.3, 0.6 are under, 1.1 is not
        (0.6, [0.5, 0.125, 0.25, 0.225], (1, 3)),
        (0.5, [0.5, 0.25, 0.25, 9.0], (1,)),  # a sum of the bound is not under it
        (0.0, [0.5, 0.1, 0.2, 0.3], (1,)),
        (9.0, [0.5, 0.5, 0.5, 0.5], (0, 1, 2, 3)),
        (0.6, [0.5, 0.5, 0.5, 0.5], (0,)),
    ],
)
def test_what_an_entropy_bound_reveals(bound: float, entropy: list[float], where: Columns) -> None:
    assert EntropyBound(bound).reveal(EMPTY, says([0] * 4, entropy=entropy), None) == (where, None)


def test_schedules() -> None:
    assert schedule_of(4, None) == (1, 1, 1, 1)
    assert [schedule_of(8, steps) for steps in (1, 2, 3, 5, 8)] == [(8,), (4, 4), (3, 3, 2), (2, 2, 2, 1, 1), (1,) * 8]
    assert [Sequential(schedule_of(4, steps)).left_to_right for steps in (None, 4, 3, 1)] == [True, True, False, False]


def test_log_odds() -> None:
    assert (logit(0), logit(1), logit(0.5)) == (-math.inf, math.inf, 0)
    assert logit(0.9) == pytest.approx(math.log(9))
    for odds in (-800.0, -3.0, 0.0, 3.0, 40.0, 800.0, math.inf, -math.inf):
        p = 1 / (1 + math.exp(-odds)) if odds > -700 else 0
        assert log_sigmoid(odds) == pytest.approx(odds if p == 0 else math.log(p), abs=1e-12)
    assert log_sigmoid(40.0) == pytest.approx(-math.exp(-40), rel=1e-9)  # not 0


# --------------------------------------------------------------------------------------------------- what they guess


def approx(guesses: Guesses) -> list[tuple[Columns, Any]]:
    return [(where, pytest.approx(chance)) for where, chance in guesses]


def test_static_guesses() -> None:
    """One column alone: by the power of its odds. Of several all but the last are the surest."""
    odds = weights(1, 6, 2, 1)
    one, two = Static((1, 1, 1, 1)), Static((2, 2))
    assert one.likely(EMPTY, odds, 3) == approx([((1,), 0.6), ((2,), 0.2), ((0,), 0.1)])
    assert one.likely(SOME, odds, 1) == approx([((2,), 0.5)])
    assert two.likely(EMPTY, odds, 3) == approx([((1, 2), 0.5), ((0, 1), 0.25), ((1, 3), 0.25)])
    assert AT_ONCE.likely(EMPTY, odds, 3) == approx([((0, 1, 2, 3), 1.0)])
    assert Static((4,)).likely(SOME, odds, 3) == [((0, 2, 3), 1.0)]
    assert one.likely(EMPTY, [math.inf, 0, 0, 0], 1) == approx([((0,), 1.0)])


def test_sequential_guesses() -> None:
    """There is one set: as likely as that every token is right."""
    assert Sequential((1,)).likely(SOME, [0, 9, 9, 9], 3) == approx([((0,), 0.5)])
    assert Sequential((2,)).likely(SOME, [0, 9, math.log(3), 9], 3) == approx([((0, 2), 0.375)])


def test_dynamic_guesses_several() -> None:
    """Two are over tau. Odds of 2 |gap| for each but the surest: of the doubts the smallest changes sides first."""
    rule, odds = Dynamic(1.0), [3.0, 1.5, 0.75, -1.0]
    certain = math.prod(1 / (1 + math.exp(-2 * gap)) for gap in (0.5, 0.25, 2.0))
    assert rule.likely(EMPTY, odds, 3) == approx(
        [((0, 1), certain), ((0, 1, 2), certain * math.exp(-0.5)), ((0,), certain * math.exp(-1.0))]
    )
    assert [where for where, _ in rule.likely(EMPTY, odds, 9)] == [(0, 1), (0, 1, 2), (0,), (0, 1, 3)]
    assert rule.likely(EMPTY, odds, 1) == approx([((0, 1), certain)])


def test_dynamic_guesses_one() -> None:
    """None but the surest is over tau: it is as uncertain which one that is; in turn another joins it, or is it instead."""
    rule, odds = Dynamic(5.0), weights(1, 6, 2, 1)
    certain = math.prod(1 / (1 + math.exp(-2 * (5 - odds[column]))) for column in (0, 2, 3))
    both = certain * math.exp(-2 * (5 - odds[2]))
    assert rule.likely(EMPTY, odds, 4) == approx(
        [
            ((1,), certain * 0.6),
            ((1, 2), both),
            ((2,), certain * 0.2),
            ((0, 1), certain * math.exp(-2 * 5)),
        ]
    )
    assert len(rule.likely(EMPTY, odds, 3)) == 3
    assert Dynamic(math.inf).likely(state([5, 5, M, 5]), [0, 0, math.inf, 0], 3) == approx([((2,), 1.0)])


def test_entropy_guesses() -> None:
    """Even odds are estimated to hold log 2 + 1 nats: a bound of 4 has room for two of them. One more or less is 0.35 times as
    likely."""
    odds = [0.0, 0.0, 0.0, 0.0]
    assert EntropyBound(4.0).likely(EMPTY, odds, 3) == approx([((0, 1), 1.0), ((0, 1, 2), 0.35), ((0,), 0.35)])
    assert EntropyBound(4.0).likely(EMPTY, odds, 9) == approx(
        [((0, 1), 1.0), ((0, 1, 2), 0.35), ((0,), 0.35), ((0, 1, 2, 3), 0.35**2)]
    )
    assert EntropyBound(1.0).likely(EMPTY, weights(1, 6, 2, 1), 5) == approx(
        [((1,), 0.6), ((1, 2), 0.35 * 0.6), ((2,), 0.2), ((0, 1, 2), 0.35**2 * 0.6), ((0,), 0.1)]
    )
    sure = 1 / (1 + math.exp(-2.0))
    nats = -sure * math.log(sure) - (1 - sure) * math.log(1 - sure) + 2 * (1 - sure)
    for bound, room in ((2 * nats - 1e-9, 1), (2 * nats + 1e-9, 2)):
        assert len(EntropyBound(bound).likely(EMPTY, [2.0] * 4, 1)[0][0]) == room


# --------------------------------------------------------------------------------------------------------- the states


def test_a_state_and_what_a_reveal_makes_of_it() -> None:
    at = row().state
    assert (at.key, at.free, at.end, at.masks, at.step) == ((4, (M,) * 4), (0, 1, 2, 3), 4, 4, 0)
    made = row().after(at, (1, 3), [A, B, C, D])
    assert (made.key, made.free, made.end, made.masks, made.step) == ((4, (M, B, M, D)), (0, 2), 4, 2, 1)
    ended = row().after(made, (2,), [A, B, EOS, D])
    assert (ended.ids, ended.free, ended.end, ended.masks, ended.step) == ((M, B, EOS, D), (0,), 2, 1, 2)
    two = row().after(at, (1, 2), [A, EOS, EOS, D])
    assert (two.end, two.free) == (1, (0,))  # the first of two ends


@pytest.mark.parametrize(
    ("given", "ids", "start", "stop"),
    [
        ({"new": 8}, [A, B, C, D], 4, None),  # another block follows
        ({"new": 8}, [A, B, C, D], 8, 12),
        ({"new": 8}, [A, B, M, EOS], 4, None),
        ({"new": 8}, [A, B, EOS, M], 4, 7),
        ({"new": 6}, [A, B, M, M], 8, 10),  # the limit lies within the block
        ({"new": 6}, [A, B, C, EOS], 8, 10),  # an end behind it
        ({"new": 6}, [A, M, C, M], 8, None),
        ({"given": [M, M, M, M, 5, 6, 7, 8]}, [A, B, C, D], 4, 12),  # the rest is given
        ({"given": [M, M, M, M, 5, M, 7, 8]}, [5, B, 7, 8], 8, 12),
        ({"given": [M, M, 5, 6, 7]}, [A, B, 5, 6], 4, None),
    ],
)
def test_where_a_text_ends(given: dict[str, Any], ids: list[int], start: int, stop: int | None) -> None:
    of = row(**given)
    of.state = state(ids, start)
    of.settle()
    assert (of.stop, of.ends(of.state)) == (stop, stop is not None)


def test_a_reveal_is_written() -> None:
    of = row()
    scores = says([0.0, 2.0, -1.0, 0.0])
    frontier = first_frontier(of, Static((2, 2)), scores)
    assert frontier is not None
    assert frontier.where == (0, 1)
    write(of, frontier)
    assert of.text[4:] == [A, B, M, M, M, M, M, M]
    assert of.logprob == [log_sigmoid(0.0), log_sigmoid(2.0), *[0.0] * 6]
    assert of.step == [0, 0, *[-1] * 6]
    assert (of.steps, of.source, of.state.ids) == (1, scores, (A, B, M, M))
    whole = row([1, 2, 3], 2, given=[4, 5])
    assert first_frontier(whole, Static((1,)), scores) is None


def test_what_has_no_score_is_an_error() -> None:
    of = row()
    frontier = first_frontier(of, Static((2, 2)), says([math.nan, 9.0, math.nan, 0.0]))
    assert frontier is not None
    with pytest.raises(UnscoredError) as caught:
        write(of, frontier)
    assert caught.value.place == 0
    assert caught.value.position in (4, 6, 7)
    assert of.text[4:] == [M] * 8, "nothing of it was written"


# ------------------------------------------------------------------------------------------------------------- drafts

ONE = Static((1, 1, 1, 1))


def drafting_row(odds: Sequence[float], token: Sequence[int] = (A, B, C, D), at: Sequence[int] = (M,) * 4, **given: Any) -> Row:
    of = row(**given)
    of.state, of.source = state(at), says(odds, token)
    return of


def test_growth() -> None:
    assert [growth(4, passes) for passes in (1, 2, 3, 9)] == [[3], [2, 3], [1, 2, 3], [1, 2, 3]]
    assert [growth(8, 2), growth(8, 3), growth(2, 1)] == [[4, 7], [3, 5, 7], [1]]


def test_a_chain() -> None:
    """The surest first, then the surest of the rest; behind a clean state the next block, which looks at it."""
    of = drafting_row([1, 4, 3, 2])
    nodes = build_draft(of, ONE, 7, 1, {})
    assert ids_of(nodes) == [[M] * 4, [M, B, M, M], [M, B, C, M], [M, B, C, D], [A, B, C, D], [M] * 4]
    assert [node.parent for node in nodes] == [-1] * 5 + [4]
    assert [node.state.start for node in nodes] == [4] * 5 + [8]
    assert [node.source for node in nodes] == [of.source] * 5 + [None]
    assert ids_of(build_draft(of, ONE, 3, 1, {})) == [[M] * 4, [M, B, M, M], [M, B, C, M]]
    assert build_draft(row(), ONE, 4, 3, {})[0].state.ids == (M,) * 4, "nothing is known: nothing is drafted"
    assert len(build_draft(row(), ONE, 4, 3, {})) == 1


def test_orders_that_meet_add_up() -> None:
    """0.4, 0.3, 0.3 and no chance. Either order of columns 0 and 1 leads to both: 0.4 * 0.3 / 0.6 + 0.3 * 0.4 / 0.7 = 0.371 is
    more than 0.3, the chance of column 2 alone, and what follows it all but certainly has the third."""
    of = drafting_row([*weights(4, 3, 3), -1e4])
    nodes = build_draft(of, ONE, 5, 3, {})
    assert ids_of(nodes) == [[M] * 4, [A, M, M, M], [M, B, M, M], [A, B, M, M], [A, B, C, M]]
    alone = drafting_row([*weights(4, 3, 3), -1e4])
    assert ids_of(build_draft(alone, ONE, 4, 1, {})) == [[M] * 4, [A, M, M, M], [A, B, M, M], [A, B, C, M]]


def test_estimates_go_before_what_was_said_of_the_state_before() -> None:
    of = drafting_row([4, 3, 2, 1])
    estimate = says([1, 2, 3, 4], [20, 21, 22, 23])
    nodes = build_draft(of, ONE, 4, 1, {of.state.key: estimate, (4, (M, M, M, 23)): says([9, 1, 1, 1], [30, 31, 32, 33])})
    assert ids_of(nodes) == [[M] * 4, [M, M, M, 23], [30, M, M, 23], [30, 31, M, 23]]
    assert [node.source for node in nodes[:2]] == [of.source, estimate]


def test_a_state_that_was_scored_stands_for_what_it_leads_to() -> None:
    """[A, M, M, M] was scored and leads to [A, M, M, 33], this to [A, M, 42, 33]: no forward is spent on either."""
    of = drafting_row([4, 3, 2, 1])
    first, second = says([0, 1, 2, 3], [30, 31, 32, 33]), says([0, 1, 2, 0], [40, 41, 42, 43])
    for ids, said in (([A, M, M, M], first), ([A, M, M, 33], second)):
        of.memory[4, tuple(ids)] = (state(ids), said)
    nodes = build_draft(of, ONE, 3, 1, {})
    assert ids_of(nodes) == [[M] * 4, [A, M, 42, 33], [A, 41, 42, 33]]
    assert nodes[1].source is second
    assert nodes[1].state.step == 3


def test_no_whole_text_is_drafted() -> None:
    """Neither behind an eos nor at the limit; an eos whose text has masks before it is."""
    of = drafting_row([1, 4, 3, 2], [A, EOS, C, D])
    assert ids_of(build_draft(of, ONE, 7, 1, {})) == [[M] * 4, [M, EOS, M, M]]  # what follows is whole
    first = drafting_row([9, 4, 3, 2], [EOS, B, C, D])
    assert len(build_draft(first, ONE, 7, 1, {})) == 1
    near = drafting_row([4, 3, 2, 1], new=3)
    assert ids_of(build_draft(near, ONE, 7, 1, {})) == [[M] * 4, [A, M, M, M], [A, B, M, M]]


def test_a_clean_states_successor() -> None:
    """One block at a time: a given one has to wait. What is given in it is there."""
    of = drafting_row([0] * 4, at=[A, B, C, D], given=[M, M, M, M, M, 5])
    assert ids_of(build_draft(of, ONE, 4, 3, {})) == [[A, B, C, D], [M, 5, M, M]]
    assert ids_of(undrafted(of, False)) == [[A, B, C, D], [M, 5, M, M]]
    assert ids_of(undrafted(of, True)) == [[A, B, C, D]]
    given = drafting_row([0] * 4, at=[A, B, C, D], new=12, given=[M, M, M, M, 5, 6, 7, 8, M])
    for nodes in (build_draft(given, ONE, 4, 3, {}), undrafted(given, False)):
        assert ids_of(nodes) == [[A, B, C, D]]
    masked = drafting_row([0] * 4, at=[A, M, C, D])
    assert ids_of(undrafted(masked, False)) == [[A, M, C, D]]


def test_sampled_drafts_choose_with_the_states_own_noise() -> None:
    """The token with the most log-probability and noise, at every state anew; what is truncated is never chosen."""
    rng, picked = random.Random(0), set()
    for seed in range(40):
        of = row()
        of = Row(0, of.text, 4, M, of.eos, 4, 0, 12, 12, 0, seed)
        odds = np.array([[rng.uniform(-2, 2) for _ in range(5)] for _ in range(4)])
        odds[:, 4] = -np.inf
        ids = np.array([[20 + 5 * column + place for place in range(5)] for column in range(4)])
        of.source = says([0] * 4, likeliest=(ids, odds))
        (_, node) = build_draft(of, Sequential((1,)), 2, 1, {})
        noise = gumbel_noise(noise_keys(*torch.tensor([[seed], [4], [4]])), torch.tensor(ids[0]), torch.float64)[0]
        p = torch.tensor(odds[0]).sigmoid()
        best = int((p.log() + noise).argmax())
        assert node.state.ids == (20 + best, M, M, M)
        assert best != 4
        picked.add(best)
    assert len(picked) == 4


# --------------------------------------------------------------------------------------------------------- acceptance


def accepted(of: Row, rule: RevealRule, scored: Sequence[tuple[State, int, Scores]]) -> tuple[Any, list[int]]:
    nodes = [Node(at, parent, None) for at, parent, _ in scored]
    return accept(of, rule, nodes, [said for _, _, said in scored], True)


def test_a_path_ends_where_nothing_was_scored() -> None:
    of, rule = row(width=3), ONE
    first, second = says([4, 3, 2, 1]), says([0, 3, 9, 1])
    frontier, clean = accepted(of, rule, [(state([M] * 4), -1, first), (state([A, M, M, M]), -1, second)])
    assert frontier is not None
    assert (frontier.state.ids, frontier.where, frontier.scores) == ((A, M, M, M), (2,), second)
    assert (of.text[4:8], of.state.ids, clean) == ([A, M, M, M], (A, M, M, M), [])
    counts = of.counts
    assert (counts.drafted, counts.accepted, counts.lengths) == (1, 1, [0, 0, 1, 0, 0, 0, 0])
    assert counts.offered_at_depth == counts.accepted_at_depth == [1, 0, 0, 0, 0]
    assert set(of.memory) == {(4, (M,) * 4), (4, (A, M, M, M))}


def test_a_wrong_draft_is_remembered() -> None:
    """[M, B, ...] was drafted, [A, ...] comes; a round later B follows A: the path goes on through what was scored in vain."""
    of = row(width=3)
    wrong, vain = state([A, B, M, M]), says([0, 0, 1, 2])
    frontier, _ = accepted(of, ONE, [(state([M] * 4), -1, says([4, 3, 2, 1])), (wrong, -1, vain)])
    assert frontier is not None
    assert frontier.where == (0,)
    assert (of.counts.accepted, of.counts.offered_at_depth, of.counts.accepted_at_depth) == (0, [1, 0, 0, 0, 0], [0] * 5)
    write(of, frontier)
    frontier, _ = accepted(of, ONE, [(of.state, -1, says([0, 3, 2, 1]))])
    assert frontier is not None
    assert (frontier.state.ids, frontier.scores, frontier.where) == (wrong.ids, vain, (3,))
    assert (of.counts.drafted, of.counts.accepted) == (1, 1)
    assert of.counts.lengths == [0, 1, 1, 0, 0, 0, 0]
    assert set(of.memory) == {(4, (A, M, M, M))}, "one round is remembered"


def test_a_path_through_a_clean_block() -> None:
    """The next block's state counts as no draft; without one the row stands there, and has no source."""
    of = row(width=4)
    of.state = state([A, B, C, M])
    done, behind = state([A, B, C, D]), state([M] * 4, 8)
    scored = [(of.state, -1, says([0] * 4)), (done, -1, says([0] * 4)), (behind, 1, says([1, 2, 3, 4]))]
    frontier, clean = accepted(of, ONE, scored)
    assert frontier is not None
    assert (clean, frontier.state.key, frontier.where) == ([1], behind.key, (3,))
    assert (of.counts.drafted, of.counts.accepted, of.counts.lengths[3]) == (1, 1, 1)
    assert set(of.memory) == {(4, (A, B, C, M))}, "neither clean states nor what looks at one"
    of = row(width=4)
    of.state, of.source = state([A, B, C, M]), says([0] * 4)
    frontier, clean = accepted(of, ONE, scored[:2])
    assert (frontier, clean) == (None, [1])
    assert (of.state.key, of.source) == ((8, (M,) * 4), None)


# ------------------------------------------------------------------------------------------ a rule that has a memory


@dataclass(frozen=True)
class AboveTheMean:
    """Reveals what is surer than the mean of all reveals so far; at least the surest."""

    needs_entropy: ClassVar[bool] = False
    left_to_right: ClassVar[bool] = False

    def reveal(self, at: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        count, total = memo or (0, 0.0)
        best = max(at.free, key=lambda column: (scores.odds[column], -column))
        over = [c for c in at.free if c == best or (count and scores.odds[c] > total / count)]
        return tuple(over), (count + len(over), total + sum(scores.odds[column] for column in over))

    def likely(self, at: State, odds: Sequence[float], count: int) -> Guesses:
        return Static((1,)).likely(at, odds, count)


def network(at: State, alike: float, seed: int) -> Scores:
    """What a made-up backbone says of a state: `alike` of what it says of the empty one."""
    empty, own = random.Random(f"{seed}{at.start}"), random.Random(f"{seed}{at.key}")
    odds = [alike * empty.uniform(-3, 3) + (1 - alike) * own.uniform(-3, 3) for _ in at.ids]
    token = [(empty if own.random() < alike else own).randrange(9, 30) for _ in at.ids]
    entropy = [own.uniform(0, 1) for _ in at.ids]
    return Scores(token, odds, entropy)


def decoded(rule: RevealRule, of: Row, width: int, branches: int, alike: float, seed: int) -> int:
    """Rounds that a row takes to its end."""
    frontier = first_frontier(of, rule, network(of.state, alike, seed))
    rounds = 0
    while True:
        if frontier is not None:
            write(of, frontier)
        of.settle()
        if of.stop is not None:
            return rounds
        nodes = build_draft(of, rule, width, branches, {}) if width > 1 else undrafted(of, False)
        frontier, _ = accept(of, rule, nodes, [network(node.state, alike, seed) for node in nodes], width > 1)
        rounds += 1
        assert rounds < 200


RULES = [
    *(AboveTheMean(), ONE, Static((2, 1, 1)), Sequential((1,)), Dynamic(0.5), EntropyBound(0.6)),
    *(FastDLLM(factor_thresholds(4, 2.0)), EBSampler(0.6), Hierarchy(1.5, 0.0), LocalLeap(2.0, 0.5, radius=1)),
    *(ConfidenceAdaptive(0.5, frozenset([EOS]), most=2), EosRejection((1, 3), frozenset([EOS])), Prophet((1, 1, 1, 1))),
    *(BoundedAdaptive(0.9, 0.6), SlowFast(1.5, -0.5), Coherent(2), Credit(1.0), Klass(0.0, divergence=0.5, steps=1)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_drafted_as_undrafted(rule: RevealRule) -> None:
    """Of 60 texts with ends, given tokens and any width: tokens, steps, log-probabilities and memo are the same."""
    rng, saved = random.Random(type(rule).__name__), 0
    for seed in range(60):
        given = [rng.choice((M, M, M, 5, 6)) for _ in range(rng.choice((0, 0, 9)))]
        options: dict[str, Any] = {"new": rng.randint(max(1, len(given)), 18), "given": given}
        alike, width, branches = rng.choice((0.5, 0.9, 1.0)), rng.randint(2, 8), rng.randint(1, 4)
        prompt = [1] * rng.randint(1, 6)
        one, other = row(prompt, **options), row(prompt, width=width, **options)
        alone = decoded(rule, one, 1, 0, alike, seed)
        saved += alone - decoded(rule, other, width, branches, alike, seed)
        for name in ("logprob", "step", "stop", "memo", "steps"):
            assert getattr(one, name) == getattr(other, name), (name, seed)
        assert one.text[: one.stop] == other.text[: other.stop]
        if isinstance(rule, AboveTheMean):
            assert (one.memo or (0, 0.0))[0] == sum(step >= 0 for step in one.step), "it knows of all reveals"
    assert saved > (20 if isinstance(rule, EBSampler | EosRejection) else 60)  # these take few steps alone


# --------------------------------------------------------------------------------------------------------------- noise


def test_noise_is_that_of_the_device_to_the_bit() -> None:
    rng = random.Random(0)
    cases = [(rng.randrange(1 << 62), rng.randrange(1 << 20), rng.randrange(33)) for _ in range(50)] + [(0, 0, 0)]
    keys = [noise_key(*case) for case in cases]
    theirs = noise_keys(*torch.tensor(cases).unbind(1))
    assert keys == theirs.tolist()
    tokens = np.array([[rng.randrange(200_000) for _ in range(9)] for _ in cases])
    expected = gumbel_noise(theirs, torch.tensor(tokens), torch.float64).numpy()
    np.testing.assert_allclose(gumbel(keys, tokens), expected, rtol=1e-14)


def test_nothing_of_it_imports_torch() -> None:
    """With the package itself left out, which does."""
    script = """
import sys, types
for name in ("modeling_mrp",):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1]]
import modeling_mrp.rules.accept, modeling_mrp.rules.draft, modeling_mrp.rules.reveal, modeling_mrp.rules.noise
assert "torch" not in sys.modules
"""
    import modeling_mrp

    subprocess.run([sys.executable, "-c", script, modeling_mrp.__path__[0]], check=True)
