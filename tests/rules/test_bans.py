"""Banned sequences at random against the slow decoder's: what may not stand where, and what a step may reveal at once."""

import random
from types import SimpleNamespace
from typing import Any

from handmade import A, B, C, D, M, row, state

from modeling_mrp.rules.bans import Bans
from tests.reference import Row as SlowRow


def random_case(rng: random.Random) -> tuple[Bans, Any, list[int]]:
    """Bans of three tokens, a slow row that has them, and a text of these with masks."""
    words = [[rng.randint(1, 3) for _ in range(rng.randint(1, 3))] for _ in range(rng.choice((0, 1, 3)))]
    size, slow = rng.choice((0, 1, 2, 3)), object.__new__(SlowRow)
    slow.options = SimpleNamespace(bad_words_ids=words, no_repeat_ngram_size=size, eos_ids=[])
    slow.text, slow.given_end, slow.mask = [], 0, M
    return Bans(tuple(map(tuple, words)), size), slow, rng.choices((1, 2, 3, M), (3, 3, 3, 4), k=rng.randint(1, 9))


def test_what_may_not_stand_at_a_position() -> None:
    """Whatever stands there now; of tokens between nothing is known where they are masks."""
    rng = random.Random(0)
    for _ in range(3000):
        bans, slow, text = random_case(rng)
        for at in range(len(text)):
            assert bans.barred(text, at, M) == set(slow.barred(text, at)), (bans, text, at)


def test_what_a_step_may_reveal_at_once() -> None:
    """The surest first, of equals the leftmost, each as if those before it stood there."""
    rng = random.Random(1)
    for _ in range(3000):
        bans, slow, text = random_case(rng)
        start = rng.randrange(len(text))
        slow.step_of = {tuple(text): 0}
        token, odds = (rng.choices(range(1, 4), k=len(text) - start) for _ in range(2))
        masked = [at for at in range(start, len(text)) if text[at] == M]
        picks = [SimpleNamespace(position=at, token=token[at - start], log_odds=odds[at - start]) for at in masked]
        kept = tuple([pick.position - start for pick in slow.allowed(tuple(text), picks)])
        assert bans.allowed(text, start, tuple([at - start for at in masked]), token, odds, M) == kept, (
            bans,
            text,
            token,
            odds,
        )


def test_what_is_known_of_a_text() -> None:
    """The row's text with a state's block, and given tokens behind it; before it a clean block that is not text yet."""
    of = row([1, 2, 3, 4], 12, given=[M, M, M, M, M, M, 5, M])
    assert of.text_at(state([A, M, C, M])) == [1, 2, 3, 4, A, M, C, M, M, M, 5]
    assert of.text_at(state([M, M, 5, M], 8), state([A, B, C, D])) == [1, 2, 3, 4, A, B, C, D, M, M, 5, M]
    assert row().text_at(state([A, M, C, M])) == [1, 2, 3, 4, A, M, C, M]
