"""Experts that rounds of drafted states read, counted in a tiny model; `benchmarks.cost_model` predicts what they cost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import BLOCK, random_ids
from mrp_trainer.doctor.roofline import Shape
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from modeling_mrp import MRPForCausalLM

EXPERTS, CHOSEN = 32, 4
SHAPE = Shape("tiny", 32, 48, 2, 4, 2, 8, 64, BLOCK, 2, EXPERTS, CHOSEN, 16)


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16}
    return make_model(family="sdar_moe", **sizes)


@contextmanager
def routed(model: MRPForCausalLM) -> Iterator[list[Tensor]]:
    """Experts [tokens, chosen] of each layer of each forward of the backbone."""
    seen: list[Tensor] = []
    routers = [part for part in model.modules() if isinstance(part, Qwen3MoeTopKRouter)]
    assert len(routers) == model.config.num_hidden_layers
    hooks = [one.register_forward_hook(lambda _, __, out: seen.append(out[2])) for one in routers]
    yield seen
    for hook in hooks:
        hook.remove()


def distinct(chosen: Tensor) -> int:
    return len(chosen.unique())


def rounds(model: MRPForCausalLM, states: int, rows: int) -> list[list[Tensor]]:
    """Of each layer of each round of K states or fewer a row, experts [tokens of a state, chosen] by state, fillers too."""
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "seed": 1, "max_new_tokens": 24, "eos_token_id": None}
    with routed(model) as seen:
        drafting = {"decoding": "self_spec", "target": "static", "num_draft_states": states}
        model.generate(random_ids(0, rows, BLOCK), **drafting, **options)
    return [list(chosen.split(BLOCK)) for chosen in seen[model.config.num_hidden_layers :]]  # behind the prefill


def test_a_round_reads_the_experts_of_all_its_states(model: MRPForCausalLM) -> None:
    """No more than one state does and than there are; one state's are what its tokens choose."""
    for states in (2, 4, 8):
        of_rounds = rounds(model, states, 1)
        assert max(map(len, of_rounds)) == states
        for parts in of_rounds:
            alone, together = [distinct(part) for part in parts], distinct(torch.cat(parts))
            assert max(alone) <= together <= min(EXPERTS, sum(alone))
            assert max(alone) <= BLOCK * CHOSEN


@pytest.mark.parametrize("rows", [1, 4])
def test_more_states_read_more_experts_and_fewer_than_predicted(model: MRPForCausalLM, rows: int) -> None:
    """On average over rounds of so many states. The prediction takes tokens to choose evenly and each by itself, which reads
    the most; where nearly all are read, more states read hardly more."""
    means = []
    for states in (2, 4, 8):
        read = [distinct(torch.cat(parts)) for parts in rounds(model, states, rows) if len(parts) == rows * states]
        assert len(read) > 4
        means.append(sum(read) / len(read))
        assert means[-1] <= SHAPE.experts_read(rows * states * BLOCK)
    assert means == sorted(means)
    if rows == 4:
        assert means[0] > 0.6 * means[2]
