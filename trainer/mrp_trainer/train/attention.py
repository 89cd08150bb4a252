"""How models attend in training passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from modeling_mrp.modeling import MRPForCausalLM

TRAINING_FLEX = "flex_attention_of_one_type"


def flex_attention_of_one_type(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Flex attention with queries and keys in the type of the values.

    Under autocast the float32 weights of q_norm and k_norm make queries and keys float32 beside bfloat16 values, of which flex
    attention on CUDA has no backward pass.
    """
    return flex_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, **kwargs)


@contextmanager
def attending(model: MRPForCausalLM, implementation: str | None) -> Iterator[str]:
    """Runs a model with another implementation of attention, if one is given; yields the one it had."""
    AttentionInterface.register(TRAINING_FLEX, flex_attention_of_one_type)
    before = model.config._attn_implementation
    if implementation is not None and implementation != before:
        model.set_attn_implementation(implementation)
    try:
        yield before
    finally:
        if model.config._attn_implementation != before:
            model.set_attn_implementation(before)
