"""Estimates of the FLOPs and the activation memory of a training step, made on the meta device.

The passes of a step run on the meta device over full rows, so nothing is computed or allocated.
Torch counts the matrix products and the tensors that are saved for the backward pass. Attention
saves no scores there, like compiled attention on CUDA.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from modeling_mrp.kernels.pick import logits_at_once

from .arguments import MRPTrainingArguments
from .attention import attention_implementation
from .inputs import MAX_LENGTH
from .packed import CleanCache

COUNTED = "counted"
# Number of tensors of the size of a chunk's logits that the vocabulary loss holds: logits,
# softmaxes and gradients of student and teacher.
_OF_A_CHUNK = 10


@dataclass(frozen=True)
class StepEstimate:
    """The estimated memory and FLOPs of one row in a training step.

    Attributes:
        columns: The number of columns of the noisy copies, and the number of columns of the clean
            text.
        saved: Bytes kept for the backward pass.
        transient: Bytes needed only during a pass: the keys and values of the clean text, and the
            activations of the widest layer.
        logits: Bytes of the logits, softmaxes and their gradients in the loss, which is computed
            for one chunk of tokens at a time. They are the same for any number of rows.
        flops: FLOPs of all passes, including their backward passes.
    """

    columns: tuple[int, int]
    saved: int
    transient: int
    logits: int
    flops: int


class _Attention(torch.autograd.Function):
    """A stand-in for attention on the meta device. It computes nothing, but saves the same tensors
    for the backward pass as fused attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        level = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, level)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _counted_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    output: Tensor = _Attention.apply(query, key, value)
    return output.transpose(1, 2).contiguous(), None


def estimate_step(model: Any, arguments: MRPTrainingArguments, dtype: torch.dtype) -> StepEstimate:
    """Estimate the memory and FLOPs of a training step for one row, all of whose tokens are
    learned.

    Args:
        model: A model on the meta device. It is cast to `dtype`.
        arguments: The training arguments. The row has `max_length` tokens; if this is None, 4,096
            or the model's number of positions, whichever is smaller.
        dtype: The dtype in which the passes run.
    """
    config = model.config
    block = config.block_size
    length = arguments.max_length
    if length is None:  # the longest that rows can get
        length = min(MAX_LENGTH, config.max_position_embeddings)
    clean = max(block, length // block * block)
    noisy = arguments.copies(block) * clean
    trains = [parameter.requires_grad for parameter in model.parameters()]
    model = model.to(dtype)
    for parameter, trained in zip(model.parameters(), trains, strict=True):
        parameter.requires_grad_(trained)
    AttentionInterface.register(COUNTED, _counted_attention)
    counter = FlopCounterMode(display=False)
    with attention_implementation(model, COUNTED), counter:
        if arguments.objective == "mrp":
            saved = _head_passes(model, arguments, noisy, clean)
        else:
            saved = _saved_by(lambda: _backbone(model, noisy + clean, None), model)
    pairs = _attention_flops(config, arguments, noisy, clean)
    vocabulary = _vocabulary_flops(config, arguments, noisy)
    flops = counter.get_total_flops() + pairs + vocabulary
    keys = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * clean
    layer = (noisy + clean) * (2 * config.intermediate_size + 4 * config.hidden_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chunk = min(logits_at_once(device), config.vocab_size * noisy)
    transient = dtype.itemsize * (keys + layer)
    return StepEstimate((noisy, clean), saved, transient, _OF_A_CHUNK * 4 * chunk, flops)


def _saved_by(run: Callable[[], Tensor], model: Any) -> int:
    """Run a pass and its backward pass. Return the number of bytes that the pass saves for the
    backward pass, without weights; memory that tensors share counts once."""
    weights = {StorageWeakRef(weight.untyped_storage()) for weight in model.parameters()}
    saved: dict[StorageWeakRef, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference not in weights:
            saved[reference] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    output.backward(torch.empty_like(output))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _backbone(model: Any, columns: int, cache: CleanCache | None) -> Tensor:
    ids = torch.zeros(1, columns, dtype=torch.long, device="meta")
    output: Tensor = model.backbone(ids, ids, None, cache)
    return output


def _head_passes(model: Any, arguments: MRPTrainingArguments, noisy: int, clean: int) -> int:
    """Run the passes of the head's objective. Return the number of bytes that they save for their
    backward passes."""
    of_backbone = CleanCache(noisy)
    of_head = CleanCache(noisy)
    hidden = _backbone(model, noisy + clean, of_backbone)  # whose weights are frozen
    for _ in range(arguments.later_passes):
        _backbone(model, noisy, of_backbone)

    def run() -> Tensor:
        estimate = hidden
        for _ in range(arguments.unroll):
            ids = torch.zeros(1, estimate.shape[1], dtype=torch.long, device="meta")
            residual = model.residual(ids, estimate, ids, None, of_head)
            estimate = estimate[:, :noisy] + residual[:, :noisy]
        return estimate

    return _saved_by(run, model)


def _attention_flops(config: Any, arguments: MRPTrainingArguments, noisy: int, clean: int) -> int:
    """Compute the FLOPs of attention for a row that is a single text; a token of it sees half of
    the text on average."""
    per_pair = 4 * config.num_attention_heads * config.head_dim
    seen = clean // 2 + config.block_size
    if arguments.objective != "mrp":
        return 3 * config.num_hidden_layers * per_pair * (noisy + clean) * seen
    backbone = (noisy + clean + arguments.later_passes * noisy) * config.num_hidden_layers
    head = 3 * (noisy * arguments.unroll + clean) * config.num_nextn_predict_layers
    return per_pair * seen * (backbone + head)


def _vocabulary_flops(config: Any, arguments: MRPTrainingArguments, noisy: int) -> int:
    """Compute the FLOPs of the loss over the vocabulary: logits of student and teacher, and
    derivatives. Half of the noisy columns are taken to be masked; of the states of `sequential`,
    each has one position with a loss."""
    compared = noisy // (config.block_size if arguments.every_state else 2)
    product = 2 * config.vocab_size * config.hidden_size * compared
    if arguments.objective != "mrp":
        return 4 * product  # computed again in the backward pass, where `lm_head` trains, too
    if arguments.every_state:
        return product * arguments.unroll * 3
    derivatives = 1 + bool(arguments.order_weight)
    return product * (arguments.unroll * (2 + derivatives) + 3 * bool(arguments.reread_weight))
