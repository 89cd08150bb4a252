"""Unpack the source distributions of transformers and PEFT, whose tests are run on our model:

    python tests/peers/unpack.py FOLDER transformers==5.23.0 peft==0.21.2

Masks with holes, which the model refuses, are made whole in PEFT's tests.
"""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path


def unpack(folder: Path, requirements: list[str]) -> None:
    """Download and unpack into a folder by project; an earlier content is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    subprocess.run([*pip, "--no-binary", ":all:", "--dest", str(folder), *requirements], check=True)
    for archive in folder.glob("*.tar.gz"):
        project = archive.name.partition("-")[0]
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (folder / archive.name.removesuffix(".tar.gz")).rename(folder / project)
        archive.unlink()
    for path in (folder / "peft" / "tests").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"\[1, 0, 1\]", "[1, 1, 1]", text), encoding="utf-8")


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), sys.argv[2:])
