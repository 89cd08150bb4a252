"""The options of `generate` for MRP models: the config that holds, checks and interprets them."""

import inspect
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor
from transformers.generation import GenerationConfig

from ..rules.reveal import Dynamic, EntropyBound, RevealRule, Sequential, Static, logit, schedule_of
from .budget import WIDTHS
from .loop import Drafting, Mode
from .option_table import COUNT, DECODINGS, OPTIONS, PROBABILITY, TARGETS, DecodingOptions, Option, closest_name
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
_POSITIVE: Any = (int | float, lambda v, _: 0 < v < inf, "it must be a positive number (1: off)")
_TEMPERATURE: Any = (*_POSITIVE[:2], "it must be a positive number (greedy decoding is do_sample=False)")
_SECONDS: Any = (int | float, lambda v, _: v >= 0, "it must be a number of seconds, 0 or more")
_FLAG: Any = (bool, lambda *_: True, "use True or False")
_MOST_COPIES = 65_535  # a CUDA grid has no more in the dimension along which attention takes rows
_COPIES: Any = (int, lambda v, _: 1 <= v <= _MOST_COPIES, f"it must be an int from 1 to {_MOST_COPIES}")
_IDS: Any = (object, lambda v, _: all(map(_is_id, _ids_of(v))), "it must be an id, an int, or a list of them or None")
_ID: Any = (object, lambda v, _: _is_id(v), "it must be an id, an int, or None")
# Options of transformers that it checks later, or not, or by failing on them; the last ones only sampling follows: clients ask
# for greedy decoding by do_sample=False together with temperature=0.
CHECKED = (
    *(Option(name, None, *_FLAG) for name in ("do_sample", "return_dict_in_generate", "output_scores", "output_logits")),
    Option("remove_invalid_values", None, *_FLAG),
    *(Option(name, None, *COUNT) for name in ("max_new_tokens", "max_length")),
    *(Option(name, None, *_FROM_ZERO) for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size")),
    Option("max_time", None, *_SECONDS),
    Option("repetition_penalty", None, *_POSITIVE),
    Option("num_return_sequences", None, *_COPIES),
    Option("eos_token_id", None, *_IDS),
    Option("pad_token_id", None, *_ID),
    Option("suppress_tokens", None, list | tuple, lambda v, _: all(map(_is_id, v)), "it must be a list of ids"),
)
OF_SAMPLING = (
    Option("temperature", None, *_TEMPERATURE),
    Option("top_k", None, *_FROM_ZERO),
    *(Option(name, None, *PROBABILITY) for name in ("top_p", "min_p")),
    *(Option(name, None, *_POSITIVE_SHARE) for name in ("typical_p", "top_h")),
    *(Option(name, None, *_CUTOFF) for name in ("epsilon_cutoff", "eta_cutoff")),
)
_BEAMS = "a beam compares prefixes that grow from the left; several texts of a prompt are num_return_sequences with do_sample"
_PACKED = "rounds hold drafted states side by side, of which no text needs them; the forward of the model returns them"
_CONSTRAINED = "transformers forces words by beams, which compare prefixes that grow from the left"
_BOUGHT = "drafts are states of a block, not tokens on the right: decoding='self_spec' or 'mrp_spec' makes them"
_ENCODER = "there is no encoder, and its prompt would be the padded batch"
# Options of transformers that have no meaning here: what switches them off beside None, and why that is.
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, _BEAMS),
    "num_beam_groups": (1, _BEAMS),
    "penalty_alpha": (0, "contrastive search runs a forward for each candidate of one next token, and here a step has many"),
    "guidance_scale": (1, "guidance needs a second forward of each state, under another prompt"),
    "dola_layers": (None, "tokens are picked from the last layer, and no state keeps the earlier ones"),
    "token_healing": (False, "a prompt's last token is kept: cut it off the prompt"),
    "constraints": (None, _CONSTRAINED),
    "force_words_ids": (None, f"{_CONSTRAINED}; given tokens are infill_ids"),
    "use_mtp": (False, _BOUGHT),
    "prompt_lookup_num_tokens": (None, _BOUGHT),
    "assistant_early_exit": (None, _BOUGHT),
    "output_attentions": (False, _PACKED),
    "output_hidden_states": (False, _PACKED),
    "cache_implementation": (None, "keys and values lie in a BlockCache, where a round's states do"),
    "prefill_chunk_size": (None, "prompts are read in chunks of whole blocks as it is"),
    "watermarking_config": (None, "a watermark is seeded by the token on the left, which may come later"),
    "exponential_decay_length_penalty": (
        None,
        "it grows with the columns of the padded batch, which a processor here does not see",
    ),
    "begin_suppress_tokens": (None, "it acts at one column of the padded batch; suppress_tokens acts everywhere"),
    "forced_bos_token_id": (None, "it acts where the text has one token, a decoder's start: put it into the prompt"),
    "forced_eos_token_id": (None, "it acts at the last column of the padded batch; a text that ends there needs no eos"),
    "encoder_repetition_penalty": (1, f"{_ENCODER}; repetition_penalty sees the prompt, too"),
    "encoder_no_repeat_ngram_size": (0, f"{_ENCODER}; no_repeat_ngram_size sees the prompt, too"),
}

_T = TypeVar("_T")


def shows_options(given: _T) -> _T:
    """Add the options to the docstring and the signature of a function or class that takes them as keyword arguments."""
    shown: Any = given
    modes = {one.name: "" if one.modes == DECODINGS else f", of {', '.join(one.modes)}" for one in OPTIONS}
    lines = [f"    {one.name}: {one.help} (default {one.default!r}{modes[one.name]})" for one in OPTIONS]
    shown.__doc__ = "\n".join([inspect.getdoc(shown) or "", "", "Options:", *lines])
    hints, signature = get_type_hints(DecodingOptions), inspect.signature(shown)
    fixed, others = list(signature.parameters.values())[:-1], list(signature.parameters.values())[-1]
    kind = inspect.Parameter.KEYWORD_ONLY
    named = [inspect.Parameter(one.name, kind, default=None, annotation=hints[one.name]) for one in OPTIONS]
    shown.__signature__ = signature.replace(parameters=[*fixed, *named, others])
    return given


@shows_options
class MRPGenerationConfig(DecodingOptions, GenerationConfig):
    """A `GenerationConfig` with the options of block-diffusion decoding.

    As with every generation config, None leaves an option to the model's own config, and then to the option's default.
    """

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Validate as transformers does, and the options: when it is made, changed by `update`, or saved.

        Raises:
            ValueError: with value and remedy, for the first option whose value no model can honour.
        """
        check_values(vars(self), None, bool(self.do_sample))
        super().validate(*args, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Leave out the options that are not set: they are not saved."""
        return {name: value for name, value in super().to_diff_dict().items() if value is not None}

    def check(self, block_size: int, has_head: bool) -> None:
        """Fill in defaults, then raise `ValueError`, with value and remedy, for the first option that cannot be honoured."""
        for option in OPTIONS:
            if getattr(self, option.name) is None:
                setattr(self, option.name, option.default)
        check_values(vars(self), block_size, bool(self.do_sample))
        if str(self.decoding).startswith("mrp_") and not has_head:
            raise ValueError(
                f"decoding={self.decoding!r} needs an MRP head, and this model has none: load one with "
                "MRPForCausalLM.from_backbone(backbone, head=...) or model.attach_head(head), or use 'self_spec', which is "
                "lossless and needs no head"
            )
        for name, (off, why) in UNSUPPORTED.items():
            if (value := getattr(self, name, None)) not in (None, off):
                raise ValueError(f"{name}={value!r} is not supported: {why}. Leave {name} unset")

    def mode(self, block_size: int) -> Mode:
        """Look up what is revealed, refined and drafted, of options that were checked."""
        return _MODES[str(self.decoding)](self, block_size)

    def eos_ids(self) -> list[int]:
        """List the ids that end a row."""
        return _ids_of(self.eos_token_id)

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


_FIELDS = (*vars(GenerationConfig()), *get_type_hints(DecodingOptions))
OPTION_NAMES = frozenset(name for name in _FIELDS if not name.startswith("_"))


def did_you_mean(name: str) -> str:
    """Suggest the option whose name is most like this one, with a space before; "" if none is."""
    return closest_name(name, OPTION_NAMES)


def check_values(values: Mapping[str, Any], block_size: int | None, sampling: bool) -> None:
    """Raise `ValueError`, with value and remedy, for the first of some options whose value cannot be honoured by itself.

    Without `sampling`, those that only sampling follows may be anything, as in transformers.
    """
    for option in (*CHECKED, *OPTIONS, *(OF_SAMPLING if sampling else ())):
        if (value := values.get(option.name)) is not None:
            option.check(value, block_size)


def _ids_of(value: Any) -> list[Any]:
    """List the ids that an option gives: one, several or None."""
    if isinstance(value, Tensor):
        return list(value.flatten().tolist())
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


__all__ = [
    "CHECKED",
    "OF_SAMPLING",
    "OPTION_NAMES",
    "UNSUPPORTED",
    "MRPGenerationConfig",
    "check_values",
    "did_you_mean",
    "shows_options",
]
