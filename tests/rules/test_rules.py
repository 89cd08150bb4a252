"""What a row decides, without a model: what rules reveal and guess, and that drafts lose nothing. `test_fuzz.py` holds drafts
and acceptance, with a model, against the slow reference."""

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from handmade import EOS, M, row, says, state
from reference_rules import Step, chosen_by

from modeling_mrp.generate.option_table import TARGETS
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.rules.draft import Node, accept
from modeling_mrp.rules.published import (
    SlowFast,
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
)
from modeling_mrp.rules.state import Scores

# -------------------------------------------------------------------------------------------------- what rules reveal


def rule_of(name: str, block: int = 8, **options: Any) -> tuple[RevealRule, MRPGenerationConfig]:
    """A rule and its options, the published numbers where none is given."""
    config = MRPGenerationConfig(decoding=name, eos_token_id=[EOS], **options)
    config.check(block, has_head=False)
    return config.mode(block).rule, config


def random_options(rng: random.Random, block: int) -> dict[str, Any]:
    """Options of rules, some left as they are."""
    drawn = {
        "confidence_threshold": rng.choice((0.0, 0.3, 0.6, 0.8, 1.0)),
        "low_threshold": rng.choice((0.0, 0.1, 0.5)),
        "entropy_threshold": rng.choice((0.0, 0.2, 1.5, 4.0)),
        "factor": rng.choice((0.25, 2.0, 9.0)),
        "denoising_steps": rng.randint(1, block),
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.5}


def random_scores(rng: random.Random, block: int, before: Scores | None, coarse: bool) -> Scores:
    """Of each column a token and its log-odds, mostly near those of the step before; with equals where they are coarse."""
    calm, least = rng.choice((0.0, 0.05, 0.3, 3.0)), rng.choice((-4, -4, 0))
    fresh = [rng.choice((math.inf, -math.inf)) if rng.random() < 0.02 else least + rng.uniform(0, 10) for _ in range(block)]
    token = [rng.choice((EOS, *range(20, 26))) for _ in range(block)]
    if before is not None:
        kept = [rng.random() < 0.8 for _ in range(block)]
        fresh = [
            was + rng.uniform(-calm, calm) if keep else new for was, new, keep in zip(before.odds, fresh, kept, strict=True)
        ]
        token = [was if keep else new for was, new, keep in zip(before.token, token, kept, strict=True)]
    entropy = [rng.choice((0.0, rng.uniform(0, 1.5), rng.uniform(0, 0.1))) for _ in range(block)]
    return Scores(token, [round(one) + 0.3 for one in fresh] if coarse and math.inf not in map(abs, fresh) else fresh, entropy)


def pick_of(scores: Scores, start: int, column: int) -> Any:
    """A column as the slow rules are told of it."""
    odds = scores.odds[column]
    assert scores.entropy is not None
    told = {"log_odds": odds, "logprob": log_sigmoid(odds), "entropy": scores.entropy[column]}
    return SimpleNamespace(position=start + column, token=scores.token[column], **told)


@pytest.mark.parametrize("name", TARGETS)
def test_a_rule_reveals_what_its_definition_says(name: str) -> None:
    """Of 400 texts of two blocks, step by step: the columns of the slow rule, which knows no memo but all earlier steps."""
    rng = random.Random(name)
    for trial in range(400):
        block = rng.choice((1, 2, 4, 6, 8, 12))
        rule, options = rule_of(name, block, **random_options(rng, block))
        slow = SimpleNamespace(**{one: getattr(options, one) for one in vars(options)}, eos_ids=[EOS])
        memo, past, coarse = None, list[Step](), name != "bacd" and rng.random() < 0.3  # a mean's log-odds are rounded
        for start in (block, 2 * block):
            ids, number, scores = [rng.choice((M, M, M, 30)) for _ in range(block)], 0, None
            while (at := state(ids, start, number)).free:
                scores = random_scores(rng, block, scores, coarse)
                told = Step(start, block, at.masks, number, [pick_of(scores, start, column) for column in at.free])
                where, memo = rule.reveal(at, scores, memo)
                told.chosen = chosen_by(name, told, past, slow)
                assert [start + column for column in where] == [one.position for one in told.chosen], (trial, number, ids)
                past.append(told)
                for column in where if rng.random() < 0.8 else where[:1]:  # as bans leave it
                    ids[column] = scores.token[column]
                number += 1


def test_slow_fast_gives_up_exploring() -> None:
    """Estimates that jump between 6 and 2: behind the sixth step the mean of the last two, 4, is taken."""
    rule, memo = SlowFast(logit(0.9), logit(0.3)), None
    for step in range(6):
        odds = [logit(one) for one in (0.2, 0.4, 0.1, 0.1, 0.1, 0.1 if step % 2 else 0.5)]
        where, memo = rule.reveal(state([M] * 6, 8, step), says(odds, range(20, 26)), memo)
        assert where == ((1,) if step % 2 else (5,))
    assert memo == (8, 0, 4, 6, 2)


def test_log_odds() -> None:
    assert (logit(0), logit(1), logit(0.5)) == (-math.inf, math.inf, 0)
    assert logit(0.9) == pytest.approx(math.log(9))
    for odds in (-800.0, -3.0, 0.0, 3.0, 40.0, 800.0, math.inf, -math.inf):
        p = 1 / (1 + math.exp(-odds)) if odds > -700 else 0
        assert log_sigmoid(odds) == pytest.approx(odds if p == 0 else math.log(p), abs=1e-12)
    assert log_sigmoid(40.0) == pytest.approx(-math.exp(-40), rel=1e-9)  # not 0


# --------------------------------------------------------------------------------------------------- what they guess

EMPTY = state([M, M, M, M])
SOME = state([M, 5, M, M])


def weights(*values: float) -> list[float]:
    """Log-odds whose power `ORDER_SHARPNESS` is in these proportions."""
    return [math.log(value) / ORDER_SHARPNESS for value in values]


def approx(guesses: Guesses) -> list[tuple[Columns, Any]]:
    return [(where, pytest.approx(chance)) for where, chance in guesses]


def test_static_and_sequential_guesses() -> None:
    """One column alone: by the power of its odds. Of several all but the last are the surest. From the left there is one set,
    whose chance orders nothing; so it is where one is asked for."""
    odds = weights(1, 6, 2, 1)
    one, two = Static((1, 1, 1, 1)), Static((2, 2))
    assert one.likely(EMPTY, odds, 3) == approx([((1,), 0.6), ((2,), 0.2), ((0,), 0.1)])
    assert one.likely(SOME, odds, 2) == approx([((2,), 0.5), ((0,), 0.25)])
    assert one.likely(SOME, odds, 1) == [((2,), 1.0)]
    assert two.likely(EMPTY, odds, 3) == approx([((1, 2), 0.5), ((0, 1), 0.25), ((1, 3), 0.25)])
    assert Static((4,)).likely(SOME, odds, 3) == [((0, 2, 3), 1.0)]
    assert one.likely(EMPTY, [math.inf, 0, 0, 0], 2) == approx([((0,), 1.0), ((1,), 0.0)])
    assert Sequential((1,)).likely(SOME, [0, 9, 9, 9], 3) == [((0,), 1.0)]
    assert Sequential((2,)).likely(SOME, [0, 9, math.log(3), 9], 3) == [((0, 2), 1.0)]


def test_dynamic_guesses() -> None:
    """Two are over tau. Odds of 2 |gap| for each but the surest: of the doubts the smallest changes sides first. Where none but
    the surest is over it, it is as uncertain which one that is; in turn another joins it, or is it instead."""
    rule, odds = Dynamic(1.0), [3.0, 1.5, 0.75, -1.0]
    certain = math.prod(1 / (1 + math.exp(-2 * gap)) for gap in (0.5, 0.25, 2.0))
    assert rule.likely(EMPTY, odds, 3) == approx(
        [((0, 1), certain), ((0, 1, 2), certain * math.exp(-0.5)), ((0,), certain * math.exp(-1.0))]
    )
    assert rule.likely(EMPTY, odds, 1) == [((0, 1), 1.0)]
    assert [where for where, _ in rule.likely(EMPTY, odds, 9)] == [(0, 1), (0, 1, 2), (0,), (0, 1, 3)]
    rule, odds = Dynamic(5.0), weights(1, 6, 2, 1)
    certain = math.prod(1 / (1 + math.exp(-2 * (5 - odds[column]))) for column in (0, 2, 3))
    both = certain * math.exp(-2 * (5 - odds[2]))
    wanted = [((1,), certain * 0.6), ((1, 2), both), ((2,), certain * 0.2), ((0, 1), certain * math.exp(-2 * 5))]
    assert rule.likely(EMPTY, odds, 4) == approx(wanted)
    assert rule.likely(EMPTY, odds, 3) == approx(wanted[:3])
    assert Dynamic(math.inf).likely(state([5, 5, M, 5]), [0, 0, math.inf, 0], 3) == approx([((2,), 1.0)])


def test_entropy_guesses() -> None:
    """Even odds are estimated to hold log 2 + 1 nats: a bound of 4 has room for two of them. One more or less is 0.35 times as
    likely."""
    assert EntropyBound(4.0).likely(EMPTY, [0.0] * 4, 9) == approx(
        [((0, 1), 1.0), ((0, 1, 2), 0.35), ((0,), 0.35), ((0, 1, 2, 3), 0.35**2)]
    )
    assert EntropyBound(1.0).likely(EMPTY, weights(1, 6, 2, 1), 5) == approx(
        [((1,), 0.6), ((1, 2), 0.35 * 0.6), ((2,), 0.2), ((0, 1, 2), 0.35**2 * 0.6), ((0,), 0.1)]
    )
    sure = 1 / (1 + math.exp(-2.0))
    nats = -sure * math.log(sure) - (1 - sure) * math.log(1 - sure) + 2 * (1 - sure)
    for bound, room in ((2 * nats - 1e-9, 1), (2 * nats + 1e-9, 2)):
        assert len(EntropyBound(bound).likely(EMPTY, [2.0] * 4, 1)[0][0]) == room


@pytest.mark.parametrize("name", TARGETS)
def test_guesses_are_sets_of_what_may_be_revealed(name: str) -> None:
    """Of each rule: as many as asked for at most, distinct, one column at least in each, with a chance; whatever the odds. And
    where estimates are right, the first guess is what the rule does, behind a few steps that said the same."""
    rule, _ = rule_of(name)
    right = [5.0, 1.0, 4.0, -1.0, 6.0, 2.5, 3.0, 0.0]
    for step, free in ((0, (0, 1, 2, 3, 4, 5, 6, 7)), (3, (1, 4, 5)), (7, (6,))):
        at = state([M if column in free else 5 for column in range(8)], 8, step)
        for odds in (right, [math.inf, -math.inf] * 4, [0.0] * 8, [9.0 + c for c in range(8)]):
            for count in (1, 2, 5):
                guesses = rule.likely(at, odds, count)
                assert 1 <= len(guesses) <= count
                assert len({where for where, _ in guesses}) == len(guesses)
                for where, chance in guesses:
                    assert where == tuple(sorted({*where} & {*free})) != ()
                    assert 0 <= chance <= 1
    memo, ids, step, found = None, [M] * 8, 0, 0
    scores = Scores(list(range(10, 18)), right, [0.01 * (9 - one) for one in right])
    while M in ids:
        at = state(ids, 8, step)
        where, memo = rule.reveal(at, scores, memo)
        found += rule.likely(at, right, 3)[0][0] == where
        for column in where:
            ids[column] = scores.token[column]
        step += 1
    assert found >= step - 2


# ----------------------------------------------------------------------------------------------- what a row remembers


def test_what_is_remembered_of_a_round() -> None:
    """Neither clean states nor what looks at one, whose scores depend on it."""
    of = row(width=4)
    of.state = state([10, 11, 12, M])
    scored = [(of.state, -1), (state([10, 11, 12, 13]), -1), (state([M] * 4, 8), 1)]
    nodes = [Node(at, parent, None) for at, parent in scored]
    frontier, clean = accept(of, Static((1, 1, 1, 1)), nodes, [says([0] * 4), says([0] * 4), says([1, 2, 3, 4])], True)
    assert frontier is not None
    assert (clean, frontier.state.key, frontier.where) == ([1], (8, (M,) * 4), (3,))
    assert set(of.memory) == {(4, (10, 11, 12, M))}
