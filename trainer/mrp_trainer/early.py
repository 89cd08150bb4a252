"""What commands look at before they import torch, which takes seconds: paths, names, and values that go without a model."""

import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import find_adapter_config_file

from modeling_mrp.generate.option_table import OPTIONS
from modeling_mrp.model.layouts import stored_json

from .data.decode_options import DecodeOptions
from .data.sources import check_paths
from .embedded import located
from .evaluate.options import EvaluateOptions, check_names, generate_options
from .evaluate.questions import read_questions
from .evaluate.results import ResultsFile
from .train.settings import Settings

RESULTS = "give result files, the lines that mrp evaluate writes"
ABOUT = "give a Markdown file that tells of the checkpoint, or leave it out"
CARD = "give the card to publish, or leave it out"
# The trackers that the Trainer knows, and what they import where that has another name; any one of these will do.
_TRACKERS = {"azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow", "neptune", "swanlab"}
_TRACKERS |= {"tensorboard", "trackio", "wandb"}
_MODULES = {"azure_ml": ("azureml",), "flyte": ("flytekit",), "tensorboard": ("tensorboard", "tensorboardX")}


def check_training(settings: Settings, dry_run: bool) -> None:
    """Refuse a run whose data, model, head or trackers are not there; a dry run connects to nothing.

    Raises:
        ValueError: Something is not given, or damaged.
        ImportError: A tracker is not installed.
        OSError: There is no such checkpoint.
    """
    options = settings.options
    if not options.data and not dry_run:
        raise ValueError("no data: give --data, or data in the YAML file")
    for paths in (options.data, options.eval_data):
        check_paths(paths)
    check_trackers(settings.training.get("report_to"))
    for source, revision in ((options.model, options.revision), (options.head, options.head_revision)):
        if source is not None and not (dry_run and _may_be_id(source)):
            check_checkpoint(source, revision)


def check_trackers(names: str | Iterable[str] | None) -> None:
    """Refuse, with an `ImportError`, a tracker that is not installed; one that nobody knows is left to the Trainer."""
    for name in [names] if isinstance(names, str) else names or ():
        modules = _MODULES.get(name, (name,))
        if name in _TRACKERS and not any(find_spec(module) for module in modules):
            package = modules[0].replace("_", "-")
            raise ImportError(f"report_to is {name!r}, which is not installed: pip install {package}, or name another tracker")


def check_evaluation(options: EvaluateOptions) -> None:
    """Refuse an evaluation that could not begin, as far as this can be told without its model's weights.

    Raises:
        ValueError: An option, a file of prompts or the file of results is not what it must be.
        OSError: There is no such checkpoint.
    """
    check_asked(options.model, options.settings())
    for path in options.prompts:
        read_questions(path, options.judge, options.limit)
    if options.output:
        ResultsFile(options.output, "asked")


def check_asked(model: str, settings: Iterable[dict[str, Any]]) -> None:
    """Refuse options of `generate` that no model or this one cannot follow.

    Raises:
        ValueError: An option is unknown, or its value is not what it must be.
        OSError: There is no such checkpoint.
    """
    settings = list(settings)
    config = check_checkpoint(model)
    for setting in settings:
        check_names(setting)
        given = generate_options(setting)
        for option in OPTIONS if "block_size" in config else ():
            if option.name in given:
                option.check(given[option.name], config["block_size"])


def check_decoding(options: DecodeOptions) -> None:
    """Refuse data that are not there, with a `ValueError`, and a checkpoint that is not, with an `OSError`."""
    check_paths(options.data)
    check_checkpoint(options.model, options.revision)


def check_push(folder_or_id: str, repo_id: str | None, files: Iterable[tuple[str | Path | None, str]]) -> None:
    """Refuse, with a `ValueError`, what can be no checkpoint, no name of a repository, or files for a card that are not there.

    Args:
        folder_or_id: The checkpoint.
        repo_id: Where it goes; None if only its card is printed, which takes a folder.
        files: Paths, each with the remedy.
    """
    for path, remedy in files:
        if path is not None:
            check_file(path, remedy)
    if repo_id is None and not os.path.isdir(folder_or_id):
        raise ValueError(f"{folder_or_id} is not a folder: save the model there first, with save_pretrained")
    if repo_id is not None:
        validate_repo_id(repo_id)
        if not _may_be_id(folder_or_id) and not os.path.isdir(folder_or_id):
            raise ValueError(f"{folder_or_id!r} is neither a folder nor the id of a repository ('org/name')")


def check_file(path: str | Path, remedy: str) -> None:
    """Raise `ValueError` for a file that is not there."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: {remedy}")


def check_new_folder(target: Path) -> None:
    """Raise `ValueError` for a folder that is there and not empty, or a file."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty: name a new folder")


def check_checkpoint(source: str, revision: str | None = None) -> dict[str, Any]:
    """Return the fields of a checkpoint's config, fetched if it has to be; none of an adapter's, whose base has one.

    Raises:
        ValueError: It has no config, or a damaged one.
        OSError: There is no such folder, or the repository cannot be read.
    """
    source = located(source)
    try:
        return stored_json(source, revision=revision)[1]
    except OSError:
        with suppress(OSError, ValueError):  # what is wrong is told of the config
            if find_adapter_config_file(source, revision=revision) is not None:
                return {}
        raise


def _may_be_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not os.path.isfile(name)


__all__ = [
    "ABOUT",
    "CARD",
    "RESULTS",
    "check_checkpoint",
    "check_decoding",
    "check_evaluation",
    "check_file",
    "check_new_folder",
    "check_push",
    "check_trackers",
    "check_training",
]
