"""What a row decides, without a model, at random against the slow rules and bans; what rules guess,
where the slow reference asks them. `test_fuzz.py` holds drafts, acceptance and refinement, with a
model, against the slow reference."""

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from modeling_mrp.generate.option_table import TARGETS
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.generate.refine import RereadRemask, refined
from modeling_mrp.rules.bans import Bans
from modeling_mrp.rules.costs import draft_sizes
from modeling_mrp.rules.draft import Node, accept, build_draft
from modeling_mrp.rules.published import SlowFast
from modeling_mrp.rules.reveal import ORDER_SHARPNESS, RevealRule, Static, log_sigmoid, logit
from modeling_mrp.rules.state import PendingReveal, Row, Scores
from tests.support.handmade import EOS, A, B, C, D, M, row, says, state
from tests.support.random_cases import SOME_VALUES, options_of_rules
from tests.support.reference import Row as SlowRow
from tests.support.reference_rules import Step, chosen_by

# --------------------------------------------------------------------------------------------------
# what rules reveal


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
    for name, option in options_of_rules().items():
        if name not in drawn:
            drawn[name] = rng.choice(SOME_VALUES[option.values])
    return {name: value for name, value in drawn.items() if rng.random() < 0.5}


def random_scores(rng: random.Random, block: int, before: Scores | None, coarse: bool) -> Scores:
    """Of each column a token and its log-odds, mostly near those of the step before; with equals
    where they are coarse."""
    calm, least = rng.choice((0.0, 0.05, 0.3, 3.0)), rng.choice((-4, -4, 0))
    fresh = [
        rng.choice((math.inf, -math.inf)) if rng.random() < 0.02 else least + rng.uniform(0, 10)
        for _ in range(block)
    ]
    token = [rng.choice((EOS, *range(20, 26))) for _ in range(block)]
    if before is not None:
        kept = [rng.random() < 0.8 for _ in range(block)]
        fresh = [
            was + rng.uniform(-calm, calm) if keep else new
            for was, new, keep in zip(before.log_odds, fresh, kept, strict=True)
        ]
        token = [
            was if keep else new for was, new, keep in zip(before.token, token, kept, strict=True)
        ]
    entropy = [rng.choice((0.0, rng.uniform(0, 1.5), rng.uniform(0, 0.1))) for _ in range(block)]
    return Scores(
        token,
        [round(one) + 0.3 for one in fresh]
        if coarse and math.inf not in map(abs, fresh)
        else fresh,
        entropy,
    )


def pick_of(scores: Scores, start: int, column: int) -> Any:
    """A column as the slow rules are told of it."""
    odds = scores.log_odds[column]
    assert scores.entropy is not None
    told = {"log_odds": odds, "logprob": log_sigmoid(odds), "entropy": scores.entropy[column]}
    return SimpleNamespace(position=start + column, token=scores.token[column], **told)


@pytest.mark.parametrize("name", TARGETS)
def test_a_rule_reveals_what_its_definition_says(name: str) -> None:
    """Of 400 texts of two blocks, step by step: the columns of the slow rule, which knows no memo
    but all earlier steps."""
    rng = random.Random(name)
    for trial in range(400):
        block = rng.choice((1, 2, 4, 6, 8, 12))
        rule, options = rule_of(name, block, **random_options(rng, block))
        slow = SimpleNamespace(
            **{one: getattr(options, one) for one in vars(options)}, eos_ids=[EOS]
        )
        # a mean's log-odds are rounded
        memo, past, coarse = None, list[Step](), name != "bacd" and rng.random() < 0.3
        for start in (block, 2 * block):
            ids, number, scores = [rng.choice((M, M, M, 30)) for _ in range(block)], 0, None
            while (at := state(ids, start, number)).free:
                scores = random_scores(rng, block, scores, coarse)
                told = Step(
                    start,
                    block,
                    at.masks,
                    number,
                    [pick_of(scores, start, column) for column in at.free],
                )
                where, memo = rule.reveal(at, scores, memo)
                told.chosen = chosen_by(name, told, past, slow)
                assert [start + column for column in where] == [
                    one.position for one in told.chosen
                ], (trial, number, ids)
                past.append(told)
                for column in where if rng.random() < 0.8 else where[:1]:  # as bans leave it
                    ids[column] = scores.token[column]
                number += 1


def test_slow_fast_gives_up_exploring() -> None:
    """Estimates that jump between 6 and 2: behind the sixth step the mean of the last two, 4, is
    taken."""
    rule, memo = SlowFast(logit(0.9), logit(0.3)), None
    for step in range(6):
        odds = [logit(one) for one in (0.2, 0.4, 0.1, 0.1, 0.1, 0.1 if step % 2 else 0.5)]
        where, memo = rule.reveal(state([M] * 6, 8, step), says(odds, range(20, 26)), memo)
        assert where == ((1,) if step % 2 else (5,))
    assert memo == (8, 0, 4, 6, 2)


# --------------------------------------------------------------------------------------------------
# what they guess


@pytest.mark.parametrize("name", TARGETS)
def test_guesses_are_sets_of_what_may_be_revealed(name: str) -> None:
    """Of each rule: as many as asked for at most, distinct, one column at least in each, with a
    chance; whatever the odds. And where estimates are right, the first guess is what the rule does,
    behind a few steps that said the same."""
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
        first = rule.likely(at, right, 3)[0][0]
        assert rule.likely(at, right, 1)[0][0] == first
        found += first == where
        for column in where:
            ids[column] = scores.token[column]
        step += 1
    assert found >= step - 2, (
        f"the first guess is the reveal in {found} of {step} steps: `likely` has to compare as "
        "`reveal` does, also equal numbers"
    )


# --------------------------------------------------------------------------------------------------
# what is drafted

ONE = Static((1, 1, 1, 1))


def drafting_row(odds: Sequence[float], at: Sequence[int] = (M,) * 4) -> Row:
    of = row()
    of.state, of.source = state(at), says(odds)
    return of


def ids_of(nodes: Sequence[Node]) -> list[list[int]]:
    return [list(node.state.ids) for node in nodes]


def test_orders_that_meet_add_up() -> None:
    """0.4, 0.3, 0.3 and no chance. Either order of columns 0 and 1 leads to both: 0.4 * 0.3 / 0.6 +
    0.3 * 0.4 / 0.7 = 0.371 is more than 0.3, the chance of column 2 alone, and what follows it all
    but certainly has the third."""
    of = drafting_row([*(math.log(value) / ORDER_SHARPNESS for value in (4, 3, 3)), -1e4])
    assert ids_of(build_draft(of, ONE, 5, 3, {})) == [
        [M] * 4,
        [A, M, M, M],
        [M, B, M, M],
        [A, B, M, M],
        [A, B, C, M],
    ]
    assert ids_of(build_draft(of, ONE, 4, 1, {})) == [
        [M] * 4,
        [A, M, M, M],
        [A, B, M, M],
        [A, B, C, M],
    ]


def test_a_state_that_was_scored_stands_for_what_it_leads_to() -> None:
    """[A, M, M, M] was scored and leads to [A, M, M, 33], this to [A, M, 42, 33]: no forward is
    spent on either."""
    of = drafting_row([4, 3, 2, 1])
    first, second = says([0, 1, 2, 3], [30, 31, 32, 33]), says([0, 1, 2, 0], [40, 41, 42, 43])
    for ids, said in (([A, M, M, M], first), ([A, M, M, 33], second)):
        of.memory[4, tuple(ids)] = (state(ids), said)
    nodes = build_draft(of, ONE, 3, 1, {})
    assert ids_of(nodes) == [[M] * 4, [A, M, 42, 33], [A, 41, 42, 33]]
    assert nodes[1].source is second
    assert nodes[1].state.step == 3


def test_how_many_states() -> None:
    """At each head pass of a round, and where nothing is drafted: behind a clean state the next
    block's first."""
    assert [draft_sizes(4, passes) for passes in (1, 2, 3, 9)] == [
        [3],
        [2, 3],
        [1, 2, 3],
        [1, 2, 3],
    ]
    assert [draft_sizes(8, 2), draft_sizes(8, 3), draft_sizes(2, 1)] == [[4, 7], [3, 5, 7], [1]]
    clean = drafting_row([0] * 4, [A, B, C, D])
    drafts = [ids_of(build_draft(clean, ONE, size, 3, {})) for size in (1, 2, 4)]
    assert drafts == [[[A, B, C, D]], *[[[A, B, C, D], [M] * 4]] * 2]


def test_what_is_remembered_of_a_round() -> None:
    """Neither clean states nor what looks at one, whose scores depend on it."""
    of = row(width=4)
    of.state = state([10, 11, 12, M])
    nodes = [
        Node(of.state, -1, None),
        Node(state([10, 11, 12, 13]), -1, None),
        Node(state([M] * 4, 8), 1, None),
    ]
    pending, clean = accept(
        of, ONE, nodes, [says([0] * 4), says([0] * 4), says([1, 2, 3, 4])], True
    )
    assert pending is not None
    assert (clean, pending.state.key, pending.columns) == ([1], (8, (M,) * 4), (3,))
    assert set(of.memory) == {(4, (10, 11, 12, M))}


def test_drafts_of_the_next_block_start_from_its_preview() -> None:
    """A preview takes the place of what is unlikely, and counts neither as a draft nor as scored;
    once the block's end is drafted, the next block's drafts start from it."""
    of = drafting_row([4, 3, 2, 1])
    nodes = build_draft(of, ONE, 9, 1, {}, previews=True)
    preview = nodes[-1]
    assert (preview.state.key, preview.parent, preview.is_preview) == ((8, (M,) * 4), 0, True)
    assert [node.is_preview for node in nodes] == [*[False] * (len(nodes) - 1), True]
    assert not any(node.is_preview for node in build_draft(of, ONE, 9, 1, {}))

    scores = [says([4, 3, 2, 1]) for _ in nodes]
    accept(of, ONE, [*nodes[:1], preview], scores[:2], True)
    assert of.counts.drafted == 0
    assert (8, (M,) * 4) not in of.memory
    assert of.preview[0] == (8, (M,) * 4)
    of.state, of.source = state([A, B, C, D]), None
    drafted = build_draft(of, ONE, 4, 1, {}, previews=True)
    assert [node.state.masks for node in drafted] == [0, 4, 3, 2]
    assert drafted[1].source is of.preview[1]
    of.state = state([A, B, C, M])
    of.state.end = 2  # an eos: there is no next block
    assert not any(node.is_preview for node in build_draft(of, ONE, 4, 1, {}, previews=True))


def test_what_was_drafted_behind_another_block_is_neither_remembered_nor_offered() -> None:
    """The path takes the first of two clean states; behind the second one a reveal was drafted."""
    of = row(width=4)
    of.state = state([A, B, C, M])
    nodes = [
        Node(of.state, -1, None),
        Node(state([A, B, C, D]), -1, None),
        Node(state([A, B, C, 14]), -1, None),
        Node(state([M] * 4, 8), 1, None),
        Node(state([A, M, M, M], 8), 2, None),
    ]
    pending, clean = accept(of, ONE, nodes, [says([1, 2, 3, 4])] * 5, True)
    assert pending is not None
    assert (clean, pending.state.key, pending.columns) == ([1], (8, (M,) * 4), (3,))
    assert set(of.memory) == {(4, (A, B, C, M))}
    assert (of.counts.drafted, of.counts.accepted) == (3, 1)
    assert of.counts.offered_at_depth == [1, *[0] * (len(of.counts.offered_at_depth) - 1)]


def test_a_remembered_state_on_the_path_counts_as_an_accepted_draft() -> None:
    """Without drafts [M, M, M, M] leads to [A, M, M, M], which the round before scored, and this to
    [A, B, M, M]."""
    of = drafting_row([4, 3, 2, 1])
    of.memory[4, (A, M, M, M)] = (state([A, M, M, M]), says([0, 3, 2, 1]))
    pending, clean = accept(of, ONE, [Node(of.state, -1, None)], [says([4, 3, 2, 1])], True)
    assert pending is not None
    assert (clean, pending.successor.ids) == ([], (A, B, M, M))
    assert (of.counts.drafted, of.counts.accepted, of.counts.lengths[2]) == (0, 1, 1)
    assert (of.counts.offered_at_depth, of.counts.accepted_at_depth) == (
        [1, *[0] * 6],
        [1, *[0] * 6],
    )


# --------------------------------------------------------------------------------------------------
# what is banned


def random_bans(rng: random.Random) -> tuple[Bans, Any, list[int]]:
    """Bans of three tokens, a slow row that has them, and a text of these with masks."""
    words = [
        [rng.randint(1, 3) for _ in range(rng.randint(1, 3))] for _ in range(rng.choice((0, 1, 3)))
    ]
    size, slow = rng.choice((0, 1, 2, 3)), object.__new__(SlowRow)
    slow.options = SimpleNamespace(bad_words_ids=words, no_repeat_ngram_size=size, eos_ids=[])
    slow.text, slow.given_end, slow.mask = [], 0, M
    return (
        Bans(tuple(map(tuple, words)), size),
        slow,
        rng.choices((1, 2, 3, M), (3, 3, 3, 4), k=rng.randint(1, 9)),
    )


def test_what_may_not_stand_where() -> None:
    """At a position, whatever stands there now: of tokens between nothing is known where they are
    masks. Of what a step may reveal at once the surest comes first, of equals the leftmost, each as
    if those before it stood there."""
    rng = random.Random(0)
    for _ in range(3000):
        bans, slow, text = random_bans(rng)
        for at in range(len(text)):
            assert bans.barred(text, at, M) == set(slow.barred(text, at)), (bans, text, at)
        start = rng.randrange(len(text))
        slow.step_of = {tuple(text): 0}
        token, odds = (rng.choices(range(1, 4), k=len(text) - start) for _ in range(2))
        masked = [at for at in range(start, len(text)) if text[at] == M]
        picks = [
            SimpleNamespace(position=at, token=token[at - start], log_odds=odds[at - start])
            for at in masked
        ]
        kept = tuple([pick.position - start for pick in slow.allowed(tuple(text), picks)])
        found = bans.allowed(text, start, tuple([at - start for at in masked]), token, odds, M)
        assert found == kept, (bans, text, token, odds)


def test_what_is_known_of_a_text() -> None:
    """The row's text with a state's block, and given tokens behind it; before it a clean block that
    is not text yet."""
    of = row([1, 2, 3, 4], 12, given=[M, M, M, M, M, M, 5, M])
    assert of.text_at(state([A, M, C, M])) == [1, 2, 3, 4, A, M, C, M, M, M, 5]
    assert of.text_at(state([M, M, 5, M], 8), state([A, B, C, D])) == [
        1,
        2,
        3,
        4,
        A,
        B,
        C,
        D,
        M,
        M,
        5,
        M,
    ]


def test_what_is_read_again_under_the_surest_alone() -> None:
    """Two reveals that the head, shown both, believes: then it is shown the surer one, here the
    right one, alone."""
    of, at, where, shown = row(), state([M] * 4), (0, 1), list[list[int]]()
    scores = says([1, 2, 0, 0], hidden=("hidden", 0))

    def head(rows: Any, asked: Any, residual: bool) -> Any:
        shown.append(list(asked[0][0][0].ids))
        return [[scores.hidden]]

    sampler = SimpleNamespace(token_odds=lambda *_: [[9.0] * 4])
    networks: Any = SimpleNamespace(head=head, sampler=sampler)
    refined(
        RereadRemask(1.0, -1.0),
        networks,
        [of],
        [PendingReveal(at, scores, where, None, of.successor(at, where, scores.token))],
    )
    assert shown == [[A, B, M, M], [M, B, M, M]]
