"""Stand-ins for a GPU: tapes of operations for CUDA graphs, and small sizes to measure a device by.
Kernels are interpreted where `TRITON_INTERPRET` is set."""

from mrp_trainer.doctor import baselines, replays

from modeling_mrp.networks import graphs
from tests.support.tape import TapeRecorder


def stand_in() -> None:
    """Let the CPU of this process stand for a GPU."""
    graphs.RECORDERS["cpu"] = TapeRecorder
    replays.CALLS = 1
    baselines.CALLS = 1
    replays.COPIED["cpu"] = 1 << 16
    replays.SIDE["cpu"] = 64
