"""Options of `mrp doctor`. Nothing here imports torch, so that help appears at once."""

from dataclasses import dataclass

from ..evaluate.options import ModelOptions
from ..flags import flag

_TIMES = "What is timed"


@dataclass(kw_only=True)
class DoctorOptions(ModelOptions):
    """Options of `mrp doctor`: the model, and the rounds to time; each field is a flag."""

    random: str | None = flag(
        "Random weights of a published shape in place of a checkpoint: 1.7B, 4B or 8B.",
        None,
        panel="Model",
        metavar="SHAPE",
    )
    states: list[int] = flag(
        "K, the states per row and round.", [1, 2, 4, 8], panel=_TIMES, min=1, metavar="K"
    )
    batch: list[int] | None = flag(
        "Rows per batch.", None, panel=_TIMES, shown="1, 4; on CUDA also 16", min=1
    )
    prefix: list[int] | None = flag(
        "Tokens of a random prompt.", None, panel=_TIMES, shown="512; on CUDA also 4096", min=1
    )
    baselines: bool = flag(
        "Whether to time a step of plain transformers, and on CUDA a compiled one.",
        True,
        panel=_TIMES,
        name="--baselines/--no-baselines",
    )
    turns: int = flag("Repetitions of each timing.", 3, panel=_TIMES, min=1)
