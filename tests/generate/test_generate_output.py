"""What `generate` reports beside the text: reveal steps, counts of forwards and drafts, and log-probabilities."""

import pytest
import torch
from helpers import LIVELY, MASK, PROMPTS, every_mode, generate
from test_streaming import Drafts

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS


def test_counts_of_static_by_hand(random_model: MRPForCausalLM) -> None:
    """A prompt of 6 and 10 tokens, two a step: blocks of 2, 4 and 4 masks take 1 + 2 + 2 steps, the first in the prefill.

    Of the four rounds two score a clean block and the all-mask state behind it: two states; the others score one.
    """
    out = generate(random_model, [[1, 2, 3, 4, 5, 6]], denoising_steps=2, max_new_tokens=10)
    assert out.stats.forwards == {"prefill": 1, "denoise": 4, "verify": 0, "head": 0}
    assert out.stats.row_forwards.tolist() == [5]
    assert out.stats.row_head_forwards.tolist() == [0]
    assert out.stats.accepted_lengths.tolist() == [[0, 2, 2]]
    assert out.tokens_per_forward.tolist() == [2.0]


@pytest.mark.parametrize(
    ("mode", "drafts"), [("static", 4), *((mode, drafts) for mode in ("self_spec", "mrp_spec") for drafts in (1, 2, 3, 8))]
)
def test_every_state_is_accepted_once(random_model: MRPForCausalLM, mode: str, drafts: int) -> None:
    """However many states a round accepts, a row passes through the same ones; forwards are told by role.

    Prompts of 6 and 2 tokens and 10 new: blocks of 2, 4 and 4 masks, so 10 states with masks, of which the prefill scores
    one, and two clean ones: 11.
    """
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8]]
    stats = generate(random_model, prompts, decoding=mode, num_draft_states=drafts, max_new_tokens=10).stats
    assert (stats.accepted_lengths * torch.arange(stats.accepted_lengths.shape[1])).sum(1).tolist() == [11, 11]
    assert stats.accepted_lengths.sum(1).equal(stats.row_forwards - 1), "every forward but the prefill is a round"
    assert int(stats.row_forwards.max()) == sum(stats.forwards[role] for role in ("prefill", "denoise", "verify"))
    drafting = mode != "static" and drafts > 1
    assert drafting or stats.row_forwards.tolist() == [10, 10], "a clean state is scored beside the next block's first"
    assert bool((stats.drafted > 0).all()) == drafting == (stats.forwards["verify"] > 0)
    assert (stats.forwards["head"] > 0) == (drafting and mode == "mrp_spec")


@pytest.mark.parametrize("mode", sorted({*DECODINGS} - {"mrp_remask"}))
def test_rounds_tell_which_forward_revealed_a_token(random_model: MRPForCausalLM, mode: str) -> None:
    """Told by the steps of `rounds`, a token is there after its forward and not before, as a streamer sees it."""
    watcher = Drafts()
    prompt = [21, 22, 23, 24, 25, 26]
    options = {**LIVELY, "decoding": mode, "seed": 5, "max_new_tokens": 14, "eos_token_id": None}
    out = random_model.generate(
        torch.tensor([prompt]), streamer=watcher, pad_token_id=0, return_dict_in_generate=True, **options
    )
    rounds = {name: counts[:, 0].tolist() for name, counts in out.stats.rounds.items()}
    sent: list[int] = []  # finished blocks
    shown = []  # what stood there after each round: these, then the current one with its masks
    for kind, tokens in watcher.events[1:]:
        sent += tokens if kind == "put" else []
        shown += [] if kind == "put" else [sent + tokens]
    assert len(rounds["steps"]) >= len(shown) > 2
    for after, (seen, steps) in enumerate(zip(shown, rounds["steps"], strict=False)):
        there = [step < steps for step in out.reveal_step[0].tolist()]
        masked = [*(token != MASK for token in seen), *[False] * len(there)][: len(there)]
        assert there == masked, after


@every_mode
def test_rounds_end_with_the_counts_and_know_no_neighbours(random_model: MRPForCausalLM, mode: str) -> None:
    options = {**LIVELY, "decoding": mode, "max_new_tokens": 11, "eos_token_id": None}
    out = generate(random_model, PROMPTS, seed=[3, 4, 5], **options)
    rounds = out.stats.rounds
    for name in ("row_forwards", "drafted", "accepted"):
        assert rounds[name][-1].equal(getattr(out.stats, name)), name
    assert rounds["steps"][-1].equal(1 + out.reveal_step.amax(1))
    assert all((counts[1:] >= counts[:-1]).all() for counts in rounds.values())
    alone = generate(random_model, PROMPTS[1:2], seed=[4], **options).stats.rounds
    for name, counts in alone.items():
        assert counts[:, 0].equal(rounds[name][: len(counts), 1]), name


def test_blocks_begin_where_rounds_say(random_model: MRPForCausalLM) -> None:
    """Blocks of 4: behind a prompt of 5 they begin at column 3, 7 and 11, behind one of 3 at 1, 5 and 9."""
    out = generate(random_model, PROMPTS[:2], max_new_tokens=12, eos_token_id=None)
    found = [sorted({column for column in row if 0 < column < 12}) for row in out.stats.rounds["column"].T.tolist()]
    assert found == [[3, 7, 11], [1, 5, 9]]
