"""The settings of a training run: flags over a YAML file over defaults, each checked against its type."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from huggingface_hub.dataclasses import type_validator

from ..flags import assigned, plain_number
from .arguments import MRPTrainingArguments
from .options import KEPT_CHECKPOINTS, LEARNING_RATES, MIN_RATE, SCHEDULER, RunOptions, TrainerFlags, check_declared

RECIPES = Path(__file__).parent / "recipes"
RUN_FILE = "run.yaml"
# The run decides these.
_NOT_SET = {"remove_unused_columns", "resume_from_checkpoint", "do_train", "do_eval", "do_predict"}
# A resumed run may have others of these: they change what is measured, logged and kept, and not the weights.
_FREE = {"output_dir", "save", "report_to", "run_name", "project", "disable_tqdm", "push_to_hub", "bf16_full_eval"}
_FREE |= {"dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers"}
_FREE_PREFIXES = ("eval_", "save_", "log_", "logging_", "hub_", "trackio_")
# Defaults that a run writes down beside what it was given.
_FLAGS = ("num_train_epochs", "per_device_train_batch_size", "max_length", "packed", "logging_steps", "save_steps")
_WRITTEN: dict[str, Any] = {name: getattr(TrainerFlags, name) for name in _FLAGS}
_WRITTEN |= {"lr_scheduler_type": SCHEDULER, "save_total_limit": KEPT_CHECKPOINTS, "report_to": "none"}
# What needs data to evaluate on.
_WATCHED = {"early_stopping_patience", "eval_prompts", "eval_steps", "eval_strategy"}
# transformers declares the texts alone, whose names it has deprecated.
_ALSO: dict[str, Any] = {"fsdp": bool | str | None, "report_to": str | list[str] | None, "eval_steps": float | None}


@dataclass
class Settings:
    """A run, described.

    Attributes:
        objective: `mrp` or `block_diffusion`.
        options: See `RunOptions`.
        training: Fields of `MRPTrainingArguments` that are not as it has them by default.
        data_digest: Of the files that are trained on; None where they were not read yet, or can be read only once.
    """

    objective: str
    options: RunOptions
    training: dict[str, Any]
    data_digest: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """One mapping of everything, which can serve as a YAML file."""
        names = _option_names(self.objective)
        options = {name: value for name, value in asdict(self.options).items() if name in names}
        digest = {} if self.data_digest is None else {"data_digest": self.data_digest}
        return {"objective": self.objective, **options, **self.training, **digest}

    def differences(self, before: Mapping[str, Any]) -> list[str]:
        """What makes another result than a run with the settings `before` (as `as_dict` gives them), with both values."""
        now = self.as_dict()
        names = [name for name in {**before, **now} if changes_weights(name)]
        pairs = [(name, before.get(name, _default(name)), now.get(name, _default(name))) for name in names]
        return [f"{name} was {old!r} and is {new!r}" for name, old, new in pairs if old != new]

    def arguments(self, **others: Any) -> MRPTrainingArguments:
        """The options of the trainer."""
        return MRPTrainingArguments(objective=self.objective, **{**self.training, **others})


def changes_weights(name: str) -> bool:
    """Whether another value makes other weights, rather than other measurements, logs, or places."""
    return name not in _FREE and not name.startswith(_FREE_PREFIXES)


def read_settings(
    objective: str,
    config: str | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
) -> Settings:
    """The settings of a run: flags win over the YAML file, and that over the defaults.

    Args:
        objective: `mrp` or `block_diffusion`.
        config: A YAML file, or the name of a recipe that the package has.
        flags: Values by the names of fields of `RunOptions` and `MRPTrainingArguments`; None for what is not given.
        assignments: "name=value", the values as YAML writes them.

    Raises:
        ValueError: for an unknown name, a value of another type, values that do not go together, or an unreadable file.
    """
    known = known_names(objective)
    found: dict[str, Any] = {}
    if config is not None:
        path = _config_path(config)
        for name, value in read_yaml(path).items():
            if name != "data_digest":  # of the files as they were
                name = _known(str(name), known, str(path))
                found[name] = _checked(name, value, str(path))
    for name, value in assigned(assignments).items():
        name = _known(name, known, "--set")
        found[name] = _checked(name, value, "--set", _text_of(name, assignments))
    for name, value in (flags or {}).items():
        if value is not None and value != []:
            _known(name, known, "a flag")
            found[name] = _checked(name, value, "a flag")
    if found.pop("objective", objective) != objective:
        raise ValueError(f"{config} is for another objective than {objective!r}: use the other command of mrp train")
    names = _option_names(objective)
    given = {name: found.pop(name) for name in list(found) if name in names}
    if given.get("lora_rank") and "head" in given and "model" not in given:  # the checkpoint that the adapter changes
        given |= {new: given.pop(name) for name, new in (("head", "model"), ("head_revision", "revision")) if name in given}
    if "model" not in given:
        raise ValueError("no model: give --model, or model in the YAML file")
    settings = Settings(objective, RunOptions(**given), _with_defaults(found, objective, given))
    _check(settings, given)
    return settings


def known_names(objective: str) -> tuple[str, ...]:
    """Everything that may be set."""
    of_trainer = [f.name for f in fields(MRPTrainingArguments) if f.init and f.name not in _NOT_SET]
    return (*_option_names(objective), *of_trainer)


def recipe_names() -> list[str]:
    """The recipes that the package has."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _option_names(objective: str) -> tuple[str, ...]:
    return tuple(f.name for f in fields(RunOptions) if f.metadata["only"] in (None, objective))


def _with_defaults(given: dict[str, Any], objective: str, options: Mapping[str, Any]) -> dict[str, Any]:
    training = {**_WRITTEN, "lr_scheduler_kwargs": dict(MIN_RATE), "learning_rate": LEARNING_RATES[objective], **given}
    if "lr_scheduler_type" in given and "lr_scheduler_kwargs" not in given:
        del training["lr_scheduler_kwargs"]  # of the default schedule
    if options.get("eval_data"):
        training = {"eval_strategy": "steps", "eval_steps": TrainerFlags.eval_steps, **training}
    if options.get("early_stopping_patience"):
        best = {"load_best_model_at_end": True, "restore_callback_states_from_checkpoint": True}
        training = {**training, "save_steps": training.get("eval_steps"), **best, **given}
    return training


def _check(settings: Settings, given: Mapping[str, Any]) -> None:
    options, training = settings.options, settings.training
    if "output_dir" not in training:
        raise ValueError("no output folder: give --output-dir, or output_dir in the YAML file")
    check_declared(options)
    watched = {**training, "early_stopping_patience": options.early_stopping_patience}
    asked = [name for name in sorted(watched) if name in _WATCHED and watched[name] not in (0, None, "no")]
    if asked and not options.eval_data:
        raise ValueError(f"{', '.join(asked)}: there is nothing to evaluate on: give --eval-data")
    new = sorted({"head", "head_layers", "head_init", "save"} & given.keys())
    if options.lora_rank and new:
        raise ValueError(
            f"lora_rank is {options.lora_rank}: an adapter belongs to one checkpoint, which has the head that it changes. Give "
            f"that as model, and leave out {', '.join(new)}"
        )
    if options.head is not None and (new := sorted({"head_layers", "head_init"} & given.keys())):
        raise ValueError(f"head is {options.head!r}, and {', '.join(new)} describe a new one: leave out either")
    if options.lora_alpha is not None and not options.lora_rank:
        raise ValueError(f"lora_alpha is {options.lora_alpha}, and there is no lora_rank: give both")


def _config_path(config: str) -> Path:
    path, recipe = Path(config), RECIPES / f"{config}.yaml"
    if path.is_file():
        return path
    if config in recipe_names():
        return recipe
    raise ValueError(f"{config} is neither a file nor one of the recipes {', '.join(recipe_names())}")


def read_yaml(path: Path) -> dict[Any, Any]:
    """Reads the lines of 'name: value' of a YAML file.

    Raises:
        ValueError: for anything else.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not YAML that is read here: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds {'nothing' if found is None else type(found).__name__}: needed are lines of 'name: value'"
        )
    return found


def _known(name: str, known: Sequence[str], where: str) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see the fields of MRPTrainingArguments and of RunOptions"
    raise ValueError(f"{where}: nothing is called {name!r} here: {hint}")


@cache
def _hints() -> dict[str, Any]:
    return {**get_type_hints(MRPTrainingArguments), **get_type_hints(RunOptions), **_ALSO}


def _text_of(name: str, assignments: Sequence[str]) -> str:
    """What a user wrote for a value."""
    return next(text.strip() for key, _, text in (one.partition("=") for one in assignments) if key.strip() == name)


@cache
def _default(name: str) -> Any:
    for one in (*fields(RunOptions), *fields(MRPTrainingArguments)):
        if one.name == name:
            return one.default_factory() if one.default_factory is not MISSING else one.default
    return None


def _checked(name: str, value: Any, where: str, text: str | None = None) -> Any:
    """A value as its field's type has it; `text` is what the user wrote.

    Raises:
        ValueError: if it is of another type.
    """
    hint = _hints()[name]
    number = plain_number(value)
    whole = isinstance(number, int) and not isinstance(number, bool)
    candidates = [value, number, float(number) if whole else number, text]
    for candidate in candidates:
        try:
            type_validator(name, candidate, hint)
        except TypeError:
            continue
        if candidate is not None or value is None:
            return candidate
    needed = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
    raise ValueError(f"{where}: {name} is {value!r}, and must be {needed}")
