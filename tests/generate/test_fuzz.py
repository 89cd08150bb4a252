"""Random decodes: texts, steps, log-probabilities and counts are those of the slow reference, whatever the batch and the mode.

In float64 two tokens or positions whose scores agree to the last bits do not come up, so there is no false alarm: a
difference is a bug.
"""

import random
from typing import Any

import pytest
from helpers import close

from modeling_mrp.generate import generation
from modeling_mrp.generate.budget import Amount, budget_of
from modeling_mrp.networks import networks
from tests.random_cases import Case, SlowRow, assert_same_text, of_slow

SEEDS, CASES = 48, 6
SIZES = (1, 1, 2, 3, 5)
TABLES = ("accepted_lengths", "offered_at_depth", "accepted_at_depth")


class AnyBudget:
    """Chooses at random how much each round drafts, so that the head rests and comes back at any time."""

    def __init__(self, rng: random.Random, states: int, passes: int) -> None:
        self.rng, self.states, self.passes = rng, states, passes

    def choose(self, rows: Any) -> Amount:
        states = self.rng.choice((1, self.rng.randint(1, self.states)))
        passes = self.rng.randint(0, min(self.passes, states - 1))
        return Amount(states, passes, states == 1 and self.rng.random() < 0.5)

    def learn(self, *_: Any) -> None: ...


def assert_same_counts(out: Any, place: int, told: SlowRow, fresh: bool, case: Any) -> None:
    """Compare what a row's drafts came to, by depth too, and what it cost where it began without a cache."""
    stats = out.stats
    expected = {"drafted": told.drafted, "accepted": told.accepted, "revoked": len(told.revocations)}
    if fresh:
        expected |= {"row_forwards": told.row_forwards, "row_head_forwards": told.row_head_forwards}
    assert {name: getattr(stats, name)[place].item() for name in expected} == expected, case
    assert [(column, token) for row, column, token in stats.revocations.tolist() if row == place] == told.revocations, case
    if not told.lengths:
        return
    lengths, offered, accepted = (getattr(stats, name)[place].tolist() for name in TABLES)
    assert lengths == [told.lengths.count(length) for length in range(len(lengths))], case
    assert offered == [sum(most > k for most, _ in told.depths) for k in range(len(offered))], case
    assert accepted == [sum(depth > k for _, depth in told.depths) for k in range(len(accepted))], case


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_decodes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is decoded fast and each of its rows slowly, then some go on from its cache, in another mode."""
    rng = random.Random(seed)
    monkeypatch.setattr(networks, "PREFILL_CHUNK", chunk := rng.choice((8, networks.PREFILL_CHUNK)))

    def any_budget(model: Any, mode: Any, states: int, passes: int, paced: bool) -> Any:
        return AnyBudget(rng, states, passes) if paced else budget_of(model, mode, states, passes, paced)

    monkeypatch.setattr(generation, "budget_of", any_budget)
    for trial in range(CASES):
        case, past = Case(f"{seed}/{trial}", SIZES), None
        while True:
            drafted = case.drafted() if rng.random() < 0.7 else {}
            counted = drafted.get("num_draft_states") != "auto"
            rows, out = case.decode(past_key_values=past, output_scores=True, **drafted)
            told = [case.by_reference(place, **(drafted if counted else {})) for place in range(len(rows))]
            name = (trial, case.mode, drafted, case.options, case.prompts, case.infill)
            for place, (row, slow) in enumerate(zip(rows, told, strict=True)):
                assert_same_text(row, of_slow(slow), name)
                for column, step in enumerate(slow.reveal_step):
                    if step >= 0:
                        close(out.scores[column][place], slow.drawn[len(case.prompts[place]) + column], 1e-9)
                if counted:
                    assert_same_counts(out, place, slow, past is None and chunk > 8, name)
            if rng.random() < 0.6 or case.model.config.block_size == 32:
                break
            past = out.past_key_values
            case.go_on([of_slow(slow) for slow in told], 60)
