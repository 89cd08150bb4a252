"""The files and folders that commands write. A command overwrites and removes only what it has
written itself.

A file is written completely or not at all. It may replace a file of the same content, or a file
that is recognised as an earlier output. A folder is written to if it is empty or missing, or if it
has a *listing*: a file that names what was written there, and therefore what may be removed again.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

LISTING = ".mrp-files"
_HEADING = "# What mrp wrote into this folder, and may remove from it."
_SAVING = ".saving"  # a folder in which results are written before they replace earlier ones
_WRITABLE = 0o222
# Messages for a full disk in errors of safetensors and torch.save, which are not OSErrors.
_FULL_DISK_SIGNS = (
    "No space left",
    "os error 28",
    "PytorchStreamWriter failed writing",
    "unexpected pos",
)


def check_output(path: Path | str) -> None:
    """Raise `ValueError` if no file can be written at `path`: the path is a folder or a read-only
    file, or its nearest existing parent is a file or a read-only folder."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file")
    if path.exists() and not path.stat().st_mode & _WRITABLE:
        raise ValueError(f"{path} is read-only: name another file")
    _check_above(path)


def write_output(
    path: Path | str,
    content: str | bytes,
    *,
    overwrite: bool = False,
    is_own: Callable[[bytes], bool] = lambda _: False,
) -> None:
    """Write a command's output file, creating the folders above it. If the path is a symbolic link,
    write to its target.

    Args:
        path: The file.
        content: The complete content; a text is written in UTF-8.
        overwrite: Whether any existing file may be replaced.
        is_own: Given the content of an existing file, returns whether this is an unchanged output
            of the command; such a file is replaced.

    Raises:
        ValueError: if the path is a folder or a read-only file; if its nearest existing parent is a
            file or a read-only folder; or if another file exists at the path, which is left
            unchanged.
        OSError: if the file cannot be written, such as on a full disk; an existing file is left
            unchanged.
    """
    check_output(path)
    path = Path(path)
    if isinstance(content, str):
        content = content.encode()
    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))
    if (
        target.exists()
        and (existing := target.read_bytes()) != content
        and not (overwrite or is_own(existing))
    ):
        raise ValueError(
            f"{path} is there already, and holds something else: name another file, or pass "
            "--overwrite"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, content)


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to a file, completely or not at all: if writing fails, an existing file stays
    as it is."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class OwnFolder:
    """A folder that a command writes to. A file in it, the listing, names what was written there,
    so that nothing else is overwritten or removed. Creating this object reads and writes nothing.

    Args:
        path: The folder, which may be missing.

    Attributes:
        path: The folder.
        listing: The path of the listing.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.listing = self.path / LISTING

    @property
    def claimed(self) -> bool:
        """Whether the folder has a listing."""
        return self.listing.is_file()

    def check(self) -> None:
        """Raise `ValueError` if the folder may not be written to: it has content but no listing, it
        is read-only, its path or a parent is a file, or a symbolic link leads nowhere."""
        if not self.path.is_dir():
            if self.path.exists() or self.path.is_symlink():
                raise ValueError(
                    f"{self.path} is a file, or a link that leads nowhere: name a folder"
                )
            _check_above(self.path)
            return
        foreign = sorted(
            path.name
            for path in self.path.iterdir()
            if not path.name.lstrip(".").startswith(LISTING[1:])
        )
        if foreign and not self.claimed:
            remainder = f" and {len(foreign) - 1} more" if foreign[1:] else ""
            raise ValueError(
                f"{self.path} holds {foreign[0]}{remainder}, which this command did not write: "
                "name a folder that is empty or not there yet"
            )
        if not self.path.stat().st_mode & _WRITABLE:
            raise ValueError(f"{self.path} is read-only: name another folder")

    def names(self) -> list[str]:
        """Read the paths in the listing, which are relative to the folder; skip lines that lead out
        of the folder."""
        if not self.claimed:
            return []
        names = []
        for line in self.listing.read_text(encoding="utf-8").splitlines():
            is_inside = not Path(line).is_absolute() and ".." not in Path(line).parts
            if is_inside and line not in ("", ".", _HEADING):
                names.append(line)
        return names

    def check_free(self, *names: str) -> None:
        """Raise `ValueError` if one of these names exists in the folder but is not in the
        listing."""
        listed = self.names()
        if foreign := [
            name for name in names if (self.path / name).exists() and name not in listed
        ]:
            raise ValueError(
                f"{self.path / foreign[0]} was not written by this command: move it elsewhere, and "
                "run it again"
            )

    def claim(self, *names: str) -> None:
        """Create the folder if it is missing, and add paths to its listing; call this before
        anything is written at these paths. `ValueError` as from `check`."""
        self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        listed = self.names()
        if not self.claimed or set(names) - set(listed):
            self._list([*listed, *names])

    def remove(self, *names: str) -> None:
        """Remove the files and folders that are among `names` and in the listing, and remove
        `names` from the listing. Leave other files unchanged. Of a symbolic link, remove only the
        link."""
        listed = self.names()
        for name in set(names) & set(listed):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if self.claimed:
            self._list([name for name in listed if name not in names])

    def give_up(self) -> None:
        """Remove everything that is in the listing, then the listing itself, and then the folder if
        it is empty."""
        self.remove(*self.names())
        self.listing.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    @contextmanager
    def saving(self) -> Iterator[Path]:
        """A context manager that yields a temporary folder to write results into. When the context
        ends, these results replace those of earlier runs, and weight files that only earlier runs
        wrote are removed; after an error, nothing is replaced. `ValueError` if a result would
        replace a file that is not in the listing."""
        partial = self.path / _SAVING
        self.claim(_SAVING)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            yield partial
            names = []
            for path in sorted(partial.rglob("*")):
                if path.is_file():
                    names.append(path.relative_to(partial).as_posix())
            self.check_free(*names)
            stale = {
                name
                for name in self.names()
                if name.endswith((".safetensors", ".safetensors.index.json"))
            }
            self.claim(*names)
            for name in names:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).replace(self.path / name)
            self.remove(*stale - set(names))
        finally:
            self.remove(_SAVING)

    def _list(self, names: list[str]) -> None:
        replace_file(
            self.listing,
            "".join(f"{line}\n" for line in dict.fromkeys([_HEADING, *names])).encode(),
        )


def _check_above(path: Path) -> None:
    """Raise `ValueError` if the nearest existing parent of a path is a file or a read-only
    folder."""
    above = next(parent for parent in Path(os.path.abspath(path)).parents if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{path}: {above} is a file, and not a folder: name another")
    if not above.stat().st_mode & _WRITABLE:
        raise ValueError(f"{path}: the folder {above} is read-only: name another")


@contextmanager
def report_full_disk(path: Path | str, remedy: str) -> Iterator[None]:
    """A context manager that turns any error that a library raises because the disk is full into an
    `OSError` that names the path and the remedy."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            sign in str(error) for sign in _FULL_DISK_SIGNS
        )
        if not full or (isinstance(error, OSError) and remedy in str(error)):
            raise
        raise OSError(
            errno.ENOSPC, f"the disk is full, or your quota is used up: {remedy}", str(path)
        ) from error
