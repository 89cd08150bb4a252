"""Bytes and FLOPs of the forwards of a round at a given shape, and the least time they take on a device.

A kernel group takes as long as its bytes or its FLOPs need, whichever is longer. Counted are weights (once a forward), the
embeddings of the tokens used, hidden states that enter and leave, and keys and values; activations inside a layer are taken to
stay on chip, and the packed states of a row to read its prefix together. Everything is in bytes, FLOPs and seconds, bf16.
"""

from dataclasses import dataclass, fields
from typing import Any

from mrp_trainer.doctor.checks import PUBLISHED as SIZES

BYTES = 2  # of a bf16 number


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as its config.json gives them; with experts `intermediate_size` is that of the head's layers."""

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
        """Read the sizes of a config."""
        sizes = {field.name: getattr(config, field.name, field.default) for field in fields(cls)}
        return cls(**{**sizes, "name": name, "head_layers": config.num_nextn_predict_layers})

    @property
    def layer_matrix(self) -> int:
        """Parameters of the matrices of a decoder layer: q, k, v, o, gate, up, down."""
        attention = (2 * self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim * self.hidden_size
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def layer(self) -> int:
        """Parameters of a decoder layer, with its four norms."""
        return self.layer_matrix + 2 * self.hidden_size + 2 * self.head_dim

    def with_experts(self, experts: float) -> float:
        """Parameters by which a layer of the backbone has more than a dense one, if so many experts count; none without any."""
        if not self.num_experts:
            return 0
        expert = self.moe_intermediate_size * experts - self.intermediate_size
        return self.num_experts * self.hidden_size + 3 * self.hidden_size * expert

    def experts_read(self, tokens: float) -> float:
        """Experts that a layer reads for so many tokens which choose evenly, each by itself: the most that is to be expected,
        as tokens of a text that choose alike read fewer."""
        if not self.num_experts:
            return 0
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** tokens)

    @property
    def backbone(self) -> int:
        """Parameters of the backbone without embeddings and lm_head."""
        return self.num_hidden_layers * (self.layer + int(self.with_experts(self.num_experts))) + self.hidden_size

    @property
    def eh_proj(self) -> int:
        """Parameters of the head's input projection."""
        return 2 * self.hidden_size * self.hidden_size

    @property
    def head(self) -> int:
        """Parameters of the head: input projection, layers, three norms."""
        return self.eh_proj + self.head_layers * self.layer + 3 * self.hidden_size

    @property
    def vocabulary(self) -> int:
        """Parameters of lm_head, and as many again of the embeddings."""
        return self.vocab_size * self.hidden_size

    def head_share(self, rows: int = 0) -> float:
        """Compute the cost of a head pass as a share of a backbone forward, by the numbers that each reads.

        The head's picks read `rows` rows of `lm_head`, all of them where that is 0; the backbone's picks read all.
        """
        picked = (rows or self.vocab_size) * self.hidden_size
        return (self.head + picked) / (self.backbone - self.hidden_size + self.vocabulary)


@dataclass(frozen=True)
class Work:
    """What a group of kernels reads and writes, and computes."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Device:
    """A device: bytes a second from its memory, dense bf16 FLOPs a second, and the share of these that large matrix products
    reach.
    """

    name: str
    bandwidth: float
    peak: float
    achievable: float = 0.6

    def seconds(self, work: Work) -> float:
        """The least time a kernel group takes."""
        return max(work.bytes / self.bandwidth, work.flops / (self.peak * self.achievable))


def decoder_layers(
    shape: Shape, layers: int, batch: int, states: float, prefix: int, sparse: bool = False
) -> tuple[Work, Work]:
    """The matrices of decoder layers over `batch` rows of `states` packed states each, and their attention.

    Packed attention computes every pair of a query with the row's prefix and all of its states, seen or not. `sparse` layers
    read the experts that some token chooses, and compute with those that each does.
    """
    tokens = batch * states * shape.block_size
    more = [shape.with_experts(count) if sparse else 0 for count in (shape.experts_read(tokens), shape.num_experts_per_tok)]
    matrices = Work(layers * (shape.layer + more[0]) * BYTES, 2 * layers * (shape.layer_matrix + more[1]) * tokens)
    keys = prefix + states * shape.block_size
    query_size = shape.num_attention_heads * shape.head_dim
    kv_size = 2 * shape.num_key_value_heads * shape.head_dim  # numbers that a token's keys and values take in one layer
    written_and_read = layers * batch * (keys + states * shape.block_size) * kv_size * BYTES
    return matrices, Work(written_and_read, 4 * layers * query_size * tokens * keys)


def backbone_forward(shape: Shape, batch: int, states: float, prefix: int) -> list[Work]:
    """One backbone forward over `batch` x `states` blocks, without the vocabulary step."""
    tokens = batch * states * shape.block_size
    ends = Work((2 * tokens * shape.hidden_size + shape.hidden_size) * BYTES, 0)
    return [ends, *decoder_layers(shape, shape.num_hidden_layers, batch, states, prefix, sparse=True)]


def head_forward(shape: Shape, batch: int, states: float, prefix: int) -> list[Work]:
    """One pass of the head over `batch` x `states` blocks, without its vocabulary step; reads hidden states and embeddings."""
    tokens = batch * states * shape.block_size
    ends = Work(3 * (tokens + 1) * shape.hidden_size * BYTES, 0)
    projection = Work(shape.eh_proj * BYTES, 2 * shape.eh_proj * tokens)
    return [ends, projection, *decoder_layers(shape, shape.head_layers, batch, states, prefix)]


def vocabulary_step(shape: Shape, positions: float) -> Work:
    """Picks at so many positions, masked ones, from logits that never leave the chip."""
    return Work((shape.vocab_size + positions) * shape.hidden_size * BYTES, 2 * positions * shape.vocabulary)


@dataclass(frozen=True)
class Counts:
    """What a mode does in a round, per row: tokens generated per backbone forward, states that a row packs into it, passes of
    the head, one after the other, each with a vocabulary step, and states that a row packs into each.
    """

    tokens_per_forward: float
    states_per_forward: float
    head_passes: float = 0.0
    states_per_head_pass: float = 1.0


def masks_per_state(block_size: int) -> float:
    """Count the positions of a state that need a pick, on average over a block's states, from all masks to none."""
    return block_size / 2


def round_seconds(shape: Shape, device: Device, counts: Counts, batch: int, prefix: int) -> float:
    """Predict the seconds of a round behind `prefix` tokens: of the backbone and its picks, and of each pass of the head."""
    masks = batch * masks_per_state(shape.block_size)
    backbone = backbone_forward(shape, batch, counts.states_per_forward, prefix)
    head = head_forward(shape, batch, counts.states_per_head_pass, prefix)
    backbone.append(vocabulary_step(shape, masks * counts.states_per_forward))
    head.append(vocabulary_step(shape, masks * counts.states_per_head_pass))
    return sum(map(device.seconds, backbone)) + counts.head_passes * sum(map(device.seconds, head))


# Of the published backbones, with a head of three layers.
PUBLISHED = {name: Shape(name, *sizes, 8, 128, 151936, 16, 3) for name, sizes in SIZES.items()}
