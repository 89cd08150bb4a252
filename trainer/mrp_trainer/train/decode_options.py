"""What `mrp decode` is asked to do: every option, once. Nothing here imports torch, so that help comes at once."""

from dataclasses import dataclass

from ..evaluate.options import Dtype
from ..flags import flag

_WHAT, _HOW, _MODEL, _OUTPUT = "What is asked", "How it is decoded", "Model", "Output"


@dataclass(frozen=True)
class DecodeOptions:
    """Options of the command that records decodings, `mrp decode`; each field is a flag.

    All processes see the folder of `output`. A sampled text depends on `seed` and its record's number, and not on the batch or
    the number of processes. Without `device` each process takes its own GPU.

    Raises:
        ValueError: for a value out of range.
    """

    model: str = flag("Checkpoint: folder or Hub id.", panel=_MODEL, metavar="PATH")
    data: list[str] = flag("JSON lines or a datasets folder, with prompts.", panel=_WHAT, metavar="FILE")
    output: str = flag("JSON lines that mrp train reads.", panel=_OUTPUT, metavar="FILE")
    revision: str | None = flag("The model's commit, branch or tag.", None, panel=_MODEL)
    tokenizer: str | None = flag("Another tokenizer.", None, panel=_MODEL, metavar="PATH", shown="the model's")
    dtype: str | None = flag("Type of the weights.", None, panel=_MODEL, kind=Dtype, shown="the checkpoint's")
    device: str | None = flag("Device of the model.", None, panel=_MODEL, shown="own GPU, or cpu")
    split: str = flag("Split of a datasets folder.", "train", panel=_WHAT)
    limit: int | None = flag("Decode only so many records.", None, panel=_WHAT, min=1)
    max_new_tokens: int = flag("Limit of tokens per prompt.", 256, panel=_HOW, min=1)
    temperature: float = flag("Temperature of sampling; 0 is greedy.", 0.0, panel=_HOW, min=0)
    seed: int = flag("Seed of sampling.", 0, panel=_HOW, min=0)
    batch_size: int = flag("Prompts per generate.", 32, panel=_HOW, min=1)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (greedy) or more")
