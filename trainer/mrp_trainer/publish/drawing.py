"""Pictures for cards: a decode of what is published, drawn where that costs little beside the upload."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.layouts import is_hub_id, stored_json, weight_files

from ..loading import load_tokenizer
from ..picture.modes import draw_modes
from ..picture.options import ShowOptions
from .cardtext import PICTURE
from .folder import Folder, json_of
from .hub import CONFIGS

log = logging.getLogger(__name__)

# Bytes of weights up to which a model is loaded for its picture where there is no GPU.
LARGEST_DRAWN = 4 << 30
_REVISION = "base_model_revision"


class _Source(NamedTuple):
    name: str
    revision: str | None = None


@contextmanager
def with_picture(folder: Folder, wanted: bool = True) -> Iterator[Folder]:
    """Lend a checkpoint's folder with a picture of a decode among its files, or with the reason why there is none.

    Nothing is fetched for it: a head and an adapter are drawn if what they belong to is in the cache. A push does not fail for
    its picture; the card then says why it has none, in words that tell nothing of this machine.
    """
    if PICTURE in folder.files:
        yield folder
        return
    with TemporaryDirectory() as place:
        target = Path(place) / PICTURE
        why = _draw(folder, target) if wanted else "none was asked for"
        yield replace(folder, files={**folder.files, PICTURE: target}) if why is None else replace(folder, not_drawn=why)


def _draw(folder: Folder, target: Path) -> str | None:
    """Draw a folder's model, or say why that cannot be done here."""
    bases = list[_Source]()
    try:
        why = _obstacle(folder, bases)
        if why is None:
            _decode(folder, bases, target)
            return None
        detail = ""
    except Exception as error:  # of any kind: only the picture is lost
        why = "the model could not be decoded where it was pushed"
        detail = " (" + (str(error) or type(error).__name__).splitlines()[0] + ")"
    log.warning("no picture for the card: %s%s. mrp show makes one, which is published from the folder", why, detail)
    return why


def _obstacle(folder: Folder, bases: list[_Source]) -> str | None:
    """Say why nothing is drawn, None if something can be.

    Args:
        folder: The checkpoint.
        bases: Is filled with what it belongs to: the backbone of a head, the model of an adapter and, if that is a head, its
            backbone.
    """
    size = sum(path.stat().st_size for name, path in folder.files.items() if name.endswith(".safetensors"))
    config, revision = json_of(folder.path / CONFIGS[folder.kind]), "revision" if folder.kind == "adapter" else _REVISION
    while (name := config.get("base_model_name_or_path")) is not None and len(bases) < 2:
        if not is_hub_id(name) or Path(name).exists():
            return "what it belongs to is no repository by its name where it was pushed"
        bases.append(_Source(name, config.get(revision)))
        here: dict[str, Any] = {"revision": bases[-1].revision, "local_files_only": True}
        try:
            size += sum(path.stat().st_size for path in weight_files(name, **here))
            config, revision = stored_json(name, **here)[1], _REVISION
        except (OSError, ValueError):
            return f"{name} was not in the cache of the machine that pushed it"
    if folder.kind == "full" and "tokenizer_config.json" not in folder.files:
        return "there is no tokenizer beside the model"
    if size > LARGEST_DRAWN and not torch.cuda.is_available():
        return f"the weights have {size / 1e9:,.0f} GB, and there was no GPU"
    return None


def _decode(folder: Folder, bases: list[_Source], target: Path) -> None:
    own, adapter = _Source(str(folder.path)), folder.kind == "adapter"
    tokenizer = load_tokenizer(*(own if "tokenizer_config.json" in folder.files else bases[-1]), local_files_only=True)
    name, revision = bases[0] if adapter else own
    model: Any = MRPForCausalLM.from_pretrained(name, revision=revision, dtype="auto", local_files_only=True).eval()
    if adapter:
        model.load_adapter(own.name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = ShowOptions(animated=True, output=str(target))
    with torch.inference_mode():
        draw_modes(model.to(device), tokenizer, options)


__all__ = ["LARGEST_DRAWN", "with_picture"]
