"""Sources of drafts: what a lookup proposes, and how proposals and scores are combined."""

import math
from typing import Any

import pytest
import torch

from modeling_mrp.rules.draft import build_draft, variants
from modeling_mrp.rules.lookup import FADE, PRIOR, NgramIndex, PromptLookup
from modeling_mrp.rules.reveal import Sequential, Static, sigmoid
from modeling_mrp.rules.sources import TRUST, UNKNOWN, Candidates, Guess, combined
from tests.support.handmade import A, B, C, D, M, row, says, state
from tests.support.random_cases import batch_of, make_model

ONE_BY_ONE = Sequential((1, 1, 1, 1))
MOST_CONFIDENT = Static((1, 1, 1, 1))


def proposed(text: list[int], ids: list[int], size: int = 2, count: int = 9) -> Any:
    """What a lookup proposes at a state of the block behind a prompt of whole blocks."""
    candidates = PromptLookup(count, size).propose(row(text), state(ids, len(text)), None)
    return candidates and {column: token for column, ((token, _),) in candidates.tokens.items()}


def test_the_last_occurrence_of_the_longest_match_is_proposed() -> None:
    assert proposed([1, 2, 3, 4, 1, 2, 5, 6, 7, 7, 1, 2], [M] * 4) == {0: 5, 1: 6, 2: 7, 3: 7}
    assert proposed([1, 2, 3, 4, 8, 2, 5, 6, 7, 7, 1, 2], [M] * 4) == {0: 3, 1: 4, 2: 8, 3: 2}
    assert proposed([1, 2, 3, 4, 8, 2, 5, 6, 7, 7, 1, 2], [M] * 4, size=1) == dict(
        enumerate([5, 6, 7, 7])
    )
    assert proposed([1, 2, 3, 4], [M] * 4) is None
    assert proposed([1, 2, 3, 1], [M] * 4, count=2) == {0: 2, 1: 3}


def test_what_disagrees_with_revealed_tokens_is_left_out() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1]
    assert proposed(text, [2, M, M, M]) == {1: 3, 2: 4, 3: 5}
    assert proposed(text, [2, M, 4, M]) == {1: 3, 3: 5}
    assert proposed(text, [2, M, 8, M]) == {1: 3}
    assert proposed(text, [8, M, M, M]) is None


def test_a_drafted_block_before_the_state_is_context() -> None:
    drafting = row([1, 2, 3, 4, 5, 6, 7, 8])
    opening, clean = state([M] * 4, 12), state([8, 8, 2, 3], 8)
    candidates = PromptLookup(9, 2).propose(drafting, opening, clean)
    assert candidates is not None
    assert [candidates.tokens[column][0][0] for column in range(4)] == [4, 5, 6, 7]


def test_the_chance_is_that_of_the_generated_text_so_far() -> None:
    """Tokens of the prompt are no trials; late trials count more."""
    index = NgramIndex()
    assert index.chance(1) == PRIOR
    text = [1, 2, 1, 2, 1, 3, 1, 3]
    index.read(text, 4, 4, 1)
    assert (index.trials, index.hits) == ({}, {})
    index.read(text, len(text), 4, 1)
    # 2 -> 1 right; 1 -> 2 wrong; 3 is new; 1 -> 3 right
    assert index.trials[1] == pytest.approx(1 + FADE + FADE**2)
    assert index.hits[1] == pytest.approx(1 + FADE**2)
    assert index.chance(1) == pytest.approx((1 + FADE**2 + PRIOR) / (2 + FADE + FADE**2))


def test_a_trial_is_of_the_longest_match() -> None:
    """The second 2 follows a 1 alone, the second 3 both 1 and 2."""
    index = NgramIndex()
    index.read([1, 2, 3, 1, 2, 3], 6, 3, 2)
    assert index.trials == index.hits == {1: 1.0, 2: 1.0}


def test_the_surest_source_of_a_token_counts() -> None:
    others = [Candidates({0: [(7, 0.9)]}), Candidates({0: [(7, 0.2), (8, 0.5)]})]
    guess = combined(state([M, M, M, M]), None, others, left_to_right=True)
    assert guess is not None
    assert guess.token[0] == 7
    assert dict(guess.rivals) == {0: [(7, 0.9 / 1.4), (8, 0.5 / 1.4)]}


def test_tokens_compete_where_the_order_is_known() -> None:
    at, scores = state([M, M, C, M]), ([A, B, C, D], [0.0, 3.0, 0.0, 0.0])
    others = [Candidates({0: [(7, 0.99)], 1: [(7, 0.5)], 3: [(D, 0.1)]})]
    guess = combined(at, scores, others, left_to_right=True)
    assert guess is not None
    assert list(guess.token) == [7, B, C, D]
    assert guess.log_odds == scores[1]
    first, second = sigmoid(TRUST), sigmoid(3.0 + TRUST)
    assert dict(guess.rivals) == {
        0: [(7, 0.99 / (0.99 + first)), (A, first / (0.99 + first))],
        1: [(B, second / (0.5 + second)), (7, 0.5 / (0.5 + second))],
    }


def test_where_the_rule_chooses_the_order_scores_are_heard_alone() -> None:
    """Other sources are not even asked there, but in a block without scores."""
    drafting = row(new=12)
    drafting.state, drafting.source = state([M, M, C, M]), says([1.0, 2.0, 0.0, 3.0])
    asked: list[Any] = []

    class Asked:
        def propose(self, row: Any, state: Any, parent: Any) -> Candidates:
            asked.append((state.ids, parent))
            return Candidates({column: [(7, 1.0)] for column in state.free})

    alone = build_draft(drafting, MOST_CONFIDENT, 9, 3, {})
    drafts = build_draft(drafting, MOST_CONFIDENT, 9, 3, {}, [Asked()])
    assert [node.state.ids for node in drafts] == [node.state.ids for node in alone]
    assert {parent is None for _, parent in asked} == {False}
    build_draft(drafting, ONE_BY_ONE, 9, 3, {}, [Asked()])
    assert ((M, M, C, M), None) in asked


def test_without_scores_the_order_has_to_be_known() -> None:
    at = state([M, M, M, M])
    silent = [Candidates({0: [(7, 0.5)]})]
    told = [*silent, Candidates({1: [(8, 0.5)]}, [1.0, 2.0, 3.0, 4.0])]
    assert combined(at, None, silent, left_to_right=False) is None
    guess = combined(at, None, silent, left_to_right=True)
    assert guess is not None
    assert (list(guess.token), list(guess.log_odds)) == ([7, UNKNOWN, UNKNOWN, UNKNOWN], [0.0] * 4)
    guess = combined(at, None, told, left_to_right=False)
    assert guess is not None
    assert (list(guess.token), list(guess.log_odds)) == (
        [7, 8, UNKNOWN, UNKNOWN],
        [1.0, 2.0, 3.0, 4.0],
    )


def test_variants_share_the_chance_of_a_reveal() -> None:
    guess = Guess([A, B, C, UNKNOWN], [0.0] * 4, {0: [(A, 0.6), (7, 0.4)], 1: [(B, 0.9), (8, 0.1)]})
    made = [(list(tokens[:3]), share) for tokens, share in variants((0, 1, 2), guess)]
    assert [tokens for tokens, _ in made] == [[A, B, C], [7, B, C]]
    assert [share for _, share in made] == pytest.approx([0.54, 0.36])
    assert [share for _, share in variants((2,), guess)] == [1.0]
    assert list(variants((2, 3), guess)) == []


def test_a_draft_goes_on_into_the_next_block() -> None:
    """A source that knows the text drafts it all, each state of the next block behind its clean
    block; nothing is drafted behind that."""
    drafting = row(new=12)
    drafting.state, drafting.source = state([A, B, C, M]), says([-1.0] * 4)

    class Knows:
        def propose(self, row: Any, state: Any, parent: Any) -> Candidates:
            return Candidates({column: [(20 + column, 0.9)] for column in state.free})

    nodes = build_draft(drafting, ONE_BY_ONE, 9, 3, {}, [Knows()])
    assert [(list(node.state.ids), node.parent, node.opens) for node in nodes] == [
        ([A, B, C, M], -1, False),
        ([A, B, C, 23], -1, False),
        ([M] * 4, 1, True),
        ([20, M, M, M], 1, False),
        ([20, 21, M, M], 1, False),
        ([20, 21, 22, M], 1, False),
        ([20, 21, 22, 23], 1, False),
        ([A, B, C, D], -1, False),
        ([M] * 4, 7, True),
    ]
    nodes = build_draft(drafting, MOST_CONFIDENT, 9, 3, {}, [Knows()])
    assert [list(node.state.ids) for node in nodes] == [[A, B, C, M], [A, B, C, D], [M] * 4]


class Fixed:
    """Proposes the same tokens everywhere."""

    def __init__(self, candidates: Any) -> None:
        self.candidates = candidates

    def propose(self, row: Any, state: Any, parent: Any) -> Any:
        return self.candidates


DRAFTED = {"decoding": "self_spec", "target": "sequential", "num_draft_states": 8}


def test_a_source_of_ones_own_changes_counts_and_no_text() -> None:
    model, inputs = make_model(), batch_of([[5, 6, 7], [8, 9, 10, 11, 12]], "left")
    options = {"max_new_tokens": 22, "return_dict_in_generate": True}
    alone = model.generate(**inputs, decoding="sequential", **options)
    plain = model.generate(**inputs, **DRAFTED, **options)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(*both(alone, inputs), strict=True)]

    class Knows:
        def propose(self, row: Any, state: Any, parent: Any) -> Candidates:
            ids = texts[row.place][state.start : state.start + 4]
            return Candidates({c: [(ids[c], 0.99)] for c in state.free if c < len(ids)})

    sources: dict[str, list[Any]] = {
        "knows": [Knows()],
        "knows nothing": [Fixed(None)],
        "wrong": [Fixed(Candidates({c: [(3, 1.0)] for c in range(4)}, [9.0] * 4))],
        "two": [Fixed(Candidates({0: [(3, 1.0), (4, 0.0)]})), Knows()],
    }
    rounds = {}
    for name, given in sources.items():
        out = model.generate(**inputs, **DRAFTED, draft_sources=given, **options)
        assert out.sequences.equal(alone.sequences), name
        rounds[name] = out.stats.forwards["verify"] + out.stats.forwards["denoise"]
    usual = plain.stats.forwards["verify"] + plain.stats.forwards["denoise"]
    # 22 tokens, of which a round writes those of seven drafted states at most, and no more than
    # one block is entered in a round
    assert rounds["knows"] <= 5 < usual == rounds["knows nothing"]


def test_a_lookup_serves_several_calls() -> None:
    """What it read in one call is not there in the next one, of shorter texts."""
    model, lookup = make_model(), PromptLookup(9)
    for prompt in ([5, 6, 7, 8] * 6, [8, 7, 6, 5, 9] * 2, [5, 6]):
        inputs = batch_of([prompt], "left")
        options = {**DRAFTED, "max_new_tokens": 22, "return_dict_in_generate": True}
        out = model.generate(**inputs, **options, draft_sources=[lookup])
        fresh = model.generate(**inputs, **options, prompt_lookup_num_tokens=9)
        assert out.sequences.equal(fresh.sequences)
        assert out.stats.forwards == fresh.stats.forwards
    assert not lookup._indices


def both(out: Any, inputs: dict[str, Any]) -> tuple[Any, Any]:
    mask = inputs["attention_mask"]
    new = mask.new_ones(len(mask), out.sequences.shape[1] - mask.shape[1])
    return out.sequences, torch.cat([mask, new], 1)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (Candidates({0: [(60, 0.5)]}), "other than the mask's"),
        (Candidates({0: [(64, 0.5)]}), "ids below 64"),
        (Candidates({4: [(1, 0.5)]}), "columns below 4"),
        (Candidates({0: [(1, math.nan)]}), "chances from 0 to 1"),
        (Candidates({0: [(1.5, 0.5)]}), "token 1.5"),  # type: ignore[list-item]
        (Candidates({}, [0.0]), "one for each of the 4 columns"),
        ({0: 1}, r"gave a dict: give Candidates\(tokens\)"),
    ],
)
def test_impossible_proposals_are_refused(candidates: Candidates, message: str) -> None:
    model, inputs = make_model(), batch_of([[5, 6, 7]], "left")
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs, **DRAFTED, draft_sources=[Fixed(candidates)], max_new_tokens=8)


def test_sources_need_a_mode_that_drafts() -> None:
    model, inputs = make_model(), batch_of([[5, 6, 7]], "left")
    with pytest.raises(ValueError, match=r"'sequential' drafts nothing: with draft_sources use"):
        model.generate(**inputs, decoding="sequential", draft_sources=[Fixed(None)])
    for wrong in ([object()], Fixed(None), 3):
        with pytest.raises(ValueError, match=r"draft_sources is .*: pass a list"):
            model.generate(**inputs, **DRAFTED, draft_sources=wrong)
