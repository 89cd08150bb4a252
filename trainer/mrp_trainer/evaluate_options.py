"""What `mrp evaluate` and ``python -m mrp_trainer.evaluate`` are asked to do: the options, their defaults and their help, once.

Nothing here imports torch, so that help comes at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

FILE_NEW_TOKENS = 256
_AT_LEAST_ONE = ("count", "limit", "max_new_tokens", "batch_size")
# Options of `generate` that other flags give, and those that the measurement rests on.
_BY_FLAG = {
    "decoding": "--decoding",
    "confidence_threshold": "--tau",
    "num_draft_states": "--states",
    "draft_branches": "--branches",
    "max_new_tokens": "--max-new-tokens",
}
_FIXED = ("return_dict_in_generate", "num_return_sequences", "max_length")


# Of each option: its help, and what help shows as the default where that is None or a list.
_HELP: dict[str, tuple[str, str | None]] = {
    "model": ("Checkpoint: folder or Hub id.", None),
    "tokenizer": ("Another tokenizer: folder or Hub id.", "the model's"),
    "dtype": ("Type of the weights.", "the checkpoint's"),
    "device": ("Device, such as cuda:0.", "first GPU, or cpu"),
    "prompts": ("JSON lines: prompt or messages, and answer.", None),
    "judge": ("How answers to --prompts are compared.", None),
    "chat": ("Chat template around each prompt of --prompts.", None),
    "family": ("Synthetic problems.", "math, code"),
    "split": ("Split of the synthetic problems.", None),
    "count": ("Problems of a family.", None),
    "limit": ("Only so many of each set.", None),
    "decoding": ("Modes of decoding.", "static"),
    "tau": ("confidence_threshold of dynamic, mrp_remask.", "0.9"),
    "states": ("num_draft_states of mrp_spec, self_spec.", "4"),
    "branches": ("draft_branches: followers considered per state.", "3"),
    "set": ("Any other option of generate.", None),
    "max_new_tokens": ("Tokens per answer.", "the family's, or 256"),
    "batch_size": ("Prompts per call of generate.", None),
    "output": ("Append lines here; what is there is skipped.", None),
    "show": ("Answers to print.", None),
}


@dataclass(kw_only=True)
class EvaluateOptions:
    """What is measured, and how; each field is a flag of both commands.

    Raises:
        ValueError: for a number below 1, and an assignment that is no NAME=VALUE.
    """

    model: str = "hub_configs/sdar-tiny-mrp"
    tokenizer: str | None = None
    dtype: str | None = None
    device: str | None = None
    prompts: list[str] = field(default_factory=list)
    judge: str = "exact"
    chat: bool = False
    family: list[str] = field(default_factory=list)
    split: str = "heldout"
    count: int = 500
    limit: int | None = None
    decoding: list[str] = field(default_factory=lambda: ["static"])
    tau: list[float] = field(default_factory=lambda: [0.9])
    states: list[int] = field(default_factory=lambda: [4])
    branches: list[int] = field(default_factory=lambda: [3])
    set: list[str] = field(default_factory=list)
    max_new_tokens: int | None = None
    batch_size: int = 32
    output: str | None = None
    show: int = 0

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: at least 1{' problem' if name == 'count' else ''}")
        self.extra()

    @property
    def families(self) -> list[str]:
        """The families of synthetic problems that are asked."""
        return self.family or ([] if self.prompts else ["math", "code"])

    def extra(self) -> dict[str, Any]:
        """What `set` assigns, the values as YAML writes them.

        Raises:
            ValueError: for an assignment without a name or value, a name that is given twice, or one that has another flag.
        """
        found: dict[str, Any] = {}
        for assignment in self.set:
            name, equals, text = (part.strip() for part in assignment.partition("="))
            if not (name and equals and text):
                raise ValueError(f"--set {assignment}: write it as NAME=VALUE")
            if name in found:
                raise ValueError(f"--set {assignment}: {name} is given twice, leave one out")
            if name in _BY_FLAG:
                raise ValueError(f"--set {assignment}: use {_BY_FLAG[name]}")
            if name in _FIXED:
                raise ValueError(f"--set {assignment}: the measurement decides on {name}, leave it out")
            found[name] = _value(text, assignment)
        return found

    def settings(self) -> list[dict[str, Any]]:
        """The options of `generate`, one mapping a setting; those of `set` are together under that name."""
        extra = self.extra()
        settings: list[dict[str, Any]] = []
        for decoding in self.decoding:
            if decoding in ("dynamic", "mrp_remask"):
                settings += [{"decoding": decoding, "confidence_threshold": tau} for tau in self.tau]
            elif decoding in ("mrp_spec", "self_spec"):
                settings += [
                    {"decoding": decoding, "num_draft_states": states, "draft_branches": branches}
                    for states in self.states
                    for branches in self.branches
                ]
            else:
                settings.append({"decoding": decoding})
        return [{**one, "set": extra} for one in settings] if extra else settings


def generate_options(setting: Mapping[str, Any]) -> dict[str, Any]:
    """A setting as keyword arguments of `generate`."""
    return {**{name: value for name, value in setting.items() if name != "set"}, **setting.get("set", {})}


def help_of(name: str) -> str:
    """The help of an option."""
    return _HELP[name][0]


def shown_default(name: str) -> str | None:
    """What help shows as an option's default, where that is None or a list."""
    return _HELP[name][1]


def _value(text: str, assignment: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {assignment}: the value is not YAML: {error}") from error
    if isinstance(value, str):  # YAML 1.1 reads 1e-3, which has no point, as a text
        try:
            return float(value)
        except ValueError:
            return value
    return value


__all__ = ["FILE_NEW_TOKENS", "EvaluateOptions", "generate_options", "help_of", "shown_default"]
