"""The options of `generate` for MRP models: the config that holds, checks and interprets them."""

import operator
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig

from ..rules.reveal import Dynamic, EntropyBound, RevealRule, Sequential, Static, logit, schedule_of
from .budget import WIDTHS
from .loop import Drafting, Mode
from .option_table import COUNT, OPTIONS, PROBABILITY, TARGETS, Option, closest_name
from .refine import Direct, RereadRemask, ResidualRemask, ThresholdRemask

# Of options that were checked, none of them None, and the block size.
_RULES: dict[str, Callable[[Any, int], RevealRule]] = {
    "static": lambda options, block: Static(schedule_of(block, options.denoising_steps)),
    "dynamic": lambda options, block: Dynamic(logit(options.confidence_threshold)),
    "sequential": lambda options, block: Sequential(schedule_of(block, options.denoising_steps)),
    "entropy_bound": lambda options, block: EntropyBound(options.entropy_threshold),
}
_MODES: dict[str, Callable[[Any, int], Mode]] = {
    **{name: lambda options, block: Mode(_RULES[options.decoding](options, block)) for name in TARGETS},
    "self_spec": lambda options, block: Mode(_RULES[options.target](options, block), drafting=_drafting(options, 0)),
    "mrp_spec": lambda options, block: Mode(
        _RULES[options.target](options, block), drafting=_drafting(options, options.draft_passes)
    ),
    "mrp_direct": lambda options, block: Mode(_RULES["static"](options, block), Direct(options.mrp_steps)),
    "mrp_remask": lambda options, block: Mode(_RULES["dynamic"](options, block), _REMASKS[options.remask_rule](options)),
}
_REMASKS: dict[str, Callable[[Any], Any]] = {
    "reread": lambda options: RereadRemask(logit(options.confidence_threshold), logit(0.5 * options.confidence_threshold)),
    "threshold": lambda options: ThresholdRemask(logit(options.confidence_threshold)),
    "residual": lambda options: ResidualRemask(options.residual_delta),
}


def _drafting(options: Any, passes: int) -> Drafting:
    states, auto = options.num_draft_states, options.num_draft_states == "auto"
    states = WIDTHS[-1] if auto else states
    return Drafting(states, options.draft_branches, min(passes, states - 1), auto)


_FROM_ZERO: Any = (int, lambda v, _: v >= 0, "it must be an int of 0 or more")
_CUTOFF: Any = (int | float, lambda v, _: 0 <= v < 1, "it must be a probability, 0 (off) or more and below 1")
_POSITIVE_SHARE: Any = (int | float, lambda v, _: 0 < v <= 1, "it must be above 0 and 1 (off) at most")
_FLAG: Any = (bool, lambda *_: True, "use True or False")
_MOST_COPIES = 65_535  # a CUDA grid has no more in the dimension along which attention takes rows
# Options of transformers that it checks later, or not, or by failing on them.
_CHECKED = (
    *(Option(name, None, *COUNT) for name in ("max_new_tokens", "max_length")),
    *(Option(name, None, *_FROM_ZERO) for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size")),
    *(Option(name, None, *_FLAG) for name in ("do_sample", "return_dict_in_generate", "remove_invalid_values")),
    Option("max_time", None, int | float, lambda v, _: v >= 0, "it must be a number of seconds, 0 or more"),
    Option("repetition_penalty", None, int | float, lambda v, _: 0 < v < inf, "it must be a positive number (1: off)"),
    Option(
        "num_return_sequences",
        None,
        int,
        lambda v, _: 1 <= v <= _MOST_COPIES,
        f"it must be an int from 1 to {_MOST_COPIES}",
    ),
)
# Those that have no effect on greedy decoding, which clients ask for by do_sample=False together with temperature=0.
_OF_SAMPLING = (
    Option("top_k", None, *_FROM_ZERO),
    *(Option(name, None, *PROBABILITY) for name in ("top_p", "min_p")),
    *(Option(name, None, *_POSITIVE_SHARE) for name in ("typical_p", "top_h")),
    *(Option(name, None, *_CUTOFF) for name in ("epsilon_cutoff", "eta_cutoff")),
    Option(
        "temperature",
        None,
        int | float,
        lambda v, _: 0 < v < inf,
        "it must be a positive number (greedy decoding is do_sample=False)",
    ),
)
# Those whose meaning rests on one token per forward, one hypothesis per row, or a second model, and what switches them off
# beside None.
_UNSUPPORTED: dict[str, Any] = {
    **{"num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0, "guidance_scale": 1, "use_mtp": False, "token_healing": False},
    **{"output_scores": False, "output_logits": False, "output_attentions": False, "output_hidden_states": False},
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "prompt_lookup_num_tokens", "assistant_early_exit")),
    **dict.fromkeys(("cache_implementation", "watermarking_config", "exponential_decay_length_penalty", "prefill_chunk_size")),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")),
    **{"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0},
}
_ONE_HYPOTHESIS = "block-diffusion decoding follows one hypothesis per row through its own rounds"
_LOGPROBS = "with return_dict_in_generate=True the output has token_logprobs, the log-probability of every token"
_FORWARD = "the forward of the model returns them, for any text"
_INSTEAD = {
    "output_scores": _LOGPROBS,
    "output_logits": _LOGPROBS,
    "output_attentions": _FORWARD,
    "output_hidden_states": _FORWARD,
}


class MRPGenerationConfig(GenerationConfig):
    """A `GenerationConfig` plus the options of block-diffusion decoding: one field for each of `OPTIONS`.

    As with every generation config, None leaves an option to the model's own config, and then to the option's default.
    """

    def __init__(self, **kwargs: Any) -> None:
        for option in OPTIONS:
            setattr(self, option.name, kwargs.pop(option.name, None))
        super().__init__(**kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Leave out the options that are not set: they are not saved."""
        return {name: value for name, value in super().to_diff_dict().items() if value is not None}

    def check(self, block_size: int, has_head: bool) -> None:
        """Fill in defaults, then raise `ValueError`, with value and remedy, for the first option that cannot be honoured."""
        self.update(**{option.name: option.default for option in OPTIONS}, defaults_only=True)
        check_values(vars(self), block_size, bool(self.do_sample))
        if self.decoding.startswith("mrp_") and not has_head:
            raise ValueError(
                f"decoding={self.decoding!r} needs an MRP head, and this model has none: load one with "
                "MRPForCausalLM.from_backbone(backbone, head=...) or model.attach_head(head), or use 'self_spec', which is "
                "lossless and needs no head"
            )
        for name, off in _UNSUPPORTED.items():
            if (value := getattr(self, name, None)) not in (None, off):
                why = _INSTEAD.get(name, _ONE_HYPOTHESIS)
                raise ValueError(f"{name}={value!r} is not supported: {why}. Leave {name} unset")

    def mode(self, block_size: int) -> Mode:
        """Look up what is revealed, refined and drafted, of options that were checked."""
        return _MODES[self.decoding](self, block_size)

    def eos_ids(self) -> list[int]:
        """List the ids that end a row."""
        return _given_ids(self.eos_token_id)

    def seeds(self, rows: int) -> list[int]:
        """Give every row its seed.

        Raises:
            ValueError: if `seed` lists another number of them.
        """
        if isinstance(self.seed, list):
            if len(self.seed) != rows:
                raise ValueError(
                    f"seed lists {len(self.seed)} values for {rows} rows: give one per row (after num_return_sequences)"
                )
            return self.seed
        if self.seed is not None:
            return [self.seed + row for row in range(rows)]
        return torch.randint(1 << 62, (rows,)).tolist() if self.do_sample else [0] * rows


OPTION_NAMES = frozenset(name for name in vars(MRPGenerationConfig()) if not name.startswith("_"))


def did_you_mean(name: str) -> str:
    """Suggest the option whose name is most like this one, with a space before; "" if none is."""
    return closest_name(name, OPTION_NAMES)


def check_values(values: Mapping[str, Any], block_size: int, sampling: bool) -> None:
    """Raise `ValueError`, with value and remedy, for the first of some options whose value cannot be honoured by itself.

    Without `sampling`, those that only sampling follows may be anything, as in transformers.
    """
    for option in (*OPTIONS, *_CHECKED, *(_OF_SAMPLING if sampling else ())):
        if (value := values.get(option.name)) is not None:
            option.check(value, block_size)
    for name, several in (("eos_token_id", " or a list of them"), ("pad_token_id", "")):
        value = values.get(name)
        if not all(map(_is_id, _given_ids(value))) or (not several and isinstance(value, list | tuple)):
            raise ValueError(f"{name} is {value!r}: it must be an id, an int,{several} or None")


def _given_ids(value: Any) -> list[Any]:
    """List the ids that an option gives: one, several or None."""
    if isinstance(value, Tensor):
        return list(value.flatten().tolist())
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _is_id(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


__all__ = ["OPTION_NAMES", "MRPGenerationConfig", "check_values", "did_you_mean"]
