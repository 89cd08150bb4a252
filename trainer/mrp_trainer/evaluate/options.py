"""Options of `mrp evaluate`, some of which other commands share; each is declared once.

Nothing here imports torch, so that help appears at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Self

from modeling_mrp.generate.option_table import DECODINGS, DRAFTING, OPTIONS, TARGETS

from ..data.tasks import Family, Split
from ..embedded import EMBEDDED
from ..flags import flag, parse_assignments

_OPTIONS = {option.name: option for option in OPTIONS}
# Options of `generate`: those whose flag takes several values, all that have a flag, and those that
# a measurement cannot change.
_SWEPT = {"confidence_threshold": "tau", "num_draft_states": "states", "draft_branches": "branches"}
_BY_FLAG = {
    **_SWEPT,
    "decoding": "decoding",
    "target": "target",
    "max_new_tokens": "max-new-tokens",
}
_FIXED = ("return_dict_in_generate", "num_return_sequences", "max_length")

Judge = Literal["exact", "last_number", "contains"]
Dtype = Literal["auto", "float64", "float32", "bfloat16", "float16"]
Decoding: Any = Literal[DECODINGS]
Target: Any = Literal[TARGETS]
_WHAT, _HOW, _MODEL, _OUTPUT = "Problems", "Decoding", "Model", "Output"


def _of(name: str) -> dict[str, Any]:
    """Make the arguments of `flag` for a repeatable option of `generate`, from the declaration of
    that option."""
    option = _OPTIONS[name]
    meaning, _, _of_none = option.help.partition("; None: ")
    return {
        "help": f"{meaning[:1].upper()}{meaning[1:]} ({name} of {', '.join(option.modes)}).",
        "default": [option.default],
        "panel": _HOW,
    }


@dataclass(kw_only=True)
class ModelOptions:
    """Options that select the model and its device; each field is a flag."""

    model: str = flag("Checkpoint: folder or Hub id.", EMBEDDED, panel=_MODEL, metavar="PATH")
    revision: str | None = flag(
        "The model's commit, branch or tag.", None, panel=_MODEL, metavar="NAME"
    )
    backbone: str | None = flag(
        "Another backbone, as where a head's has moved.",
        None,
        panel=_MODEL,
        metavar="PATH",
        shown="the head's own",
    )
    tokenizer: str | None = flag(
        "Another tokenizer: folder or Hub id.",
        None,
        panel=_MODEL,
        metavar="PATH",
        shown="the model's",
    )
    dtype: str | None = flag(
        "Type of the weights.", None, panel=_MODEL, kind=Dtype, shown="the checkpoint's"
    )
    device: str | None = flag(
        "Device, such as cuda:0.", None, panel=_MODEL, shown="first GPU, or cpu"
    )


@dataclass(kw_only=True)
class GenerateOptions(ModelOptions):
    """Options that select the model, and further options of `generate`. The latter have no flag of
    their own, and are assigned in `set` as NAME=VALUE.

    Raises:
        ValueError: for an assignment without a name or value, or a name that is given twice, has a
            flag of its own, or cannot be set here.
    """

    set: list[str] = flag("Any other option of generate.", [], panel=_HOW, metavar="NAME=VALUE")

    def __post_init__(self) -> None:
        self.extra()

    def extra(self) -> dict[str, Any]:
        """Parse the assignments of `set`, in which each VALUE is YAML; return a dict of options of
        `generate`."""
        flags = {}
        for name, flag_name in _BY_FLAG.items():
            if hasattr(self, flag_name.replace("-", "_")):
                flags[name] = flag_name
        return parse_assignments(self.set, flags, _FIXED)


@dataclass(kw_only=True)
class ModeOptions(GenerateOptions):
    """Options of the decoding modes. Each field that this class adds is a flag that can be given
    several times, with a value each time; `settings` combines these values. The fields `tau`,
    `states` and `branches` hold values of the `generate` options `confidence_threshold`,
    `num_draft_states` and `draft_branches`."""

    decoding: list[str] = flag(
        "Modes of decoding.",
        [],
        panel=_HOW,
        kind=list[Decoding],
        shown="the target, self_spec, and with a head mrp_spec",
    )
    target: list[str] = flag(
        "Target modes of drafts.", [], panel=_HOW, kind=list[Target], shown="the checkpoint's"
    )
    tau: list[float] = flag(**_of("confidence_threshold"))
    states: list[int | str] = flag(
        **_of("num_draft_states") | {"default": []},
        kind=list[str],
        metavar="K",
        shown="the checkpoint's; some for auto",
    )
    branches: list[int] = flag(**_of("draft_branches") | {"default": [3]})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.states = [
            int(count) if str(count).removeprefix("-").isdecimal() else count
            for count in self.states
        ]

    def of_checkpoint(
        self, defaults: Mapping[str, Any], has_head: bool = True, states: int = 4
    ) -> Self:
        """Return a copy with values for all options that no flag sets.

        Targets and numbers of states come from a checkpoint's generation config (`defaults`). The
        modes are each target without drafts, then `self_spec` (drafts without a head) and, if the
        checkpoint `has_head`, `mrp_spec` (drafts with it). `states` is used in place of `auto`,
        with which the number of states would differ in every run.
        """
        width = defaults.get("num_draft_states")
        if not isinstance(width, int):
            width = states
        targets = self.target or [defaults.get("target") or _OPTIONS["target"].default]
        drafted = ["self_spec"]
        if has_head:
            drafted.append("mrp_spec")
        decoding = self.decoding or [*targets, *drafted]
        return replace(self, decoding=decoding, target=targets, states=self.states or [width])

    def settings(self) -> list[dict[str, Any]]:
        """List the settings, one for each combination of a mode with values of the options that
        apply to it. If there are no modes, targets or numbers of states, those that
        `of_checkpoint({})` fills in are used.

        A setting is a dict from names of `generate` options to their values, such as
        {"decoding": "self_spec", "target": "static", "num_draft_states": 4, "draft_branches": 3}.
        If `--set` gives options, each setting also has the item "set", which is a dict of them,
        such as {"temperature": 0.7}.
        """
        if not (self.decoding and self.target and self.states):
            return self.of_checkpoint({}).settings()
        extra = self.extra()
        settings: list[dict[str, Any]] = []
        for decoding in self.decoding:
            for target in self.target if decoding in DRAFTING else [None]:
                mode: dict[str, Any] = {"decoding": decoding}
                if target is not None:
                    mode["target"] = target
                swept = [name for name in _SWEPT if {decoding, target} & {*_OPTIONS[name].modes}]
                for values in product(*(getattr(self, _SWEPT[name]) for name in swept)):
                    setting = mode | dict(zip(swept, values, strict=True))
                    if extra:
                        setting["set"] = extra
                    settings.append(setting)
        return settings


@dataclass(kw_only=True)
class EvaluateOptions(ModeOptions):
    """Options of `mrp evaluate`; each field is a flag."""

    prompts: list[str] = flag(
        "JSON lines: prompt or messages, and answer.", [], panel=_WHAT, metavar="FILE"
    )
    judge: str = flag("How answers to --prompts are compared.", "exact", panel=_WHAT, kind=Judge)
    chat: bool = flag("Chat template around each prompt of --prompts.", False, panel=_WHAT)
    family: list[str] = flag(
        "Families of synthetic problems.", [], panel=_WHAT, kind=list[Family], shown="math, code"
    )
    split: str = flag("Split of the synthetic problems.", "heldout", panel=_WHAT, kind=Split)
    count: int | None = flag(
        "Problems per set.", None, panel=_WHAT, min=1, shown="500 of a family, all of a file"
    )
    max_new_tokens: int | None = flag(
        "Tokens per answer.", None, panel=_HOW, min=1, shown="the family's, or 256"
    )
    batch_size: int = flag(
        "Prompts decoded at once; the others join as these end.", 32, panel=_HOW, min=1
    )
    json: bool = flag("JSON lines, not a table.", False, panel=_OUTPUT)
    output: str | None = flag(
        "Append JSON lines here; skip results it has already.", None, panel=_OUTPUT, metavar="FILE"
    )
    show: int = flag("Number of answers to print.", 0, panel=_OUTPUT, min=0)

    @property
    def families(self) -> list[str]:
        """The families of synthetic problems to decode: those in `family`. If there are none, they
        are math and code, or no family if there are files in `prompts`."""
        return self.family or ([] if self.prompts else ["math", "code"])


def generate_options(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a setting, an item of `ModeOptions.settings`, into keyword arguments of `generate`.
    The options in its item "set", a dict, become items of the result like the other options."""
    options = dict(setting)
    extra = options.pop("set", {})
    return options | extra
