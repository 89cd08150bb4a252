"""Checkpoints of training runs: finding the last complete one, logging at each, and saving sharded models.

The Trainer writes a checkpoint's `trainer_state.json` last: a checkpoint is incomplete if that file cannot be read.
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
    """A callback that also logs at checkpoints, so that a resumed run averages over the same steps as an uninterrupted one."""

    def on_step_end(  # noqa: D102 - the class says it
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    on_epoch_end = on_step_end


@contextmanager
def under_own_class(model: Any) -> Iterator[None]:
    """Restore a model's own class, which FSDP2 replaces when it shards, while the context is open: saving writes the name and
    the file of the class as remote code."""
    sharded = type(model)
    own: Any = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    model.__class__ = own
    try:
        yield
    finally:
        model.__class__ = sharded


def last_whole_checkpoint(folder: Path) -> Path | None:
    """Find the complete checkpoint of the greatest step in a run's folder; None if there is none."""
    whole = {step: path for path in folder.glob("checkpoint-*") if (step := step_of(path)) is not None}
    return whole[max(whole)] if whole else None


def step_of(checkpoint: Path) -> int | None:
    """Read the global step of a checkpoint; None if it is incomplete."""
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
