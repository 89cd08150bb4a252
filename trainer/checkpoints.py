"""Checkpoints that an interrupted run left behind."""

import json
from pathlib import Path


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run that was written to its end, or None.

    The Trainer writes `trainer_state.json` last, and removes older checkpoints behind it. So one without it, or with a part
    of it, was cut off, and the one before is still there.
    """
    whole = [path for path in folder.glob("checkpoint-*") if _step(path) is not None]
    return max(whole, key=lambda path: _step(path) or 0, default=None)


def _step(checkpoint: Path) -> int | None:
    """Where a checkpoint goes on, if it is whole."""
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        return int(state["global_step"])
    except (OSError, ValueError, KeyError):
        return None
