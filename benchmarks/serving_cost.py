"""Where MRP pays on a GPU behind SGLang, predicted: ``python -m benchmarks.serving_cost``.

    seconds of a round = bytes or FLOPs of backbone, head and picks (the roofline of `cost_model`)
                       + what a forward of the engine takes beyond its bytes, as published
                       + launches outside of graphs, copies and reads, as counted (`tests/plugin/test_serving_work.py`)

It prints a table of the best K and its speed over stock `LowConfidence` by concurrent requests, for drafts that are each right
with the same chance if those before were. Stock takes one more forward per block, to store its keys and values. No GPU was
measured: the seconds of a launch, a copy and a read are assumptions, which options change.
"""

from dataclasses import dataclass

from mrp_trainer.evaluate.roofline import PUBLISHED, Counts, Device, Shape, round_seconds
from mrp_trainer.publish.card import markdown_table

from .common import parser_of
from .cost_model import DEVICES

# Bandwidth and dense bf16 peak as its maker gives them.
RTX_PRO = Device("RTX PRO 6000", 1.79e12, 503e12)
PUBLISHED_FORWARD = 19.6e-3  # seconds of SDAR-8B at batch 1 on it, in SGLang
WIDTHS = (1, 2, 3, 4)  # up to three drafts, as published
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Beside:
    """The work of a round beside the networks and their picks, at most, as a test counts it.

    Attributes:
        launches: Kernels launched.
        copies: Copies to the device.
        reads: Reads that the host waits for.
    """

    launches: int
    copies: int
    reads: int

    def seconds(self, launch: float, crossing: float) -> float:
        """Compute the seconds of a round from those of a launch, and of a copy or a read."""
        return self.launches * launch + (self.copies + self.reads) * crossing


# With a head pass for drafts and one for a clean block; and without drafts.
DRAFTED, ALONE = Beside(30, 4, 2), Beside(12, 1, 1)
# Assumed launches of a head pass in a graph: its inputs and metadata are written, and its result is copied.
HEAD_PASS = 12


def tokens_of(width: int, chance: float) -> float:
    """Compute the expected tokens of a round that scores a chain of `width` states, each draft right with a chance."""
    return sum(chance**place for place in range(width))


def seconds_a_token(
    shape: Shape,
    device: Device,
    width: int,
    chance: float,
    batch: int,
    prefix: int,
    waits: float,
    launch: float,
    crossing: float,
) -> float:
    """Predict the seconds per token of each row under MRP.

    Args:
        shape: Of the model.
        device: The device.
        width: K.
        chance: That a draft is right.
        batch: Concurrent requests.
        prefix: Committed tokens of each.
        waits: Seconds of a forward beyond its bytes or FLOPs.
        launch, crossing: Seconds of a launch outside of graphs, and of a copy or a read.
    """
    tokens, block = tokens_of(width, chance), shape.block_size
    if width == 1:
        return round_seconds(shape, device, Counts(1, 1 + 1 / block), batch, prefix) + waits + ALONE.seconds(launch, crossing)
    passes = 1 + tokens / block  # one for drafts, and one per clean block
    counts = Counts(tokens, width, passes, width - 1)
    head = passes * HEAD_PASS * launch
    seconds = round_seconds(shape, device, counts, batch, prefix) + waits + head + DRAFTED.seconds(launch, crossing)
    return seconds / tokens


def stock_seconds_a_token(shape: Shape, device: Device, batch: int, prefix: int, waits: float) -> float:
    """Predict the seconds per token of each row under stock's static decoding, which stores each block by an extra forward."""
    return (round_seconds(shape, device, Counts(1, 1), batch, prefix) + waits) * (1 + 1 / shape.block_size)


def table(chance: float, prefix: int, launch: float, crossing: float) -> str:
    """Predict the best K and its speed by concurrent requests, on devices that wait as published and that never wait."""
    waits = PUBLISHED_FORWARD - round_seconds(PUBLISHED["8B"], RTX_PRO, Counts(1, 1), 1, prefix)
    cases = [
        ("8B, RTX PRO 6000, as published", PUBLISHED["8B"], RTX_PRO, waits),
        ("8B, RTX PRO 6000, no waits", PUBLISHED["8B"], RTX_PRO, 0.0),
        ("4B, H200, no waits", PUBLISHED["4B"], DEVICES["H200"], 0.0),
        ("1.7B, H200, no waits", PUBLISHED["1.7B"], DEVICES["H200"], 0.0),
    ]
    lines = []
    for name, shape, device, waiting in cases:
        cells = []
        for batch in BATCHES:
            stock = stock_seconds_a_token(shape, device, batch, prefix, waiting)
            speeds = {
                width: stock / seconds_a_token(shape, device, width, chance, batch, prefix, waiting, launch, crossing)
                for width in WIDTHS
            }
            best = max(speeds, key=speeds.__getitem__)
            cells.append(f"{f'K={best}' if best > 1 else 'rests'} {speeds[best]:.2f}x")
        lines.append([name, *cells])
    return markdown_table(["predicted", *(str(batch) for batch in BATCHES)], lines)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a Markdown table."""
    parser = parser_of("serving_cost", __doc__)
    parser.add_argument("--acceptance", type=float, default=0.75, dest="chance", help="chance of a draft")
    parser.add_argument("--prefix", type=int, default=512, help="committed tokens of a request")
    parser.add_argument("--launch", type=float, default=6e-6, help="seconds of a launch outside of graphs")
    parser.add_argument("--crossing", type=float, default=20e-6, help="seconds of a copy or a read")
    print(table(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
