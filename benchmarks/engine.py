"""Everything that benchmarks read of the engine beside `generate` and the kernels' own functions."""

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from modeling_mrp.kernels.dispatch import failed_kernels
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.cache import BlockCache
from modeling_mrp.networks.graphs import recording_report
from modeling_mrp.networks.picker import Picker


def code_of_parts() -> dict[CodeType, str]:
    """Give the part of a round that each function does, by the code that a profiler sees; none of them calls another."""
    functions: dict[str, list[Callable[..., Any]]] = {
        "backbone": [MRPForCausalLM.backbone],
        "head": [MRPForCausalLM.residual],
        "vocabulary": [Picker.__call__, Picker.token_odds],
        "commit": [BlockCache.move],
    }
    return {inspect.unwrap(function).__code__: part for part, parts in functions.items() for function in parts}


def fallbacks(model: MRPForCausalLM) -> dict[str, Any]:
    """Count what ran as it should and what fell back.

    Returns:
        `recordings`, `replays` and `bytes` of the model's graphs, `failed_recordings`, `failed_kernels` of this process by
        name, and `fell_back`: whether anything failed, or nothing was replayed on a GPU.
    """
    report, kernels = recording_report(model), failed_kernels()
    failed = report.pop("failed")
    fell_back = bool(kernels or failed or (model.device.type == "cuda" and not report["replays"]))
    return {"fell_back": fell_back, **report, "failed_recordings": failed, "failed_kernels": kernels}


def backbone_hidden(model: MRPForCausalLM, ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
    """Run the backbone on a stock cache; [batch, length, hidden_size]."""
    return model.backbone(ids, positions, mask, cache)


def head_residual(model: MRPForCausalLM, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Run the head without a cache; [batch, length, hidden_size]."""
    return model.residual(ids, hidden, positions, mask)


def scratch_of_a_layer(rows: int, kv_heads: int, head_dim: int, tokens: int, like: Tensor) -> BlockCache:
    """Make a cache of one layer with scratch for so many tokens of each row, of the dtype and on the device of a tensor."""
    cache = BlockCache(rows, kv_heads, head_dim, [torch.device(like.device)], 0, tokens, like.dtype)
    cache.target(0, tokens)
    return cache
