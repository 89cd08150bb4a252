"""Checkpoints of training runs: what they hold, and which of them an interrupted run left whole."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

_STATE = "trainer_state.json"  # the Trainer writes it last


@contextmanager
def saving_head_alone(model: Any) -> Iterator[None]:
    """Inside, whoever has a model save itself gets a head repository, which names its backbone and loads it."""
    model.save_pretrained = partial(model.save_pretrained, head_only=True)
    try:
        yield
    finally:
        del model.save_pretrained


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
    """The newest checkpoint of a run that was written to its end, or None.

    One without `trainer_state.json`, or with a part of it, was cut off. The one before is still there: older ones are removed
    behind a new one.
    """
    whole = [path for path in folder.glob("checkpoint-*") if step_of(path) is not None]
    return max(whole, key=lambda path: step_of(path) or 0, default=None)


def make_room(folder: Path, step: int) -> None:
    """Before a checkpoint is written: removes those that were cut off, and what an earlier run left in its place.

    The Trainer knows a checkpoint by its name alone. One that was cut off could be kept as the newest in place of a whole one,
    and in one that is written over, an old `trainer_state.json` would vouch for new files that are not all there.
    """
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", path.name) and (path.name == f"checkpoint-{step}" or step_of(path) is None):
            (path / _STATE).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def step_of(checkpoint: Path) -> int | None:
    """Where a checkpoint goes on, if it is whole."""
    try:
        state = json.loads((checkpoint / _STATE).read_text())
        return int(state["global_step"])
    except (OSError, ValueError, KeyError):
        return None
