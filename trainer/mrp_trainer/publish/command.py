"""What `mrp push` and `mrp card` do with a folder: push a full model, a head or an adapter, render a card."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.layouts import is_hub_id

from ..train.settings import RUN_FILE
from .card import About, is_own_card, read_results, render_card
from .cardtext import PICTURE
from .folder import Folder, read_folder
from .hub import CONFIGS, KINDS
from .send import Publication, publish


@contextmanager
def _as_kind(folder: Path, kind: str | None, base: str | None, revision: str | None) -> Iterator[Path]:
    """A folder of the asked kind: itself, or a temporary one: of a full model the head alone, or with another base.

    Raises:
        ValueError: if it is of another kind, or the head's backbone has no name.
    """
    checkpoint = read_folder(folder)
    found = checkpoint.kind
    if kind in (None, found):
        if base is None:
            yield folder
        elif found == "full":
            raise ValueError(f"the backbone is to be {base}, but {folder} holds {KINDS[found]}, which has its own")
        else:
            with TemporaryDirectory() as copied:
                _copy_with_base(checkpoint, Path(copied), base, revision)
                yield Path(copied)
    elif kind == "head" and found == "full":
        if base is None:
            raise ValueError(f"{folder} does not say where its backbone is on the Hub: give --base-model org/name")
        with TemporaryDirectory() as head:
            MRPForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(
                head, head_only=True, base_model_name_or_path=base, base_model_revision=revision
            )
            _copy_recipe(folder, Path(head))
            if (folder / PICTURE).is_file():
                shutil.copyfile(folder / PICTURE, Path(head) / PICTURE)
            yield Path(head)
    else:
        raise ValueError(f"{folder} holds {KINDS[found]}, not {KINDS[str(kind)]}: leave out the option, or give another folder")


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
    if isinstance(told := fields.get("speculators_config"), dict):
        named["speculators_config"] = {**told, "verifier": {**told.get("verifier", {}), "name_or_path": base}}
    (target / config_name).write_text(json.dumps(fields | named, indent=2), encoding="utf-8")
    _copy_recipe(checkpoint.path, target)


def _copy_recipe(source: Path, target: Path) -> None:
    """Have the card of a copy tell how it was trained."""
    if (source / RUN_FILE).is_file():
        shutil.copyfile(source / RUN_FILE, target / RUN_FILE)


def push(
    folder: str,
    repo_id: str,
    kind: str | None = None,
    base_model: str | None = None,
    base_revision: str | None = None,
    **options: Any,
) -> Publication:
    """Publishes a checkpoint's folder.

    Args:
        folder: The folder.
        repo_id: Where to, "org/name", or "name" for a repository of the user's own.
        kind: "head" to publish the head of a full model alone; "adapter" or "full" to make sure of what it is.
        base_model: For the head of a full model, or a head or an adapter that names another: the repository of its base.
        base_revision: The backbone's commit, branch or tag.
        options: As `mrp_trainer.publish.publish` takes them.
    """
    with _as_kind(Path(folder), kind, base_model, base_revision) as chosen:
        return publish(chosen, repo_id, **options)


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
