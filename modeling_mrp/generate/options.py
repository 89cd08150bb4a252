"""The input of a call of `generate`, checked: options, the config that holds and interprets them, and prompts."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.utils import logging as transformers_logging

from ..rules.draft import BRANCHES, CROWD
from ..rules.published import (
    BoundedAdaptive,
    Coherent,
    ConfidenceAdaptive,
    Credit,
    EBSampler,
    EosRejection,
    FastDLLM,
    Hierarchy,
    Klass,
    LocalLeap,
    Prophet,
    SlowFast,
    ascending,
)
from ..rules.reveal import Dynamic, EntropyBound, RevealRule, Sequential, Static, logit, schedule_of
from .budget import WIDTHS
from .loop import Drafting, Mode
from .option_table import DRAFTING, OPTIONS, DecodingOptions, check_supported, closest_name, ids_of
from .refine import Direct, Refinement, RereadRemask, ResidualRemask, ThresholdRemask

logger = transformers_logging.get_logger(__name__)


def _low(options: Any, published: float) -> float:
    """Choose the lower threshold of a rule, a probability: the published one unless the option is set."""
    return published if options.low_threshold is None else options.low_threshold


# Of options that were checked.
_RULES: dict[str, Callable[[Any, int], RevealRule]] = {
    "static": lambda options, block: Static(schedule_of(block, options.denoising_steps)),
    "dynamic": lambda options, block: Dynamic(logit(options.confidence_threshold)),
    "sequential": lambda options, block: Sequential(schedule_of(block, options.denoising_steps)),
    "entropy_bound": lambda options, block: EntropyBound(options.entropy_threshold),
    "fast_dllm": lambda options, block: FastDLLM(options.factor),
    "eb_sampler": lambda options, block: EBSampler(options.entropy_threshold),
    "hierarchy": lambda options, block: Hierarchy(logit(options.confidence_threshold), logit(_low(options, 0.4))),
    "local_leap": lambda options, block: LocalLeap(logit(options.confidence_threshold), logit(_low(options, 0.75))),
    "cad": lambda options, block: ConfidenceAdaptive(logit(options.confidence_threshold), frozenset(options.eos_ids())),
    "eoser": lambda options, block: EosRejection(ascending(block), frozenset(options.eos_ids())),
    "prophet": lambda options, block: Prophet(schedule_of(block, options.denoising_steps)),
    "bacd": lambda options, block: BoundedAdaptive(logit(options.confidence_threshold), logit(_low(options, 0.6))),
    "slow_fast": lambda options, block: SlowFast(logit(options.confidence_threshold), logit(_low(options, 0.3))),
    "ccd": lambda options, block: Coherent(),
    "credit": lambda options, block: Credit(logit(options.confidence_threshold)),
    "klass": lambda options, block: Klass(logit(options.confidence_threshold)),
}
# Modes that refine: the rule whose reveals they change, and how.
_REFINED: dict[str, tuple[str, Callable[[Any], Refinement]]] = {
    "mrp_direct": ("static", lambda options: Direct(options.mrp_steps)),
    "mrp_remask": ("dynamic", lambda options: _REMASKS[options.remask_rule](options)),
}
_REMASKS: dict[str, Callable[[Any], Refinement]] = {
    "reread": lambda options: RereadRemask(logit(options.confidence_threshold), logit(0.5 * options.confidence_threshold)),
    "threshold": lambda options: ThresholdRemask(logit(options.confidence_threshold)),
    "residual": lambda options: ResidualRemask(options.residual_delta),
}
# What else `generate` may be given, beside the fields of the generation config.
_ARGUMENTS = {"input_ids", "attention_mask", "logits_processor", "stopping_criteria", "tokenizer", "synced_gpus"}


class MRPGenerationConfig(DecodingOptions, GenerationConfig):
    """A `GenerationConfig` with the fields of `DecodingOptions`.

    As with every generation config, None leaves an option to the model's own config, and then to the option's default.
    """

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Validate as transformers does, and the options: when it is made, changed by `update`, or saved.

        Raises:
            ValueError: with value and remedy, for the first option whose value no model can honour.
        """
        self.check_values(None)
        super().validate(*args, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Leave out the options that are not set: they are not saved."""
        return {name: value for name, value in super().to_diff_dict().items() if value is not None}

    def check(self, block_size: int, has_head: bool) -> None:
        """Fill in defaults, then raise `ValueError`, with value and remedy, for the first option that cannot be honoured."""
        for option in OPTIONS:
            if getattr(self, option.name) is None:
                setattr(self, option.name, option.default)
        self.check_values(block_size)
        if str(self.decoding).startswith("mrp_") and not has_head:
            raise ValueError(
                f"decoding={self.decoding!r} needs an MRP head, and this model has none: load one with "
                "MRPForCausalLM.from_backbone(backbone, head=...) or model.attach_head(head), or use 'self_spec', which is "
                "lossless and needs no head"
            )
        check_supported(vars(self))

    def check_values(self, block_size: int | None) -> None:
        """Raise `ValueError`, with value and remedy, for the first option whose value is out of range by itself."""
        for option in OPTIONS:
            option.check(getattr(self, option.name), block_size)

    def mode(self, block_size: int, rows: int = 1) -> Mode:
        """Make the mode of a call with `rows` rows from checked options."""
        options: Any = self  # none of them None
        name, auto = options.decoding, options.num_draft_states == "auto"
        if name in _REFINED:
            rule, refinement = _REFINED[name]
            return Mode(_RULES[rule](self, block_size), refinement(self))
        if name not in DRAFTING:
            return Mode(_RULES[name](self, block_size))
        states = WIDTHS[-1] if auto else options.num_draft_states
        passes = min(options.draft_passes, states - 1) if name == "mrp_spec" else 0
        few = options.draft_shortlist if name == "mrp_spec" else None
        branches = options.draft_branches or (BRANCHES if rows < CROWD else 1)
        drafting = Drafting(states, branches, passes, auto, few)
        return Mode(_RULES[options.target](self, block_size), drafting=drafting)

    def eos_ids(self) -> list[int]:
        """List the ids that end a row."""
        return ids_of(self.eos_token_id)

    def pad_id(self) -> int:
        """Choose the id that fills rows after the end of their text."""
        return self.pad_token_id if self.pad_token_id is not None else next(iter(self.eos_ids()), 0)

    def seeds(self, rows: int) -> list[int]:
        """Give every row its seed; raise `ValueError` if `seed` lists another number of them."""
        if isinstance(self.seed, list):
            if len(self.seed) != rows:
                raise ValueError(
                    f"seed lists {len(self.seed)} values for {rows} rows: give one per row (after num_return_sequences)"
                )
            return self.seed
        if self.seed is not None:
            return [self.seed + row for row in range(rows)]
        return torch.randint(1 << 62, (rows,)).tolist() if self.do_sample else [0] * rows


OPTION_NAMES = frozenset({*vars(GenerationConfig()), *DecodingOptions.__annotations__})


def set_fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Select the fields that are set: those that are not None, nor private to transformers (a leading underscore)."""
    return {str(name): value for name, value in fields.items() if value is not None and not str(name).startswith("_")}


def resolved(model: Any, given: Any, kwargs: dict[str, Any]) -> tuple[MRPGenerationConfig, dict[str, Any]]:
    """Resolve the options and other arguments of a call: arguments override a given config, and this the model's own.

    Raises:
        ValueError: for what `generate` does not know, does not support, or cannot honour.
    """
    given = vars(given) if isinstance(given, GenerationConfig) else given or {}
    asked = set_fields(given) | set_fields(kwargs)
    if kwargs.get("eos_token_id", 0) is None:  # as an argument it means no eos; left as None, the model's own would come back
        asked["eos_token_id"] = []
    config, fields = MRPGenerationConfig(), set_fields(vars(model.generation_config)) | asked
    for name in fields.keys() & OPTION_NAMES:
        setattr(config, name, fields[name])
    config.check(model.config.block_size, model.config.has_head)
    others = {name: value for name, value in asked.items() if name not in OPTION_NAMES}
    check_supported(others)
    if unknown := [f"{name}{closest_name(name, OPTION_NAMES)}" for name in sorted(others.keys() - _ARGUMENTS)]:
        raise ValueError(
            f"{', '.join(unknown)}: not used or not supported by generate here. Check the spelling, or leave it unset"
        )
    tokenizer, strings = others.pop("tokenizer", None), config.stop_strings
    if strings is not None:  # transformers would lose the tokenizer on the way to a custom loop
        if tokenizer is None:
            raise ValueError(f"stop_strings={strings!r} need the tokenizer: pass tokenizer=... to generate")
        criteria = [*others.get("stopping_criteria", []), StopStringCriteria(tokenizer, strings)]
        others["stopping_criteria"], config.stop_strings = StoppingCriteriaList(criteria), None
    for name, ids in (("eos_token_id", config.eos_ids()), ("pad_token_id", [config.pad_id()])):
        if outside := [one for one in ids if not 0 <= one < model.config.vocab_size]:
            raise ValueError(f"{name} holds {outside[0]}, outside the vocabulary of {model.config.vocab_size}: use one inside")
    if (mask_id := model.config.mask_token_id) in config.eos_ids():
        raise ValueError(f"eos_token_id holds the mask id {mask_id}, which is never picked: leave it out")
    return config, others


def check_prompt(prompt: Any, attention_mask: Any, mask_token_id: int, vocab_size: int) -> Tensor:
    """Check ids as `check_ids` does, and that none is the mask's id."""
    real = check_ids(prompt, attention_mask, vocab_size)
    if bool(((prompt == mask_token_id) & real).any()):
        raise ValueError(
            f"the prompt holds the mask id {mask_token_id}: pass what stands before the first mask as input_ids, and the rest, "
            "masks and given tokens, as infill_ids"
        )
    return real


def check_ids(ids: Any, attention_mask: Any, vocab_size: int, name: str = "input_ids", rows: int | None = None) -> Tensor:
    """Check ids [rows, length] and return which of them are real, a bool tensor.

    Raises:
        ValueError: unless they are ids below `vocab_size`, of `rows` rows if given, and `attention_mask` is None or as large.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.long, torch.int):
        hint = ". Of what a tokenizer returns with return_tensors='pt', pass **inputs" if hasattr(ids, "keys") else ""
        kind = str(ids.dtype) if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} are {kind}: pass a [rows, n] tensor of ids, torch.long{hint}")
    if ids.dim() != 2 or not ids.numel() or len(ids) != (rows or len(ids)):
        hint = f". For one row pass {name}[None]" if ids.dim() == 1 else ""
        raise ValueError(f"{name} have shape {list(ids.shape)}: pass [{rows or 'rows'}, n], with a token or more in each{hint}")
    real = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
            given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(f"attention_mask is {given} for {name} of {list(ids.shape)}: pass 0 and 1 of the same shape")
        real = attention_mask.bool()
    for outside in ids[real & ((ids < 0) | (ids >= vocab_size))]:
        raise ValueError(
            f"{name} hold the id {int(outside)}, outside the vocabulary of {vocab_size}: use this model's tokenizer"
        )
    return real


def check_rows(real: Tensor, new_tokens: int, max_positions: int) -> None:
    """Raise `ValueError` for a row without a token or with holes, or more tokens than positions; `real` is [rows, length]."""
    for row in (~real.any(-1)).nonzero():
        raise ValueError(f"row {int(row)} has no token (its attention_mask is all zeros): drop the row")
    for row in ((real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1).nonzero():
        raise ValueError(
            f"attention_mask of row {int(row)} has holes: a row's tokens must be contiguous, with padding on one side or both"
        )
    longest = int(real.sum(-1).max())
    if longest + new_tokens > max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new ones make {longest + new_tokens}, which exceeds "
            f"max_position_embeddings={max_positions}: shorten the prompt or lower max_new_tokens (or max_length)"
        )
