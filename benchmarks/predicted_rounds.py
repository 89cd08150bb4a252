"""Rounds of a 4B model as they are predicted from what they launch, copy, wait for and read.

    TRITON_INTERPRET=1 python -m benchmarks.predicted_rounds

Prints a table: rounds before the host's waits were taken out (commit ca68fa36) and now, by rows and
K, on three GPUs. Launches, copies and waits are counted here, on small models of the same kinds of
layers: launches within recordings by tapes of operations, with kernels that are not run; those
around them one by one; copies on a stand-in for a device. What was counted at that commit, by this
command, is in `BEFORE`. Bytes and products are those of the roofline. A round with drafts has one
pass of the head; counts are means over the rounds of a text, in some of which a block ends.

    TRITON_INTERPRET=1 python -m benchmarks.predicted_rounds --counts

prints the counts alone. Nothing of this was run on a GPU: `TIMES` are assumptions.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from mrp_trainer.doctor.replays import floors_of
from mrp_trainer.evaluate.roofline import PUBLISHED, Device, masks_per_state
from mrp_trainer.publish.card import markdown_table
from torch.utils._python_dispatch import _disable_current_modes

from modeling_mrp.generate.loop import RoundDecoder
from modeling_mrp.kernels.pick import LIST, PICK
from modeling_mrp.networks import graphs
from modeling_mrp.networks.networks import Networks
from modeling_mrp.networks.predicted import EAGER, READ, RECORDED, UPLOAD

from .common import parser_of

DEVICES = (
    Device("H100", 3.35e12, 989e12),
    Device("H200", 4.8e12, 989e12),
    Device("RTX 4090", 1.01e12, 165e12),
)
ROWS, STATES, PREFIX = (1, 4, 16), (1, 4, 8), 512
# Seconds of a launch: within a recording, and by the host; of a copy to the device that waits, of
# one that does not, and of a read.
TIMES = {
    "recorded": RECORDED,
    "eager": EAGER,
    "waits": 12e-6,
    "uploads": UPLOAD,
    "reads": READ,
}
LAYERS, HEAD_LAYERS = 36, 3


@dataclass(frozen=True)
class Counted:
    """Counts of a round.

    Attributes:
        recorded: Launches within recordings, of a model of 36 + 3 layers.
        eager: Launches around them.
        waits: Copies to the device for which the host waits, and other waits.
        uploads: Copies to the device for which it does not.
        reads: Copies to the host.
    """

    recorded: float
    eager: float
    waits: float
    uploads: float
    reads: float

    def seconds(self) -> float:
        """Return what all that takes."""
        return sum(seconds * getattr(self, name) for name, seconds in TIMES.items())


# By rows and K, as counted at commit ca68fa36.
BEFORE = {
    (1, 1): Counted(372.0, 9.26, 2.14, 0, 1),
    (1, 4): Counted(428.0, 48.79, 5.6, 0, 2),
    (1, 8): Counted(428.0, 48.79, 5.64, 0, 2),
    (4, 1): Counted(372.0, 9.26, 2.14, 0, 1),
    (4, 4): Counted(428.0, 48.89, 5.6, 0, 2),
    (4, 8): Counted(428.0, 48.95, 5.64, 0, 2),
    (16, 1): Counted(372.0, 9.26, 2.14, 0, 1),
    (16, 4): Counted(428.0, 48.84, 5.64, 0, 2),
    (16, 8): Counted(428.0, 49.11, 5.64, 0, 2),
}


def mode_of(states: int) -> dict[str, Any]:
    """Return the options of a decode with K = `states`."""
    if states == 1:
        return {"decoding": "static"}
    return {"decoding": "mrp_spec", "target": "static", "num_draft_states": states}


def model_of(layers: int, head_layers: int) -> Any:
    """Make a small model of SDAR's block size."""
    tests: Any = import_module("tests.support.random_cases")
    sizes = {"num_hidden_layers": layers, "num_nextn_predict_layers": head_layers}
    return tests.make_model(4, block_size=16, **sizes).float()


def decode(model: Any, rows: int, states: int, **more: Any) -> None:
    """Decode some blocks."""
    ids = torch.arange(1, 7, device=model.device).repeat(rows, 1)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "draft_shortlist": 16}
    if states == 1:
        del options["draft_shortlist"]
    model.generate(ids, **mode_of(states), **options, **more)


@contextmanager
def each_round(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` and `end` around every round."""
    run = RoundDecoder.round

    def counted(self: RoundDecoder, *args: Any) -> None:
        begin()
        run(self, *args)
        end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoundDecoder, "round", counted)
        yield


def _picked(_: Any, logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for the kernel of the pick, by two operations for its two launches."""
    return torch.full((len(logits),), 3), logits.new_ones(len(logits))


def _listed(_: Any, logits: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    """Stand for the kernel that lists tokens beside the pick, likewise."""
    token, odds = _picked(_, logits)
    # a view, which launches nothing
    return token, odds, odds[:, None].expand(-1, 2 * others[-1] + 1)


def launches_of(
    layers: int, head_layers: int, rows: int, states: int
) -> tuple[dict[str, int], list[int]]:
    """Count launches of a model of so many layers: those of a recording, by network, and those
    around recordings, by round."""
    tape: Any = import_module("tests.support.tape")
    tape.TapeRecorder.tapes = []
    visited = tape.Seen()
    call = graphs.Graphs.call
    network = Networks._network
    roles: dict[str, int] = {}
    eager: list[int] = []

    def outside(self: Any, key: Any, function: Any, *inputs: Any) -> Any:
        visited.operations += ["copy"] * len(inputs)  # to where the recording reads
        with _disable_current_modes():
            return call(self, key, function, *inputs)

    def noted(self: Networks, *args: Any) -> Any:
        first = len(tape.TapeRecorder.tapes)
        output = network(self, *args)
        for recorded in tape.TapeRecorder.tapes[first:]:
            roles["head" if isinstance(args[-1], torch.Tensor) else "backbone"] = tape.of_tape(
                recorded
            ).total()
        return output

    def end() -> None:
        names = [operation for operation in visited.operations if not isinstance(operation, str)]
        eager.append(tape.launches(names).total() + len(visited.operations) - len(names))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(graphs.RECORDERS, "cpu", tape.TapeRecorder)
        patch.setattr(tape.GridExecutor, "__call__", lambda *_, **__: None)
        patch.setattr(PICK, "launch", _picked)
        patch.setattr(LIST, "launch", _listed)
        patch.setattr(graphs.Graphs, "call", outside)
        patch.setattr(Networks, "_network", noted)
        with each_round(visited.operations.clear, end), visited:
            decode(model_of(layers, head_layers), rows, states, kernels=True)
    graphs._KEPT.clear()
    return roles, eager


def count_launches(rows: int, states: int) -> tuple[float, float]:
    """Count the launches of a round within recordings, and around them."""
    few, eager = launches_of(2, 1, rows, states)
    extra, _ = launches_of(3, 2, rows, states)
    recorded = 0.0
    for role, depth, small in (("backbone", LAYERS, 2), ("head", HEAD_LAYERS, 1)):
        if role in few:
            recorded += few[role] + (depth - small) * (extra[role] - few[role])
    return recorded, statistics.mean(eager)


def count_copies(rows: int, states: int) -> tuple[float, float, float]:
    """Count the waits, the uploads for which nobody waits, and the reads of a round."""
    devices: Any = import_module("tests.support.devices")
    counted: list[tuple[int, int, int]] = []
    with pytest.MonkeyPatch.context() as patch, devices.counted_copies(patch) as copies:
        model = model_of(2, 1)
        devices.place(model, devices.SMALL)

        def end() -> None:
            counted.append((len(copies.waits), copies.uploads, copies.reads))

        with each_round(copies.reset, end):
            decode(model, rows, states)
    waits, uploads, reads = map(statistics.mean, zip(*counted, strict=True))
    return waits, uploads, reads


def count(rows: int, states: int) -> Counted:
    """Count a round of `rows` rows with K = `states`, as a mean over rounds."""
    recorded, eager = count_launches(rows, states)
    waits, uploads, reads = count_copies(rows, states)
    numbers = (recorded, eager, waits, uploads, reads)
    return Counted(*(round(number, 2) for number in numbers))


def floor(device: Device, rows: int, states: int) -> float:
    """Return the least seconds of a 4B round, by its bytes and products."""
    masks = int(rows * states * masks_per_state(16))
    floors = floors_of(PUBLISHED["4B"], device, rows, states, PREFIX, masks)
    return sum(floors.values())


def table() -> str:
    """Tabulate predicted rounds before and now, in milliseconds."""
    lines = []
    for (rows, states), old in BEFORE.items():
        current = count(rows, states)
        line = [str(rows), str(states)]
        for name in ("recorded", "eager", "waits", "uploads", "reads"):
            line.append(f"{getattr(old, name):.4g} -> {getattr(current, name):.4g}")
        for device in DEVICES:
            minimum = floor(device, rows, states)
            old_time = 1e3 * (minimum + old.seconds())
            new_time = 1e3 * (minimum + current.seconds())
            line.append(f"{old_time:.2f} -> {new_time:.2f} ({1e3 * minimum:.2f})")
        lines.append(line)
    head = ["rows", "K", "launches recorded", "around", "waits", "uploads", "reads"]
    head += [f"{device.name}, ms (floor)" for device in DEVICES]
    return markdown_table(head, lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of("predicted_rounds", __doc__ or "")
    parser.add_argument("--counts", action="store_true", help="print counts, as JSON lines")
    options = parser.parse_args(arguments)
    if not options.counts:
        print(table())
        return
    for rows in ROWS:
        for states in STATES:
            counts = vars(count(rows, states))
            print(json.dumps({"rows": rows, "states": states, **counts}), flush=True)


if __name__ == "__main__":
    main()
