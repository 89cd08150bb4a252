"""What a training run needs of a device's memory, estimated from shapes alone."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from modeling_mrp.modeling import MRPForCausalLM

# Logits matrices of a chunk that are alive at once: student, teacher, what is stale, their softmaxes and gradients. Measured:
# 7.6 of 64 MB each at 2048 tokens and the published vocabulary.
_LOGITS_MATRICES = 8
_LOGITS_AT_ONCE = 1 << 24  # of the student, see losses_mrp.over_vocabulary
_FLOAT32 = 4


@dataclass(frozen=True)
class Load:
    """What one device computes at a time.

    Attributes:
        rows: Rows per device and pass.
        max_length: Tokens of a row.
        copies: Noisy copies of each.
        objective: `mrp` or `block_diffusion`.
        unroll: Head steps.
        reread: Whether the leave-one-out loss is computed.
        order: Whether the order of reveals is learned.
        bf16: Whether passes run in bfloat16, with the frozen weights in it.
        optimizer_bytes: Of the optimizer's state, per trained parameter of the layers' matrices.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
    """

    rows: int
    max_length: int
    copies: int = 2
    objective: str = "mrp"
    unroll: int = 1
    reread: bool = True
    order: bool = False
    bf16: bool = False
    optimizer_bytes: int = 2 * _FLOAT32
    gradient_checkpointing: bool = False

    @property
    def noisy(self) -> int:
        """Columns of all noisy copies, if every token is a response."""
        return self.rows * self.copies * self.max_length

    @property
    def columns(self) -> int:
        """Columns of a whole pass [x_t | x_0]."""
        return self.noisy + self.rows * self.max_length

    @property
    def element(self) -> int:
        """Bytes of a number in a pass."""
        return 2 if self.bf16 else _FLOAT32


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, of one process that holds everything.

    Attributes:
        parameters: In all.
        trained: Those that train.
        weights: Of all parameters, with the bfloat16 copies that autocast makes of those that train.
        gradients: Of those that train.
        optimizer: Its state.
        kept: Keys and values, hidden states and masks that the passes share.
        activations: Saved for the backward pass.
        working: Of one layer while it is computed, or of the mask while it is made.
        loss: Logits of a chunk of tokens.
        largest_unit: Bytes of the largest part that FSDP gathers at a time.
    """

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    kept: int
    activations: int
    working: int
    loss: int
    largest_unit: int

    @property
    def of_batch(self) -> int:
        """What depends on the batch, and is needed on each device."""
        return self.kept + self.activations + self.working + self.loss

    def total(self, processes: int = 1, sharded: bool = False) -> int:
        """Bytes per device.

        DDP adds the buckets in which gradients are summed. FSDP divides weights, gradients and the optimizer's state, and
        gathers one unit at a time.
        """
        of_model = self.weights + self.gradients + self.optimizer
        if sharded and processes > 1:
            return of_model // processes + self.largest_unit + self.of_batch
        return of_model + (self.gradients if processes > 1 else 0) + self.of_batch


def estimate(model: Any, load: Load) -> MemoryEstimate:
    """Estimates a training step's memory.

    Trained weights are float32, with gradients of their size and, by default, Adam's two moments; frozen ones have the type of
    the passes. Every token of `max_length` is taken for a response, which no batch exceeds.

    Objective `mrp`: the backbone's passes run without gradients and leave h_A, h_B and, per layer, the keys and values of the
    first pass's clean columns (`CleanCache`). The head's passes keep everything for the backward
    pass: the first all columns, each further one those of the noisy copies. `block_diffusion` keeps everything of every layer,
    or with gradient checkpointing each layer's input. Losses hold one chunk of logits (`losses_mrp.over_vocabulary`) and a
    derivative per token.

    What the allocator wastes, the CUDA context (some 0.5 GB) and the buffers of libraries are not in it.

    Args:
        model: An `MRPForCausalLM`, or a peft model of one, whose parameters say by `requires_grad` what trains; on the meta
            device it takes no memory.
        load: What a step computes.
    """
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = bare.config
    trained = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    numbers, of_trained = sum(p.numel() for p in model.parameters()), sum(size for _, size in trained)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and "layers." in name)
    hidden = config.hidden_size * load.element
    of_layer = _layer_bytes(bare, load)
    if load.objective == "mrp":
        depth = config.num_nextn_predict_layers
        passed = load.columns + (load.unroll - 1) * load.noisy
        clean = load.columns - load.noisy
        kept = 2 * config.num_key_value_heads * config.head_dim * load.element * clean * config.num_hidden_layers
        kept += load.columns * hidden + load.noisy * hidden * (load.unroll + load.reread)
        activations = passed * (depth * of_layer + _projection_bytes(config.hidden_size, load))
        # the keys and values of the first pass are put beside those of each further one, once per query head
        activations += (load.unroll - 1) * (load.columns - load.noisy) * depth * 2 * _query_bytes(bare, load)
        losses, slopes = load.unroll + load.reread, 2 if load.order else 1
        kept += losses * slopes * load.rows * load.max_length * config.hidden_size * _FLOAT32
    else:
        depth = config.num_hidden_layers
        kept = load.columns * hidden
        activations = load.columns * depth * (hidden if load.gradient_checkpointing else of_layer)
    length = load.columns // load.rows
    mask = load.rows * length**2  # bool; making it takes as much again, twice
    logits = min(_LOGITS_AT_ONCE, load.rows * load.max_length * config.vocab_size) * _FLOAT32
    return MemoryEstimate(
        parameters=numbers,
        trained=of_trained,
        weights=(numbers - of_trained) * load.element + of_trained * (_FLOAT32 + (2 if load.bf16 else 0)),
        gradients=of_trained * _FLOAT32,
        optimizer=matrices * load.optimizer_bytes + (of_trained - matrices) * 2 * _FLOAT32,
        kept=kept + mask,
        activations=activations,
        working=max(of_layer * load.columns, 2 * mask),
        loss=_LOGITS_MATRICES * logits,
        largest_unit=_largest_unit(bare, load),
    )


def _query_bytes(model: MRPForCausalLM, load: Load) -> int:
    """Of one column's queries."""
    return int(model.config.num_attention_heads * model.config.head_dim * load.element)


def _layer_bytes(model: MRPForCausalLM, load: Load) -> int:
    """What a decoder layer saves of one column: the input of every matrix, norm and product.

    A norm saves its input in float32, the normed values, and its output. Keys and values are saved once per query head, as
    SDPA gets them.
    """
    config = model.config
    norm = _FLOAT32 + 2 * load.element
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    norms = norm * 2 * config.hidden_size + (norm - load.element) * (queries + keys)
    attention = load.element * 5 * queries  # queries, keys, values, and what comes out, twice
    return int(norms + attention + load.element * 4 * config.intermediate_size)


def _projection_bytes(hidden_size: int, load: Load) -> int:
    """What the head saves of one column outside its layers: two norms, their outputs side by side, the last norm."""
    norm = _FLOAT32 + 2 * load.element
    return hidden_size * (3 * norm + 2 * load.element)


def _largest_unit(model: MRPForCausalLM, load: Load) -> int:
    """FSDP gathers a decoder layer or the head at a time, and what lies outside of these."""
    units: list[nn.Module] = [*model.model.layers, *([model.mrp_head] if model.mrp_head is not None else [])]
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in units]
    outside = sum(p.numel() for p in model.parameters()) - sum(sizes)
    return (max(sizes) + outside) * load.element
