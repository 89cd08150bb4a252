"""The options of `generate` beyond those of transformers, each declared once.

From `OPTIONS` come the fields of `MRPGenerationConfig`, their defaults and checks, the flags of command lines and the README's
table. Nothing here imports torch, so that the help of a command line comes at once.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

DECODINGS = ("static", "dynamic", "sequential", "entropy_bound", "self_spec", "mrp_direct", "mrp_spec", "mrp_remask")
TARGETS, DRAFTING = DECODINGS[:4], ("self_spec", "mrp_spec")
REMASK_RULES = ("reread", "threshold", "residual")


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

    def check(self, value: Any, block_size: int) -> None:
        """Raise `ValueError`, with value and remedy, for a value of another type or out of range."""
        if value is None and self.default is None:
            return
        if isinstance(value, int) and value.bit_length() > 63:  # so many digits need not be shown, nor can they
            shown = f"{'-' if value < 0 else ''}2**{value.bit_length() - 1}"
            raise ValueError(f"{self.name} is {shown} or more: {self.remedy.format(block_size=block_size)}, and of 64 bits")
        fits = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
        if not fits or not self.holds(value, block_size):
            kind = "" if fits else f", of type {type(value).__name__}"
            raise ValueError(f"{self.name} is {value!r}{kind}: {self.remedy.format(block_size=block_size)}")


# Type, range and remedy.
_Values = tuple[Any, Callable[[Any, int], bool], str]
COUNT: _Values = (int, lambda v, _: v >= 1, "it must be an int of 1 or more")
_MOST_STATES = 256  # of a block of 4, the shortest published, the kernels hold no more
_STATES: _Values = (
    int | str,
    lambda v, _: v == "auto" if isinstance(v, str) else 1 <= v <= _MOST_STATES,
    f"it must be 'auto' or an int from 1 to {_MOST_STATES}",
)
_STEPS: _Values = (int, lambda v, size: 1 <= v <= size, "it must be an int from 1 to block_size ({block_size})")
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


OPTIONS = (
    Option("decoding", "static", *_one_of(DECODINGS), "the mode"),
    Option(
        "target",
        "static",
        *_one_of(TARGETS),
        "whose text it is that drafts reach in fewer forwards: that of `decoding=target`",
        DRAFTING,
    ),
    Option(
        "denoising_steps",
        None,
        *_STEPS,
        "steps per block; None: `block_size`, one token a step",
        ("static", "sequential", "mrp_direct"),
    ),
    Option("confidence_threshold", 0.9, *PROBABILITY, "tau, a probability", ("dynamic", "mrp_remask")),
    Option(
        "entropy_threshold",
        0.35,
        *_NATS,
        "bound in nats on the summed entropy of a step's reveals",
        ("entropy_bound",),
    ),
    Option("mrp_steps", 1, *_STEPS, "reveals of the head after each backbone step, unverified", ("mrp_direct",)),
    Option(
        "num_draft_states",
        "auto",
        *_STATES,
        "K: states a row submits per round, at most: the next one, and drafts; `auto`: as many as measured time says pay, none "
        "where none do",
        DRAFTING,
    ),
    Option("draft_branches", 3, *COUNT, "followers considered per state; 1 drafts a chain", DRAFTING),
    Option("draft_passes", 1, *COUNT, "head passes per round, at most; each re-reads what is drafted so far", ("mrp_spec",)),
    Option("remask_rule", "reread", *_one_of(REMASK_RULES), "`reread`, `threshold` or `residual`", ("mrp_remask",)),
    Option("residual_delta", 1.0, *_LOGITS, "for the rule `residual`, in logits", ("mrp_remask",)),
    Option("seed", None, *_SEED, "with `do_sample`: int s gives row i s + i, a list one per row, None torch's generator"),
    Option("kernels", None, *_KERNELS, "Triton kernels: None where possible, True or an error, False never"),
    Option("graphs", None, *_GRAPHS, "CUDA graphs: None where possible, True or an error, False never"),
)


def closest_name(name: str, names: Iterable[str]) -> str:
    """Suggest the one of some names that is most like this one, with a space before; "" if none is."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""


__all__ = ["COUNT", "DECODINGS", "DRAFTING", "OPTIONS", "PROBABILITY", "REMASK_RULES", "TARGETS", "Option", "closest_name"]
