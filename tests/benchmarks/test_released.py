"""The released reference that benchmarks compare with: lossless too, and as costly as its description says."""

import random

import pytest
import torch
from conftest import make_model
from helpers import left_padded

from benchmarks.released import Released


@pytest.mark.parametrize(("states", "head_prefix"), [(1, False), (3, True), (6, False)])
def test_the_released_reference_gives_the_text_of_static(states: int, head_prefix: bool) -> None:
    rng = random.Random(states)
    for trial in range(6):
        model = make_model(trial, block_size=rng.choice((4, 8)))
        prompts = [[rng.randrange(1, 50) for _ in range(rng.randint(1, 19))] for _ in range(rng.choice((1, 4)))]
        eos = rng.choice(([], [7, 11], list(range(1, 12))))
        new = rng.randint(1, 25)
        out = model.generate(**left_padded(prompts), max_new_tokens=new, eos_token_id=eos or None, return_dict_in_generate=True)
        generated = out.sequences[:, max(map(len, prompts)) :]
        expected = [row[steps >= 0].tolist() for row, steps in zip(generated, out.reveal_step, strict=True)]
        assert Released(states, head_prefix)(model, prompts, new, eos).ids == expected


@pytest.mark.parametrize(
    ("block_size", "states", "rounds", "head"),
    [
        (4, 3, 1, 2),  # the seed reveals one; states with 3, 2 and 1 masks; the bonus of the last ends the block
        (4, 2, 2, 1),  # 3 and 2 masks, a bonus; 1 mask, behind which nothing is drafted
        (8, 3, 2, 4),  # 7, 6 and 5 masks, a bonus; 4, 3, 2 and 1
        (8, 8, 1, 7),  # 7 masks to 1, and one state behind the block
    ],
)
def test_its_forwards_by_hand(block_size: int, states: int, rounds: int, head: int) -> None:
    """Positions do not look at each other, so that every draft is right. Beside its rounds a block takes a seed forward and a
    store; the last one needs no store, and the prompt's block one forward of its own. The head drafts all but slot 0 of a
    block's first round, and of later ones all but slots 0 and 1."""
    model = make_model(block_size=block_size)
    for layer in (*model.model.layers, *model.mrp_head.layers):
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    made = Released(states)(model, [list(range(1, 1 + block_size))], 3 * block_size, [])
    assert made.forwards == [1 + 3 * (rounds + 2) - 1]
    assert made.head_forwards == [3 * head]
