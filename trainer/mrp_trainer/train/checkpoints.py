"""Checkpoints of training runs: what they hold, and which of them is whole.

A checkpoint's last file, `digests.json`, has the SHA-256 of every other one. Without it the checkpoint was cut off while it was
written, and where a file is not what it says, the checkpoint is damaged.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

log = logging.getLogger(__name__)

_STATE = "trainer_state.json"
_DIGESTS = "digests.json"


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


def digest_of(paths: Sequence[Path]) -> dict[str, str]:
    """Compute the SHA-256 of every file, by its path; of a folder, of all files in it."""
    files = {path for one in paths for path in ([one] if one.is_file() else one.rglob("*")) if path.is_file()}
    digests = {}
    for path in sorted(files):
        with path.open("rb") as file:
            digests[path.as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def seal(checkpoint: Path) -> None:
    """Write the digests, behind which a checkpoint is whole."""
    digests = {Path(name).relative_to(checkpoint).as_posix(): value for name, value in digest_of([checkpoint]).items()}
    written = checkpoint / f"{_DIGESTS}.partial"
    written.write_text(json.dumps(digests, indent=1), encoding="utf-8")
    written.replace(checkpoint / _DIGESTS)


def check_whole(checkpoint: Path) -> None:
    """Refuse, with a `ValueError`, a damaged checkpoint; one without digests, which this package did not write, passes."""
    try:
        digests = dict(json.loads((checkpoint / _DIGESTS).read_bytes()))
    except FileNotFoundError:
        return
    except (ValueError, TypeError) as error:
        raise ValueError(f"{checkpoint / _DIGESTS} is damaged ({error}): resume from another checkpoint") from error
    found = digest_of([checkpoint])
    for name in {_STATE, *digests}:
        if found.get((checkpoint / name).as_posix(), "nothing") != digests.get(name):
            raise ValueError(f"{checkpoint / name} is not what was written there: resume from another checkpoint")


def last_whole_checkpoint(folder: Path) -> Path | None:
    """Find the newest whole checkpoint of a run, or None; damaged ones that are newer are named and set aside.

    One that was cut off is passed over. The one before is still there: older ones are removed behind a new one.
    """
    for path in sorted(_checkpoints(folder), key=_number, reverse=True):
        if not (path / _DIGESTS).is_file():
            continue
        try:
            check_whole(path)
        except ValueError as error:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            log.warning("%s. It is now called %s, and the one before is taken", str(error).partition(":")[0], aside.name)
        else:
            return path
    return None


def make_room(folder: Path, step: int) -> None:
    """Before a checkpoint is written: removes those that were cut off, and what an earlier run left in its place.

    The Trainer knows a checkpoint by its name alone: one that was cut off could be kept as the newest in place of a whole one.
    """
    for path in _checkpoints(folder):
        if _number(path) == step or not (path / _DIGESTS).is_file():
            (path / _DIGESTS).unlink(missing_ok=True)  # or, killed here, it would vouch for what is left
            shutil.rmtree(path, ignore_errors=True)


def step_of(checkpoint: Path) -> int | None:
    """Where a checkpoint goes on, if it says so."""
    try:
        state = json.loads((checkpoint / _STATE).read_text())
        return int(state["global_step"])
    except (OSError, ValueError, KeyError):
        return None


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])
