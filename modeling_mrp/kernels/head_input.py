"""What the head reads: the embeddings of x' and h_A, each under its norm, side by side: one launch before `eh_proj`."""

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .dispatch import LARGEST_ROW, MULTIPLY_ADD, Dispatch, more_than, power_of_two, tl, triton


def normed_pair_ref(embeds: Tensor, hidden: Tensor, enorm: nn.Module, hnorm: nn.Module) -> Tensor:
    """[..., 2 * hidden_size]: [enorm(embeds) ; hnorm(hidden)]."""
    return torch.cat([enorm(embeds), hnorm(hidden)], -1)


def normed_pair(
    embed_tokens: nn.Embedding, enorm: Qwen3RMSNorm, hnorm: Qwen3RMSNorm, input_ids: Tensor, hidden: Tensor, dispatch: Dispatch
) -> Tensor | None:
    """The same from ids, in one kernel; None where that does not run and the modules are to be called.

    The casts are those of `Qwen3RMSNorm`: normalised in float32, rounded to the input's dtype, times the weight.

    Args:
        embed_tokens: The embeddings, a plain `nn.Embedding`.
        enorm: The norm of the embeddings.
        hnorm: The norm of the hidden states.
        input_ids: [...] long.
        hidden: [..., hidden_size].
        dispatch: Kernel or PyTorch.

    Returns:
        [..., 2 * hidden_size], or None.

    Raises:
        ValueError: if kernels are forced and cannot be used here.
    """
    reason = more_than(embed_tokens, nn.Embedding) or more_than(enorm, Qwen3RMSNorm) or more_than(hnorm, Qwen3RMSNorm)
    tensors: tuple[Tensor, ...] = (hidden,)
    if reason is None:
        tensors = (hidden, embed_tokens.weight, enorm.weight, hnorm.weight)
        reason = (
            _head_input_layout(*tensors) if embed_tokens.max_norm is None else "the embeddings have a max_norm: use plain ones"
        )
    return dispatch.run(
        "head_input",
        lambda: _normed_pair_kernel(embed_tokens, enorm, hnorm, input_ids, hidden),
        lambda: None,
        *tensors,
        input_ids,
        obstacle=reason,
    )


def _head_input_layout(hidden: Tensor, embeddings: Tensor, *scales: Tensor) -> str | None:
    if len({t.dtype for t in (hidden, embeddings, *scales)}) > 1:
        return "embeddings, norms and hidden states differ in dtype: load the model in one"
    if embeddings.stride(1) != 1:
        return f"the embeddings have strides {embeddings.stride()}: make their rows contiguous"
    if hidden.shape[-1] > LARGEST_ROW:
        return f"hidden_size is {hidden.shape[-1]}, more than {LARGEST_ROW}: run without this kernel"
    return None


def _normed_pair_kernel(
    embed_tokens: nn.Embedding, enorm: Qwen3RMSNorm, hnorm: Qwen3RMSNorm, input_ids: Tensor, hidden: Tensor
) -> Tensor | None:
    """Floor: 4 * rows * hidden_size numbers read and written: microseconds, less than its launch."""
    size, rows = hidden.shape[-1], input_ids.numel()
    pair = torch.empty(*hidden.shape[:-1], 2 * size, dtype=hidden.dtype, device=hidden.device)
    if rows:
        _normed_pairs[(rows,)](
            *(input_ids.contiguous(), embed_tokens.weight, hidden.contiguous(), enorm.weight, hnorm.weight, pair),
            *(size, embed_tokens.weight.stride(0), enorm.variance_epsilon, hnorm.variance_epsilon),
            TILE=power_of_two(size),
            num_warps=4 if size <= 4096 else 8,
            **MULTIPLY_ADD,
        )
    return pair


if triton is not None:

    @triton.jit
    def _normed(source, scale, target, size, epsilon, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, TILE)
        inside = column < size
        x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        unit = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
        kind = target.dtype.element_ty
        scaled = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32) * unit.to(kind).to(tl.float32)
        tl.store(target + column, scaled.to(kind), mask=inside)

    @triton.jit
    def _normed_pairs(  # type: ignore[no-untyped-def]
        input_ids, embeddings, hidden, enorm, hnorm, pair, size, stride, e_epsilon, h_epsilon, TILE: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        token = tl.load(input_ids + row).to(tl.int64)
        _normed(embeddings + token * stride, enorm, pair + row * 2 * size, size, e_epsilon, TILE)
        _normed(hidden + row * size, hnorm, pair + row * 2 * size + size, size, h_epsilon, TILE)


__all__ = ["normed_pair", "normed_pair_ref"]
