"""Kernels, bytes and host syncs of a round at the published shapes, and its predicted time beside the floor.

``python -m benchmarks.rounds > benchmarks/results/rounds.jsonl`` prints a line for each shape, batch and K, of blocks of 16
behind 512 tokens: `static` (K = 1), and drafts of one pass of the head. Kernels are those that tests count in recordings of
this code (`tests/test_recorded_kernels.py`). The floor is what bytes and FLOPs take on a device that never waits. Predicted is
more: logits go to memory and back, every kernel starts, every sync waits for what was picked, and the host decides for each
row. It is arithmetic: no GPU has been measured.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from .common import HUB_CONFIGS, emit, header
from .cost_model import DEVICES, Counts, masks_per_state, round_work
from .roofline import LOGIT_BYTES, Device, Shape

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
    counts = Counts(1.0, states, float(drafted), max(1, states - 1), float(drafted))
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


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each shape, batch and K."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="H200", choices=[*DEVICES])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--states", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prefix", type=int, default=512, help="committed tokens of a row")
    options = parser.parse_args(arguments)
    emit(header("rounds", options))
    for size in ("1.7b", "4b", "8b"):
        shape = Shape.read(HUB_CONFIGS / f"sdar-{size}-mrp")
        for batch in options.batch:
            for states in options.states:
                found = predict(shape, DEVICES[options.device], batch, states, options.prefix)
                line: dict[str, Any] = {"shape": shape.name, "batch": batch, "states": states, **vars(found)}
                line |= {"bytes": float(f"{found.bytes:.4g}"), "over_floor": round(found.seconds / found.floor, 3)}
                for name in ("floor", "seconds"):
                    line[f"{name.replace('seconds', 'predicted')}_ms"] = round(1e3 * line.pop(name), 3)
                emit(line)


if __name__ == "__main__":
    main()
