"""The rules of decoding by hand, without a model: reveals, remasking, ends of texts, acceptance, schedules."""

from math import exp, inf, log

import pytest
import torch
from torch import Tensor

from modeling_mrp.rules.revealing import (
    EACH_MORE,
    ORDER_SHARPNESS,
    TAIL_NATS,
    THRESHOLD_SHARPNESS,
    Candidates,
    Dynamic,
    EntropyBound,
    RevealRule,
    Sequential,
    Static,
    likely_entropy,
    logit,
    reveal_schedule,
)
from modeling_mrp.rules.rules import (
    Accepted,
    accept,
    kept_reveal,
    kept_states,
    least_believed,
    offered_behind,
    path_from_first,
    stepped,
    steps_on_path,
    whole_text,
)
from modeling_mrp.rules.states import END, PARENT, START, STATE_COLUMNS, STEP, Memory, Reveal, Scored, States

M = 9  # the mask
NO = -inf  # the confidence of what is no candidate


def columns(chosen: Tensor) -> list[int]:
    return chosen.nonzero()[:, 0].tolist()


# ------------------------------------------------------------------------------------------------ what is revealed


def candidates(confidence: list[float], quota: int = 1, entropy: list[float] | None = None) -> Candidates:
    odds = torch.tensor(confidence)
    where = odds > NO
    return Candidates(
        where=where,
        token=torch.arange(len(odds)),
        confidence=odds,
        entropy=None if entropy is None else torch.tensor(entropy),
        ids=torch.where(where, M, 1),
        step=torch.tensor(0),
        quota=torch.tensor(quota),
    )


@pytest.mark.parametrize(
    ("quota", "revealed"), [(0, []), (1, [1]), (2, [1, 3]), (3, [1, 2, 3]), (4, [1, 2, 3]), (9, [1, 2, 3])]
)
def test_static_takes_the_most_confident_and_the_left_of_equals(quota: int, revealed: list[int]) -> None:
    assert columns(Static()(candidates([NO, 3.0, -2.0, 3.0], quota))) == revealed


@pytest.mark.parametrize(("quota", "revealed"), [(0, []), (1, [1]), (2, [1, 3]), (9, [1, 3])])
def test_sequential_takes_the_leftmost(quota: int, revealed: list[int]) -> None:
    assert columns(Sequential()(candidates([NO, -5.0, NO, 8.0], quota))) == revealed


@pytest.mark.parametrize(
    ("threshold", "revealed"), [(-9.0, [0, 1, 3]), (-1.0, [0, 3]), (1.9, [0, 3]), (2.0, [3]), (4.0, [3]), (99.0, [3])]
)
def test_dynamic_takes_what_exceeds_the_threshold_and_the_best(threshold: float, revealed: list[int]) -> None:
    assert columns(Dynamic(threshold)(candidates([2.0, -1.0, NO, 4.0], quota=1))) == revealed


@pytest.mark.parametrize(("bound", "revealed"), [(0.1, [1]), (0.375, [1]), (0.376, [1, 2]), (0.875, [1, 2]), (1.0, [0, 1, 2])])
def test_entropy_bound_adds_up_from_the_least(bound: float, revealed: list[int]) -> None:
    """Sums of 1/8, 3/8 and 7/8 nats; column 3 is none, and its entropy of 0 counts for nothing."""
    assert columns(EntropyBound(bound)(candidates([1.0, 1.0, 1.0, NO], entropy=[0.5, 0.125, 0.25, 0.0]))) == revealed


def test_static_is_likely_to_take_the_surest_and_is_unsure_of_the_last() -> None:
    """Two a step: the best and one of the others, by the sharpened odds; all of it where no more is left."""
    sets, chance = Static().likely(candidates([0.5, NO, 2.0, 0.0, -1.0], quota=2), 3)
    assert [columns(each) for each in sets] == [[0, 2], [2, 3], [2, 4]]
    weight = [exp(ORDER_SHARPNESS * odds) for odds in (0.5, 0.0, -1.0)]
    assert chance.tolist() == pytest.approx([each / sum(weight) for each in weight])
    sets, chance = Static().likely(candidates([0.5, NO, 2.0], quota=3), 2)
    assert (columns(sets[0]), chance.tolist()) == ([0, 2], [1, 0])


def test_sequential_is_certain_of_positions_but_not_of_tokens() -> None:
    sets, chance = Sequential().likely(candidates([NO, 0.0, 1.0, 2.0], quota=2), 3)
    assert columns(sets[0]) == [1, 2]
    assert chance.tolist() == pytest.approx([0.5 / (1 + exp(-1.0)), 0, 0])


def test_dynamic_is_unsure_of_what_is_near_its_threshold() -> None:
    """Over a threshold of 1 are 4 and 1.5, under it 0.8 and -3; the best is revealed anyhow. The nearest changes first."""
    sets, chance = Dynamic(1.0).likely(candidates([1.5, 4.0, 0.8, -3.0, NO]), 4)
    assert [columns(each) for each in sets] == [[0, 1], [0, 1, 2], [1], [0, 1, 3]]
    near = {0: 0.5, 2: 0.2, 3: 4.0}
    right = {column: 1 / (1 + exp(-THRESHOLD_SHARPNESS * gap)) for column, gap in near.items()}
    all_right = right[0] * right[2] * right[3]
    flipped = [all_right * (1 - right[column]) / right[column] for column in (2, 0, 3)]
    assert chance.tolist() == pytest.approx([all_right, *flipped], rel=1e-5)
    sets, chance = Dynamic(1.0).likely(candidates([0.3, NO]), 3)
    assert (columns(sets[0]), chance.tolist()) == ([0], [1, 0, 0])


def test_entropy_bound_takes_about_as_many_as_estimates_leave_room_for() -> None:
    nats = likely_entropy(torch.tensor([3.0, 2.0])).tolist()
    bound = sum(nats) + 1e-3  # the two surest; then one more, one less
    sets, chance = EntropyBound(bound).likely(candidates([2.0, NO, 3.0, 1.0]), 5)
    assert [columns(each) for each in sets[:3]] == [[0, 2], [0, 2, 3], [2]]
    assert chance.tolist() == pytest.approx([1, EACH_MORE, EACH_MORE, 0, 0])
    odds = torch.tensor([0.0, 4.0])
    p = odds.sigmoid()
    expected = -p * p.log() - (1 - p) * (1 - p).log() + (1 - p) * TAIL_NATS
    torch.testing.assert_close(likely_entropy(odds), expected)


@pytest.mark.parametrize(
    "rule", [Static(), Sequential(), Dynamic(0.5), EntropyBound(1.5)], ids=lambda rule: type(rule).__name__
)
def test_nothing_is_likely_where_nothing_is_left(rule: RevealRule) -> None:
    sets, chance = rule.likely(candidates([NO, NO]), 2)
    assert not sets.any()
    assert chance.tolist() == [0, 0]


RULES = (Static(), Sequential(), Dynamic(0.5), EntropyBound(1.5))


def test_which_one_is_revealed_alone_is_as_uncertain_as_under_static() -> None:
    """Every other set is another position alone, with its chance among all; between them stand those of more."""
    weight = {column: exp(ORDER_SHARPNESS * odds) for column, odds in {0: 0.5, 2: 0.8, 3: -0.5}.items()}
    share = {column: each / sum(weight.values()) for column, each in weight.items()}
    sets, chance = Dynamic(1.0).likely(candidates([0.5, NO, 0.8, -0.5]), 5)
    assert [columns(each) for each in sets] == [[2], [0, 2], [0], [2, 3], [3]]
    over = {column: 1 / (1 + exp(THRESHOLD_SHARPNESS * gap)) for column, gap in {0: 0.5, 3: 1.5}.items()}
    none = (1 - over[0]) * (1 - over[3])
    expected = [none * share[2], over[0] * (1 - over[3]), none * share[0], over[3] * (1 - over[0]), none * share[3]]
    assert chance.tolist() == pytest.approx(expected, rel=1e-5)
    bound = likely_entropy(torch.tensor(0.8)).item() + 1e-3
    sets, chance = EntropyBound(bound).likely(candidates([0.5, NO, 0.8, -0.5]), 5)
    assert [columns(each) for each in sets] == [[2], [0, 2], [0], [0, 2, 3], [3]]
    assert chance.tolist() == pytest.approx([share[2], EACH_MORE * share[2], share[0], EACH_MORE**2 * share[2], share[3]])


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_a_function_of_one_state(rule: RevealRule) -> None:
    """Six states as [2, 3] get what each gets alone: with a candidate at least one, without one none."""
    torch.manual_seed(0)
    confidence = torch.randn(2, 3, 5).masked_fill(torch.rand(2, 3, 5) < 0.3, NO)
    confidence[1, 2] = NO
    where, entropy, quota = confidence > NO, torch.rand(2, 3, 5), torch.tensor([[1, 2, 3], [1, 2, 3]])
    ids = torch.where(where, M, 1)
    together = rule(Candidates(where, ids, confidence, entropy, ids, torch.zeros(2, 3).long(), quota))
    for row in range(2):
        for slot in range(3):
            at = row, slot
            alone = Candidates(where[at], ids[at], confidence[at], entropy[at], ids[at], torch.tensor(0), quota[at])
            assert torch.equal(rule(alone), together[at])
    assert not (together & ~where).any()
    assert torch.equal(together.any(-1), where.any(-1))
    assert columns(where.any(-1).flatten()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("steps", "schedule"),
    [(None, [1, 1, 1, 1]), (4, [1, 1, 1, 1]), (3, [2, 1, 1, 0]), (2, [2, 2, 0, 0]), (1, [4, 0, 0, 0])],
)
def test_the_remainder_of_a_schedule_goes_to_the_first_steps(steps: int | None, schedule: list[int]) -> None:
    assert reveal_schedule(4, steps).tolist() == schedule


def test_log_odds() -> None:
    assert [logit(p) for p in (0.0, 0.5, 1.0)] == [-inf, 0.0, inf]
    assert logit(0.75) == pytest.approx(log(3))


# ------------------------------------------------------------------------------------------------ what is taken back


def reveal_of(tokens: list[list[int | None]]) -> Reveal:
    """A reveal of these tokens; None is a position that is not revealed, where a token stands that means nothing."""
    where = torch.tensor([[token is not None for token in row] for row in tokens])
    token = torch.tensor([[3 if token is None else token for token in row] for row in tokens])
    numbers = torch.zeros(where.shape)
    return Reveal(where, token, numbers, numbers)


def test_what_passed_stays_or_else_the_most_believed() -> None:
    """Column 3 is believed most of all but was not revealed."""
    reveal = reveal_of([[5, 6, 7, None], [5, 6, 7, None], [None, None, None, None]])
    passed = torch.tensor([[False, True, True, True], [False, False, False, True], [True] * 4])
    kept = kept_reveal(reveal, passed, torch.tensor([1.0, 3.0, 2.0, 9.0]).expand(3, 4))
    assert [columns(row) for row in kept.where] == [[1, 2], [1], []]
    assert torch.equal(kept.token, reveal.token)


@pytest.mark.parametrize(
    ("belief", "least"),
    [
        ([2.0, -1.0, -2.0, -9.0], [2]),  # column 3 was not revealed
        ([0.0, 3.0, 1.0, -9.0], []),  # the threshold itself is enough
        ([-3.0, -1.0, -2.0, -9.0], [0]),
        ([-2.0, -1.0, -2.0, -9.0], [0]),  # the left of equals
        ([-1.0, -2.0, 5.0, -9.0], [1]),
    ],
)
def test_the_least_believed_goes_first(belief: list[float], least: list[int]) -> None:
    reveal = reveal_of([[5, 6, 7, None]])
    back, doubted = least_believed(reveal, torch.tensor([belief]), 0.0, torch.tensor([True]))
    assert (columns(back[0]), doubted.tolist()) == (least, [bool(least)])


def test_the_most_believed_is_not_doubted_nor_what_is_not_looked_at() -> None:
    reveal = reveal_of([[5, None, None, None], [5, 6, None, None]])
    back, doubted = least_believed(reveal, torch.full((2, 4), -7.0), 0.0, torch.tensor([True, False]))
    assert not back.any()
    assert doubted.tolist() == [False, False]


# ------------------------------------------------------------------------------------------------ where a text ends


@pytest.mark.parametrize(
    ("ids", "eos_column", "limit", "whole"),
    [
        ([1, 2, 3, M], 4, 3, True),  # the limit lies before the mask
        ([1, 2, 3, M], 4, 4, False),
        ([1, 2, 3, 4], 4, 4, True),
        ([1, 2, 3, 4], 4, 5, False),  # the text goes on in the next block
        ([1, 2, M, M], 1, 8, True),  # up to and with the eos
        ([M, 2, M, M], 1, 8, False),  # a mask before it
        ([M, 2, M, M], 1, 0, True),  # nothing is open in this block
        ([1, 2, 3, 4], 3, 8, True),
        ([1, M, 3, 4], 3, 1, True),  # the limit lies before the eos
    ],
)
def test_where_a_text_is_whole(ids: list[int], eos_column: int, limit: int, whole: bool) -> None:
    assert whole_text(torch.tensor(ids), torch.tensor(eos_column), torch.tensor(limit), M).item() == whole


# ------------------------------------------------------------------------------------------------ what is accepted


def states_of(*rows: list[tuple[list[int], int, int]], step: int | None = None) -> States:
    """States [rows, n] from ids, start and parent; by default a step for each position that is no mask."""
    made = [
        [[*ids, start, parent, len(ids) - ids.count(M) if step is None else step, len(ids)] for ids, start, parent in row]
        for row in rows
    ]
    table = torch.tensor(made)
    return States(table, torch.ones(table.shape[:2], dtype=torch.bool))


def test_a_step_writes_what_is_revealed_and_notes_the_first_eos() -> None:
    """Ids 7 and 8 end a text; row 2 had an eos in column 0 before, and row 3 shows one that is not revealed."""
    states = states_of(*[[([M, M, 5, M], 8, 3)]] * 4, step=1).map(lambda t: t[:, 0])
    states.table[2, END] = 0
    reveal = reveal_of([[6, None, None, 6], [None, 8, None, 7], [None, None, None, 7], [4, 8, None, None]])
    reveal.where[3, 1] = False
    after = stepped(states, reveal, torch.tensor([7, 8]))
    assert after.ids.tolist() == [[6, M, 5, 6], [M, 8, 5, 7], [M, M, 5, 7], [4, M, 5, M]]
    assert after.table[:, -STATE_COLUMNS:].tolist() == [[8, -1, 2, 4], [8, -1, 2, 1], [8, -1, 2, 0], [8, -1, 2, 4]]
    assert stepped(states, reveal, torch.tensor([], dtype=torch.long)).end.tolist() == [4, 4, 0, 4]


@pytest.mark.parametrize(
    ("next_index", "passed", "last"),
    [
        ([-1], [0], 0),
        ([-1, 0, 1], [0], 0),
        ([2, -1, 1, 0], [0, 1, 2], 1),
        ([1, 2, 3, 4, 5, 6, -1], [0, 1, 2, 3, 4, 5, 6], 6),
        ([6, -1, 5, 4, -1, 1, 2], [0, 1, 2, 5, 6], 1),
    ],
)
def test_a_path_follows_its_links(next_index: list[int], passed: list[int], last: int) -> None:
    links = torch.tensor([next_index, [-1] * len(next_index)])
    way, end = path_from_first(links)
    assert [columns(row) for row in way] == [passed, [0]]
    assert end.tolist() == [last, 0]


def scored(states: States, *rows: list[list[int | None]]) -> Scored:
    """States [rows, n] at which these tokens are revealed."""
    reveals = [reveal_of(row) for row in rows]
    reveal = Reveal(*(torch.stack([getattr(one, name) for one in reveals]) for name in vars(reveals[0])))
    return Scored(states, reveal, torch.zeros(*states.valid.shape, 2, 1))


# Two positions a block: a block's masks, one draft that is right or wrong, the clean block, and the next one behind it.
ROUND = [([M, M], 4, -1), ([5, M], 4, -1), ([5, 6], 4, -1), ([M, M], 6, 2)]
RIGHT: list[list[int | None]] = [[5, None], [None, 6], [None, None], [None, 8]]
WRONG: list[list[int | None]] = [[4, None], [None, 6], [None, None], [None, 8]]


def accepted(memory: Memory | None = None) -> Accepted:
    """Three rows of that round: all drafts right, the first wrong, and a row that has ended."""
    states = states_of(ROUND, ROUND, ROUND)
    states.valid[2, 0] = False
    successor = states_of(*[[([M, M], 6, -1)]] * 3).map(lambda t: t[:, 0])
    eos = torch.tensor([7])
    return accept(scored(states, RIGHT, WRONG, RIGHT), memory, successor, eos, M)


def test_drafts_are_accepted_as_far_as_the_backbone_reveals_them() -> None:
    found = accepted()
    assert [columns(row) for row in found.passed] == [[0, 1, 2, 3], [0], []]
    assert found.last[:2].tolist() == [3, 0]
    assert found.next_index.tolist() == [[1, 2, 3, -1], [-1, 2, 3, -1], [-1, 2, 3, -1]]
    assert [columns(row) for row in found.clean] == [[2], [2], [2]]
    follower = found.follower.table[0]
    assert follower[:, :2].tolist() == [[5, M], [5, 6], [M, M], [M, 8]]
    assert follower[:, START].tolist() == [4, 4, 6, 6]
    assert follower[:, PARENT].tolist() == [-1, -1, 2, -1]
    assert follower[:, STEP].tolist() == [1, 2, 0, 1]


def test_what_the_last_round_scored_is_accepted_too() -> None:
    """Row 1's own reveal, 4, was remembered with what it reveals, (4, 3); row 0 remembers the same and does not need it."""
    earlier = scored(states_of(*[[([4, M], 4, -1), ([4, 3], 6, -1)]] * 3), *[[[None, 3], [None, None]]] * 3)
    found = accepted(Memory(earlier, torch.zeros(3, 2, 8, dtype=torch.long)))
    assert [columns(row) for row in found.passed] == [[0, 1, 2, 3], [0, 4], []]
    assert found.last[:2].tolist() == [3, 4]
    assert found.follower.ids[1, 4].tolist() == [4, 3]
    assert found.next_index[1].tolist() == [4, 2, 3, -1, -1, -1], "(4, 3) was remembered of another block, and is clean"


def test_a_state_is_met_by_ids_start_and_parent_and_if_it_is_valid() -> None:
    """The next block's masks behind another slot than the clean one; a draft that was not submitted."""
    states = states_of(ROUND, ROUND)
    states.table[0, 3, PARENT] = 1
    states.valid[1, 1] = False
    successor = states_of(*[[([M, M], 6, -1)]] * 2).map(lambda t: t[:, 0])
    found = accept(scored(states, RIGHT, RIGHT), None, successor, torch.tensor([7]), M)
    assert [columns(row) for row in found.passed] == [[0, 1, 2], [0]]


def test_memory_holds_what_is_not_clean_and_where_it_leads() -> None:
    """Both the masks and the draft behind them lead to (5, 6), which is not scored as far as the memory knows, since a clean
    state is not kept: source 2, the draft, tells of it. Row 1's masks lead to (4, *), told of by themselves, source 1."""
    keep, ahead = kept_states(accepted(), 4, 5)
    assert [columns(row) for row in keep] == [[0, 1], [0, 1], [1]]
    assert ahead[0, :2].tolist() == [[5, 6, 4, -1, 2, 2, 2, 2]] * 2
    assert ahead[1, :2].tolist() == [[4, M, 4, -1, 1, 2, 1, 1], [5, 6, 4, -1, 2, 2, 2, 2]]
    assert keep.shape == ahead.shape[:2] == (3, 5)


def test_drafts_behind_the_last_accepted_state() -> None:
    last = states_of([([5, M, M], 3, -1)]).map(lambda t: t[:, 0])
    for state, offered in (
        (([5, M, 6], 3, -1), True),
        (([5, 4, M], 3, -1), True),
        (([4, 6, M], 3, -1), False),  # contradicts what is revealed
        (([5, 4, 6], 3, -1), False),  # two steps further
        (([5, M, M], 3, -1), False),  # the state itself
        (([5, M, 6], 6, -1), False),  # another block
        (([5, M, 6], 3, 0), False),  # looks at a block that may not be text
    ):
        assert offered_behind(states_of([([M, M, M], 3, -1), state]), last, M).tolist() == [offered], state
    unused = states_of([([5, M, 6], 3, -1)])
    unused.valid[:] = False
    assert offered_behind(unused, last, M).tolist() == [False]
    last.valid[:] = False
    assert offered_behind(states_of([([5, M, 6], 3, -1)]), last, M).tolist() == [False]


@pytest.mark.parametrize(("begin", "steps"), [(0, [0, 1, 2, 2]), (1, [0, 1, 1])])
def test_steps_go_on_in_the_next_block(begin: int, steps: list[int]) -> None:
    """From the masks, or from the draft on: the clean state takes no step, so that the next block's first has its number."""
    states = states_of(ROUND[begin:])
    states.table[:, -1, PARENT] -= begin
    successor = states_of([([M, M], 6, -1)]).map(lambda t: t[:, 0])
    found = accept(scored(states, RIGHT[begin:]), None, successor, torch.tensor([7]), M)
    assert columns(found.passed[0]) == list(range(len(steps)))
    assert steps_on_path(found, M).tolist() == [steps]


def test_steps_are_counted_along_the_path() -> None:
    """A state that was drafted as one step away and is reached in two."""
    states = states_of([([M, M, M], 3, -1), ([5, M, M], 3, -1), ([5, 6, M], 3, -1)])
    states.table[:, 2, STEP] = 1
    successor = states_of([([M, M, M], 6, -1)]).map(lambda t: t[:, 0])
    found = accept(scored(states, [[5, None, None], [None, 6, None], [None, None, 7]]), None, successor, torch.tensor([4]), M)
    assert steps_on_path(found, M).tolist() == [[0, 1, 2]]


def test_steps_of_what_was_not_accepted_do_not_count() -> None:
    """Behind a given clean block, which took no step, while a draft of it is in another slot."""
    states = states_of([([5, 6], 4, -1), ([M, M], 6, 0), ([5, M], 4, -1)])
    states.table[:, 0, STEP] = 0
    successor = states_of([([M, M], 6, -1)]).map(lambda t: t[:, 0])
    found = accept(scored(states, [[None, None], [None, 8], [None, 6]]), None, successor, torch.tensor([7]), M)
    assert columns(found.passed[0]) == [0, 1]
    assert steps_on_path(found, M)[0, :2].tolist() == [0, 0]
