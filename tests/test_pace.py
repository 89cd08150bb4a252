"""How much to draft: choices by hand on a made-up clock, and decodes whose amounts change from round to round."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from tape import TapeRecorder, tapes

from benchmarks.random_cases import assert_same_text, dampened, decode_rows, make_model
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation, pace
from modeling_mrp.generate.modes import Drafting, Mode
from modeling_mrp.generate.pace import Amount, Fixed, Pace, pace_of, paced
from modeling_mrp.rules.revealing import Static

__all__ = ["tapes"]  # a fixture

Seconds = Callable[[Amount], float]
CHANCES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def test_amounts() -> None:
    """Nothing, then drafts from stale logits, then with the head; no more passes than states may follow."""
    assert paced(4, 0) == (Amount(), Amount(2, 0), Amount(3, 0), Amount(4, 0))
    assert paced(3, 7) == (Amount(), Amount(2, 0), Amount(3, 0), Amount(2, 1), Amount(3, 2))


def run(it: Pace, rounds: int, seconds: Seconds, right: float = 1.0) -> tuple[float, float, dict[Amount, int]]:
    """Rounds of one row on a clock: accepted states, seconds, and how often each amount was chosen.

    The head's drafts are right as often as `CHANCES` say, stale ones `right` times as often.
    """
    states = spent = 0.0
    chosen: dict[Amount, int] = {}
    for _ in range(rounds):
        amount = it.choose()
        chosen[amount] = chosen.get(amount, 0) + 1
        chances = [1.0, *(chance * (1.0 if amount.passes else right) for chance in CHANCES[1:])][: amount.states]
        it.learn(amount, amount.states, [round(1000 * chance) for chance in chances], 1000, seconds(amount))
        states, spent = states + sum(chances), spent + seconds(amount)
    return states, spent, chosen


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        (lambda amount: 1.0, Amount(8, 1)),  # time does not grow: all drafts, of the better kind
        (lambda amount: 1.0 + 2.0 * (amount.passes > 0), Amount(8, 0)),  # the head takes twice a forward
        (lambda amount: float(amount.states), Amount(1, 0)),  # a state is worth less than it takes
        (
            lambda amount: 1 + 0.4 * (amount.states - 1) + 0.05 * amount.passes,
            Amount(3, 1),
        ),  # 1.8 / 1.45, 2.4 / 1.85, 2.9 / 2.25
    ],
)
def test_the_best_amount_is_found(seconds: Seconds, best: Amount) -> None:
    """And is what is chosen but for a try now and then: within 5 % of its pace."""
    it = Pace(paced(8, 1))
    run(it, 200, seconds, right=0.7)
    states, spent, chosen = run(it, 1000, seconds, right=0.7)
    assert max(chosen, key=lambda amount: chosen[amount]) == best
    ideal = sum([1.0, *(chance * (1.0 if best.passes else 0.7) for chance in CHANCES[1:])][: best.states]) / seconds(best)
    assert states / spent > 0.95 * ideal


def test_what_does_not_pay_is_hardly_tried() -> None:
    """Where a state takes as long as a forward, learning from nothing costs little, and next to nothing later."""
    it = Pace(paced(8, 1))
    states, spent, _ = run(it, 100, lambda amount: float(amount.states), right=0.2)
    assert spent / 100 < 1.2
    states, spent, _ = run(it, 1000, lambda amount: float(amount.states), right=0.2)
    assert states / spent > 0.97


def test_a_clock_that_changes_is_noticed() -> None:
    """Drafts are free, and then they are not."""
    it = Pace(paced(8, 0))
    assert max((found := run(it, 300, lambda amount: 1.0)[2]), key=lambda amount: found[amount]) == Amount(8, 0)
    run(it, 600, lambda amount: float(amount.states) ** 2)
    *_, chosen = run(it, 200, lambda amount: float(amount.states) ** 2)
    assert chosen[Amount(1, 0)] > 150


def test_first_rounds_that_compile_say_nothing() -> None:
    """Each amount takes a hundred times as long in its first two rounds."""
    it, seen = Pace(paced(4, 0)), dict[Amount, int]()

    def seconds(amount: Amount) -> float:
        seen[amount] = seen.get(amount, 0) + 1
        return 100.0 if seen[amount] <= 2 else 1.0

    *_, chosen = run(it, 100, seconds)
    assert max(chosen, key=lambda amount: chosen[amount]) == Amount(4, 0)


def test_what_was_learnt_stays_with_the_model(random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By mode and number of rows; where several processes run, nothing follows the clock; and a number stays a number."""
    mode = Mode(Static(), drafting=Drafting(8, 3, 1, paced=True))
    own = pace_of(random_model, mode, 2)
    assert pace_of(random_model, mode, 2) is own
    assert pace_of(random_model, mode, 3) is not own
    assert pace_of(random_model, Mode(Static(), drafting=Drafting(5, 3, 1)), 2) == Fixed(Amount(5, 1))
    assert pace_of(random_model, Mode(Static()), 2) == Fixed(Amount(1, 0))
    monkeypatch.setattr(pace.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(pace.dist, "get_world_size", lambda: 2)
    assert pace_of(random_model, mode, 2) == Fixed(Amount(4, 1))


class Scripted:
    """Amounts in turn, whatever rounds take; notes what it is taught."""

    def __init__(self, amounts: tuple[Amount, ...]) -> None:
        self.amounts: Iterator[Amount] = cycle(amounts)
        self.taught: list[tuple[Amount, int, list[int], int]] = []

    def choose(self) -> Amount:
        return next(self.amounts)

    def learn(self, amount: Amount, width: int, passed: list[int], rows: int, seconds: float) -> None:
        assert seconds > 0
        self.taught.append((amount, width, passed, rows))


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
)


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
    assert len(paces) > 1, "each size of the batch has its own"
    taught = [lesson for each in paces for lesson in each.taught]
    assert {amount for amount, *_ in taught} == set(amounts)
    assert all(len(passed) == width <= amount.states and max(passed) <= rows for amount, width, passed, rows in taught if rows)
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
