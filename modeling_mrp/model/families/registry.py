"""Families of backbones by name; and models that declare themselves SDAR but are not."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

DENSE = "sdar"  # the family of a config that names none

# transformers may run a repository's file again in the same module, and those that import it not: what they registered stays.
_FAMILIES: dict[str, Any] = globals().get("_FAMILIES", {})
_FOLDER = Path(__file__).parent if Path(__file__).stem == "registry" else None  # the families' files, if this is one of them


def family(name: str) -> Callable[[Any], Any]:
    """Register a backbone class as the family of that name, the value of `MRPConfig.family`."""

    def register(backbone: Any) -> Any:
        _FAMILIES[name] = backbone
        backbone.family = name
        return backbone

    return register


def families() -> dict[str, Any]:
    """Find the backbone class of every family: those in this folder and those registered elsewhere.

    A Hub repository's code is one file, with only the family that its checkpoint needs.
    """
    for file in sorted(_FOLDER.glob("[a-z]*.py")) if _FOLDER else ():
        import_module(f"{__package__}.{file.stem}")
    return _FAMILIES


def backbone_of(name: str) -> Any:
    """Find the backbone class of a family.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in _FAMILIES and _FOLDER and name.isidentifier() and (_FOLDER / f"{name}.py").is_file():
        import_module(f"{__package__}.{name}")
    if name not in _FAMILIES:
        raise ValueError(
            f"family is {name!r}: the families here are {', '.join(sorted(families()))}. The code of a repository has that of "
            "its own checkpoint only: for others install this package"
        )
    return _FAMILIES[name]


def family_reading(fields: Mapping[str, Any]) -> Any:
    """Find the backbone class for a published config; None if no family reads it."""
    return next((backbone for backbone in families().values() if backbone.reads(fields)), None)


def refuse_causal(fields: Mapping[str, Any], source: str = "") -> None:
    """Refuse I-DLM and UNO, which declare themselves SDAR but decode differently.

    Args:
        fields: Of the published `config.json`.
        source: The folder or repository, since some say only by their name what they are.

    Raises:
        ValueError: names the model, and what differs.
    """
    named = re.match(r"(i-dlm|uno)\b", Path(source).name.lower()) is not None
    if str(fields.get("model_type")).startswith("sdar") and (named or fields.get("use_regular_causal")):
        raise ValueError(
            f"{source or 'the config'} is of I-DLM or UNO, by its name or by use_regular_causal: each token of it sees the "
            "tokens before it alone, and its logits at a position are those of the next token, where SDAR sees its whole block "
            "and predicts the position itself. It does not load; models that do are in docs/models.md"
        )
