"""Checkpoints of training runs: finding the last complete one, logging at each save, saving at
Ctrl-C, and saving sharded models.

The Trainer writes `trainer_state.json` as the last file of a checkpoint. If that file cannot be
read, the checkpoint is incomplete. If another file is missing or cannot be read, the checkpoint is
damaged.
"""

import json
import logging
import re
import signal
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ..outputs import OwnFolder

log = logging.getLogger(__name__)


class LogAtSaves(TrainerCallback):
    """A callback that also logs at each save of a checkpoint, so that a resumed run averages over
    the same steps as an uninterrupted one."""

    def on_step_end(  # noqa: D102 - the class says it
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    on_epoch_end = on_step_end


class StopAtInterrupt(TrainerCallback):
    """A callback that, at the first Ctrl-C, saves a checkpoint at the end of the current step and
    ends training. A second Ctrl-C ends the process at once. The callback is also a context manager,
    and handles Ctrl-C only while its context is open."""

    def __init__(self) -> None:
        self.interrupted = False

    def __enter__(self) -> "StopAtInterrupt":
        self.previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, self.previous)

    def _note(self, *_: Any) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, self.previous)
        print("interrupted: a checkpoint is saved at the end of this step", file=sys.stderr)

    def on_step_end(  # noqa: D102 - the class says it
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.interrupted:
            control.should_save = control.should_log = control.should_training_stop = True


@contextmanager
def under_own_class(model: Any) -> Iterator[None]:
    """Restore a model's own class while the context is open. FSDP2 replaces the class of a model
    that it shards, but saving writes the class's name and its source file as remote code."""
    sharded = type(model)
    own_class: Any = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
    model.__class__ = own_class
    try:
        yield
    finally:
        model.__class__ = sharded


def checkpoints_in(folder: Path) -> list[Path]:
    """List the folders `checkpoint-N` of a run, complete or not, in order of increasing N. Other
    names that begin with `checkpoint-` are ignored."""
    folders = []
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir():
            folders.append(path)
    return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))


def last_whole_checkpoint(folder: Path, with_states: bool = True) -> Path | None:
    """Return the newest checkpoint in a run's folder that is complete and not damaged. Return None
    if no checkpoint is complete.

    A checkpoint is complete if its `trainer_state.json`, which is written last, can be read. It is
    damaged if another of its files cannot be read. With `with_states`, it is also damaged if a file
    of the model, or of the state of the optimizer, the scheduler or the random generators, is
    missing. Damaged checkpoints are skipped with a warning; `ValueError` if all complete
    checkpoints are damaged.
    """
    damaged = ""
    for path in reversed(checkpoints_in(folder)):
        if step_of(path) is None:
            continue
        if (damage := damage_of(path, with_states)) is None:
            return path
        damaged = f"{path} is damaged: {damage}"
        log.warning(f"{damaged}. It is passed over, for the checkpoint before it")
    if damaged:
        raise ValueError(
            f"{damaged}, and no older one is whole: restore it from a copy, or begin again with "
            "--restart"
        )
    return None


def make_room(folder: OwnFolder, limit: int, protected: set[str]) -> None:
    """Remove the oldest checkpoints of a run's folder, until at most `limit` checkpoints are left.
    Only checkpoints that runs wrote, according to the folder's listing of its own files, are
    counted and removed. Those whose names are in `protected` are counted, but never removed."""
    names = set(folder.names())
    listed = [path.name for path in checkpoints_in(folder.path) if path.name in names]
    removable = [name for name in listed if name not in protected]
    folder.remove(*removable[: max(0, len(listed) - limit)])


def damage_of(checkpoint: Path, with_states: bool = True) -> str | None:
    """Describe the first file of a checkpoint that is missing or cannot be read; return None if
    there is no such file. With `with_states`, the files of the model and of the states of
    optimizer, scheduler and random generators must exist; otherwise only the files that exist are
    checked. Nothing is unpickled."""
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    needed = [
        ("config.json", "adapter_config.json"),
        ("*.safetensors",),
        ("optimizer.pt",),
        ("scheduler.pt",),
        ("rng_state*.pth",),
    ]
    for patterns in needed if with_states else ():
        if not any(path.match(pattern) for path in files for pattern in patterns):
            return f"it has no {patterns[0]}"
    for path in files:
        try:
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            elif path.suffix in (".pt", ".pth", ".bin"):
                with zipfile.ZipFile(path) as archive:
                    if (member := archive.testzip()) is not None:
                        return f"{path.name} has other contents than were written, in {member}"
        except (
            OSError,
            ValueError,
            RecursionError,
            SafetensorError,
            zipfile.BadZipFile,
            EOFError,
        ) as error:
            return f"{path.name} cannot be read ({error})"
    return None


def step_of(checkpoint: Path) -> int | None:
    """Read the global step of a checkpoint from its `trainer_state.json`, the file that is written
    last. Return None if this file is missing, cannot be read or has no step: the checkpoint is
    incomplete."""
    try:
        return int(json.loads((checkpoint / "trainer_state.json").read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
