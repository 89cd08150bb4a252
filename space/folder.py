"""Write the folder of the Space, ready to upload: ``python space/folder.py FOLDER``.

It gets the app, its requirements, the two packages and the embedded checkpoint, since a Space has
nothing else: ``hf upload org/name FOLDER --repo-type space``.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "modeling_mrp": HERE.parent / "modeling_mrp",
    "mrp_trainer": HERE.parent / "trainer" / "mrp_trainer",
    "mrp_trainer/sdar-tiny-mrp": HERE.parent / "hub_configs" / "sdar-tiny-mrp",
}
FILES = ("app.py", "style.css", "requirements.txt", "README.md")


def write_folder(target: Path) -> Path:
    """Write the Space to a new folder; return the folder.

    Raises:
        ValueError: if the folder exists already.
    """
    if target.exists():
        raise ValueError(f"{target} exists already: remove it, or give a new folder")
    for name, source in PARTS.items():
        shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copyfile(HERE / name, target / name)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python space/folder.py FOLDER")
    try:
        print(f"wrote {write_folder(Path(sys.argv[1]))}")
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
