"""Prediction of the costs of a round's forwards, from the shape of a model and from its device.

A forward takes the time to read its weights or the time to compute its operations, whichever is
longer, plus the time of its launches and copies. Keys and values of the text are left out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..rules.costs import RoundCosts

# Numbers of states in the predicted table.
STATES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)
# Seconds that the host takes for a drafted state.
HOST = 20e-6
# Dense bf16 FLOPs of a multiprocessor's tensor cores per clock, by compute capability.
TENSOR_FLOPS = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}
SMALL_TENSOR_FLOPS = 512  # for other capabilities, such as consumer cards
PLAIN_FLOPS = 256  # in float32, without tensor cores
REACHED = 0.6  # share of its peak that a large product reaches
# FLOPs and bytes of a CPU's thread a second, and bytes of all threads together.
CPU_FLOPS, CPU_THREAD_BYTES, CPU_BYTES = 6e10, 1e10, 8e10
# Seconds for the launches of a layer on a CPU, and on other devices than GPUs.
CPU_LAYER, OTHER_LAYER = 250e-6, 200e-6
# Seconds on a GPU: of a launch within a CUDA graph and around it, of a copy to the device for which
# the host does not wait, and of one to the host.
RECORDED, EAGER, UPLOAD, READ = 1.2e-6, 5e-6, 3e-6, 15e-6
# With CUDA graphs, seconds for the launches of a layer, and for the launches and copies of a
# backbone forward and of a head pass beside their layers, by their numbers
# (`benchmarks.predicted_rounds`).
GRAPH_LAYER = 9 * RECORDED
GRAPH_FORWARD = 13 * RECORDED + 9 * EAGER + 2 * UPLOAD + READ
GRAPH_PASS = 27 * RECORDED + 25 * EAGER + 3 * UPLOAD + READ


@dataclass(frozen=True)
class Rates:
    """The rates by which a device computes, and the additional time that each layer takes there.

    Attributes:
        bytes: Bytes read per second.
        flops: Floating-point operations per second.
        layer: Additional seconds for each layer.
        forward, head_pass: Additional seconds of a backbone forward, and of a head pass.
    """

    bytes: float
    flops: float
    layer: float
    forward: float = 0.0
    head_pass: float = 0.0

    @classmethod
    def of_gpu(cls, bandwidth: float, flops: float) -> "Rates":
        """Return the rates of a GPU with CUDA graphs that reads `bandwidth` bytes and computes
        `flops` operations per second."""
        return cls(bandwidth, flops, GRAPH_LAYER, GRAPH_FORWARD, GRAPH_PASS)


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Estimate how many bytes a device reads per second, how many operations it computes per second
    with numbers of a dtype, and the additional seconds for each layer of a model.

    For a GPU, the estimates use the properties that it reports; for a CPU, torch's number of
    threads. For any other device, they are constants.
    """
    if device.type == "cpu":
        threads = torch.get_num_threads()
        flops = threads * CPU_FLOPS / (2 if dtype == torch.float64 else 1)
        return Rates(min(CPU_BYTES, threads * CPU_THREAD_BYTES), flops, CPU_LAYER)
    if device.type != "cuda":
        return Rates(2e11, 1e13, OTHER_LAYER)
    card = torch.cuda.get_device_properties(device)
    per_clock = TENSOR_FLOPS.get((card.major, card.minor), SMALL_TENSOR_FLOPS)
    if dtype.itemsize > 2:
        per_clock = PLAIN_FLOPS
    clock = 1e3 * getattr(card, "clock_rate", 1.7e6)
    memory_clock = 1e3 * getattr(card, "memory_clock_rate", 2.6e6)
    bus = getattr(card, "memory_bus_width", 5120) / 8
    flops = REACHED * card.multi_processor_count * clock * per_clock
    return Rates.of_gpu(2 * memory_clock * bus, flops)


def predicted_costs(config: Any, weight: Tensor, shortlist: int = 0) -> RoundCosts:
    """Predict the costs of a model's forwards, in seconds, on the device of its weights.

    Args:
        config: The model's config, or any object with its sizes as attributes (`hidden_size`,
            `num_hidden_layers` and so on).
        weight: [vocab, hidden_size], the weight of `lm_head`; only its device and dtype are used.
        shortlist: Number of tokens among which a head pass chooses at each position; 0 for all
            tokens.
    """
    rates = rates_of(weight.device, weight.dtype)
    return costs_at(config, rates, weight.element_size(), shortlist)


def costs_at(config: Any, rates: Rates, item_bytes: float, shortlist: int = 0) -> RoundCosts:
    """Predict the costs of a model's forwards, in seconds, at given rates.

    Args:
        config: The model's config, or any object with its sizes as attributes (`hidden_size`,
            `num_hidden_layers` and so on).
        rates: The rates of the device.
        item_bytes: The bytes that each number of the model's weights takes.
        shortlist: Number of tokens among which a head pass chooses at each position; 0 for all
            tokens.
    """
    hidden_size = config.hidden_size
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden_size // heads
    attention = 2 * (heads + key_heads) * head_dim * hidden_size
    dense = attention + 3 * hidden_size * config.intermediate_size
    experts = getattr(config, "num_experts", None) or 0
    expert = 3 * hidden_size * (getattr(config, "moe_intermediate_size", None) or 0)
    chosen = getattr(config, "num_experts_per_tok", None) or 0

    def seconds(read: float, computed: float, tokens: float) -> float:
        return max(read * item_bytes / rates.bytes, 2 * computed * tokens / rates.flops)

    def forward(layers: int, tokens: int, listed: int, sparse: bool) -> float:
        read = computed = float(dense)
        if sparse:
            share = 1 - (1 - chosen / experts) ** tokens
            read = attention + experts * share * expert
            computed = attention + chosen * expert
        picked = tokens / 2  # about half of the positions of states are masked
        per_pick = (listed or config.vocab_size) * hidden_size
        unembedding = min(config.vocab_size * hidden_size, per_pick * picked)
        total = seconds(layers * read, layers * computed, tokens) + layers * rates.layer
        return total + seconds(unembedding, per_pick, picked)

    backbone = []
    head = []
    layers = getattr(config, "num_nextn_predict_layers", 0)
    for states in STATES:
        tokens = states * config.block_size
        forward_seconds = forward(config.num_hidden_layers, tokens, 0, experts > 0)
        backbone.append(forward_seconds + rates.forward)
        if layers:
            projection = 2 * hidden_size**2
            pass_seconds = forward(layers, tokens, shortlist, False)
            pass_seconds += seconds(projection, projection, tokens)
            head.append(pass_seconds + rates.head_pass)
    return RoundCosts(STATES, tuple(backbone), tuple(head), HOST)
