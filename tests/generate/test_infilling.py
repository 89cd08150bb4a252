"""Filling in: given tokens among masks are kept, and the text is that of the slow reference decoder."""

from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import MASK, PROMPTS, generate
from test_streaming import Blocks
from transformers import GenerationConfig

from modeling_mrp import MRPForCausalLM
from tests.random_cases import StopsBehind

RUN = [MASK, MASK, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, MASK, MASK, MASK, MASK]  # blocks of 2, 0, 0 and 4 masks


def test_counts_of_static_by_hand(random_model: MRPForCausalLM) -> None:
    """The prefill and one round fill the first block. A round each scores it and the first given block, the next one the other
    given block with the first state of the last, whose four masks take three more."""
    out = random_model.generate(torch.tensor([[1, 2, 3, 4]]), infill_ids=torch.tensor([RUN]), return_dict_in_generate=True)
    assert out.stats.forwards == {"prefill": 1, "denoise": 7, "verify": 0, "head": 0}
    assert out.stats.accepted_lengths.tolist() == [[0, 6, 1]]
    assert out.tokens_per_forward.tolist() == pytest.approx([6 / 8])
    assert out.reveal_step[0, 2:12].tolist() == [-1] * 10
    assert sorted(out.reveal_step[0].tolist()) == [-1] * 10 + [*range(6)]
    assert out.token_logprobs[0, 2:12].tolist() == [0.0] * 10


def test_given_blocks_with_drafts() -> None:
    """Positions do not look at each other, so that every draft is right: one round scores the state with one mask and the clean
    block, one the first given block, one the other with the first state behind it; one more what follows."""
    model = make_model()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    out = model.generate(
        torch.tensor([[1, 2, 3, 4]]),
        infill_ids=torch.tensor([RUN]),
        decoding="self_spec",
        num_draft_states=5,
        draft_branches=1,
        return_dict_in_generate=True,
    )
    assert sum(out.stats.forwards.values()) == 1 + 4
    assert out.tokens_per_forward.tolist() == pytest.approx([6 / 5])


def test_given_tokens_before_the_first_mask_are_prefilled(random_model: MRPForCausalLM) -> None:
    """A prompt of 3 and 7 given ones cost what a prompt of 10 does."""
    ids = [*range(1, 11)]
    plain = random_model.generate(torch.tensor([ids]), max_new_tokens=6, return_dict_in_generate=True)
    out = random_model.generate(
        torch.tensor([ids[:3]]), infill_ids=torch.tensor([ids[3:] + [MASK] * 6]), return_dict_in_generate=True
    )
    assert out.sequences.equal(plain.sequences)
    assert out.stats.forwards == plain.stats.forwards == {"prefill": 1, "denoise": 5, "verify": 0, "head": 0}
    assert out.reveal_step[0].tolist() == [-1] * 7 + plain.reveal_step[0].tolist()


@pytest.mark.parametrize(("mode", "length"), [("static", 1), ("mrp_spec", 7), ("mrp_remask", 7)])
def test_everything_given(random_model: MRPForCausalLM, mode: str, length: int) -> None:
    """Nothing is left to generate: one forward looks at it, and the text is what was given, with every eos in it."""
    given = torch.arange(1, 3 * length + 1).view(3, length)
    out = generate(random_model, PROMPTS, infill_ids=given, decoding=mode, eos_token_id=[2, 3, length])
    assert out.sequences[:, 10:].equal(given)
    assert (out.reveal_step == -1).all()
    assert out.tokens_per_forward.tolist() == [0.0] * 3
    assert sum(out.stats.forwards[role] for role in ("prefill", "denoise", "verify")) == 1


@pytest.mark.parametrize(("token", "end"), [(11, 8)])
def test_a_stopping_criterion_may_end_the_text_before_given_tokens(random_model: MRPForCausalLM, token: int, end: int) -> None:
    infill = torch.tensor([[MASK, 7, MASK, MASK, 8, 9, 10, 11, 12, 13, MASK]])
    ids = random_model.generate(torch.tensor([[1, 2]]), infill_ids=infill, stopping_criteria=[StopsBehind([token])])
    assert ids.shape[1] == 2 + end
    assert ids[0, -1] == token


def test_a_row_that_a_criterion_ended_stays_as_it_is(random_model: MRPForCausalLM) -> None:
    """Its text is whole in the same round, as all but one of its tokens are given, and three other rows go on for long."""
    infill = torch.tensor([[MASK, 7, *range(11, 21)], *[[MASK] * 12] * 3])
    ids = random_model.generate(torch.tensor([[1, 2, 3, 4]] * 4), infill_ids=infill, stopping_criteria=[StopsBehind([7])])
    assert ids[0, 5:].tolist() == [7] + [0] * (ids.shape[1] - 6)
    assert ids.shape[1] > 8


@pytest.mark.parametrize(("mode", "infill"), [("mrp_spec", RUN), ("static", [5, 6, 7])])
def test_a_streamer_is_put_given_tokens_too(random_model: MRPForCausalLM, mode: str, infill: list[int]) -> None:
    ids, streamer = torch.tensor([[1, 2, 3]]), Blocks()
    out = random_model.generate(ids, infill_ids=torch.tensor([infill]), streamer=streamer, decoding=mode)
    assert streamer.events[0] == ("put", ids.tolist())
    assert [token for _, tokens in streamer.events[1:] for token in tokens] == out[0, 3:].tolist()


def test_a_text_is_complete_with_its_last_mask(random_model: MRPForCausalLM) -> None:
    """Two masks, then given tokens to the limit two blocks on: the prefill and one forward reveal the two; nothing looks at
    what is given behind them. Ids of 32 bits will do."""
    ids, infill = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[MASK, MASK, *range(11, 21)]])
    out = random_model.generate(ids, infill_ids=infill.int(), return_dict_in_generate=True)
    assert out.sequences[0, 6:].tolist() == [*range(11, 21)]
    assert out.stats.forwards == {"prefill": 1, "denoise": 1, "verify": 0, "head": 0}


# How long it gets


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 6),
        ({"max_new_tokens": 9}, 9),
        ({"max_length": 11}, 8),
        ({"generation_config": GenerationConfig(max_length=10)}, 7),
    ],
    ids=str,
)
def test_length(random_model: MRPForCausalLM, options: dict[str, Any], length: int) -> None:
    infill = torch.tensor([[MASK, 7, MASK, MASK, 8, MASK]])
    assert random_model.generate(torch.tensor([[1, 2, 3]]), infill_ids=infill, **options).shape[1] == 3 + length
