"""Checkpoints of training runs: what they hold, and which of them is whole.

The Trainer writes a checkpoint's `trainer_state.json` last: where that cannot be read the checkpoint was cut off.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy


class LogAtSaves(TrainerCallback):
    """Logs at every checkpoint, too, so that a resumed run averages over the same steps as one that was not cut off."""

    def on_step_end(  # noqa: D102 - the class says it
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    on_epoch_end = on_step_end


@contextmanager
def under_own_class(model: Any) -> Iterator[None]:
    """Inside, a model that FSDP2 has sharded is of its own class: FSDP2 puts another in its place, by whose name and file the
    remote code would be saved."""
    sharded = type(model)
    own: Any = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    model.__class__ = own
    try:
        yield
    finally:
        model.__class__ = sharded


def last_whole_checkpoint(folder: Path) -> Path | None:
    """Find the checkpoint of the greatest step in a run's folder, or None; those that were cut off are passed over."""
    whole = {step: path for path in folder.glob("checkpoint-*") if (step := step_of(path)) is not None}
    return whole[max(whole)] if whole else None


def step_of(checkpoint: Path) -> int | None:
    """Where a checkpoint goes on; None of one that was cut off."""
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
