"""Kernels, bytes and host syncs of a round at the published shapes, and its predicted time beside the floor.

    python -m benchmarks.rounds --shape 1.7b 4b 8b

prints a line for each shape, batch and K, of blocks of 16 behind 512 tokens: `static` (K = 1), and drafts of one pass of the
head. Kernels are those that tests count in recordings of this code (`tests/test_recorded_kernels.py`). The floor is what bytes
and FLOPs take on a device that never waits. Predicted is more: logits go to memory and back, every kernel starts, every sync
waits for what was picked, and the host decides for each row. It is arithmetic: no GPU has been measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from mrp_trainer.doctor.roofline import LOGIT_BYTES, PUBLISHED, Counts, Device, Shape, masks_per_state, round_work
from mrp_trainer.publish.card import markdown_table

from .common import parser_of
from .cost_model import DEVICES, SHAPES

# Kernels of a decoder layer: products of qkv, o, gate and up, down; kernels of our own; SiLU and the product behind it.
LAYER = {"mm": 4, "triton._sum_and_norm": 2, "triton._rotate": 1, "triton._attend": 1, "silu": 1, "mul": 1}
BACKBONE = 15  # beside its layers: unpacking, embedding, rotary angles, the last norm
HEAD = 33  # likewise, with the two norms and the product that it begins with
PICK = 10  # masked places, logits, the row kernel's two, and spreading the results over blocks
TRANSFER = 5  # on a GPU, around a pick: places go there; tokens and odds are cast, stacked and come back
COMMIT = 13  # of clean states: counted for each round, though it comes with a clean block alone
# Seconds that a kernel takes to start, in a graph or behind another one; that a sync takes beside the kernels before it; and
# that the host decides for a row of a round, alone and drafted: at batch 1, and from 8 on (the engine's own budget).
KERNEL, SYNC = 1.5e-6, 15e-6
DECIDING = {True: (30e-6, 100e-6), False: (8e-6, 40e-6)}


@dataclass(frozen=True)
class Prediction:
    """What a round takes.

    Attributes:
        kernels: That the device runs.
        launches: That the host makes: a graph for each network, with a copy to it and one from it, and picks and commit.
        syncs: Times that the host waits for what was picked.
        bytes: Read and written at least.
        floor: Seconds by bytes and FLOPs alone.
        seconds: Predicted.
    """

    kernels: int
    launches: int
    syncs: int
    bytes: float
    floor: float
    seconds: float


def predict(shape: Shape, device: Device, batch: int, states: int, prefix: int) -> Prediction:
    """Predict a round over `states` states a row; more than one are drafted by one pass of the head over all but one."""
    drafted = states > 1
    counts = Counts(1.0, states, float(drafted), max(1, states - 1))
    networks = 1 + drafted
    picks = networks * (PICK + TRANSFER)
    kernels = shape.num_hidden_layers * sum(LAYER.values()) + BACKBONE + picks + COMMIT
    kernels += drafted * (shape.head_layers * sum(LAYER.values()) + HEAD)
    work = [(times, each) for times, works in round_work(shape, counts, batch, prefix).values() for each in works]
    floor = sum(times * device.seconds(each) for times, each in work)
    picked = batch * masks_per_state(shape.block_size) * (states + drafted * (states - 1))
    logits = 2 * picked * shape.vocab_size * LOGIT_BYTES / device.bandwidth
    deciding = batch * DECIDING[batch == 1][drafted]
    return Prediction(
        kernels=kernels,
        launches=3 * networks + picks + COMMIT,
        syncs=networks,
        bytes=sum(times * each.bytes for times, each in work),
        floor=floor,
        seconds=floor + logits + kernels * KERNEL + networks * SYNC + deciding,
    )


def table(device: str, shape: Sequence[str], batch: Sequence[int], states: Sequence[int], prefix: int) -> str:
    """Predict rounds at each shape, batch size and K."""
    rows = []
    for size, each, k in product(shape, batch, states):
        sizes = PUBLISHED[size.upper()]
        found = predict(sizes, DEVICES[device], each, k, prefix)
        counted = (each, k, found.kernels, found.launches, found.syncs, f"{found.bytes / 1e9:.2f}")
        times = f"{1e3 * found.floor:.2f}", f"{1e3 * found.seconds:.2f}", f"{found.seconds / found.floor:.2f}"
        rows.append([sizes.name, *map(str, counted), *times])
    head = ["shape", "batch", "K", "kernels", "launches", "syncs", "GB", "floor, ms", "predicted, ms", "over floor"]
    return markdown_table(head, rows)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a Markdown table."""
    parser = parser_of("rounds", __doc__)
    parser.add_argument("--device", default="H200", choices=[*DEVICES])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["4b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--states", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prefix", type=int, default=512, help="committed tokens of a row")
    print(table(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
