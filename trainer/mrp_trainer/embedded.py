"""The small checkpoint that comes with the package: in its wheel, in a Space's folder, and in a clone of the project."""

import os
from pathlib import Path

EMBEDDED = "sdar-tiny-mrp"
_HERE = Path(__file__).parent
TINY = str(next((at for at in (_HERE / EMBEDDED, _HERE.parents[1] / "hub_configs" / EMBEDDED) if at.is_dir()), EMBEDDED))


def located(source: str) -> str:
    """Locate a checkpoint: a folder or a Hub id stays as it is, and the name of the embedded one becomes its folder."""
    return TINY if source == EMBEDDED and not os.path.isdir(source) else source
