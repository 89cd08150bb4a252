"""Times of the parts of a round, beside the least time that the device's measured memory bandwidth
and rate of matrix products allow.

The times are measured without decoding a text: the same states are scored repeatedly after a prefix
of random ids, so that acceptance, drafting and the end of a row do not change the work.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from modeling_mrp.kernels.dispatch import AUTOMATIC, PYTORCH
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Networks, networks_for
from modeling_mrp.networks.picker import SHORTLIST, Picker
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Row, Scores, State

from ..evaluate.roofline import (
    BYTES,
    Device,
    Shape,
    backbone_forward,
    head_forward,
    vocabulary_step,
)
from .checks import inputs_of
from .rounds import now

# The forward of the backbone, the pick after it, a pass of the head over all drafted states, and
# the head's pick.
PARTS = ("forward", "pick", "head", "head's pick")
# Numbers of calls before the timed ones (warm-up, recording, compared replays), and of timed calls.
WARM_UPS, CALLS = 5, 10
# The largest vocabulary for which the head picks among all tokens by default.
_LISTED = 1024 * SHORTLIST
# By device: how many numbers are copied, and the side of the matrices that are multiplied, to
# measure it.
COPIED, SIDE = {"cuda": 1 << 28, "cpu": 1 << 24}, {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Part:
    """The time of a part of a round, in seconds.

    Attributes:
        name: "forward" (of the backbone), "pick" (of tokens from the backbone's hidden states),
            "head" (a pass over the drafted states), or "head's pick" (of tokens from the hidden
            states that the head estimates).
        wall: Median time by the clock, including the wait for the device.
        busy: Total time of the device's kernels; None where it is unknown.
        floor: The least time that the device needs for the part's memory traffic and products; None
            if it is not predicted.
    """

    name: str
    wall: float
    busy: float | None = None
    floor: float | None = None


@dataclass(frozen=True)
class Replayed:
    """The times of the parts of a round (see `Part`). The round has `rows` rows, each with `states`
    states after `prefix` tokens."""

    rows: int
    prefix: int
    states: int
    parts: list[Part]

    @property
    def wall(self) -> float:
        """Sum the seconds of all parts."""
        return sum(part.wall for part in self.parts)

    @property
    def busy(self) -> float | None:
        """Sum the seconds in which kernels of the parts ran on the device; None if these are
        unknown for a part."""
        total = 0.0
        for part in self.parts:
            if part.busy is None:
                return None
            total += part.busy
        return total

    @property
    def floor(self) -> float:
        """Sum the least seconds of the parts; a part without a predicted floor counts as 0."""
        return sum(part.floor or 0.0 for part in self.parts)


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """Measure a device's memory bandwidth with a large copy, and its FLOPs per second with a
    product of large matrices, both in `dtype`. The bandwidth that is returned is scaled to numbers
    of two bytes, because `roofline` counts two bytes for every number: in float32, for example, it
    is half of the measured bandwidth."""
    kind = "cuda" if device.type != "cpu" else "cpu"
    source = torch.zeros(COPIED[kind], dtype=dtype, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / min(_seconds(device, partial(target.copy_, source), 3))
    del source, target
    side = SIDE[kind]
    factor = torch.zeros(side, side, dtype=dtype, device=device)
    product = min(_seconds(device, partial(torch.mm, factor, factor), 3))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # `roofline` counts bytes as if all numbers had two
    return Device(name, bandwidth * BYTES / dtype.itemsize, 2 * side**3 / product, 1.0)


def _seconds(device: torch.device, call: Callable[[], Any], count: int) -> list[float]:
    """Call a function `count` times; return the seconds that each call takes by the clock,
    including the wait for the device."""
    seconds = []
    for _ in range(count):
        start = now(device)
        call()
        seconds.append(now(device) - start)
    return seconds


def floors_of(
    shape: Shape, device: Device, rows: int, states: int, prefix: int, masks: int
) -> dict[str, float]:
    """Return the least seconds that a device needs for each part of a round, by name: "forward" (of
    the backbone), "pick" (of tokens from its hidden states) and "head" (a head pass). There is no
    "head" if `states` is 1 or the model of this `shape` has no head, as nothing is drafted with a
    head then.

    The round has `rows` rows, each with `states` states after `prefix` tokens. `masks` is the
    number of positions in all rows at which tokens are picked. For each row, the head reads one
    state less than the backbone.
    """
    floors = {
        "forward": sum(map(device.seconds, backbone_forward(shape, rows, states, prefix))),
        "pick": device.seconds(vocabulary_step(shape, masks)),
    }
    if shape.head_layers and states > 1:
        head = head_forward(shape, rows, states - 1, prefix)
        floors["head"] = sum(map(device.seconds, head))
    return floors


@torch.inference_mode()
def replay_rounds(
    model: MRPForCausalLM, device: Device, rows: int, prefix: int, widths: Sequence[int]
) -> Iterator[Replayed]:
    """Time the parts of a round for each number of states per row in `widths`. No text is decoded:
    the same states are scored repeatedly after `prefix` random tokens. `device` has the rates from
    which the least possible times are computed."""
    config = model.config
    block = config.block_size
    shape = Shape.of("model", config)
    prefix = max(1, prefix // block) * block
    with_head = config.has_head
    length = prefix + 2 * block
    ids = inputs_of(model, None, rows, prefix)["input_ids"].tolist()
    weight = model.lm_head.weight
    for states in widths:
        drafts_with_head = with_head and states > 1
        shortlist = SHORTLIST if drafts_with_head and config.vocab_size > _LISTED else 0
        picker = Picker(
            weight,
            config.mask_token_id,
            candidates=shortlist,
            shortlist=shortlist,
            dispatch=AUTOMATIC if AUTOMATIC.allows("those of the pick", weight) else PYTORCH,
        )
        batch = []
        for index, prompt in enumerate(ids):
            text = [*prompt, *[config.mask_token_id] * (2 * block)]
            ends = (prefix, prefix, length, length, 0)
            row = Row(index, text, block, config.mask_token_id, frozenset(), *ends, 0)
            batch.append(row)
        size = (rows, length, max(widths) * block)
        with networks_for(model, picker, None, None, *size, drafts_with_head) as networks:
            networks.cache.empty()
            networks.prefill(batch, [0] * rows)
            drafts = [_nodes_of(row, states) for row in batch]
            masks = sum(len(node.state.free) for node in chain.from_iterable(drafts))
            floors = floors_of(shape, device, rows, states, prefix, masks)
            yield Replayed(rows, prefix, states, _parts(networks, batch, drafts, floors))
    model.release_graphs()


def _parts(
    networks: Networks,
    rows: Sequence[Row],
    drafts: Sequence[Sequence[Node]],
    floors: dict[str, float],
) -> list[Part]:
    """Time each part of a round that scores the same states, `drafts`, repeatedly. `floors` maps
    names of parts to their least seconds."""
    score = partial(networks.score, rows, drafts)
    scores = score()
    owners = []
    hidden: list[Any] = []
    drafted = []
    candidates = []
    queries: list[list[tuple[State, Any]]] = []
    for row, nodes, row_scores in zip(rows, drafts, scores, strict=True):
        queries.append([])
        source: Scores | None = None
        for node, node_scores in zip(nodes, row_scores, strict=True):
            owners.append((row, node.state))
            hidden.append(node_scores.hidden)
            if source is not None:
                drafted.append(owners[-1])
                queries[-1].append((node.state, source.hidden))
                candidates.append(source.candidates)
            source = node_scores
    scored, busy = _time(networks.device, score)
    picked, busy_pick = _time(networks.device, partial(networks.sampler.pick, owners, hidden))
    forward_busy = None if busy is None or busy_pick is None else busy - busy_pick
    parts = [
        Part("forward", max(0.0, scored - picked), forward_busy, floors["forward"]),
        Part("pick", picked, busy_pick, floors["pick"]),
    ]
    if networks.with_head:
        head = partial(networks.head, rows, queries)
        outputs = list(chain.from_iterable(head()))
        pick = partial(networks.sampler.estimate, drafted, outputs, candidates=candidates)
        for name, call in (("head", head), ("head's pick", pick)):
            parts.append(Part(name, *_time(networks.device, call), floors.get(name)))
    return parts


def _nodes_of(row: Row, count: int) -> list[Node]:
    """Make `count` nodes of the row's next block. Each has one more token revealed than the node
    before. When only one mask is left, the next node starts again with one revealed token."""
    nodes = [Node(row.state, -1, None)]
    for index in range(1, count):
        column = index % row.block_size
        state = row.state if column == 0 else nodes[-1].state
        revealed = row.successor(state, [state.free[0]], [1] * row.block_size)
        nodes.append(Node(revealed, -1, None))
    return nodes


def _time(device: torch.device, call: Callable[[], Any]) -> tuple[float, float | None]:
    """Return the median seconds that a call takes by the clock, including the wait for the device,
    and the total seconds of the device's kernels in one call. The latter are measured with torch's
    profiler, and None where they are unknown."""
    for _ in range(WARM_UPS):
        call()
    wall = statistics.median(_seconds(device, call, CALLS))
    if device.type != "cuda":
        return wall, None
    activities = [ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize(device)
    total = sum(event.self_device_time_total for event in profiler.key_averages())
    return wall, total * 1e-6 / CALLS if total else None
