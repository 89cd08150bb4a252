"""Bytes and FLOPs of the forwards of a round for a model of a given shape, and the least time that
they take on a device.

A group of kernels takes the time of its bytes or of its FLOPs, whichever is longer. Its bytes are
weights (once per forward), embeddings of the tokens used, hidden states that enter and leave, and
keys and values. It is assumed that activations inside a layer stay on chip, and that the packed
states of a row share one read of its prefix. All numbers are bf16.
"""

from dataclasses import dataclass, fields
from typing import Any

from mrp_trainer.doctor.checks import PUBLISHED as SIZES

BYTES = 2  # per bf16 number
# Bytes of a layer's weight: int8 (without its scale for each row of a matrix), and 4 bits with a
# float32 scale for 64 of them.
WEIGHT_BYTES = {"bfloat16": 2.0, "int8": 1.0, "4-bit": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, named as in config.json. In a model with experts, `intermediate_size`
    is that of the head's layers."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    head_layers: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @classmethod
    def of(cls, name: str, config: Any) -> "Shape":
        """Make a shape with this name and the sizes in an `MRPConfig`."""
        sizes = {field.name: getattr(config, field.name, field.default) for field in fields(cls)}
        return cls(**{**sizes, "name": name, "head_layers": config.num_nextn_predict_layers})

    @property
    def layer_matrix(self) -> int:
        """Count the parameters of a decoder layer's matrices: q, k, v, o, gate, up, down."""
        attention = (
            (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
            * self.head_dim
            * self.hidden_size
        )
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer(self) -> int:
        """Count the parameters of a decoder layer, with its four norms."""
        return self.layer_matrix + 2 * self.hidden_size + 2 * self.head_dim

    def with_experts(self, experts: float) -> float:
        """Count how many parameters a backbone layer with `experts` experts has more than a dense
        one; 0 for a dense model."""
        if not self.num_experts:
            return 0
        expert = self.moe_intermediate_size * experts - self.intermediate_size
        return self.num_experts * self.hidden_size + 3 * self.hidden_size * expert

    def experts_read(self, tokens: float) -> float:
        """Estimate the number of experts that a layer reads for `tokens` tokens, if each token
        chooses its experts evenly and independently; 0 for a dense model. This is an upper bound:
        the tokens of a text choose similar experts, so that fewer are read."""
        if not self.num_experts:
            return 0
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** tokens)

    @property
    def backbone(self) -> int:
        """Count the parameters of the backbone without its embeddings and `lm_head`."""
        return (
            self.num_hidden_layers * (self.layer + int(self.with_experts(self.num_experts)))
            + self.hidden_size
        )

    @property
    def eh_proj(self) -> int:
        """Count the parameters of the head's input projection."""
        return 2 * self.hidden_size * self.hidden_size

    @property
    def head(self) -> int:
        """Count the parameters of the head: input projection, layers, three norms."""
        return self.eh_proj + self.head_layers * self.layer + 3 * self.hidden_size

    @property
    def vocabulary(self) -> int:
        """Count the parameters of lm_head; the embeddings have as many."""
        return self.vocab_size * self.hidden_size

    def weight_bytes(self, per_weight: float) -> int:
        """Compute the bytes of a dense model with its head, if each number in matrices of the
        layers and of the head's input projection takes `per_weight` bytes. The embedding, `lm_head`
        and norms are bf16."""
        matrices = (self.num_hidden_layers + self.head_layers) * self.layer_matrix + self.eh_proj
        unquantized = self.backbone + self.head + 2 * self.vocabulary - matrices
        return int(matrices * per_weight + unquantized * BYTES)

    @property
    def cache_bytes(self) -> int:
        """Compute the bytes that one token takes in the cache of backbone and head: its keys and
        values in all layers, and a hidden state, in bf16."""
        layers = self.num_hidden_layers + self.head_layers
        return (layers * 2 * self.num_key_value_heads * self.head_dim + self.hidden_size) * BYTES


@dataclass(frozen=True)
class Work:
    """The work of a group of kernels: bytes read and written, and FLOPs."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Device:
    """A device: its memory bandwidth in bytes a second, its peak in dense bf16 FLOPs a second, and
    the share of this peak that large matrix products reach."""

    name: str
    bandwidth: float
    peak: float
    achievable: float = 0.6

    def seconds(self, work: Work) -> float:
        """Compute the least time of a group of kernels in seconds: the time to move its bytes at
        the full bandwidth, or the time of its FLOPs at the share `achievable` of the peak,
        whichever is longer."""
        return max(work.bytes / self.bandwidth, work.flops / (self.peak * self.achievable))


def decoder_layers(
    shape: Shape, layers: int, batch: int, states: float, prefix: int, sparse: bool = False
) -> tuple[Work, Work]:
    """Compute the work of `layers` decoder layers on `batch` rows, each with `states` states side
    by side after `prefix` tokens. Return the work of the matrices, then that of attention.

    Attention computes all pairs of a query with a key of its row's prefix and states, including
    masked pairs. If the layers are `sparse`, they read each expert that any token chooses, and
    compute for each token only the experts that this token chooses.
    """
    tokens = batch * states * shape.block_size
    read: float = shape.layer
    computed: float = shape.layer_matrix
    if sparse:
        read += shape.with_experts(shape.experts_read(tokens))
        computed += shape.with_experts(shape.num_experts_per_tok)
    matrices = Work(layers * read * BYTES, 2 * layers * computed * tokens)
    keys = prefix + states * shape.block_size
    query_size = shape.num_attention_heads * shape.head_dim
    # numbers that a token's keys and values take in one layer
    kv_size = 2 * shape.num_key_value_heads * shape.head_dim
    written_and_read = layers * batch * (keys + states * shape.block_size) * kv_size * BYTES
    return matrices, Work(written_and_read, 4 * layers * query_size * tokens * keys)


def backbone_forward(shape: Shape, batch: int, states: float, prefix: int) -> list[Work]:
    """List the work of the groups of kernels in one backbone forward over `batch` x `states` blocks
    after `prefix` tokens, without the pick of tokens (see `vocabulary_step`). Groups run one after
    the other."""
    tokens = batch * states * shape.block_size
    ends = Work((2 * tokens * shape.hidden_size + shape.hidden_size) * BYTES, 0)
    return [
        ends,
        *decoder_layers(shape, shape.num_hidden_layers, batch, states, prefix, sparse=True),
    ]


def head_forward(shape: Shape, batch: int, states: float, prefix: int) -> list[Work]:
    """List the work of the groups of kernels in one head pass over `batch` x `states` blocks after
    `prefix` tokens, with embeddings, but without the pick of tokens (see `vocabulary_step`). Groups
    run one after the other."""
    tokens = batch * states * shape.block_size
    ends = Work(3 * (tokens + 1) * shape.hidden_size * BYTES, 0)
    projection = Work(shape.eh_proj * BYTES, 2 * shape.eh_proj * tokens)
    return [ends, projection, *decoder_layers(shape, shape.head_layers, batch, states, prefix)]


def vocabulary_step(shape: Shape, positions: float) -> Work:
    """Compute the work of picking tokens at `positions` masked positions from their hidden states
    and `lm_head`, if the logits never leave the chip."""
    return Work(
        (shape.vocab_size + positions) * shape.hidden_size * BYTES, 2 * positions * shape.vocabulary
    )


@dataclass(frozen=True)
class Counts:
    """Mean counts of a decoding mode for each row.

    Attributes:
        tokens_per_forward: Generated tokens per backbone forward.
        states_per_forward: States per backbone forward.
        head_passes: Head passes per round, which run one after the other, each with a pick of
            tokens.
        states_per_head_pass: States per head pass.
    """

    tokens_per_forward: float
    states_per_forward: float
    head_passes: float = 0.0
    states_per_head_pass: float = 1.0


def masks_per_state(block_size: int) -> float:
    """Return the mean number of masked positions (positions that need a pick) in a state of a
    block, if all numbers of masks from 0 to `block_size` are equally frequent."""
    return block_size / 2


def round_seconds(shape: Shape, device: Device, counts: Counts, batch: int, prefix: int) -> float:
    """Predict the seconds of a round after `prefix` tokens: the time of the backbone forward and of
    each head pass, including their picks."""
    masks = batch * masks_per_state(shape.block_size)
    backbone = backbone_forward(shape, batch, counts.states_per_forward, prefix)
    head = head_forward(shape, batch, counts.states_per_head_pass, prefix)
    backbone.append(vocabulary_step(shape, masks * counts.states_per_forward))
    head.append(vocabulary_step(shape, masks * counts.states_per_head_pass))
    return sum(map(device.seconds, backbone)) + counts.head_passes * sum(map(device.seconds, head))


# By name, GPUs that are charged for. Peaks (dense bf16) and bandwidths are the makers', but the
# H200's bandwidth, which was measured with a large copy.
DEVICES = {
    "H200": Device("H200", 4.3e12, 989e12),
    "H100": Device("H100", 3.35e12, 989e12),
    "A100-80G": Device("A100-80G", 2.04e12, 312e12),
    "RTX4090": Device("RTX4090", 1.01e12, 165e12),
}
# The published backbones, with a head of three layers.
PUBLISHED = {name: Shape(name, *sizes, 8, 128, 151936, 16, 3) for name, sizes in SIZES.items()}
