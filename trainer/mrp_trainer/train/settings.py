"""The settings of a training run. Flags override assignments (`--set`), which override a YAML file,
which overrides the defaults. Each setting is checked against its type."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from huggingface_hub.dataclasses import type_validator

from ..flags import declared_of, parse_assignments, parse_yaml
from .arguments import MRPTrainingArguments
from .options import RunOptions, TrainerFlags, check_declared

RECIPES = Path(__file__).parent / "recipes"
RUN_FILE = "run.yaml"
# Fields that the run decides itself.
_NOT_SET = {"remove_unused_columns", "resume_from_checkpoint", "do_train", "do_eval", "do_predict"}
# A resumed run may change these settings: they affect measurements, logs and saved files, but not
# the weights.
_FREE = {
    "output_dir",
    "save",
    "report_to",
    "run_name",
    "project",
    "disable_tqdm",
    "push_to_hub",
    "bf16_full_eval",
    "dataset_num_proc",
}
_FREE_PREFIXES = (
    "eval_",
    "save_",
    "log_",
    "logging_",
    "hub_",
    "trackio_",
    "dataloader_num",
    "dataloader_p",
)
# Fields that a run records even if they were not given.
_WRITTEN = """
num_train_epochs per_device_train_batch_size max_length packed logging_steps save_steps
save_total_limit learning_rate lr_scheduler_type lr_scheduler_kwargs
"""
# Types that are allowed beyond the declared ones: transformers declares `fsdp` as str alone, which
# it has deprecated.
_EXTRA_TYPES: dict[str, Any] = {
    "fsdp": bool | str | None,
    "report_to": str | list[str] | None,
    "eval_steps": float | None,
}


@dataclass
class Settings:
    """The settings of a run.

    Attributes:
        objective: The objective, `mrp` or `block_diffusion`.
        options: The options that are not fields of `MRPTrainingArguments`, such as model and data.
        training: The fields of `MRPTrainingArguments` that were given, by name.
        data_digest: A digest of the training files; None before they are read, and for a dataset on
            the Hub.
    """

    objective: str
    options: RunOptions
    training: dict[str, Any]
    data_digest: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as one flat dict by name: the objective, the options of the run that
        belong to it, the given fields of `MRPTrainingArguments` and, if known, the digest of the
        data. The file `run.yaml` of a run has this content."""
        settings: dict[str, Any] = {"objective": self.objective}
        for name, value in asdict(self.options).items():
            if name in _option_names(self.objective):
                settings[name] = value
        settings |= self.training
        if self.data_digest is not None:
            settings["data_digest"] = self.data_digest
        return settings

    def differences(self, previous: Mapping[str, Any]) -> list[str]:
        """List the settings that change the weights and have another value in `previous`, a mapping
        in the form of `as_dict`. Each is described by its name and both values."""
        current = self.as_dict()
        differences = []
        for name in {**previous, **current}:
            old = previous.get(name, _default(name))
            new = current.get(name, _default(name))
            if changes_weights(name) and old != new:
                differences.append(f"{name} was {old!r} and is {new!r}")
        return differences

    def arguments(self, **others: Any) -> MRPTrainingArguments:
        """Make the arguments of the trainer from the settings; `others` are arguments that override
        them."""
        return MRPTrainingArguments(objective=self.objective, **{**self.training, **others})

    def with_defaults(self, arguments: MRPTrainingArguments, data_digest: str | None) -> "Settings":
        """Return a copy of the settings for the file `run.yaml`, with the digest of the data.
        Defaults may change later, so some options that were not given get their values from
        `arguments`: number of epochs, batch size, `max_length`, `packed`, steps between logs and
        between checkpoints, limit of checkpoints, learning rate and its schedule."""
        values = {name: getattr(arguments, name) for name in _WRITTEN.split()}
        # `TrainingArguments` has made it an enum
        values["lr_scheduler_type"] = str(
            arguments.lr_scheduler_type.value  # type: ignore[attr-defined]
        )
        return replace(self, training={**values, **self.training}, data_digest=data_digest)


def changes_weights(name: str) -> bool:
    """Return whether the setting with this name changes the trained weights. Other settings change
    only measurements, logs, saved files or paths."""
    return name not in _FREE and not name.startswith(_FREE_PREFIXES)


def read_settings(
    objective: str,
    config: str | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
) -> Settings:
    """Read the settings of a run. Flags override assignments "name=value"; assignments override
    `config`, a YAML file or the name of one of the package's recipes; and `config` overrides the
    defaults. Names are fields of `RunOptions` and `MRPTrainingArguments`.

    Raises:
        ValueError: for an unknown name, a value of the wrong type, values that conflict, or an
            unreadable file.
    """
    values_by_name: dict[str, Any] = {}
    of_file = {} if config is None else read_yaml(_config_path(config))
    of_file.pop("data_digest", None)  # it describes the files at the time of that run
    for source, values in (
        (config, of_file),
        ("--set", parse_assignments(assignments)),
        ("a flag", flags or {}),
    ):
        for name, value in values.items():
            if source != "a flag" or value not in (None, []):
                values_by_name[name] = _checked(objective, str(name), value, str(source))
    if values_by_name.pop("objective", objective) != objective:
        raise ValueError(
            f"{config} is for another objective than {objective!r}: use the other command of mrp "
            "train"
        )
    names = _option_names(objective)
    run_values = {name: values_by_name.pop(name) for name in list(values_by_name) if name in names}
    for name, values in (("model", run_values), ("output_dir", values_by_name)):
        if name not in values:
            raise ValueError(
                f"no {name}: give --{name.replace('_', '-')}, or {name} in the YAML file"
            )
    if run_values.get("head") is not None and (
        new := sorted({"head_layers", "head_init"} & run_values.keys())
    ):
        raise ValueError(
            f"head is {run_values['head']!r}, and {', '.join(new)} describe a new one: leave out "
            "either"
        )
    _check_adapter(run_values)
    options = RunOptions(**run_values)
    check_declared(options)
    if options.eval_data:
        values_by_name = {"eval_strategy": "steps", **values_by_name}
    if options.early_stopping_patience:
        best = {"load_best_model_at_end": True, "restore_callback_states_from_checkpoint": True}
        values_by_name = {
            "save_steps": values_by_name.get("eval_steps", TrainerFlags.eval_steps),
            **best,
            **values_by_name,
        }
    return Settings(objective, options, values_by_name)


def _check_adapter(values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for settings that conflict with training an adapter, or for settings of an
    adapter if none is trained."""
    if not values.get("lora_rank"):
        if values.get("lora_alpha") is not None:
            raise ValueError(f"lora_alpha is {values['lora_alpha']}, without lora_rank: give both")
        return
    for name in ("head", "head_layers", "head_init", "save"):
        if values.get(name) is not None:
            raise ValueError(
                f"lora_rank is {values['lora_rank']}, for an adapter of the head that the model "
                f"has, and {name} is {values[name]!r}: leave out either"
            )


def known_names(objective: str) -> tuple[str, ...]:
    """List the names of all settings that may be given for an objective."""
    of_trainer = [f.name for f in fields(MRPTrainingArguments) if f.init and f.name not in _NOT_SET]
    return (*_option_names(objective), *of_trainer)


def recipe_names() -> list[str]:
    """List the names of the package's recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _option_names(objective: str) -> tuple[str, ...]:
    return tuple(f.name for f in fields(RunOptions) if declared_of(f)["only"] in (None, objective))


def _config_path(config: str) -> Path:
    path = Path(config)
    if path.is_file():
        return path
    if config not in recipe_names():
        raise ValueError(
            f"{config} is neither a file nor one of the recipes {', '.join(recipe_names())}"
        )
    return RECIPES / f"{config}.yaml"


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read a YAML file whose content is a mapping, in lines 'name: value', and return it as a dict.
    `ValueError` for any other content."""
    content = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds {type(content).__name__}: needed are lines of 'name: value'"
        )
    return content


@cache
def _hints() -> dict[str, Any]:
    return {**get_type_hints(MRPTrainingArguments), **get_type_hints(RunOptions), **_EXTRA_TYPES}


@cache
def _default(name: str) -> Any:
    for option in (*fields(RunOptions), *fields(MRPTrainingArguments)):
        if option.name == name:
            return (
                option.default_factory()
                if option.default_factory is not MISSING
                else option.default
            )
    return None


def _checked(objective: str, name: str, value: Any, source: str) -> Any:
    """Return a value as the type of the field `name`, so that an int may become a float.
    `ValueError` if the value is of another type, or no field has that name; the error calls the
    value's origin `source`."""
    if name not in (names := known_names(objective)):
        similar = difflib.get_close_matches(name, names, n=3)
        hint = "see the fields of MRPTrainingArguments and of RunOptions"
        if similar:
            hint = f"did you mean {' or '.join(similar)}?"
        raise ValueError(f"{source}: nothing is called {name!r} here: {hint}")
    hint = _hints()[name]
    for candidate in [value, float(value)] if type(value) is int else [value]:
        try:
            type_validator(name, candidate, hint)
        except TypeError:
            continue
        return candidate
    needed = str(hint).replace("typing.", "")
    if isinstance(hint, type) and not get_args(hint):
        needed = hint.__name__
    raise ValueError(f"{source}: {name} is {value!r}, and must be {needed}")
