"""The small checkpoint that is part of the package: in its wheel, in a Space's folder, and in a
clone of the project."""

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
    """Return the folder of the small checkpoint that is part of the package; `AutoModel` and
    `AutoTokenizer` can load it.

    Raises:
        FileNotFoundError: if the package was copied without it.
    """
    if not os.path.isdir(TINY):
        raise FileNotFoundError(
            f"{EMBEDDED} is not beside {_PACKAGE}: install the package again, from its wheel or a "
            "clone"
        )
    return TINY


def resolve_source(source: str) -> str:
    """Resolve the name of the embedded checkpoint to its folder; return any other folder or Hub id
    as it is."""
    return TINY if source == EMBEDDED and not os.path.isdir(source) else source
