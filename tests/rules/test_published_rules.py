"""Reveal rules from papers, by hand: from a few odds which columns, and what a memory changes about the next step."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from modeling_mrp.generate.option_table import PUBLISHED
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.rules.memory import BoundedAdaptive, Coherent, Credit, Klass, SlowFast, divergence
from modeling_mrp.rules.published import (
    ConfidenceAdaptive,
    EBSampler,
    EosRejection,
    FastDLLM,
    Hierarchy,
    LocalLeap,
    Prophet,
    ascending,
    factor_thresholds,
    runs,
)
from modeling_mrp.rules.reveal import Columns, RevealRule, logit
from modeling_mrp.rules.state import Scores, State

M, EOS = 60, 9


def state(ids: Sequence[int], step: int = 0, start: int = 8) -> State:
    """A state of a block without an end."""
    free = tuple(column for column, one in enumerate(ids) if one == M)
    return State((start, tuple(ids)), free, len(ids), len(free), step)


def empty(size: int, step: int = 0, start: int = 8) -> State:
    return state([M] * size, step, start)


def says(p: Sequence[float], token: Sequence[int] = (), entropy: Sequence[float] | None = None) -> Scores:
    """Confidences as probabilities, of tokens 10, 11, ... unless others are given."""
    return Scores(list(token or range(10, 10 + len(p))), [logit(one) for one in p], None if entropy is None else list(entropy))


def revealed(rule: RevealRule, at: State, scores: Scores, memo: Any = None) -> Columns:
    return rule.reveal(at, scores, memo)[0]


# ------------------------------------------------------------------------------------------------------ of one state


@pytest.mark.parametrize(
    ("factor", "p", "where"),
    [
        (1.0, [0.2, 0.8, 0.1, 0.7], (1, 3)),  # the second needs 1 - 1/3, the third 1 - 1/4
        (1.0, [0.76, 0.8, 0.1, 0.77], (0, 1, 3)),  # the fourth 1 - 1/5
        (1.0, [0.76, 0.81, 0.80, 0.81], (1, 2, 3)),
        (1.0, [0.80001, 0.81, 0.80001, 0.81], (0, 1, 2, 3)),
        (1.0, [0.6, 0.1, 0.2, 0.65], (3,)),  # the first always goes
        (0.25, [0.9, 0.95, 0.93, 0.1], (1, 2)),  # the second needs 1 - 0.25/3 = 0.917, the third 1 - 0.25/4 = 0.9375
        (5.0, [0.01, 0.02, 0.03, 0.04], (0, 1, 2, 3)),
    ],
)
def test_fast_dllm(factor: float, p: list[float], where: Columns) -> None:
    assert revealed(FastDLLM(factor_thresholds(4, factor)), empty(4), says(p)) == where


@pytest.mark.parametrize(
    ("gamma", "entropy", "where"),
    [
        (0.625, [0.5, 0.1, 0.2, 0.3], (0, 1, 2, 3)),  # 1.1 - 0.5 = 0.6
        (0.5, [0.5, 0.1, 0.2, 0.3], (1, 2, 3)),
        (0.25, [0.5, 0.125, 0.125, 9.0], (0, 1, 2)),
        (0.0, [0.5, 0.1, 0.2, 0.3], (1,)),
        (0.0, [0.5, 0.0, 0.0, 0.3], (1, 2, 3)),  # what is certain adds nothing
    ],
)
def test_eb_sampler(gamma: float, entropy: list[float], where: Columns) -> None:
    assert revealed(EBSampler(gamma), empty(4), says([0.5] * 4, entropy=entropy)) == where


def test_runs() -> None:
    assert list(runs((0, 1, 2))) == [(0, 1, 2)]
    assert list(runs((1, 3, 4, 7))) == [(1,), (3, 4), (7,)]


@pytest.mark.parametrize(
    ("ids", "p", "where"),
    [
        ([M, M, M, M], [0.5, 0.7, 0.6, 0.5], (1,)),  # one run, its best
        ([M, M, 5, M], [0.5, 0.7, 1.0, 0.41], (1, 3)),
        ([M, M, 5, M], [0.5, 0.7, 1.0, 0.39], (1,)),  # not above the low threshold
        ([M, M, 5, M], [0.2, 0.3, 1.0, 0.1], (1,)),  # none is: the surest
        ([M, M, M, M], [0.95, 0.97, 0.6, 0.92], (0, 1, 3)),
    ],
)
def test_hierarchy(ids: list[int], p: list[float], where: Columns) -> None:
    assert revealed(Hierarchy(logit(0.9), logit(0.4)), state(ids), says(p)) == where


@pytest.mark.parametrize(
    ("p", "where"),
    [
        ([0.8, 0.7, 0.95, 0.8, 0.1, 0.1, 0.76, 0.8], (0, 2, 3, 6)),  # four to the right of column 2, not five
        ([0.8, 0.7, 0.85, 0.8, 0.1, 0.1, 0.76, 0.8], (2,)),  # no anchor
        ([0.1, 0.1, 0.95, 0.1, 0.1, 0.92, 0.76, 0.8], (2, 5, 6, 7)),
    ],
)
def test_local_leap(p: list[float], where: Columns) -> None:
    assert revealed(LocalLeap(logit(0.9), logit(0.75)), empty(8), says(p)) == where


def test_cad() -> None:
    rule = ConfidenceAdaptive(logit(0.8), frozenset([EOS]))
    assert revealed(rule, empty(6), says([0.9, 0.95, 0.85, 0.99, 0.97, 0.5])) == (0, 1, 3, 4)  # four at most
    assert revealed(rule, empty(6), says([0.7, 0.6, 0.5, 0.4, 0.3, 0.2])) == (0,)
    late = [10, EOS, EOS, EOS]
    assert revealed(rule, empty(4), says([0.5, 0.9, 0.95, 0.9], late)) == (0,)
    assert revealed(rule, state([M, 5, M, M]), says([0.5, 0.9, 0.95, 0.9], late)) == (0,)  # a quarter is there
    assert revealed(rule, state([M, 5, 5, M]), says([0.5, 0.9, 0.95, 0.9], late)) == (3,)  # half of it
    assert revealed(rule, empty(4), says([0.3, 0.9, 0.95, 0.7], [EOS] * 4)) == (1, 2)  # nothing else is left


def test_ascending() -> None:
    assert [ascending(size) for size in (1, 2, 4, 8, 16, 32)] == [
        *((1,), (2,), (1, 3), (1, 2, 5), (1, 2, 4, 9), (1, 2, 4, 8, 17))
    ]


def test_eoser() -> None:
    """Of eight in three steps an eos counts with 0.01 + 0.99 (2^(i + 1) - 1) / 8: 0.134, 0.381, 0.876."""
    rule = EosRejection(ascending(8), frozenset([EOS]))
    p, token = [0.1, 0.13, 0.95, 0.3, 0.05, 0.36, 0.2, 0.01], [10, 11, EOS, 13, 14, 15, 16, 17]
    assert revealed(rule, empty(8), says(p, token)) == (5,)  # 0.95 * 0.134 = 0.127
    assert revealed(rule, empty(8, step=1), says(p, token)) == (2, 5)  # 0.95 * 0.381 = 0.362
    assert revealed(rule, empty(8, step=2), says(p, token)) == (1, 2, 3, 5, 6)
    assert revealed(EosRejection(ascending(8)), empty(8), says(p, token)) == (2,)


def test_prophet() -> None:
    """The mean log-odds has to be 7.5, 5 and 2.5 by thirds of the steps."""
    rule = Prophet((1,) * 6)
    at_5 = Scores([10, 11, 12], [4.0, 5.0, 6.0])
    assert [revealed(rule, empty(3, step), at_5) for step in range(6)] == [(2,), (2,), *[(0, 1, 2)] * 4]
    assert [revealed(rule, empty(1, step), Scores([10], [2.4])) for step in (0, 5)] == [(0,), (0,)]
    assert revealed(rule, empty(3, 5), Scores([10, 11, 12], [2.0, 2.0, 3.4])) == (2,)
    assert revealed(rule, empty(3, 5), Scores([10, 11, 12], [2.0, 2.0, 3.6])) == (0, 1, 2)
    assert revealed(rule, empty(3), Scores([10, 11, 12], [7.0, 7.0, 8.5])) == (0, 1, 2)


# ---------------------------------------------------------------------------------------------------- with a memory


def test_bacd() -> None:
    """0.7 at first: what is as sure as the surest. Then the mean of the block's reveals: 0.7, (0.7 + 0.8 + 0.75) / 3 = 0.75."""
    rule = BoundedAdaptive(0.9, 0.6)
    where, memo = rule.reveal(empty(5), says([0.7, 0.65, 0.5, 0.6, 0.1]), None)
    assert where == (0,)
    where, memo = rule.reveal(state([10, M, M, M, M], 1), says([1, 0.8, 0.75, 0.69, 0.1]), memo)
    assert where == (1, 2)
    assert memo == (8, 3, pytest.approx(2.25))
    assert revealed(rule, state([10, 11, 12, M, M], 2), says([1, 1, 1, 0.74, 0.76]), memo) == (4,)
    assert revealed(rule, empty(5, start=16), says([0.5, 0.62, 0.1, 0.1, 0.61]), memo) == (1,)  # another block
    assert revealed(rule, empty(5), says([0.92, 0.99, 0.97, 0.5, 0.1])) == (0, 1, 2)  # no more than 0.9 is asked for
    low = rule.reveal(empty(5), says([0.3, 0.2, 0.1, 0.1, 0.1]), None)[1]
    assert revealed(rule, state([10, M, M, M, M], 1), says([1, 0.5, 0.61, 0.62, 0.1]), low) == (2, 3)  # and no less than 0.6


def test_slow_fast() -> None:
    """Estimates of the end: 1, 6, 3, 5 and 4, which settles it: columns up to there are finished, then the rest."""
    rule = SlowFast(logit(0.9), logit(0.3))
    where, memo = rule.reveal(empty(6), says([0.5, 0.2, 0.1, 0.1, 0.1, 0.1]), None)
    assert (where, memo) == ((0,), (8, 0, 0, 1, 1))
    where, memo = rule.reveal(state([10, M, M, M, M, M], 1), says([1, 0.5, 0.32, 0.1, 0.1, 0.95]), memo)
    assert (where, memo) == ((5,), (8, 0, 0, 2, 6))
    where, memo = rule.reveal(state([10, M, M, M, M, 15], 2), says([1, 0.5, 0.32, 0.1, 0.1, 1]), memo)
    assert (where, memo) == ((1,), (8, 0, 0, 3, 3))
    at = state([10, 11, M, M, M, 15], 3)
    where, memo = rule.reveal(at, says([1, 1, 0.32, 0.1, 0.95, 1]), memo)
    assert (where, memo) == ((4,), (8, 0, 0, 4, 5))
    where, memo = rule.reveal(state([10, 11, M, M, 14, 15], 4), says([1, 1, 0.32, 0.31, 1, 1]), memo)
    assert (where, memo) == ((2,), (8, 0, 4, 5, 4))  # 5 and 4 differ by one
    where, memo = rule.reveal(state([10, 11, 12, M, 14, M], 5), says([1, 1, 1, 0.1, 1, 0.99]), memo)
    assert (where, memo) == ((3,), (8, 0, 4, 5, 4))  # of the span alone
    where, memo = rule.reveal(state([10, 11, 12, 13, 14, M], 6), says([1, 1, 1, 1, 1, 0.1]), memo)
    assert (where, memo) == ((5,), (8, 4, 0, 1, 5))  # anew from its end
    assert revealed(rule, empty(6, start=14), says([0.1, 0.1, 0.1, 0.1, 0.1, 0.2]), memo) == (5,)  # another block


def test_slow_fast_gives_up_exploring() -> None:
    """Estimates that jump between 6 and 2: behind the sixth step the mean of the last two, 4, is taken."""
    rule, memo = SlowFast(logit(0.9), logit(0.3)), None
    for step in range(6):
        where, memo = rule.reveal(empty(6, step), says([0.2, 0.4, 0.1, 0.1, 0.1, 0.1 if step % 2 else 0.5]), memo)
        assert where == ((1,) if step % 2 else (5,))
    assert memo == (8, 0, 4, 6, 2)


def test_ccd() -> None:
    rule = Coherent()
    p = [0.9, 0.5, 0.6, 0.7, 0.8, 0.1]
    where, memo = rule.reveal(empty(6), says(p), None)
    assert (where, memo) == ((0,), (8, ((4, 14), (3, 13), (2, 12), (1, 11))))  # it knows nothing yet: the surest
    after = state([10, M, M, M, M, M], 1)
    assert revealed(rule, after, says([1, 0.5, 0.6, 0.7, 0.8, 0.1]), memo) == (1, 2, 3, 4)
    assert revealed(rule, after, says([1, 0.5, 0.6, 0.7, 0.8, 0.1], [10, 11, 12, 33, 14, 15]), memo) == (1, 2, 4)
    assert revealed(rule, after, says([1, 0.5, 0.6, 0.7, 0.8, 0.9]), memo) == (2, 3, 4)  # 5 is new, 1 no more among four
    assert revealed(rule, after, says([1, 0.5, 0.6, 0.7, 0.8, 0.9], [10, 31, 32, 33, 34, 35]), memo) == (5,)
    assert revealed(rule, empty(6, start=16), says(p), memo) == (0,)


def test_credit() -> None:
    """A credit of p^0.2 adds 0.7 log(1 + credit) to the odds; it decays to 0.8 of itself, and is lost with the token."""
    rule = Credit(logit(0.9))
    p = 0.85**0.2  # 0.968: 0.7 log(1.968) = 0.474, and log(0.85 / 0.15) + 0.474 = 2.209 is over log 9 = 2.197
    assert logit(0.85) + 0.7 * math.log(1 + p) > logit(0.9) > logit(0.84) + 0.7 * math.log(1 + 0.84**0.2)
    where, memo = rule.reveal(empty(3), says([0.85, 0.84, 0.9]), None)
    assert where == (0, 2)
    where, memo = rule.reveal(empty(3), says([0.5, 0.75, 0.7]), None)
    assert where == (1,)
    assert memo == (8, tuple((c, 10 + c, pytest.approx(one**0.2)) for c, one in enumerate((0.5, 0.75, 0.7))))
    # 0.8 * 0.7^0.2 + 0.8^0.2 = 1.701 adds 0.695 to log(0.8 / 0.2) = 1.386: not enough alone, but the surest stays ahead
    after = state([M, 11, M], 1)
    assert revealed(rule, after, says([0.81, 1, 0.82]), memo) == (2,)
    assert revealed(rule, after, says([0.83, 1, 0.83]), memo) == (0, 2)  # log(0.83 / 0.17) + 0.68 = 2.27
    assert revealed(rule, after, says([0.83, 1, 0.83], [10, 11, 99]), memo) == (0,)  # another token: no credit of before
    assert revealed(rule, state([M, 11, M], 1, start=16), says([0.83, 1, 0.83]), memo) == (0,)


def test_klass() -> None:
    """Sure and unchanged for two steps; the divergence of 0.93 from 0.95 is 0.004, of 0.93 from 0.99 0.078."""
    assert divergence(logit(0.93), logit(0.95)) == pytest.approx(0.93 * math.log(0.93 / 0.95) + 0.07 * math.log(0.07 / 0.05))
    assert divergence(math.inf, math.inf) == 0
    rule = Klass(logit(0.9))
    p = [0.93, 0.95, 0.93, 0.96, 0.8]
    where, memo = rule.reveal(empty(5), says(p), None)
    assert where == (3,)
    at = state([M, M, M, 13, M], 1)
    where, memo = rule.reveal(at, says([0.95, 0.96, 0.99, 1, 0.81]), memo)
    assert where == (2,)  # once is not enough
    assert memo is not None
    assert [stable for _, _, _, stable in memo[1]] == [1, 1, 0, 1]
    at = state([M, M, 12, 13, M], 2)
    steady = says([0.93, 0.97, 1, 1, 0.82])
    assert revealed(rule, at, steady, memo) == (0, 1)  # the last one is stable, and not sure
    assert revealed(rule, at, says([0.93, 0.97, 1, 1, 0.82], [99, 11, 12, 13, 14]), memo) == (1,)
    assert revealed(rule, at, says([0.99, 0.97, 1, 1, 0.82]), memo) == (1,)
    assert revealed(rule, at, says([0.6, 0.5, 1, 1, 0.82]), memo) == (4,)  # none: the surest
    assert revealed(rule, state([M, M, 12, 13, M], 2, start=16), steady, memo) == (1,)


# ------------------------------------------------------------------------------------------------------- all of them


def rule_of(name: str, **options: Any) -> RevealRule:
    config = MRPGenerationConfig(decoding=name, eos_token_id=[EOS], **options)
    config.check(8, has_head=False)
    return config.mode(8).rule


def test_published_numbers() -> None:
    """What the options are where none is set."""
    high = logit(0.9)
    assert {name: rule_of(name) for name in PUBLISHED} == {
        "fast_dllm": FastDLLM(factor_thresholds(8, 1.0)),
        "eb_sampler": EBSampler(0.35),
        "hierarchy": Hierarchy(high, logit(0.4)),
        "local_leap": LocalLeap(high, logit(0.75), 4),
        "cad": ConfidenceAdaptive(high, frozenset([EOS]), 4),
        "eoser": EosRejection((1, 2, 5), frozenset([EOS]), 0.01),
        "prophet": Prophet((1,) * 8),
        "bacd": BoundedAdaptive(0.9, 0.6),
        "slow_fast": SlowFast(high, logit(0.3), 6),
        "ccd": Coherent(4),
        "credit": Credit(high, 0.7, 0.2, 0.8),
        "klass": Klass(high, 0.01, 2),
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_guesses_are_sets_of_what_may_be_revealed(name: str) -> None:
    """Of each rule: as many as asked for at most, distinct, one column at least in each, with a chance; whatever the odds."""
    rule = rule_of(name)
    for step, free in ((0, (0, 1, 2, 3, 4, 5, 6, 7)), (3, (1, 4, 5)), (7, (6,))):
        at = State((8, tuple([M if column in free else 5 for column in range(8)])), free, 8, len(free), step)
        for odds in (
            [3.0, -1.0, 0.5, 9.0, 2.0, -3.0, 1.0, 0.0],
            [math.inf, -math.inf] * 4,
            [0.0] * 8,
            [9.0 + c for c in range(8)],
        ):
            for count in (1, 2, 5):
                guesses = rule.likely(at, odds, count)
                assert 1 <= len(guesses) <= count
                assert len({where for where, _ in guesses}) == len(guesses)
                assert all(
                    where and where == tuple(sorted({*where} & {*free})) and 0 <= chance <= 1 for where, chance in guesses
                )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_sure_block_is_guessed_as_it_is_revealed(name: str) -> None:
    """Of estimates that are right, the first guess is what the rule does behind a few steps that said the same."""
    rule, memo, ids, step, right = rule_of(name), None, [M] * 8, 0, 0
    odds = [5.0, 1.0, 4.0, -1.0, 6.0, 2.5, 3.0, 0.0]
    scores = Scores(list(range(10, 18)), odds, [0.01 * (9 - one) for one in odds])
    while M in ids:
        at = state(ids, step)
        where, memo = rule.reveal(at, scores, memo)
        right += rule.likely(at, odds, 3)[0][0] == where
        for column in where:
            ids[column] = scores.token[column]
        step += 1
    assert right >= step - 2
