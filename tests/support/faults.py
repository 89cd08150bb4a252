"""Broken kernels, recordings and models, for tests of the checks that must find them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from modeling_mrp.kernels.pick import LIST, PICK, Unembedding
from modeling_mrp.kernels.round_layers import (
    GATED,
    ROTATED,
    ROUND_ATTENTION,
    SUM_AND_NORM,
    RoundMask,
)
from modeling_mrp.networks import graphs, layers
from tests.support.tape import TapeRecorder

KERNELS = {
    kernel.name: kernel for kernel in (PICK, LIST, ROUND_ATTENTION, SUM_AND_NORM, ROTATED, GATED)
}


def broken(result: Any) -> Any:
    """Set the last tenth of a result to zero, at least its last number, as a kernel does that
    leaves it out."""
    if isinstance(result, tuple):
        return tuple(map(broken, result))
    if result is None:
        return None
    wrong = result.flatten().clone()
    wrong[-max(1, len(wrong) // 10) :] = 0
    return wrong.view(result.shape)


class Stale(TapeRecorder):
    """A recorder that always returns a step's first output, as a graph does whose inputs lie
    elsewhere."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = step().clone()
        return lambda: output


def _replace(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by `change(the function, *its arguments)`."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *given, **named: change(real, *given, **named))


def flip_mlps(patch: pytest.MonkeyPatch) -> None:
    """Subtract what every MLP adds."""
    _replace(patch, Qwen3MLP, "forward", lambda real, *given: -real(*given))


def flip_fused_mlps(patch: pytest.MonkeyPatch) -> None:
    """Subtract it in rounds only, where layers are fused."""

    def flipped(real: Any, linears: Any, *traits: bool) -> Any:
        product = real(linears, *traits)
        if len(linears) == 3:
            return product

        def negated(hidden: Tensor) -> list[Tensor]:
            both = product(hidden)
            gate, up = both.chunk(2, -1) if isinstance(both, Tensor) else both
            return [gate, -up]

        return negated

    _replace(patch, layers, "_product", flipped)


def reverse_embeddings(patch: pytest.MonkeyPatch) -> None:
    """Read the embeddings from the last row to the first."""
    _replace(
        patch,
        nn.Embedding,
        "forward",
        lambda real, table, ids: real(table, len(table.weight) - 1 - ids),
    )


def reverse_lm_head(patch: pytest.MonkeyPatch) -> None:
    """Read `lm_head` from the last row to the first."""
    _replace(patch, Unembedding, "logits", lambda real, *given: real(*given).flip(-1))


def hide_first_block(patch: pytest.MonkeyPatch) -> None:
    """Hide the prompt's first block from the states of rounds."""

    def blind(real: Any, mask: RoundMask, cached_slots: int) -> Tensor:
        dense: Tensor = real(mask, cached_slots)
        dense[..., : mask.block_size] = False
        return dense

    _replace(patch, RoundMask, "dense", blind)


def hide_own_block(patch: pytest.MonkeyPatch) -> None:
    """Hide from the tokens of states all others of their block."""

    def blind(real: Any, mask: RoundMask, cached_slots: int) -> Tensor:
        dense: Tensor = real(mask, cached_slots)
        tokens = dense.shape[2]
        own = torch.arange(tokens) // mask.block_size
        others = (own == own[:, None]) & ~torch.eye(tokens, dtype=torch.bool)
        dense[..., cached_slots:] &= ~others
        return dense

    _replace(patch, RoundMask, "dense", blind)


def swap_head(patch: pytest.MonkeyPatch) -> None:
    """Let one head of attention return what another one does."""

    def wrong(real: Any, *given: Any) -> Tensor:
        attended: Tensor = real(*given)
        attended[:, :, 0] = attended[:, :, 1]
        return attended

    _replace(patch, ROUND_ATTENTION, "twin", wrong)


def keep_graph_inputs(patch: pytest.MonkeyPatch) -> None:
    """Let recordings go on reading the last input that they were recorded with."""
    patch.setitem(graphs.RECORDERS, "cpu", TapeRecorder)

    def stale(real: Any, kept: graphs.Graphs, key: Any, function: Any, *inputs: Tensor) -> Tensor:
        whole = key, tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        if whole in kept.recorded:
            inputs = (*inputs[:-1], kept.inputs[whole][-1].clone())
        output: Tensor = real(kept, key, function, *inputs)
        return output

    _replace(patch, graphs.Graphs, "call", stale)


# Broken models that `mrp doctor` must find.
BROKEN = {
    "flipped MLPs": flip_mlps,
    "flipped MLPs in rounds": flip_fused_mlps,
    "reversed embeddings": reverse_embeddings,
    "reversed lm_head": reverse_lm_head,
    "blind to the first block": hide_first_block,
    "blind to their own block": hide_own_block,
    "a wrong head": swap_head,
    "a stale graph input": keep_graph_inputs,
}
