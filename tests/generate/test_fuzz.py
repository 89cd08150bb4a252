"""Random decodes: texts, steps, log-probabilities and counts are those of the slow reference,
whatever the batch and the mode; and what criteria and streamers are shown, and in which way options
are given.

In float64 two tokens or positions whose scores agree to the last bits do not come up, so there is
no false alarm: a difference is a bug.
"""

import random
from itertools import zip_longest
from typing import Any

import pytest

from modeling_mrp.generate import generation
from modeling_mrp.generate.loop import draft_amount
from modeling_mrp.networks import graphs, networks
from modeling_mrp.rules.gain import Amount
from tests.support.helpers import close
from tests.support.random_cases import MASK, VOCAB, WAYS, Case, SlowRow, assert_same_text, of_slow
from tests.support.tape import TapeRecorder
from tests.support.watches import Blocks, Drafts, Watch, assert_asked, assert_streamed

SEEDS, CASES = 32, 5
SIZES = (1, 1, 2, 3, 5)
TABLES = ("accepted_lengths", "offered_at_depth", "accepted_at_depth")
PROCESSORS = (
    "logits_processor",
    "repetition_penalty",
    "suppress_tokens",
    "sequence_bias",
    "renormalize_logits",
)


class AnyAmount:
    """Chooses at random how much each round drafts, so that the head rests and comes back at any
    time."""

    def __init__(self, rng: random.Random, states: int, passes: int) -> None:
        self.rng, self.outline, self.passes = rng, states, passes

    def plan(self, drafts: Any) -> Amount:
        states = self.rng.choice((1, self.rng.randint(1, self.outline)))
        if states == 1 and not any(nodes and nodes[0].state.masks for nodes in drafts):
            states = 2  # rows that all end a block would not go on
        return Amount(states, self.rng.randint(0, min(self.passes, states - 1)))

    def cut(self, amount: Amount, drafts: Any) -> int:
        return amount.states if amount.states < 3 else self.rng.randint(2, amount.states)

    def learn(self, *_: Any) -> None: ...


def random_call(rng: random.Random, case: Case) -> dict[str, Any]:
    """Draw what changes neither text nor costs: how options are given, lengths and seeds are told,
    and who watches."""
    given: dict[str, Any] = {"way": rng.choice(WAYS), "graphs": rng.choice((*[None] * 7, True))}
    longest = max(map(len, case.prompts))
    if rng.random() < 0.3:
        given |= {"max_new_tokens": None, "max_length": longest + case.options["max_new_tokens"]}
    if rng.random() < 0.3 and "min_new_tokens" in case.options:
        given |= {"min_new_tokens": None, "min_length": longest + case.options["min_new_tokens"]}
    if rng.random() < 0.3:
        first = case.seeds[0] // 2
        case.seeds = [first + row for row in range(len(case.seeds))]
        given["seed"] = first
    if rng.random() < 0.7 or given["way"] != "own":  # else the first eos pads
        given["pad_token_id"] = rng.choice((0, 55))
    if rng.random() < 0.5:
        given["criteria"] = [Watch()]
    if rng.random() < 0.5:
        kind = rng.choice((Blocks, Drafts))
        streamers = [kind() for _ in case.prompts]
        given["streamer"] = (
            streamers[0] if len(streamers) == 1 and rng.random() < 0.5 else streamers
        )
    return given


def assert_same_counts(out: Any, place: int, told: SlowRow, fresh: bool, case: Any) -> None:
    """Compare what a row's drafts came to, by depth too, and what it cost where it began without a
    cache."""
    stats = out.stats
    expected = {
        "drafted": told.drafted,
        "accepted": told.accepted,
        "revoked": len(told.revocations),
    }
    if fresh:
        expected |= {"row_forwards": told.row_forwards, "row_head_forwards": told.row_head_forwards}
    assert {name: getattr(stats, name)[place].item() for name in expected} == expected, case
    assert [
        (column, token) for row, column, token in stats.revocations.tolist() if row == place
    ] == told.revocations, case
    if not told.lengths:
        return
    lengths, offered, accepted = (getattr(stats, name)[place].tolist() for name in TABLES)
    assert lengths == [told.lengths.count(length) for length in range(len(lengths))], case
    assert offered == [sum(most > k for most, _ in told.depths) for k in range(len(offered))], case
    assert accepted == [sum(depth > k for _, depth in told.depths) for k in range(len(accepted))], (
        case
    )


def assert_adds_up(
    out: Any, told: list[SlowRow], block: int, fresh: bool, counted: bool, case: Any
) -> None:
    """Compare the counts of the batch with those of its rows, and those of its rounds with both."""
    stats, rounds = out.stats, out.stats.rounds
    assert out.tokens_per_forward.equal((out.reveal_step >= 0).sum(1) / stats.row_forwards), case
    if fresh:
        assert int(stats.row_forwards.max()) == sum(
            stats.forwards[role] for role in ("prefill", "denoise", "verify")
        ), case
    if counted:
        verified = zip_longest(*(row.verified for row in told), fillvalue=False)
        assert stats.forwards["verify"] == sum(map(any, verified)), case
    for name, counts in rounds.items():
        assert (counts[1:] >= counts[:-1]).all(), case
        if name in ("row_forwards", "drafted", "accepted"):
            assert counts[-1].equal(getattr(stats, name)), case
    for row, columns, steps in zip(
        told, rounds["column"].T, rounds["steps"][-1].tolist(), strict=True
    ):
        assert ((columns + len(row.prompt)) % block == 0).all(), case
        # drafts may go on past a criterion's end
        assert steps == row.steps or not (counted or row.stop is None), case


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_decodes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is decoded fast and each of its rows slowly, then some go on from its cache, in
    another mode."""
    rng = random.Random(seed)
    monkeypatch.setattr(networks, "PREFILL_CHUNK", chunk := rng.choice((8, networks.PREFILL_CHUNK)))
    monkeypatch.setitem(graphs.RECORDERS, "cpu", TapeRecorder)

    def any_amount(mode: Any, *others: Any) -> Any:
        drafting = mode.drafting
        if drafting and drafting.by_gain and rng.random() < 0.7:
            return AnyAmount(rng, drafting.states, drafting.passes)
        return draft_amount(mode, *others)

    monkeypatch.setattr(generation, "draft_amount", any_amount)
    for trial in range(CASES):
        case, past = Case(f"{seed}/{trial}", SIZES), None
        while True:
            drafted = case.drafted() if rng.random() < 0.7 else {}
            counted = drafted.get("num_draft_states") != "auto"
            call = random_call(rng, case)
            name = (trial, case.mode, drafted, call, case.options, case.prompts, case.infill)
            rows, out = case.decode(
                past_key_values=past, output_scores=True, output_logits=True, **drafted, **call
            )
            told = [
                case.by_reference(place, **(drafted if counted else {}))
                for place in range(len(rows))
            ]
            fresh, width = past is None and chunk > 8, max(map(len, case.prompts))
            pad = call.get("pad_token_id", next(iter(case.options["eos_token_id"] or ()), 0))
            for place, (row, slow) in enumerate(zip(rows, told, strict=True)):
                assert_same_text(row, of_slow(slow), name)
                assert row["tokens"][len(slow.tokens) :] == [pad] * (
                    len(row["tokens"]) - len(slow.tokens)
                ), name
                for column, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
                    token, drawn = row["tokens"][column], scores[place].isfinite()
                    if row["steps"][column] < 0:  # certain
                        assert (
                            scores[place].exp().nonzero().tolist()
                            == logits[place].exp().nonzero().tolist()
                            == [[token]]
                        )
                        continue
                    close(scores[place], slow.drawn[len(case.prompts[place]) + column], 1e-9)
                    assert logits[place].isfinite().sum() == VOCAB - 1, name
                    if not case.options.keys() & PROCESSORS:
                        temperature = case.options.get("temperature", 1.0)
                        close(scores[place][drawn], (logits[place] / temperature)[drawn], 1e-9)
                if counted:
                    assert_same_counts(out, place, slow, fresh, name)
            assert_adds_up(out, told, case.model.config.block_size, fresh, counted, name)
            if "streamer" in call:
                streamers = (
                    call["streamer"] if isinstance(call["streamer"], list) else [call["streamer"]]
                )
                for streamer, slow in zip(streamers, told, strict=True):
                    assert_streamed(streamer.events, slow.prompt, slow.tokens, slow.reveal_step)
            for watch in call.get("criteria", ()):
                assert_asked(
                    watch.seen,
                    out.sequences[:, :width].tolist(),
                    [slow.tokens for slow in told],
                    MASK,
                    pad,
                )
            if rng.random() < 0.6 or case.model.config.block_size == 32:
                break
            past = out.past_key_values
            case.go_on([of_slow(slow) for slow in told], 60)


def test_what_the_head_takes_back() -> None:
    """By the rule `reread`, which `test_random_decodes` seldom draws."""
    for trial in range(25):
        case = Case(f"reread/{trial}", SIZES, ("mrp_remask",))
        case.options |= {"remask_rule": "reread", "confidence_threshold": 0.05}
        rows, out = case.decode()
        for place, row in enumerate(rows):
            assert_same_text(row, of_slow(told := case.by_reference(place)), trial)
            assert_same_counts(out, place, told, True, trial)
