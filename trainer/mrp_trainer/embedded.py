"""The small checkpoint that comes with the package: in its wheel, in the folder of a Space, and in
a clone of the project."""

import os
from pathlib import Path

EMBEDDED = "sdar-tiny-mrp"
_PACKAGE = Path(__file__).parent
TINY = str(
    next(
        (
            folder
            for folder in (_PACKAGE / EMBEDDED, _PACKAGE.parents[1] / "hub_configs" / EMBEDDED)
            if folder.is_dir()
        ),
        EMBEDDED,
    )
)


def embedded_checkpoint() -> str:
    """Return the folder of the small checkpoint that comes with the package; `AutoModel` and
    `AutoTokenizer` can load it.

    Raises:
        FileNotFoundError: if the package was copied without the checkpoint.
    """
    if not os.path.isdir(TINY):
        raise FileNotFoundError(
            f"{EMBEDDED} is not beside {_PACKAGE}: install the package again, from its wheel or a "
            "clone"
        )
    return TINY


def resolve_source(source: str) -> str:
    """Return the folder of the embedded checkpoint if `source` is its name, "sdar-tiny-mrp", and no
    local folder has that name; otherwise return `source` unchanged."""
    return TINY if source == EMBEDDED and not os.path.isdir(source) else source
