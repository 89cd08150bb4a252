"""Checkpoints that an interrupted run left behind."""

import json
import re
import shutil
from pathlib import Path

_STATE = "trainer_state.json"  # the Trainer writes it last


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end, or None.

    One without `trainer_state.json`, or with a part of it, was cut off. The one before is still there: older ones are removed
    behind a new one.
    """
    whole = [path for path in folder.glob("checkpoint-*") if _step(path) is not None]
    return max(whole, key=lambda path: _step(path) or 0, default=None)


def make_room(folder: Path, step: int) -> None:
    """Before a checkpoint is written: removes those that were cut off, and what an earlier run left in its place.

    The Trainer knows a checkpoint by its name alone. One that was cut off could be kept as the newest in place of a whole one,
    and in one that is written over, an old `trainer_state.json` would vouch for new files that are not all there.
    """
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", path.name) and (path.name == f"checkpoint-{step}" or _step(path) is None):
            (path / _STATE).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _step(checkpoint: Path) -> int | None:
    """Where a checkpoint goes on, if it is whole."""
    try:
        state = json.loads((checkpoint / _STATE).read_text())
        return int(state["global_step"])
    except (OSError, ValueError, KeyError):
        return None
