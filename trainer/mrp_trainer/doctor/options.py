"""What `mrp doctor` is asked to look at. Nothing here imports torch, so that help comes at once."""

from dataclasses import dataclass

from ..evaluate.options import ModelOptions
from ..flags import flag

_TIMES = "What is timed"


@dataclass(kw_only=True)
class DoctorOptions(ModelOptions):
    """Which model, and what is timed; each field is a flag."""

    random: str | None = flag(
        "Random weights of a published shape in place of a checkpoint: 1.7B, 4B or 8B.", None, panel="Model", metavar="SHAPE"
    )
    states: list[int] = flag("K, the states of a row in a round.", [1, 2, 4, 8], panel=_TIMES, min=1, metavar="K")
    batch: list[int] = flag("Rows.", [1, 4], panel=_TIMES, min=1)
    prefix: int = flag("Tokens of a random prompt.", 512, panel=_TIMES, min=1)
    turns: int = flag("Times that each is timed.", 3, panel=_TIMES, min=1)
