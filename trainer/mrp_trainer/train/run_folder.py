"""A training run's folder: who writes to it, which run it holds, and what an interrupted one left in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from .settings import RUN_FILE, Settings, read_yaml

_LOCK = ".lock"
_RESTART = "name another folder, or begin again with --restart"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Take a folder, made if it is not there, for this process; the system takes it back from one that is killed.

    Raises:
        ValueError: if another run has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / _LOCK).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(f"{folder} is held by a run that goes on: wait for it, end it, or name another folder") from error
    with lock:
        yield


def check_folder(folder: Path, settings: Settings) -> None:
    """Refuse, with a `ValueError`, where a run with other settings or data would be taken up."""
    if not any(folder.glob("checkpoint-*")):
        return
    path = folder / RUN_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds checkpoints and no {RUN_FILE}: {_RESTART}")
    try:
        before = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{error}. What run {folder} holds cannot be told: {_RESTART}") from error
    if different := settings.differences(before):
        more = how_to_go_on(folder, settings) if (folder / "config.json").is_file() else ""
        raise ValueError(f"{folder} holds a run with other settings: {'; '.join(different)}. {_RESTART.capitalize()}.{more}")


def how_to_go_on(folder: Path, settings: Settings) -> str:
    """Say how to train further what a run has saved, with a space before; "" of an adapter."""
    what, flag = ("head", "head") if settings.objective == "mrp" else ("backbone", "model")
    if settings.options.lora_rank:
        return ""
    return f" To train its {what} further, give --{flag} {folder} and another --output-dir"


def take_over(folder: Path, settings: Settings, restart: bool) -> None:
    """Write the run's settings, and remove what saves that were killed left; with `restart`, also an earlier run."""
    for path in folder.glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)
    if restart:
        for path in folder.glob("checkpoint-*"):
            shutil.rmtree(path)
        (folder / RUN_FILE).unlink(missing_ok=True)
    written = folder / f".{RUN_FILE}.partial"
    written.write_text(yaml.safe_dump(settings.as_dict(), sort_keys=False), encoding="utf-8")
    written.replace(folder / RUN_FILE)
