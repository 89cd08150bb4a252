"""Drafts by hand, and the memory in which they are looked up: tensors alone, no model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp
from typing import Any

import pytest
import torch
from draft_tables import (
    A,
    B,
    C,
    D,
    Head,
    M,
    Reading,
    column,
    draft_table,
    grown,
    hidden_of,
    ids_of,
    memory_of,
    scored_by,
    states,
    weights,
)
from torch import Tensor

from modeling_mrp.kernels.grow import DraftTable
from modeling_mrp.kernels.noise import gumbel_noise, noise_keys
from modeling_mrp.rules.drafting import (
    BASE,
    DRAFT_END,
    DRAFT_PARENT,
    DRAFT_START,
    DRAFT_STEP,
    SOURCE,
    Draft,
    as_slots,
    followers_of,
    undrafted,
)
from modeling_mrp.rules.revealing import ORDER_SHARPNESS, Sequential
from modeling_mrp.rules.rules import Accepted, accept, path_from_first, remembered
from modeling_mrp.rules.states import PARENT, Memory, Scored, States

# Growing, by hand.


def test_the_likeliest_comes_first_and_what_meets_adds_up() -> None:
    """Weights 5, 4, 3: a 5/12, b 1/3, c 1/4. {a, b} is worth 5/12 * 4/7 through a, less than c, but 1/3 * 5/8 more through b;
    then nothing of that is lost up to the next block's state. {a, c} is worth 0.18 through a and 0.14 through c: more than
    {b, c}. Ten states there are, and no one twice."""
    said = ([A, B, C], weights(5, 4, 3))
    draft = grown(draft_table(said), 12)
    order = [[M, M, M], [A, M, M], [M, B, M], [A, B, M], [A, B, C], [M, M, M], [M, M, C], [A, M, C], [M, B, C]]
    assert ids_of(draft) == order
    assert column(draft, DRAFT_START) == [3, 3, 3, 3, 3, 6, 3, 3, 3]
    assert column(draft, DRAFT_PARENT) == [-1, -1, -1, -1, -1, 4, -1, -1, -1]
    assert column(draft, DRAFT_STEP) == [0, 1, 1, 2, 3, 0, 1, 2, 2]
    assert column(draft, SOURCE) == [0, 0, 0, 0, 0, -1, 0, 0, 0]
    assert draft.drafted.tolist() == [[False, True, True, True, True, False, True, True, True, False, False, False]]
    assert ids_of(grown(draft_table(said), 4)) == order[:4]
    assert ids_of(grown(draft_table(said), 1)) == order[:1]
    assert ids_of(grown(draft_table(said, branches=1), 12)) == [order[0], order[1], *order[3:6]]


def test_drafted_marks_guesses_only() -> None:
    """Neither a row's next state, nor the block behind a clean one, nor an unused slot."""
    line = states([1, M], [1, 2], [M, M], [3, M], valid=[True, True, True, False])
    line.table[2, PARENT] = 1
    draft = Draft(as_slots(line, 0)[None], line.valid[None])
    assert draft.drafted.tolist() == [[False, True, False, False]]


def test_twins_among_the_followers_of_a_state_add_up() -> None:
    """a 0.3, b 0.3, c 0.4; {a} and {b} are remembered and both lead to {a, b}, which is worth 0.6 and comes before c."""
    said = ([A, B, C], weights(1, 1, 1))
    entries = [([A, M, M], [A, B, M], said), ([M, B, M], [A, B, M], said), ([M, M, 7], [A, M, 7], said)]

    def remembering(lost: Sequence[int], size: int) -> Draft:
        return grown(draft_table(([A, B, C], weights(3, 3, 4)), memory=memory_of(*entries, lost=lost, start=3)), size)

    draft = remembering([], 4)
    assert ids_of(draft) == [[M, M, M], [A, B, M], [A, B, C], [M, M, M]]
    assert column(draft, SOURCE) == [0, 1, 1, -1]  # told by {a}, the first of the two
    assert ids_of(remembering([], 5))[4:] == [[M, M, C]]
    assert ids_of(remembering([0, 1], 4)) == [[M, M, M], [M, M, C], [A, M, M], [A, M, C]]


def followers(table: DraftTable, *ids: list[int], step: int = 0) -> tuple[list[list[list[int]]], Tensor]:
    """Of states with source 0, one a row: the ids of their followers, and their chances."""
    state = table.first.clone()
    state[:, : len(ids[0])] = torch.tensor(ids)
    state[:, DRAFT_STEP] = step
    made, chance = followers_of(table, state, torch.ones(len(ids), dtype=torch.bool), 0)
    return made[..., : len(ids[0])].tolist(), chance


def test_chances_are_a_softmax_of_the_sharpened_odds() -> None:
    """Log-odds 0, 1, 0.5, -1 and a revealed position: three of the four shown, their chances taken over all."""
    table = draft_table(([10, 11, 12, 13, 14], [0.0, 1.0, 0.5, -1.0, 9.0]))
    made, chance = followers(table, [M, M, M, M, 9])
    assert made == [[[M, 11, M, M, 9], [M, M, 12, M, 9], [10, M, M, M, 9]]]
    weight = [exp(ORDER_SHARPNESS * odds) for odds in (1, 0.5, 0, -1)]
    assert chance[0].tolist() == pytest.approx([w / sum(weight) for w in weight[:3]])


def test_several_reveals_a_step() -> None:
    """Two a step: the best one and, for the second, the next three. One candidate for two reveals is certain, as are two for
    three; the last position of the schedule goes alone."""
    said = ([10, 11, 12, 13, 14], [0.0, 1.0, 0.5, -1.0, 9.0])
    table = draft_table(said, said, schedule=[2, 3, 0, 0, 0])
    made, chance = followers(table, [M, M, M, M, 9], [9, 9, M, 9, 9])
    assert made[0] == [[M, 11, 12, M, 9], [10, 11, M, M, 9], [M, 11, M, 13, 9]]
    weight = [exp(ORDER_SHARPNESS * odds) for odds in (0.5, 0, -1)]
    assert chance[0].tolist() == pytest.approx([w / sum(weight) for w in weight])
    assert made[1][0] == [9, 9, 12, 9, 9]
    assert chance[1].tolist() == [1, 0, 0]
    made, chance = followers(table, [M, M, M, 9, 9], [M, 9, 9, M, 9], step=1)
    assert made[0][0] == [10, 11, 12, 9, 9]
    assert made[1][0] == [10, 9, 9, 13, 9]
    assert chance.tolist() == [[1, 0, 0], [1, 0, 0]]
    draft = grown(draft_table(([A, B, C], weights(5, 4, 3)), schedule=[2, 1, 0]), 9)
    assert ids_of(draft) == [[M, M, M], [A, B, M], [A, B, C], [M, M, M], [A, M, C]]
    assert column(draft, DRAFT_STEP) == [0, 1, 2, 0, 1]


def test_nothing_is_drafted_behind_an_end_nor_what_ends_the_row() -> None:
    """a 1/8, b 5/8, c 1/4. b is an eos: what has a and b is the whole text, and from {b} c is not a candidate, so that {b, c}
    comes through c alone, and behind it."""
    draft = grown(draft_table(([A, B, C], weights(1, 5, 2)), eos=[B]), 9)
    assert ids_of(draft) == [[M, M, M], [M, B, M], [M, M, C], [M, B, C], [A, M, M], [A, M, C]]
    assert column(draft, DRAFT_END) == [3, 1, 3, 1, 3, 3]


def test_nothing_is_drafted_that_fills_the_limit() -> None:
    """Two tokens are left: a and b are the text, whatever stands behind; what stands behind may come before."""
    draft = grown(draft_table(([A, B, C], weights(1, 5, 2)), new_tokens=2), 9)
    assert ids_of(draft) == [[M, M, M], [M, B, M], [M, B, C], [M, M, C], [A, M, M], [A, M, C]]


@pytest.mark.parametrize("following", [[M, M, M], [5, M, 7], [5, 6, 7]], ids=str)
def test_the_next_block_comes_behind_a_clean_state(following: list[int]) -> None:
    """With its given tokens; one that has no masks waits for a round of its own."""
    draft = grown(draft_table(([A, B, C], weights(5, 4, 3)), branches=1, following=following), 9)
    line = [[M, M, M], [A, M, M], [A, B, M], [A, B, C]]
    comes = M in following
    assert ids_of(draft) == line + [following] * comes
    assert column(draft, DRAFT_PARENT) == [-1] * 4 + [3] * comes
    assert column(draft, DRAFT_START) == [3] * 4 + [6] * comes
    assert draft.drafted.tolist() == [[False, True, True, True] + [False] * 5]


def test_blocks_behind_two_clean_states_stay_apart() -> None:
    """Two ways to the clean state, with different tokens: the same all-mask state behind each is another state."""
    memory = memory_of(([M, B], [7, B], ([7, B], [0.0, 0.0])), start=2)
    draft = grown(draft_table(([A, B], weights(1.2, 1)), memory=memory), 9)
    assert ids_of(draft) == [[M, M], [A, M], [A, B], [M, M], [7, B], [M, M]]
    assert column(draft, DRAFT_PARENT) == [-1, -1, -1, 2, -1, 4]


def test_without_drafting_only_the_next_block_comes_behind() -> None:
    """And that behind a clean state, with masks left in it and room for two; nothing comes behind a row that has ended."""
    current = states([A, B], [M, M], [A, B], [A, B], start=2, valid=[True, True, True, False])
    after = states([M, M], [M, M], [7, 8], [M, M], start=4)
    draft = undrafted(current, after, M, 2)
    assert [ids_of(draft, row) for row in range(4)] == [[[A, B], [M, M]], [[M, M]], [[A, B]], []]
    assert (column(draft, DRAFT_START), column(draft, DRAFT_PARENT)) == ([2, 4], [-1, 0])
    assert not draft.drafted.any()
    assert torch.equal(undrafted(current, after, M, 1).states.table, current.table[:, None])


def test_a_row_without_a_source_and_one_that_has_ended_draft_nothing() -> None:
    said = ([A, B, C], weights(5, 4, 3))
    table = draft_table(said, said, said)
    table.first[1, SOURCE] = -1
    draft = grown(replace(table, valid=torch.tensor([True, True, False])), 3)
    assert draft.valid.tolist() == [[True, True, True], [True, False, False], [False, False, False]]


# Drafts that are sampled.


def test_a_sample_is_told_with_the_noise_of_the_drafted_state() -> None:
    """Two tokens a position, as likely as each other: which one comes is the noise's choice, which the masks left decide."""
    tokens, odds = torch.tensor([[[30, 40], [31, 41], [32, 42]]]), torch.zeros(1, 3, 2, dtype=torch.float64)
    table = draft_table(([A, B, C], weights(5, 4, 3)), branches=1)
    seeds = torch.tensor([7])
    table = replace(table, token=tokens[:, None], odds=odds[:, None], seed=seeds, rule=Sequential())
    expected = [M, M, M]
    line = [[*expected]]
    for masks in (3, 2, 1):
        column = 3 - masks
        key = noise_keys(seeds, torch.tensor([3 + column]), torch.tensor([masks]))
        noise = gumbel_noise(key, tokens[0, column], torch.float64)[0]
        expected[column] = int(tokens[0, column, noise.argmax()])
        line.append([*expected])
    draft = grown(table, 4)
    assert ids_of(draft) == line
    others = [ids_of(grown(replace(table, seed=torch.tensor([seed])), 4))[-1] for seed in range(40)]
    assert len({tuple(ids) for ids in others}) == 8  # every choice comes, a false alarm in a thousand seeds
    rare = replace(table, odds=torch.tensor([0.0, -torch.inf], dtype=torch.float64).expand(1, 1, 3, 2))
    assert ids_of(grown(rare, 4))[-1] == [30, 31, 32]  # what truncation left out never comes


# What is remembered, and looked up.


def test_a_path_follows_its_links_from_the_first() -> None:
    passed, last = path_from_first(torch.tensor([[2, -1, 3, 1], [-1, 0, 1, 2], [1, 2, 3, -1], [3, -1, 1, -1]]))
    assert passed.tolist() == [[True] * 4, [True, False, False, False], [True] * 4, [True, False, False, True]]
    assert last.tolist() == [1, 0, 3, 3]


def chain(*ids: list[int], **options: Any) -> Memory:
    """A memory in which each state reveals what makes the next one; the last of `ids` is not scored."""
    said = ([0] * len(ids[0]), [0.0] * len(ids[0]))
    return memory_of(*((here, after, said) for here, after in pairwise(ids)), **options)


def line_of(count: int) -> list[list[int]]:
    """States of a block of 8 with 1, 2, ... tokens, left to right."""
    return [[i + 1 if i < n else M for i in range(8)] for n in range(1, count + 1)]


@pytest.mark.parametrize("scored", [1, 2, 3, 7])
def test_the_memory_leads_to_what_is_not_scored(scored: int) -> None:
    """Told of by the last scored state, whose source is that after the last accepted one's and those before it."""
    line = line_of(scored + 1)
    memory = chain(*line, width=scored + 2)
    places = memory.ahead[0, :scored]
    assert places[:, :8].tolist() == [line[-1]] * scored
    assert places[:, [DRAFT_STEP, BASE, SOURCE]].tolist() == [[scored + 1, scored, scored]] * scored
    assert memory.scored.states.valid.tolist() == [[True] * scored + [False] * 2]


def test_the_memory_has_gaps() -> None:
    """The third is not remembered: what comes before leads up to it, what comes behind goes on."""
    line = line_of(6)
    memory = chain(*line, lost=[2])
    assert memory.scored.states.valid.tolist() == [[True, True, False, True, True]]
    kept = memory.ahead[0, [0, 1, 3, 4]]
    assert kept[:, SOURCE].tolist() == [2, 2, 5, 5]
    assert kept[:, :8].tolist() == [line[2], line[2], line[5], line[5]]


def accepted_of(scored: Scored, memory: Memory | None = None, after: States | None = None) -> Accepted:
    """One row's; `scored` [n] are its states."""
    block = scored.states.ids.shape[-1]
    after = after or states([M] * block, start=block)
    return accept(scored.map(lambda t: t[None]), memory, after, torch.zeros(0, dtype=torch.long), M)


def test_a_way_through_older_states_ends_at_the_last_new_one() -> None:
    """{a} leads to {a, b}, which the round before scored and which goes on to {a, b, c}: what is kept is {a} alone, and what it
    leads to has to be scored anew by the time that it is looked up."""
    said = ([A, B, C], [0.0] * 3)
    older = memory_of(([A, B, M], [A, B, C], said))
    scored = scored_by(states([A, M, M]), [said])
    scored.reveal.where[0, 2] = False
    accepted = accepted_of(scored, older)
    assert accepted.passed.tolist() == [[True, True]]
    memory = remembered(accepted, 1, 1)
    assert memory.ahead[0, 0, :3].tolist() == [A, B, M]
    assert memory.ahead[0, 0, SOURCE] == 1


def test_a_state_that_looked_at_a_clean_one_is_not_remembered() -> None:
    """Nor is the clean one. And behind a clean state comes the block that looked at it only."""
    line = states([1, M], [1, 2], [M, M], [3, 2], [M, M])
    line.table[[2, 4], PARENT] = torch.tensor([3, 1])  # the block behind slot 3 comes before the one behind slot 1
    line.start[[2, 4]] = 2
    scored = scored_by(line, [([5, 2], [0.0, 0.0])] * 5)
    scored.reveal.where[[2, 4], 0] = False
    accepted = accepted_of(scored)
    assert accepted.next_index.tolist() == [[1, 4, -1, 2, -1]]
    assert (accepted.passed.tolist(), accepted.last.tolist()) == ([[True, True, False, False, True]], [4])
    assert accepted.follower.ids[0].tolist() == [[1, 2], [M, M], [M, 2], [M, M], [M, 2]]
    assert remembered(accepted, 5, 5).scored.states.valid.tolist() == [[True, False, False, False, False]]
    line.valid[4] = False
    assert accepted_of(scored).next_index.tolist() == [[1, -1, -1, 2, -1]]


def test_a_remembered_state_is_replaced_with_what_it_leads_to() -> None:
    """{a} leads through {a, c} to {a, c, 7}, told by {a, c}, the second source after the last accepted state. {b} is in the
    memory, but not kept."""
    spoken = ([A, B, C, 7], weights(1, 9, 1, 2))
    memory = memory_of(
        ([A, M, M, M], [A, M, C, M], spoken),
        ([M, B, M, M], [M, B, M, D], spoken),
        ([A, M, C, M], [A, M, C, 7], spoken),
        lost=[1],
        start=4,
    )
    table = draft_table(([A, B, C, D], weights(4, 3, 2, 1)), memory=memory)
    draft = grown(table, 4)
    assert ids_of(draft) == [[M, M, M, M], [A, M, C, 7], [A, B, C, 7], [M, M, M, M]]
    assert column(draft, SOURCE) == [0, 3, 3, -1]
    assert column(draft, BASE) == [0, 3, 3, -1]
    assert column(draft, DRAFT_STEP) == [0, 3, 4, 0]
    assert ids_of(grown(table, 5))[4:] == [[M, B, M, M]]  # 0.3
    table.known[..., -1] += 4
    assert ids_of(grown(table, 4))[1] == [A, M, M, M]  # in another block


# Drafts that the head reads.


def test_re_reading_by_hand() -> None:
    """A chain: the first pass reads the three states from what the last accepted one said (source 0), which gives sources 2, 3
    and 4 (the memory is empty but has one place). Each state then tells its followers itself, and an estimate starts from
    its parent's. The second pass leaves the first state alone."""
    head = Head(lambda row, ids, turn: ([t + 10 * (turn + 1) for t in (A, B, C, D)], weights(1, 2, 3, 4)))
    said = ([A, B, C, D], weights(4, 3, 2, 1))
    reading = Reading(draft_table(said, branches=1), head)
    draft = reading.grown(3)
    assert ids_of(draft) == [[M, M, M, M], [A, M, M, M], [A, B, M, M]]
    reading.re_read(draft)
    (at, hidden) = head.read[0]
    assert torch.equal(at.table, draft.states.table)
    torch.testing.assert_close(hidden, hidden_of([said])[:, None].expand(1, 3, 4, 2))
    assert reading.table.token[0, ..., 0].tolist()[2:] == [[20, 21, 22, 23]] * 3
    draft = reading.grown(4)
    assert ids_of(draft) == [[M, M, M, M], [M, M, M, 23], [M, M, 22, 23], [M, 21, 22, 23]]
    assert column(draft, SOURCE) == [2, 2, 2, 2]  # the first state's own; those behind it are new
    assert column(draft, BASE) == [0, 2, 2, 2]
    reading.re_read(draft)
    (at, hidden) = head.read[1]
    assert at.ids[0].tolist() == [[M, M, M, 23], [M, M, 22, 23], [M, 21, 22, 23]]
    assert hidden[0, :, :, 0].tolist() == [[20, 21, 22, 23]] * 3
    draft = reading.grown(5)
    assert ids_of(draft) == [[M, M, M, M], [M, M, M, 23], [M, M, 32, 23], [M, 31, 32, 23], [30, 31, 32, 23]]
    assert column(draft, SOURCE) == [2, 5, 5, 5, 5]
    assert column(draft, BASE) == [0, 2, 5, 5, 5]


def test_a_re_read_state_is_found_again_with_its_own_estimate() -> None:
    """The estimates agree with what was said before, so that the draft grows the same again: each state's source is then its
    own, its base its parent's. What is clean is not read, nor the next block's state."""
    said = ([A, B, C], weights(4, 3, 2))
    head = Head(lambda row, ids, turn: said)
    reading = Reading(draft_table(said, branches=1), head)
    draft = reading.grown(5)
    line = ids_of(draft)
    for turn, (source, base) in enumerate([([2, 3, 4, 4, -1], [0, 2, 3, 4, -1]), ([2, 7, 8, 8, -1], [0, 2, 7, 8, -1])]):
        reading.re_read(draft)
        assert head.read[-1][0].valid.tolist() == [[True] * 3 + [False] * 2 if turn == 0 else [True] * 2 + [False] * 2]
        draft = reading.grown(5)
        assert ids_of(draft) == line == [[M, M, M], [A, M, M], [A, B, M], [A, B, C], [M, M, M]]
        assert column(draft, SOURCE) == source
        assert column(draft, BASE) == base


def test_a_remembered_state_leads_to_one_that_was_re_read() -> None:
    """{a} leads to {a, b}, told by {a}: source 1. Read once, {a, b} tells its followers itself, and {a} still leads there."""
    memory = memory_of(([A, M, M], [A, B, M], ([A, B, C], [0.0, 0.0, 0.0])), start=3)
    head = Head(lambda row, ids, turn: ([A, B, 20], weights(4, 3, 2)))
    reading = Reading(draft_table(([A, B, C], weights(4, 3, 2)), branches=1, memory=memory), head)
    draft = reading.grown(2)
    assert (ids_of(draft), column(draft, SOURCE)) == ([[M, M, M], [A, B, M]], [0, 1])
    reading.re_read(draft)
    assert head.read[0][1][0, :, :, 1].tolist() == [pytest.approx(weights(4, 3, 2)), [0.0, 0.0, 0.0]]  # from 0 and 1
    draft = reading.grown(3)
    assert ids_of(draft) == [[M, M, M], [A, B, M], [A, B, 20]]
    assert column(draft, SOURCE) == [2, 3, 3]
    assert column(draft, BASE) == [0, 1, 3]
