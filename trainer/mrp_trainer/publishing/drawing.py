"""Pictures for cards: a decode of what is published, drawn where that costs little beside the upload."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from modeling_mrp import MRPForCausalLM

from ..loading import load_tokenizer
from ..show import draw_modes
from ..show_options import ShowOptions
from .cardtext import PICTURE
from .folder import Folder

log = logging.getLogger(__name__)

# Bytes of weights up to which a model is loaded for its picture where there is no GPU.
LARGEST_DRAWN = 4 << 30


@contextmanager
def with_picture(folder: Folder) -> Iterator[Folder]:
    """Lend a checkpoint's folder with a picture of a decode among its files.

    Nothing is fetched for it: a head is drawn if its backbone is in the cache. What cannot be drawn here goes without, and the
    card then gives the command.
    """
    if PICTURE in folder.files or (why := _obstacle(folder)) == "":
        yield folder
        return
    with TemporaryDirectory() as place:
        target = Path(place) / PICTURE
        if why is None:
            try:
                _draw(folder, target)
            except Exception as error:  # a push does not fail for its picture
                why = str(error).splitlines()[0] if str(error) else type(error).__name__
        if why is not None:
            log.warning("no picture for the card: %s. mrp show makes one, which is published from the folder", why)
        yield replace(folder, files={**folder.files, PICTURE: target}) if target.is_file() else folder


def _obstacle(folder: Folder) -> str | None:
    """Say why no picture is drawn, "" where there is nothing to say; None if one can be."""
    if folder.kind == "adapter" or (folder.kind == "full" and "tokenizer_config.json" not in folder.files):
        return ""
    size = sum(path.stat().st_size for name, path in folder.files.items() if name.endswith(".safetensors"))
    if size > LARGEST_DRAWN and not torch.cuda.is_available():
        return f"the weights have {size / 1e9:,.0f} GB, and there is no GPU"
    return None


def _draw(folder: Folder, target: Path) -> None:
    own = "tokenizer_config.json" in folder.files
    tokenizer = load_tokenizer(str(folder.path if own else folder.base), local_files_only=True)
    model: Any = MRPForCausalLM.from_pretrained(folder.path, dtype="auto", local_files_only=True).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    drafted = "self_spec" if model.mrp_head is None else "mrp_spec"
    options = ShowOptions(decoding=["static", drafted], animated=True, output=str(target))
    with torch.inference_mode():
        draw_modes(model.to(device), tokenizer, options)


__all__ = ["LARGEST_DRAWN", "with_picture"]
