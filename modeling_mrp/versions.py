"""The versions of transformers with which this release was tested. On other versions, error
messages name them."""

from collections.abc import Iterator
from contextlib import contextmanager

# The oldest and the newest version on which all tests of this release pass: `make versions`.
TESTED = "5.17.0", "5.24.0"


def version_note() -> str | None:
    """Return a note that names the tested versions of transformers and the version to install.
    Return None if the installed version is a tested one."""
    import transformers

    oldest, newest = TESTED
    installed = transformers.__version__
    if _release(oldest) <= _release(installed) and _release(installed)[:2] <= _release(newest)[:2]:
        return None
    return (
        f"This code was tested with transformers {oldest} to {newest}, and {installed} is "
        f"installed. If the error comes from that: pip install 'transformers>={oldest},<={newest}'"
    )


@contextmanager
def tested_versions() -> Iterator[None]:
    """Context manager: add the note of `version_note`, if there is one, to any error that is raised
    within the context."""
    try:
        yield
    except Exception as error:
        note = version_note()
        if note is not None and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (5, 24, 0) for "5.24.0.dev0"."""
    return tuple(int(number) for number in version.split(".")[:3] if number.isdigit())
