"""The options of `generate` beyond those of transformers, each declared once, as a field of `DecodingOptions`.

From them come the fields of `MRPGenerationConfig`, `help`, defaults and checks, the flags of command lines, and the
table of docs/decoding.md. Nothing here imports torch, so that the help of a command line comes at once.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import getdoc
from typing import Annotated, Any, Literal, get_args, get_type_hints

Target = Literal["static", "dynamic", "sequential", "entropy_bound"]
Decoding = Literal[Target, "self_spec", "mrp_direct", "mrp_spec", "mrp_remask"]
RemaskRule = Literal["reread", "threshold", "residual"]
TARGETS: tuple[str, ...] = get_args(Target)
DECODINGS: tuple[str, ...] = get_args(Decoding)
REMASK_RULES: tuple[str, ...] = get_args(RemaskRule)
DRAFTING = ("self_spec", "mrp_spec")


@dataclass(frozen=True)
class Option:
    """An option of `generate`.

    Attributes:
        name: The keyword argument, and the field of the config.
        default: The value of an option that nobody sets. None stays allowed where it is the default.
        kind: The type of its values, as `isinstance` takes it; a bool is no number.
        holds: The range: True of the values allowed, given one of that type and the model's block size.
        remedy: The end of the error for others; `{block_size}` stands for the model's.
        help: Its meaning, a line of Markdown.
        modes: The values of `decoding` in which it has an effect; it has one, too, in modes that draft for these as `target`.
    """

    name: str
    default: Any
    kind: Any
    holds: Callable[[Any, int], bool]
    remedy: str
    help: str = ""
    modes: tuple[str, ...] = DECODINGS

    def counts(self, decoding: str, target: str | None = None) -> bool:
        """Tell if it has an effect in a mode, which drafts for `target` if it drafts."""
        return decoding in self.modes or (decoding in DRAFTING and target in self.modes)

    def check(self, value: Any, block_size: int | None) -> None:
        """Raise `ValueError`, with value and remedy, for a value of another type or out of range.

        Without a block size, a number that it bounds may be of any size.
        """
        if value is None and self.default is None:
            return
        remedy = self.remedy.replace("{block_size}", "block_size" if block_size is None else f"block_size ({block_size})")
        if isinstance(value, int) and value.bit_length() > 63:  # so many digits need not be shown, nor can they
            shown = f"{'-' if value < 0 else ''}2**{value.bit_length() - 1}"
            raise ValueError(f"{self.name} is {shown} or more: {remedy}, and of 64 bits")
        fits = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
        if not fits or not self.holds(value, 1 << 63 if block_size is None else block_size):
            kind = "" if fits else f", of type {type(value).__name__}"
            raise ValueError(f"{self.name} is {value!r}{kind}: {remedy}")


# Type, range and remedy.
_Values = tuple[Any, Callable[[Any, int], bool], str]
COUNT: _Values = (int, lambda v, _: v >= 1, "it must be an int of 1 or more")
_MOST_STATES = 256  # of a block of 4, the shortest published, the kernels hold no more
_STATES: _Values = (
    int | str,
    lambda v, _: v == "auto" if isinstance(v, str) else 1 <= v <= _MOST_STATES,
    f"it must be 'auto' or an int from 1 to {_MOST_STATES}",
)
_STEPS: _Values = (int, lambda v, size: 1 <= v <= size, "it must be an int from 1 to {block_size}")
PROBABILITY: _Values = (int | float, lambda v, _: 0 <= v <= 1, "it must be a probability, a float from 0 to 1")
_NATS: _Values = (int | float, lambda v, _: v >= 0, "it must be a number of nats, a float of 0 or more")
_LOGITS: _Values = (int | float, lambda v, _: v > 0, "it must be a positive number of logits, a float")
_KERNELS: _Values = (bool, lambda *_: True, "use None (where they can be used), True (or an error) or False (PyTorch only)")
_GRAPHS: _Values = (bool, lambda *_: True, "use True, False, or None for CUDA graphs where they are possible")
_SEED: _Values = (
    int | list,
    lambda v, _: all(type(one) is int and 0 <= one < 1 << 62 for one in (v if isinstance(v, list) else [v])),
    "use None, an int of 0 or more and below 2**62, or a list of one such int per row",
)


def _one_of(names: tuple[str, ...]) -> _Values:
    return str, lambda v, _: v in names, f"choose one of {', '.join(names)}"


class DecodingOptions:
    """The options of block-diffusion decoding; None leaves one to the model's own config, and then to its default.

    A new one needs its field here, with type, default, values and modes, its meaning below, and its reader: a mode of decoding
    in `options.py`, or `generate`.

    Attributes:
        decoding: the mode
        target: whose text it is that drafts reach in fewer forwards: that of `decoding=target`
        denoising_steps: steps per block; None: `block_size`, one token a step
        confidence_threshold: tau, a probability
        entropy_threshold: bound in nats on the summed entropy of a step's reveals
        mrp_steps: reveals of the head after each backbone step, unverified
        num_draft_states: K: states a row submits per round, at most: the next one, and drafts; `auto`: as many as measured
            time says pay, none where none do
        draft_branches: followers considered per state; 1 drafts a chain
        draft_passes: head passes per round, at most; each re-reads what is drafted so far
        remask_rule: `reread`, `threshold` or `residual`
        residual_delta: for the rule `residual`, in logits
        seed: with `do_sample`: int s gives row i s + i, a list one per row, None torch's generator
        kernels: Triton kernels: None where possible, True or an error, False never
        graphs: CUDA graphs: None where possible, True or an error, False never
    """

    decoding: Annotated[Decoding | None, "static", _one_of(DECODINGS)] = None
    target: Annotated[Target | None, "static", _one_of(TARGETS), DRAFTING] = None
    denoising_steps: Annotated[int | None, None, _STEPS, ("static", "sequential", "mrp_direct")] = None
    confidence_threshold: Annotated[float | None, 0.9, PROBABILITY, ("dynamic", "mrp_remask")] = None
    entropy_threshold: Annotated[float | None, 0.35, _NATS, ("entropy_bound",)] = None
    mrp_steps: Annotated[int | None, 1, _STEPS, ("mrp_direct",)] = None
    num_draft_states: Annotated[int | Literal["auto"] | None, "auto", _STATES, DRAFTING] = None
    draft_branches: Annotated[int | None, 3, COUNT, DRAFTING] = None
    draft_passes: Annotated[int | None, 1, COUNT, ("mrp_spec",)] = None
    remask_rule: Annotated[RemaskRule | None, "reread", _one_of(REMASK_RULES), ("mrp_remask",)] = None
    residual_delta: Annotated[float | None, 1.0, _LOGITS, ("mrp_remask",)] = None
    seed: Annotated[int | list[int] | None, None, _SEED] = None
    kernels: Annotated[bool | None, None, _KERNELS] = None
    graphs: Annotated[bool | None, None, _GRAPHS] = None


def _declared() -> tuple[Option, ...]:
    """List the fields, with the default, values and modes that their types carry, and what the docstring says of them."""
    said = re.findall(r"^    (\w+): (.+(?:\n     .+)*)", getdoc(DecodingOptions) or "", re.MULTILINE)
    meaning = {name: " ".join(text.split()) for name, text in said}
    hints = get_type_hints(DecodingOptions, include_extras=True)
    options = []
    for name, hint in hints.items():
        default, (kind, holds, remedy), *modes = hint.__metadata__
        options.append(Option(name, default, kind, holds, remedy, meaning.get(name, ""), *modes[:1]))
    return tuple(options)


OPTIONS = _declared()


def closest_name(name: str, names: Iterable[str]) -> str:
    """Suggest the one of some names that is most like this one, with a space before; "" if none is."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""


__all__ = [
    "COUNT",
    "DECODINGS",
    "DRAFTING",
    "OPTIONS",
    "PROBABILITY",
    "REMASK_RULES",
    "TARGETS",
    "DecodingOptions",
    "Option",
    "closest_name",
]
