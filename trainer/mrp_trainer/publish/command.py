"""What `mrp push` and `mrp card` do with a folder: push a full model, a head or an adapter, render a card."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modeling_mrp.model.layouts import is_hub_id

from ..train.settings import RUN_FILE
from .card import About, is_own_card, read_results, render_card
from .folder import Folder, read_folder
from .hub import CONFIGS, KINDS
from .send import Publication, publish


def _copy_with_base(checkpoint: Folder, target: Path, base: str, revision: str | None) -> None:
    """Copies the files of a head or an adapter beside a config that names another base. A rendered card is left out: it tells
    of the old one."""
    config_name = CONFIGS[checkpoint.kind]
    for name, file in checkpoint.files.items():
        if name == config_name or (name == "README.md" and not is_own_card(file.read_text(encoding="utf-8"))):
            continue
        shutil.copyfile(file, target / name)
    fields = json.loads(checkpoint.files[config_name].read_text(encoding="utf-8"))
    named: dict[str, Any] = {
        "base_model_name_or_path": base,
        "revision" if checkpoint.kind == "adapter" else "base_model_revision": revision,
    }
    (target / config_name).write_text(json.dumps(fields | named, indent=2), encoding="utf-8")
    if (checkpoint.path / RUN_FILE).is_file():  # which the card tells of
        shutil.copyfile(checkpoint.path / RUN_FILE, target / RUN_FILE)


def push(
    folder: str, repo_id: str, base_model: str | None = None, base_revision: str | None = None, **options: Any
) -> Publication:
    """Publishes a checkpoint's folder.

    Args:
        folder: The folder.
        repo_id: Where to, "org/name", or "name" for a repository of the user's own.
        base_model: The repository of the base of a head or an adapter that names another, such as a folder.
        base_revision: The base's commit, branch or tag.
        options: As `mrp_trainer.publish.publish` takes them.

    Raises:
        ValueError: as from `publish`, and for the base of a full model.
    """
    if base_model is None:
        return publish(folder, repo_id, **options)
    checkpoint = read_folder(folder)
    if checkpoint.kind == "full":
        raise ValueError(f"the backbone is to be {base_model}, but {folder} holds {KINDS['full']}, which has its own")
    with TemporaryDirectory() as copied:
        _copy_with_base(checkpoint, Path(copied), base_model, base_revision)
        return publish(copied, repo_id, **options)


def card(folder: str, name: str | None, results: list[str], about: str | None) -> str:
    """The card of a checkpoint's folder, as a push would render it.

    Args:
        folder: The checkpoint.
        name: What the examples load; by default the folder, written so that it is no Hub id.
        results: Files of measurements.
        about: A file that tells of the checkpoint.
    """
    told = None if about is None else About.load(about)
    name = name or (f"./{folder}" if is_hub_id(folder) else folder)
    return str(render_card(folder, read_folder(folder).kind, name, read_results(results), told))
