"""The lattice of a round by hand and against a slow twin, and the memory that it looks states up in."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import pytest
import torch
from conftest import make_model
from torch import Tensor

from modeling_mrp.generate.decoding import Decoder
from modeling_mrp.generate.drafting import ORDER_SHARPNESS, Lattice
from modeling_mrp.generate.sampling import Sampler
from modeling_mrp.generate.states import Memory, Reveal, Scored, States
from modeling_mrp.generate.strategies import SelfSpec

M = 60  # the mask of make_model
A, B, C, D = 10, 11, 12, 13  # what the positions of a block get
Table = tuple[list[int], list[float]]  # the token of each position, and its log-odds


def states(*ids: list[int], start: int = 0, valid: list[bool] | None = None) -> States:
    """One state per row."""
    n = len(ids)
    steps = torch.tensor([len(i) - i.count(M) for i in ids])
    return States(torch.tensor(ids), torch.full((n,), start), steps, torch.arange(n), torch.tensor(valid or [True] * n))


def weights(*values: float) -> list[float]:
    """Log-odds whose power `ORDER_SHARPNESS` is in these proportions."""
    return [log(value) / ORDER_SHARPNESS for value in values]


def drafting_decoder(
    tables: Sequence[Table],
    branches: int = 3,
    schedule: Sequence[int] | None = None,
    eos: Sequence[int] = (),
    max_new_tokens: int | None = None,
    infill: Tensor | None = None,
) -> Decoder:
    """One behind its prompts of one block, whose last accepted states [rows] are told of by tables: source 0 of a lattice.

    Hidden states are made up: a position's has its token and log-odds, and picks read them there.
    """
    block = len(tables[0][0])
    model = make_model(block_size=block)
    prompts = [torch.arange(1, block + 1)] * len(tables)
    steps = torch.tensor(schedule or [1] * block)
    picker = Sampler(model.lm_head.weight, M)
    room, seeds = max_new_tokens or 3 * block, torch.zeros(len(tables), dtype=torch.long)
    decoder = Decoder(model, SelfSpec(9, branches), picker, prompts, room, steps, list(eos), seeds, infill=infill)
    decoder.seed = scored_by(decoder.current(), tables)
    decoder.has_seed = torch.ones(len(tables), dtype=torch.bool)
    decoder.memory = Memory.empty(decoder.seed)
    decoder.memory.scored.states.valid = torch.zeros(len(tables), 1, dtype=torch.bool)
    return decoder


def hidden_of(tables: Sequence[Table]) -> Tensor:
    """[n, block, 2]."""
    return torch.tensor([list(zip(*table, strict=True)) for table in tables], dtype=torch.float64)


def scored_by(at: States, tables: Sequence[Table]) -> Scored:
    """States [n] with what the backbone said there."""
    hidden = hidden_of(tables)
    token, odds = hidden[..., 0].long(), hidden[..., 1]
    return Scored(at, torch.full_like(at.start, -1), Reveal(at.ids == M, token, odds, odds), hidden)


def remember(decoder: Decoder, entries: Sequence[tuple[list[int], list[int], Table]], lost: Sequence[int] = ()) -> None:
    """Lets a decoder of one row have scored (ids, those of the follower, what was said) in its block; `lost` ones are gone."""
    start = int(decoder.rows.start[0])
    line = states(*(ids for ids, _, _ in entries), start=start, valid=[i not in lost for i in range(len(entries))])
    known = [ids for ids, _, _ in entries]
    onward = torch.tensor([[known.index(after) if after in known else -1 for _, after, _ in entries]])
    follower = states(*(after for _, after, _ in entries), start=start)
    for each in (line, follower):
        each.row = torch.zeros_like(each.row)
    flat = scored_by(line, [table for _, _, table in entries])
    scored = Scored(*(part.map(lambda t: t[None]) if hasattr(part, "map") else part[None] for part in vars(flat).values()))
    decoder.memory = Memory(scored, follower.map(lambda t: t[None]), onward)


def grown(decoder: Decoder, width: int) -> Lattice:
    lattice = Lattice(decoder, width, drafting=True)
    lattice.grow(width)
    return lattice


def ids_of(lattice: Lattice, row: int = 0) -> list[list[int]]:
    """The valid states of a row; none is behind one that is not."""
    valid = lattice.valid[row].tolist()
    assert valid == sorted(valid, reverse=True)
    return lattice.states().ids[row, : sum(valid)].tolist()


def column(lattice: Lattice, name: str, row: int = 0) -> list[int]:
    return lattice.slots[row, : int(lattice.valid[row].sum()), getattr(lattice, name)].tolist()


# ------------------------------------------------------------------------------------------------ growing by hand


def test_the_likeliest_comes_first_and_what_meets_adds_up() -> None:
    """Weights 5, 4, 3: a 5/12, b 1/3, c 1/4. {a, b} is worth 5/12 * 4/7 through a, less than c, but 1/3 * 5/8 more through b;
    then nothing of that is lost up to the next block's state. {a, c} is worth 0.18 through a and 0.14 through c: more than
    {b, c}. Ten states there are, and no one twice."""
    lattice = grown(drafting_decoder([([A, B, C], weights(5, 4, 3))]), 12)
    order = [[M, M, M], [A, M, M], [M, B, M], [A, B, M], [A, B, C], [M, M, M], [M, M, C], [A, M, C], [M, B, C]]
    assert ids_of(lattice) == order
    assert column(lattice, "start") == [3, 3, 3, 3, 3, 6, 3, 3, 3]
    assert column(lattice, "parent") == [-1, -1, -1, -1, -1, 4, -1, -1, -1]
    assert column(lattice, "step") == [0, 1, 1, 2, 3, 0, 1, 2, 2]
    assert column(lattice, "source") == [0, 0, 0, 0, 0, -1, 0, 0, 0]
    proposal = lattice.proposal()
    assert proposal.drafted.tolist() == [[False, True, True, True, True, False, True, True, True, False, False, False]]
    assert ids_of(grown(drafting_decoder([([A, B, C], weights(5, 4, 3))]), 4)) == order[:4]
    chain = grown(drafting_decoder([([A, B, C], weights(5, 4, 3))], branches=1), 12)
    assert ids_of(chain) == [order[0], order[1], *order[3:6]]


def test_twins_among_the_followers_of_a_state_add_up() -> None:
    """a 0.3, b 0.3, c 0.4; {a} and {b} are remembered and both lead to {a, b}, which is worth 0.6 and comes before c."""
    decoder = drafting_decoder([([A, B, C], weights(3, 3, 4))])
    said = ([A, B, C], weights(1, 1, 1))
    entries = [([A, M, M], [A, B, M], said), ([M, B, M], [A, B, M], said), ([M, M, 7], [A, M, 7], said)]
    remember(decoder, entries)
    lattice = grown(decoder, 4)
    assert ids_of(lattice) == [[M, M, M], [A, B, M], [A, B, C], [M, M, M]]
    assert column(lattice, "source") == [0, 1, 1, -1]  # told by {a}, the first of the two
    assert ids_of(grown(decoder, 5))[4:] == [[M, M, C]]
    remember(decoder, entries, lost=[0, 1])
    assert ids_of(grown(decoder, 4)) == [[M, M, M], [M, M, C], [A, M, M], [A, M, C]]


def followers(lattice: Lattice, ids: list[list[int]], step: int = 0) -> tuple[list[list[list[int]]], Tensor]:
    """Of states with source 0, [rows] of ids: those of the followers, and their chances."""
    state = lattice.slots[:, 0].clone()
    state[:, : len(ids[0])] = torch.tensor(ids)
    state[:, lattice.step] = step
    made, chance = lattice._followers(state, torch.ones(len(ids), dtype=torch.bool), 0)
    return made[..., : len(ids[0])].tolist(), chance


def test_chances_are_a_softmax_of_the_sharpened_odds() -> None:
    """Log-odds 0, 1, 0.5, -1 and a revealed position: three of the four shown, their chances taken over all."""
    table = ([10, 11, 12, 13, 14], [0.0, 1.0, 0.5, -1.0, 9.0])
    lattice = Lattice(drafting_decoder([table]), 4, drafting=True)
    made, chance = followers(lattice, [[M, M, M, M, 9]])
    assert made == [[[M, 11, M, M, 9], [M, M, 12, M, 9], [10, M, M, M, 9]]]
    weight = [exp(ORDER_SHARPNESS * odds) for odds in (1, 0.5, 0, -1)]
    assert chance[0].tolist() == pytest.approx([w / sum(weight) for w in weight[:3]])


def test_several_reveals_a_step() -> None:
    """Two a step: the best one and, for the second, the next three. One candidate for two reveals is certain, as are two for
    three; the last position of the schedule goes alone."""
    table = ([10, 11, 12, 13, 14], [0.0, 1.0, 0.5, -1.0, 9.0])
    lattice = Lattice(drafting_decoder([table] * 2, schedule=[2, 3, 0, 0, 0]), 4, drafting=True)
    made, chance = followers(lattice, [[M, M, M, M, 9], [9, 9, M, 9, 9]])
    assert made[0] == [[M, 11, 12, M, 9], [10, 11, M, M, 9], [M, 11, M, 13, 9]]
    weight = [exp(ORDER_SHARPNESS * odds) for odds in (0.5, 0, -1)]
    assert chance[0].tolist() == pytest.approx([w / sum(weight) for w in weight])
    assert made[1][0] == [9, 9, 12, 9, 9]
    assert chance[1].tolist() == [1, 0, 0]
    made, chance = followers(lattice, [[M, M, M, 9, 9], [M, 9, 9, M, 9]], step=1)
    assert made[0][0] == [10, 11, 12, 9, 9]
    assert made[1][0] == [10, 9, 9, 13, 9]
    assert chance.tolist() == [[1, 0, 0], [1, 0, 0]]
    steps = torch.tensor([[0, 1, 1]])
    lattice = grown(drafting_decoder([([A, B, C], weights(5, 4, 3))], schedule=[2, 1, 0]), 9)
    assert ids_of(lattice) == [[M, M, M], [A, B, M], [A, B, C], [M, M, M], [A, M, C]]
    assert torch.equal(lattice.states().step[:, :2], steps[:, :2])


def test_nothing_is_drafted_behind_an_end_nor_what_ends_the_row() -> None:
    """a 1/8, b 5/8, c 1/4. b is an eos: what has a and b is the whole text, and from {b} c is not a candidate, so that {b, c}
    comes through c alone, and behind it."""
    table = ([A, B, C], weights(1, 5, 2))
    lattice = grown(drafting_decoder([table], eos=[B]), 9)
    assert ids_of(lattice) == [[M, M, M], [M, B, M], [M, M, C], [M, B, C], [A, M, M], [A, M, C]]
    assert column(lattice, "end") == [3, 1, 3, 1, 3, 3]


def test_nothing_is_drafted_that_fills_the_limit() -> None:
    """Two tokens are left: a and b are the text, whatever stands behind; what stands behind may come before."""
    table = ([A, B, C], weights(1, 5, 2))
    lattice = grown(drafting_decoder([table], max_new_tokens=2), 9)
    assert ids_of(lattice) == [[M, M, M], [M, B, M], [M, B, C], [M, M, C], [A, M, M], [A, M, C]]


@pytest.mark.parametrize("following", [[M, M, M], [5, M, 7], [5, 6, 7]], ids=str)
def test_the_next_block_rides_behind_a_clean_state(following: list[int]) -> None:
    """With its given tokens; one that has no masks waits for a round of its own."""
    infill = torch.tensor([[M, M, M, *following, M, M, M]])
    decoder = drafting_decoder([([A, B, C], weights(5, 4, 3))], branches=1, max_new_tokens=9, infill=infill)
    lattice = grown(decoder, 9)
    line = [[M, M, M], [A, M, M], [A, B, M], [A, B, C]]
    rides = M in following
    assert ids_of(lattice) == line + [following] * rides
    assert column(lattice, "parent") == [-1] * 4 + [3] * rides
    assert column(lattice, "start") == [3] * 4 + [6] * rides
    assert lattice.proposal().drafted.tolist() == [[False, True, True, True] + [False] * 5]


def test_blocks_behind_two_clean_states_stay_apart() -> None:
    """Two ways to the clean state, with different tokens: the same all-mask state behind each is another state."""
    decoder = drafting_decoder([([A, B], weights(1.2, 1))])
    remember(decoder, [([M, B], [7, B], ([7, B], [0.0, 0.0]))])
    lattice = grown(decoder, 9)
    assert ids_of(lattice) == [[M, M], [A, M], [A, B], [M, M], [7, B], [M, M]]
    assert column(lattice, "parent") == [-1, -1, -1, 2, -1, 4]


def test_without_drafting_only_the_next_block_rides() -> None:
    decoder = drafting_decoder([([A, B], [0.0, 1.0])] * 2)
    decoder.rows.tokens[0, 2:4] = torch.tensor([A, B])
    lattice = Lattice(decoder, 2, drafting=False)
    lattice.grow(2)
    assert [ids_of(lattice, row) for row in range(2)] == [[[A, B], [M, M]], [[M, M]]]


# ------------------------------------------------------------------------------------------------ look-ups and re-reading


def test_a_remembered_state_is_replaced_with_what_it_leads_to() -> None:
    """{a} leads through {a, c} to {a, c, 7}, told by {a, c}, the second source after the last accepted state. {b} is in the
    memory, but not kept."""
    decoder = drafting_decoder([([A, B, C, D], weights(4, 3, 2, 1))])
    spoken = ([A, B, C, 7], weights(1, 9, 1, 2))
    entries = [([A, M, M, M], [A, M, C, M], spoken), ([M, B, M, M], [M, B, M, D], spoken), ([A, M, C, M], [A, M, C, 7], spoken)]
    remember(decoder, entries, lost=[1])
    lattice = grown(decoder, 4)
    assert ids_of(lattice) == [[M, M, M, M], [A, M, C, 7], [A, B, C, 7], [M, M, M, M]]
    assert column(lattice, "source") == [0, 3, 3, -1]
    assert column(lattice, "base") == [0, 3, 3, -1]
    assert column(lattice, "step") == [0, 3, 4, 0]
    assert ids_of(grown(decoder, 5))[4:] == [[M, B, M, M]]  # 0.3
    decoder.memory.scored.states.start += 4
    assert ids_of(grown(decoder, 4))[1] == [A, M, M, M]  # in another block


class Reader:
    """Stands for the head: tells of each state what a function of its ids and of the number of the pass says."""

    def __init__(self, decoder: Decoder, says: Callable[[int, tuple[int, ...], int], Table]) -> None:
        self.says, self.passes = says, 0
        self.read: list[tuple[States, Tensor]] = []
        vars(decoder).update(head_pass=self.head_pass, reveal_from=self.reveal_from)

    def head_pass(self, at: States, hidden: Tensor) -> Tensor:
        self.read.append((at, hidden))
        rows = [[self.says(r, tuple(ids), self.passes) for ids in row] for r, row in enumerate(at.ids.tolist())]
        self.passes += 1
        return torch.stack([hidden_of(row) for row in rows]) - hidden

    def reveal_from(self, at: States, hidden: Tensor, drafting: bool) -> Reveal:
        assert drafting
        return Reveal(at.ids == M, hidden[..., 0].round().long(), hidden[..., 1], hidden[..., 1])


def test_re_reading_by_hand() -> None:
    """A chain: the first pass reads the three states from what the seed said (source 0), which gives sources 1, 2 and 3 (0 is
    the seed, the memory is empty but has one place). Each state then tells its followers itself, and an estimate starts
    from its parent's. The second pass leaves the first state alone."""
    decoder = drafting_decoder([([A, B, C, D], weights(4, 3, 2, 1))], branches=1)
    reader = Reader(decoder, lambda row, ids, turn: ([t + 10 * (turn + 1) for t in (A, B, C, D)], weights(1, 2, 3, 4)))
    lattice = Lattice(decoder, 5, drafting=True)
    lattice.grow(3)
    assert ids_of(lattice) == [[M, M, M, M], [A, M, M, M], [A, B, M, M]]
    lattice.re_read()
    (at, hidden) = reader.read[0]
    assert at.ids.tolist() == lattice.states().ids.tolist()
    torch.testing.assert_close(hidden, hidden_of([([A, B, C, D], weights(4, 3, 2, 1))])[:, None].expand(1, 3, 4, 2))
    assert lattice.token[0].tolist()[2:] == [[20, 21, 22, 23]] * 3  # sources 2, 3, 4: 1 is the memory's
    lattice.grow(4)
    assert ids_of(lattice) == [[M, M, M, M], [M, M, M, 23], [M, M, 22, 23], [M, 21, 22, 23]]
    assert column(lattice, "source") == [2, 2, 2, 2]  # the first state's own; those behind it are new
    assert column(lattice, "base") == [0, 2, 2, 2]
    lattice.re_read()
    (at, hidden) = reader.read[1]
    assert at.ids[0].tolist() == [[M, M, M, 23], [M, M, 22, 23], [M, 21, 22, 23]]
    assert hidden[0, :, :, 0].tolist() == [[20, 21, 22, 23]] * 3
    lattice.grow(5)
    assert ids_of(lattice) == [[M, M, M, M], [M, M, M, 23], [M, M, 32, 23], [M, 31, 32, 23], [30, 31, 32, 23]]
    assert column(lattice, "source") == [2, 5, 5, 5, 5]
    assert column(lattice, "base") == [0, 2, 5, 5, 5]


def test_a_re_read_state_is_found_again_with_its_own_estimate() -> None:
    """The seed and the estimates agree, so that the lattice grows the same again: each state's source is then its own, its
    base its parent's. What is clean is not read, nor the next block's state."""
    table = ([A, B, C], weights(4, 3, 2))
    decoder = drafting_decoder([table], branches=1)
    reader = Reader(decoder, lambda row, ids, turn: table)
    lattice = Lattice(decoder, 5, drafting=True)
    lattice.grow(5)
    line = ids_of(lattice)
    for turn, (source, base) in enumerate([([2, 3, 4, 4, -1], [0, 2, 3, 4, -1]), ([2, 7, 8, 8, -1], [0, 2, 7, 8, -1])]):
        lattice.re_read()
        assert reader.read[-1][0].valid.tolist() == [[True] * 3 + [False] * 2 if turn == 0 else [True] * 2 + [False] * 2]
        lattice.grow(5)
        assert ids_of(lattice) == line == [[M, M, M], [A, M, M], [A, B, M], [A, B, C], [M, M, M]]
        assert column(lattice, "source") == source
        assert column(lattice, "base") == base


def test_a_remembered_state_leads_to_an_exit_that_was_re_read() -> None:
    """{a} leads to {a, b}, told by {a}: source 1. Read once, {a, b} tells its followers itself, and {a} still leads there."""
    decoder = drafting_decoder([([A, B, C], weights(4, 3, 2))], branches=1)
    remember(decoder, [([A, M, M], [A, B, M], ([A, B, C], [0.0, 0.0, 0.0]))])
    reader = Reader(decoder, lambda row, ids, turn: ([A, B, 20], weights(4, 3, 2)))
    lattice = Lattice(decoder, 3, drafting=True)
    lattice.grow(2)
    assert (ids_of(lattice), column(lattice, "source")) == ([[M, M, M], [A, B, M]], [0, 1])
    lattice.re_read()
    assert reader.read[0][1][0, :, :, 1].tolist() == [pytest.approx(weights(4, 3, 2)), [0.0, 0.0, 0.0]]  # from 0 and 1
    lattice.grow(3)
    assert ids_of(lattice) == [[M, M, M], [A, B, M], [A, B, 20]]
    assert column(lattice, "source") == [2, 3, 3]
    assert column(lattice, "base") == [0, 1, 3]


# ------------------------------------------------------------------------------------------------ the slow twin


@dataclass
class Node:
    ids: tuple[int, ...]
    start: int
    parent: int
    step: int
    table: Table | None  # what tells its followers

    @property
    def key(self) -> tuple[Any, ...]:
        return self.ids, self.start, self.parent


@dataclass
class Twin:
    """`Lattice` of one row, in lists and dictionaries."""

    branches: int
    schedule: list[int]
    eos: set[int]
    limit: int
    memory: dict[tuple[int, ...], tuple[tuple[int, ...], Table]]  # ids: (those of the follower, what was said)
    estimates: dict[tuple[int, ...], Table]

    def end(self, ids: tuple[int, ...]) -> int:
        return next((i for i, token in enumerate(ids) if token in self.eos), len(ids))

    def followers(self, node: Node, slot: int) -> list[tuple[Node, float]]:
        block = len(node.ids)
        if M not in node.ids:
            return [(Node((M,) * block, node.start + block, slot, 0, None), 1.0)]
        if node.table is None:
            return []
        token, odds = node.table
        ranked = sorted((i for i in range(self.end(node.ids)) if node.ids[i] == M), key=lambda i: -odds[i])
        sure, rest = ranked[: self.schedule[node.step] - 1], ranked[self.schedule[node.step] - 1 :]
        total = sum(exp(ORDER_SHARPNESS * odds[i]) for i in rest)
        choices = [([*sure, i], exp(ORDER_SHARPNESS * odds[i]) / total) for i in rest[: self.branches]]
        found = []
        for where, chance in choices or [(sure, 1.0)] * bool(sure):
            ids = tuple(token[i] if i in where else old for i, old in enumerate(node.ids))
            after = self.looked_up(Node(ids, node.start, -1, node.step + 1, node.table))
            end = min(self.end(after.ids) + 1, self.limit - node.start)
            if end > block or M in after.ids[:end]:
                found.append((after, chance))
        return found

    def looked_up(self, node: Node) -> Node:
        ids, table, step = node.ids, node.table, node.step
        while ids in self.memory and ids not in self.estimates:
            ids, table = self.memory[ids]
            step = sum(token != M for token in ids)  # one reveal a step where there is a memory
        return Node(ids, node.start, -1, step, self.estimates.get(ids, table))

    def grow(self, first: Node, size: int) -> list[Node]:
        taken: dict[tuple[Any, ...], Node] = {}
        waiting: dict[tuple[Any, ...], tuple[Node, float]] = {}
        node, reached = first, 1.0
        while True:
            taken[node.key] = node
            if len(taken) == size:
                return list(taken.values())
            for after, chance in self.followers(node, len(taken) - 1):
                if after.key not in taken:
                    old, before = waiting.get(after.key, (after, 0.0))
                    waiting[after.key] = old, before + reached * chance
            if not waiting:
                return list(taken.values())
            node, reached = waiting.pop(max(waiting, key=lambda key: waiting[key][1]))


def random_table(rng: random.Random, block: int) -> Table:
    """Tokens that differ now and then from one table to the next."""
    return [10 + 10 * (rng.random() < 0.2) + i for i in range(block)], [rng.gauss(0, 0.6) for _ in range(block)]


class Said:
    """For `Reader`: a random table for every state and pass."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.told: dict[tuple[int, tuple[int, ...], int], Table] = {}

    def __call__(self, row: int, ids: tuple[int, ...], turn: int) -> Table:
        return self.told.setdefault((row, ids, turn), random_table(self.rng, len(ids)))


@pytest.mark.parametrize("seed", range(4))
def test_equals_its_slow_twin(seed: int) -> None:
    """Random odds, tokens that differ between sources now and then, eos, limits, several reveals a step, or a memory with
    chains in it; three rows, grown and re-read one to three times."""
    rng = random.Random(seed)
    for _ in range(25):
        block, rows, branches = rng.choice((3, 4, 5)), 3, rng.randint(1, 5)
        schedule = rng.choice(([1] * block, [1] * block, [2, 1] + [1] * (block - 2), [3, *[block - 3] * (block > 3)]))
        schedule = [*schedule, *[0] * (block - len(schedule))]
        eos = {rng.randrange(10, 10 + block)} if rng.random() < 0.5 else set()
        limit = rng.choice((3 * block, 3 * block, block - 1))

        tables = [random_table(rng, block) for _ in range(rows)]
        decoder = drafting_decoder(tables, branches, schedule, sorted(eos), limit)
        memories = [remembered(rng, block) if max(schedule) == 1 else {} for _ in range(rows)]
        parts = []
        for row in range(rows):
            single = drafting_decoder(tables[:1], branches, schedule)
            entries = [(list(ids), list(after), told) for ids, (after, told) in memories[row].items()]
            filler = [([7] * block, [7] * block, tables[0])] * (6 - len(entries))
            remember(single, entries + filler, lost=range(len(entries), 6))
            for part in (single.memory.scored.states, single.memory.exit):
                part.row[:] = row
            parts.append(single.memory)
        memory = Memory.__new__(Memory)
        memory.end = torch.cat([part.end for part in parts])
        exits, lines = [part.exit for part in parts], [part.scored for part in parts]
        memory.exit = States(*(torch.cat(fields) for fields in zip(*(vars(e).values() for e in exits), strict=True)))
        memory.scored = Scored(
            States(*(torch.cat(fields) for fields in zip(*(vars(s.states).values() for s in lines), strict=True))),
            torch.cat([s.parent for s in lines]),
            Reveal(*(torch.cat(fields) for fields in zip(*(vars(s.reveal).values() for s in lines), strict=True))),
            torch.cat([s.hidden for s in lines]),
        )
        decoder.memory = memory

        says = Said(rng)
        Reader(decoder, says)
        twins = [Twin(branches, schedule, eos, block + limit, memories[row], {}) for row in range(rows)]
        firsts = [Node((M,) * block, block, -1, 0, tables[row]) for row in range(rows)]
        lattice = Lattice(decoder, 9, drafting=True)
        sizes = sorted(rng.sample(range(1, 12), rng.randint(1, 3)))
        for turn, size in enumerate(sizes):
            lattice.grow(size)
            for row, twin in enumerate(twins):
                nodes = twin.grow(firsts[row], size)
                assert [tuple(ids) for ids in ids_of(lattice, row)] == [node.ids for node in nodes]
                for name in ("start", "parent", "step"):
                    assert column(lattice, name, row) == [getattr(node, name) for node in nodes]
                for node, source in zip(nodes, column(lattice, "source", row), strict=True):
                    assert (source < 0) == (node.table is None)
                    if node.table is not None:
                        assert lattice.token[row, source].tolist() == node.table[0]
                        assert lattice.odds[row, source].tolist() == pytest.approx(node.table[1], abs=1e-9)
                for place, node in enumerate(nodes):
                    if M in node.ids and node.table is not None and (place or not turn):
                        twin.estimates[node.ids] = says(row, node.ids, turn)
                firsts[row].table = twin.estimates[firsts[row].ids]
            lattice.re_read()


def remembered(rng: random.Random, block: int) -> dict[Any, Any]:
    """Up to six states on ways through the block, each with the follower that one source's reveal makes."""
    found: dict[Any, Any] = {}
    for _ in range(rng.randint(0, 3)):
        ids = [M] * block
        for place in rng.sample(range(block), block)[: rng.randint(1, block - 1)]:
            ids[place] = 10 + place
        for _ in range(rng.randint(1, 2)):
            if M in ids and tuple(ids) not in found:
                told, place = random_table(rng, block), rng.choice([i for i in range(block) if ids[i] == M])
                after = [*ids]
                after[place] = told[0][place]
                found[tuple(ids)] = tuple(after), told
                ids = after
    return found
