"""Families of backbones by name; and models that declare themselves one of them, or look like one, and are none."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

DENSE = "sdar"  # the family of a config that names none

_FAMILIES: dict[str, Any] = {}
_FOLDER = Path(__file__).parent if Path(__file__).stem == "registry" else None  # the families' files, if this is one of them

_CAUSAL = (
    "each token of it sees the tokens before it alone, and its logits at a position are those of the next token, where SDAR "
    "sees its whole block and predicts the position itself"
)


def family(name: str) -> Callable[[Any], Any]:
    """Register a backbone class as the family of that name, the value of `MRPConfig.family`."""

    def register(backbone: Any) -> Any:
        _FAMILIES[name] = backbone
        backbone.family = name
        return backbone

    return register


def families() -> dict[str, Any]:
    """Find the backbone class of every family: those of this folder and those registered elsewhere.

    The code of a repository is one file, and has the family that its checkpoint needs.
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
    """Find the backbone class whose published config this is; None if there is none."""
    return next((backbone for backbone in families().values() if backbone.reads(fields)), None)


def refuse_look_alikes(fields: Mapping[str, Any], source: str = "") -> None:
    """Refuse the published config of a model that looks like one of ours and decodes otherwise.

    Args:
        fields: Of its `config.json`.
        source: The folder or repository, as some say in their name alone what they are.

    Raises:
        ValueError: names the model, and what differs.
    """
    kind, name = str(fields.get("model_type", "")), Path(source).name.lower()
    found = None
    if kind in ("sdar", "sdar_moe"):
        if fields.get("use_regular_causal"):
            found = "I-DLM or UNO (use_regular_causal)", _CAUSAL
        elif re.match(r"(i-dlm|uno)\b", name):
            found = "I-DLM" if name.startswith("i") else "UNO", _CAUSAL
    if kind.startswith("mineru") or any(fields.get(one) for one in ("vision_config", "vision_model_config")):
        found = "MinerU-Diffusion or another with a vision tower", "its prompts hold images, which nothing here reads"
    if kind.startswith("diffusion_gemma"):
        why = "it has no mask token: its canvas of random tokens is renoised, and no token is final before the last step"
        found = "DiffusionGemma", why
    elif kind.startswith("lfm2"):
        why = "its short convolutions carry a state from token to token, which no cache of keys and values by position holds"
        found = "LFM2 diffusion", why
    if found is not None:
        raise ValueError(
            f"the config's model_type is {kind!r}, and it is that of {found[0]}: {found[1]}. It does not load; models that do "
            "are in docs/models.md"
        )
