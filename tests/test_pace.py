"""How much to draft: choices by hand on a made-up clock, and decodes whose amounts change from round to round."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from tape import TapeRecorder, tapes

from benchmarks.random_cases import assert_same_text, dampened, decode_rows, make_model
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation, pace
from modeling_mrp.generate.decode_state import RoundPlan
from modeling_mrp.generate.modes import Amount, Drafting, Mode
from modeling_mrp.generate.pace import NARROW, Fixed, Pace, pace_of, paced
from modeling_mrp.rules.revealing import Static

__all__ = ["tapes"]  # a fixture

Clock = Callable[[int, Amount], float]
Chances = tuple[float, ...]
AMOUNTS = paced(8, 1)
# States of a block, of which the last has no masks: the target scores it together with the next block's first. A row stands at
# one of these, 0 for the one without masks, or at the next block's first (`STATES`), where the other was scored alone.
STATES = 8
# Chances of each slot: of stale drafts, and of the head's.
CHANCES: dict[str, tuple[Chances, Chances]] = {
    "good": ((1, 0.6, 0.3, 0.15, 0.1, 0.06, 0.04, 0.03), (1, 0.8, 0.6, 0.4, 0.3, 0.2, 0.15, 0.1)),
    "poor": ((1, 0.3, 0.1, 0.03, 0, 0, 0, 0), (1, 0.45, 0.2, 0.1, 0.05, 0, 0, 0)),
    "none": ((1, 0, 0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0, 0, 0)),
}
# Seconds of a round by the states of all rows: where states are work, where some are nearly free, and where all are.
CLOCKS: dict[str, Clock] = {
    "cpu": lambda states, amount: 2 + 1.2 * states + extra(amount, 0.5 + 0.2 * states, 1 + 0.9 * states),
    "small": lambda states, amount: 3 + 0.6 * states + extra(amount, 0.4, 3 + 0.4 * states),
    "gpu": lambda states, amount: max(1, states / 200) + extra(amount, 0.05, 0.15),
}


def extra(amount: Amount, stale: float, head: float) -> float:
    """What drafts take."""
    return head if amount.passes else stale if amount.states > 1 else 0


def test_amounts() -> None:
    """Nothing, then drafts from stale logits, then with the head; no more passes than states may follow."""
    assert paced(4, 0) == (Amount(), Amount(2, 0), Amount(3, 0), Amount(4, 0))
    assert paced(3, 7) == (Amount(), Amount(2, 0), Amount(3, 0), Amount(2, 1), Amount(3, 2))


def plan_of(active: int, clean: int = 0) -> RoundPlan:
    return RoundPlan(active, 64, 64, clean, masks=16, drafting=active > clean, late=False, blocked=False)


def call(it: Pace | Fixed, rows: int, steps: int, clock: Clock, chances: tuple[Chances, Chances], seed: int) -> float:
    """Seconds of a call on a made-up clock: all rows do so many of the target's rounds, and leave by halves."""
    rng = random.Random(seed)
    luck = [[rng.random() for _ in range(steps)] for _ in range(rows)]  # of a text, however it is drafted
    left, at, seconds, behind, size = [steps] * rows, [3 * row % STATES for row in range(rows)], 0.0, True, rows
    it.begin()
    while any(left):
        active = [row for row in range(rows) if left[row]]
        while size > 1 and (size + 1) // 2 >= len(active):
            size = (size + 1) // 2
        clean = [row for row in active if at[row] == 0]
        plan = plan_of(len(active), len(clean))
        plan = plan.with_slots(it.choose(plan, size, 4, behind), 4)
        amount, width = plan.amount, min(plan.per_row, plan.room)
        caught = 1.5 * clock(2 * size, Amount()) if behind and amount.passes else 0.0
        took, behind = clock(size * plan.room, amount if plan.per_row > 1 else Amount()), not amount.passes
        share, accepted = chances[amount.passes > 0], [0] * width
        for row in active:
            if amount.narrow and at[row] == 0:
                at[row] = STATES
                continue
            for slot in range(1 if at[row] in (0, STATES) else width):
                if not left[row] or (slot and luck[row][left[row] - 1] * share[slot - 1] >= share[slot]):
                    break
                accepted[slot] += at[row] > 0
                left[row], at[row] = left[row] - 1, (at[row] + 1) % STATES
                if at[row] == 0:
                    break
        it.learn(plan, accepted, size, took, caught)
        seconds += took + caught
    return seconds


def calls(it: Pace | Fixed, count: int, *arguments: Any) -> list[float]:
    """Several calls, one after the other."""
    return [call(it, *arguments, seed) for seed in range(count)]


@pytest.mark.parametrize("chances", list(CHANCES))
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("clock", list(CLOCKS))
def test_no_call_pays_much_for_what_is_learnt(clock: str, rows: int, chances: str) -> None:
    """Short calls: trying costs the first one a few rounds, and all others together at most 3 % of the target's time.

    Where time does not grow with the rows, a call takes as long as its slowest row, which in a few rounds is a matter of luck:
    it is longer there.
    """
    steps = 64 if clock == "gpu" and rows > 4 else 12
    which = rows, steps, CLOCKS[clock], CHANCES[chances]
    target = calls(Fixed(Amount()), 1, *which)[0]
    first, *others = calls(Pace(AMOUNTS), 20, *which)
    assert first < target + 5 * CLOCKS[clock](2 * rows, Amount())
    assert len(others) * target / sum(others) >= 0.97


@pytest.mark.parametrize("chances", list(CHANCES))
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("clock", list(CLOCKS))
def test_a_long_call_is_as_fast_as_the_best_amount(clock: str, rows: int, chances: str) -> None:
    """Within 5 %, of which the target's own may be no more than 2."""
    which = rows, 600, CLOCKS[clock], CHANCES[chances]
    fixed = {amount: call(Fixed(amount), *which, 0) for amount in AMOUNTS}
    it = Pace(AMOUNTS)
    for seed in (1, 2, 3):
        call(it, *which, seed)
    mine = call(it, *which, 0)
    assert mine <= fixed[Amount()] / 0.98
    assert mine <= min(fixed.values()) / 0.95


def rounds(
    it: Pace, count: int, seconds: Callable[[Amount], float], usual: Callable[[Amount], bool] = lambda _: True
) -> Counter[Amount]:
    """Rounds of four rows that accept all drafts: how often each amount was chosen."""
    chosen: Counter[Amount] = Counter()
    for _ in range(count):
        plan = plan_of(4)
        plan = plan.with_slots(it.choose(plan, 4, 4, behind=False), 4)
        chosen[plan.amount] += 1
        it.learn(plan, [4] * plan.room, 4, seconds(plan.amount), usual=usual(plan.amount))
    return chosen


def test_a_clock_that_changes_is_noticed() -> None:
    """Drafts are free, then they are not, and then they are again."""
    it = Pace(paced(8, 0))
    assert rounds(it, 100, lambda amount: 1.0).most_common(1)[0][0] == Amount(8, 0)
    rounds(it, 300, lambda amount: 1.5 * amount.states - 0.5)
    assert rounds(it, 200, lambda amount: 1.5 * amount.states - 0.5)[Amount()] > 180
    rounds(it, 3000, lambda amount: 1.0)
    assert rounds(it, 100, lambda amount: 1.0)[Amount(8, 0)] > 80


def test_few_clean_rows_are_scored_alone() -> None:
    """Where the others come further so than all do with room for two states, and the head need not catch up for it."""
    it = Pace(paced(1, 0))
    for clean, seconds in ((0, 1.0), (1, 1.5)):
        it.learn(plan_of(16, clean).with_slots(Amount(), 4), [16 - clean], 16, seconds)
    chosen = {clean: it.choose(plan_of(16, clean), 16, 4, behind=True) for clean in (0, 1, 4, 6, 8, 15)}
    assert chosen == {clean: NARROW if clean in (1, 4) else Amount() for clean in chosen}
    it.catch_up = 1.0
    assert it.choose(plan_of(16, 1), 16, 4, behind=False) == Amount()
    assert it.choose(plan_of(16, 1), 16, 4, behind=True) == NARROW
    assert it.choose(replace(plan_of(16, 16), drafting=False), 16, 4, behind=True) == Amount()


def test_what_is_lost_where_clean_rows_are_scored_alone() -> None:
    """They come no further: tried where room for two states has the same price, it loses what they would have come."""
    it, plan = Pace(paced(1, 0)), plan_of(16, 4)
    it.learn(plan.with_slots(Amount(), 4), [12], 16, 1.0)
    plan = plan.with_slots(it.choose(plan, 16, 4, behind=True), 4)
    assert plan.amount == NARROW
    it.learn(plan, [12], 16, 1.0)
    assert it.lost == pytest.approx(4 / 16)
    assert it.choose(plan, 16, 4, behind=True) == Amount()


def test_rows_out_of_step_are_faster_than_their_target() -> None:
    """Though no draft is right: few of them are clean at once, and room for two states costs the others."""
    which = 16, 60, CLOCKS["cpu"], CHANCES["none"]
    others = calls(Pace(AMOUNTS), 20, *which)[1:]
    assert len(others) * calls(Fixed(Amount()), 1, *which)[0] / sum(others) >= 1.1


def test_rounds_that_are_recorded_say_nothing() -> None:
    """Each amount takes a thousand times as long in its first two rounds, and is said to."""
    it, seen = Pace(paced(4, 0)), Counter[Amount]()

    def seconds(amount: Amount) -> float:
        seen[amount] += 1
        return 1000.0 if seen[amount] <= 2 else 1.0

    chosen = rounds(it, 40, seconds, lambda amount: seen[amount] > 2)
    assert chosen[Amount(4, 0)] > 25
    assert it.lost == 0


def test_what_stale_drafts_came_to_is_a_sign_of_what_the_head_would() -> None:
    """Where none of them is right the head is not tried, though nothing is known of its own drafts; where most are it is."""
    tried = {}
    for name in ("none", "good"):
        it = Pace(AMOUNTS)
        calls(it, 4, 16, 12, CLOCKS["small"], CHANCES[name])
        tried[name] = {amount for amount in it.chosen if amount.states > 1}
    assert tried["none"] == {Amount(2, 0)}
    assert any(amount.passes for amount in tried["good"])


def test_wider_batches_know_what_narrow_ones_learnt() -> None:
    """No batch size tries again what another has shown not to pay."""
    clock, chances = CLOCKS["cpu"], CHANCES["none"]
    it = Pace(AMOUNTS)
    calls(it, 20, 16, 12, clock, chances)
    lost = it.lost
    calls(it, 5, 8, 12, clock, chances)
    assert it.lost - lost < clock(16, Amount())


def test_what_was_learnt_stays_with_the_model(random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By mode, for all batch sizes; where several processes run, nothing follows the clock; and a number stays a number."""
    mode = Mode(Static(), drafting=Drafting(8, 3, 1, paced=True))
    own = pace_of(random_model, mode)
    assert pace_of(random_model, mode) is own
    assert pace_of(random_model, Mode(Static(), drafting=Drafting(7, 3, 1, paced=True))) is not own
    assert pace_of(random_model, Mode(Static(), drafting=Drafting(5, 3, 1))) == Fixed(Amount(5, 1))
    assert pace_of(random_model, Mode(Static())) == Fixed(Amount(1, 0))
    monkeypatch.setattr(pace.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(pace.dist, "get_world_size", lambda: 2)
    assert pace_of(random_model, mode) == Fixed(Amount(4, 1))


class Scripted:
    """Amounts in turn, whatever rounds take; notes what it is taught."""

    def __init__(self, amounts: tuple[Amount, ...]) -> None:
        self.amounts: Iterator[Amount] = cycle(amounts)
        self.taught: list[tuple[RoundPlan, Sequence[int], int, bool]] = []

    def begin(self) -> None:
        pass

    def choose(self, plan: RoundPlan, rows: int, branches: int | None, behind: bool) -> Amount:
        return next(self.amounts)

    def learn(
        self, plan: RoundPlan, accepted: Sequence[int], rows: int, seconds: float, catch_up: float = 0.0, usual: bool = True
    ) -> None:
        assert seconds > 0
        self.taught.append((plan, accepted, rows, usual))


TURNS = (
    Amount(1, 0),
    Amount(3, 0),
    Amount(4, 2),
    Amount(1, 0),
    Amount(1, 0),
    Amount(1, 0),
    Amount(2, 1),
    Amount(6, 1),
    Amount(2, 0),
    NARROW,
)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("target", ["static", "dynamic"])
@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_amounts_that_change_leave_the_text(mode: str, target: str, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head rests and catches up, also behind a cache of an earlier call; a batch, and its rows alone."""
    model = dampened(make_model(3), 0.1)
    amounts = TURNS if mode == "mrp_spec" else tuple(amount for amount in TURNS if not amount.passes)
    paces: list[Scripted] = []

    def scripted(*_: Any) -> Scripted:
        paces.append(Scripted(amounts))
        return paces[-1]

    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": sampled, "top_k": 0, "seed": 4}
    options["confidence_threshold"] = 0.4
    plain, _ = decode_rows(model, prompts, "left", None, decoding=target, **options)
    monkeypatch.setattr(generation, "pace_of", scripted)
    options |= {"decoding": mode, "target": target, "num_draft_states": "auto", "draft_passes": 2}
    drafted, out = decode_rows(model, prompts, "right", None, **options)
    taught = [lesson for each in paces for lesson in each.taught]
    assert {plan.amount for plan, *_ in taught} == set(amounts)
    assert len({rows for _, _, rows, _ in taught}) > 1, "the batch shrinks"
    drafts = [(plan, accepted) for plan, accepted, _, _ in taught if plan.per_row > 1]
    assert all(accepted[0] == plan.active - plan.clean for plan, accepted, _, _ in taught)
    assert all(max(accepted) <= plan.active - plan.clean for plan, accepted in drafts)
    # What was accepted with masks left is what the target would have taken a round for.
    if target == "static":
        clean = sum(plan.clean for plan, *_ in taught if not plan.amount.narrow)
        of_rounds = clean + sum(sum(accepted[: min(plan.per_row, plan.room)]) for plan, accepted, _, _ in taught)
        steps = sum(max(row["steps"]) for row in plain)
        assert 0.8 * steps <= of_rounds <= steps
    assert out.stats.drafted.min() > 0
    assert (out.stats.forwards["head"] > 0) == (mode == "mrp_spec")
    for a, b in zip(plain, drafted, strict=True):
        assert_same_text(a, b, mode)
    for row, prompt in enumerate(prompts):
        (alone,), _ = decode_rows(model, [prompt], "left", None, **{**options, "seed": 4 + row})
        assert_same_text(alone, drafted[row], row)
    more = [prompt + row["tokens"][:17] + [5] for prompt, row in zip(prompts, plain, strict=True)]
    cached, again = decode_rows(model, more, "left", None, past_key_values=out.past_key_values, **options)
    assert again.stats.row_forwards.sum() < out.stats.row_forwards.sum() + 9
    expected, _ = decode_rows(model, more, "left", None, **{**options, "decoding": target})
    for a, b in zip(expected, cached, strict=True):
        assert_same_text(a, b, "continued")


def test_what_new_memory_holds_plays_no_part(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Nor in drafts, of rows one of which has come further than the other, and than prefill, before the head reads the text."""
    model = dampened(make_model(2), 0.3)
    monkeypatch.setattr(generation, "pace_of", lambda *_: Scripted((*[Amount()] * 9, *[Amount(4, 2)] * 9)))
    prompts = [[1, 2, 3], [*range(1, 12)]]
    options: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": "auto", "draft_passes": 2, "max_new_tokens": 60}
    rows, out = decode_rows(model, prompts, "left", None, **options)
    request.getfixturevalue("new_memory_is_nan")
    again, other = decode_rows(model, prompts, "left", None, **options)
    for one, other_one in zip(rows, again, strict=True):
        assert_same_text(one, other_one, "memory")
    assert int(out.stats.accepted.min()) > 5
    assert torch.equal(out.stats.accepted_at_depth, other.stats.accepted_at_depth)


@pytest.mark.usefixtures("tapes")
def test_amounts_that_change_are_recorded_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording for each; what the head reads between two of them is not recorded."""
    model = dampened(make_model(4), 0.3)
    monkeypatch.setattr(generation, "pace_of", lambda *_: Scripted(TURNS))
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None, "return_dict_in_generate": True}
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6]])
    plain = model.generate(prompt, decoding="static", **options)
    options |= {"decoding": "mrp_spec", "num_draft_states": "auto", "draft_passes": 2}
    as_it_is, recorded = (model.generate(prompt, graphs=graphs, **options) for graphs in (False, True))
    assert torch.equal(plain.sequences, as_it_is.sequences)
    assert torch.equal(plain.sequences, recorded.sequences)
    assert recorded.stats.forwards == as_it_is.stats.forwards
    assert TapeRecorder.replays > 10


def test_a_head_that_rests_reads_nothing(random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the prompt nor what follows: it costs what the target costs. Then it reads all at once."""
    options: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": None, "return_dict_in_generate": True}
    prompt = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    plain = random_model.generate(prompt, decoding="static", **options)
    options |= {"decoding": "mrp_spec", "num_draft_states": "auto"}
    monkeypatch.setattr(generation, "pace_of", lambda *_: Fixed(Amount(1, 0)))
    resting = random_model.generate(prompt, **options)
    assert resting.stats.forwards == plain.stats.forwards
    assert resting.past_key_values.head_held.tolist() == [0]
    monkeypatch.setattr(generation, "pace_of", lambda *_: Fixed(Amount(3, 1)))
    more = torch.cat([resting.sequences, torch.tensor([[5, 6]])], 1)
    out = random_model.generate(more, past_key_values=resting.past_key_values, **options)
    assert out.past_key_values.head_held.tolist() == out.past_key_values.held.tolist()
    assert torch.equal(out.sequences, random_model.generate(more, decoding="static", max_new_tokens=16, eos_token_id=None))
