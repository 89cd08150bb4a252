"""Drafts against a slow twin: lists and dictionaries, one row at a time."""

import random
from dataclasses import dataclass
from math import exp
from typing import Any

import pytest
from draft_tables import Entry, Head, M, Prediction, Reading, column, draft_table, ids_of, memory_of, of_rows

from modeling_mrp.rules.drafting import DRAFT_PARENT, DRAFT_START, DRAFT_STEP, SOURCE
from modeling_mrp.rules.revealing import ORDER_SHARPNESS


@dataclass
class Node:
    ids: tuple[int, ...]
    start: int
    parent: int
    step: int
    said: Prediction | None  # what tells its followers

    @property
    def key(self) -> tuple[Any, ...]:
        return self.ids, self.start, self.parent


@dataclass
class Twin:
    """The draft of one row, in lists and dictionaries."""

    branches: int
    schedule: list[int]
    eos: set[int]
    limit: int
    memory: dict[tuple[int, ...], tuple[tuple[int, ...], Prediction]]  # ids: (those of the follower, what was said)
    estimates: dict[tuple[int, ...], Prediction]

    def end(self, ids: tuple[int, ...]) -> int:
        return next((i for i, token in enumerate(ids) if token in self.eos), len(ids))

    def followers(self, node: Node, slot: int) -> list[tuple[Node, float]]:
        block = len(node.ids)
        if M not in node.ids:
            return [(Node((M,) * block, node.start + block, slot, 0, None), 1.0)]
        if node.said is None:
            return []
        token, odds = node.said
        ranked = sorted((i for i in range(self.end(node.ids)) if node.ids[i] == M), key=lambda i: -odds[i])
        sure, rest = ranked[: self.schedule[node.step] - 1], ranked[self.schedule[node.step] - 1 :]
        total = sum(exp(ORDER_SHARPNESS * odds[i]) for i in rest)
        choices = [([*sure, i], exp(ORDER_SHARPNESS * odds[i]) / total) for i in rest[: self.branches]]
        found = []
        for where, chance in choices or [(sure, 1.0)] * bool(sure):
            ids = tuple(token[i] if i in where else old for i, old in enumerate(node.ids))
            after = self.looked_up(Node(ids, node.start, -1, node.step + 1, node.said))
            end = min(self.end(after.ids) + 1, self.limit - node.start)
            if end > block or M in after.ids[:end]:
                found.append((after, chance))
        return found

    def looked_up(self, node: Node) -> Node:
        ids, said, step = node.ids, node.said, node.step
        while ids in self.memory and ids not in self.estimates:
            ids, said = self.memory[ids]
            step = sum(token != M for token in ids)  # one reveal a step where there is a memory
        return Node(ids, node.start, -1, step, self.estimates.get(ids, said))

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


def random_prediction(rng: random.Random, block: int) -> Prediction:
    """Tokens that differ now and then from one prediction to the next."""
    return [10 + 10 * (rng.random() < 0.2) + i for i in range(block)], [rng.gauss(0, 0.6) for _ in range(block)]


def random_memory(rng: random.Random, block: int) -> dict[Any, Any]:
    """Up to six states on ways through the block, each with the follower that one source's reveal makes."""
    found: dict[Any, Any] = {}
    for _ in range(rng.randint(0, 3)):
        ids = [M] * block
        for place in rng.sample(range(block), block)[: rng.randint(1, block - 1)]:
            ids[place] = 10 + place
        for _ in range(rng.randint(1, 2)):
            if M in ids and tuple(ids) not in found:
                said, place = random_prediction(rng, block), rng.choice([i for i in range(block) if ids[i] == M])
                after = [*ids]
                after[place] = said[0][place]
                found[tuple(ids)] = tuple(after), said
                ids = after
    return found


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

        said = [random_prediction(rng, block) for _ in range(rows)]
        memories = [random_memory(rng, block) if max(schedule) == 1 else {} for _ in range(rows)]
        unused = ([7] * block, [7] * block, said[0])
        parts = []
        for told in memories:
            entries: list[Entry] = [(list(ids), list(after), spoken) for ids, (after, spoken) in told.items()]
            parts.append(memory_of(*entries, unused, lost=[len(entries)], width=7, start=block, eos=sorted(eos)))
        options: dict[str, Any] = {"branches": branches, "schedule": schedule, "eos": sorted(eos), "new_tokens": limit}
        table = draft_table(*said, memory=of_rows(parts), **options)

        estimates: dict[tuple[int, tuple[int, ...], int], Prediction] = {}

        def says(
            row: int, ids: tuple[int, ...], turn: int, estimates: dict[Any, Prediction] = estimates, block: int = block
        ) -> Prediction:
            return estimates.setdefault((row, ids, turn), random_prediction(rng, block))

        twins = [Twin(branches, schedule, eos, block + limit, memories[row], {}) for row in range(rows)]
        firsts = [Node((M,) * block, block, -1, 0, said[row]) for row in range(rows)]
        reading = Reading(table, Head(says))
        sizes = sorted(rng.sample(range(1, 12), rng.randint(1, 3)))
        for turn, size in enumerate(sizes):
            draft = reading.grown(size)
            for row, twin in enumerate(twins):
                nodes = twin.grow(firsts[row], size)
                assert [tuple(ids) for ids in ids_of(draft, row)] == [node.ids for node in nodes]
                for name, which in (("start", DRAFT_START), ("parent", DRAFT_PARENT), ("step", DRAFT_STEP)):
                    assert column(draft, which, row) == [getattr(node, name) for node in nodes]
                for node, source in zip(nodes, column(draft, SOURCE, row), strict=True):
                    assert (source < 0) == (node.said is None)
                    if node.said is not None:
                        assert reading.table.token[row, source, :, 0].tolist() == node.said[0]
                        assert reading.table.odds[row, source, :, 0].tolist() == pytest.approx(node.said[1], abs=1e-9)
                for place, node in enumerate(nodes):
                    if M in node.ids and node.said is not None and (place or not turn):
                        twin.estimates[node.ids] = says(row, node.ids, turn)
                firsts[row].said = twin.estimates[firsts[row].ids]
            reading.re_read(draft)
