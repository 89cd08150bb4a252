"""The training recipe in a checkpoint's card. It is made from the settings that the training run
wrote into the folder."""

import os
from pathlib import Path
from typing import Any

import yaml

from modeling_mrp.model.layouts import is_hub_id

from ..data.sources import DataPath
from ..flags import parse_yaml
from ..train.settings import RUN_FILE, changes_weights, read_yaml

_COMMANDS = {"mrp": "head", "block_diffusion": "backbone"}


def recipe_of(folder: Path, base: str | None = None) -> str | None:
    """Describe in Markdown the training run that wrote a folder: its command and its settings.
    Return None if the folder was not written by a run.

    Settings that do not change the weights are left out, and so is everything about a machine or an
    account. Local paths are shortened to names. `base` is the Hub id of the run's model; it is
    named if the run read this model from a local folder.
    """
    if not (folder / RUN_FILE).is_file():
        return None
    run = read_yaml(folder / RUN_FILE)
    recipe = {
        name: _without_folders(value)
        for name, value in run.items()
        if changes_weights(name) and value not in (None, [])
    }
    if base is not None and _is_local(run.get("model")):
        recipe["model"] = base
    command = _COMMANDS.get(str(recipe.pop("objective", None)), "head")
    settings = yaml.safe_dump(recipe, sort_keys=False)
    return (
        f"Trained by `mrp train {command}` with these settings, which `--config` takes as a file:\n"
        "\n"
        "```yaml\n"
        f"{settings}```"
    )


def settings_in(card: str) -> dict[str, Any]:
    """Read the settings of a run from a card that contains the text of `recipe_of`; return an empty
    dict if the card has none."""
    _, _, trained = card.partition("\nTrained by `mrp train ")
    text = trained.partition("```yaml\n")[2].partition("```")[0]
    settings = parse_yaml(text, "the recipe of the card") if text else None
    return settings if isinstance(settings, dict) else {}


def model_of(folder: Path) -> str | None:
    """Return the Hub id of the model that a folder's run trained; None if no run wrote the folder,
    or if that model was a local folder."""
    if not (folder / RUN_FILE).is_file():
        return None
    model = read_yaml(folder / RUN_FILE).get("model")
    return None if _is_local(model) else str(model)


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, str) and "/" in value and _is_local(DataPath.of(value).path):
        return Path(value).name
    return value


def _is_local(name: Any) -> bool:
    return not isinstance(name, str) or not is_hub_id(name) or os.path.exists(name)
