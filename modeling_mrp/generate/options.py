"""Checks of the input of `generate`: the config, the options of a call, and the prompts."""

import copy
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig, StoppingCriteriaList, StopStringCriteria
from transformers.utils import logging as transformers_logging

from ..rules.costs import WIDTHS
from ..rules.draft import BRANCHES, CROWD
from ..rules.reveal import RevealRule, logit
from .loop import Drafting, Mode
from .option_table import (
    CONSTRAINTS,
    DECODINGS,
    DRAFTING,
    OF_SAMPLING,
    OPTIONS,
    OPTIONS_OF_TRANSFORMERS,
    REFINED,
    DecodingOptions,
    check_supported,
    closest_name,
    ids_in,
    rule_of,
)
from .refine import Direct, RereadRemask, ResidualRemask, ThresholdRemask

logger = transformers_logging.get_logger(__name__)

# Arguments of `generate` other than the fields of the generation config.
_ARGUMENTS = {
    "input_ids",
    "attention_mask",
    "logits_processor",
    "stopping_criteria",
    "tokenizer",
    "synced_gpus",
    "draft_sources",
}


class MRPGenerationConfig(DecodingOptions, GenerationConfig):
    """A `GenerationConfig` with the fields of `DecodingOptions`."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from the fields of a file, `config_dict`. `kwargs` are passed on to the
        method of this name of `GenerationConfig`. Raise `ValueError` for a field whose value is
        invalid for every model, or that transformers cannot read."""
        _check_values(config_dict)
        try:
            return super().from_dict(config_dict, **kwargs)
        except (TypeError, AttributeError) as error:
            # transformers reads some fields without checking their type
            raise ValueError(
                f"the generation config cannot be read: {error}. Correct the field, or leave it out"
            ) from error

    def validate(self, strict: bool = False, **kwargs: Any) -> None:
        """Validate the config. transformers calls this method when a config is made, updated or
        saved. transformers' own checks are made, too; `kwargs` are passed on to them.

        Raise `ValueError` for an option whose value is invalid for every model. If `strict`, as
        when a changed config is saved, also raise it for a reveal rule that is given as an object,
        which no file can hold.
        """
        _check_values(vars(self))
        for name in ("decoding", "target") if strict else ():
            if isinstance(rule := getattr(self, name), RevealRule):
                raise ValueError(
                    f"{name} is {rule!r}, an object: pass it to generate, and save a config in "
                    "which it is a name or unset"
                )
        super().validate(strict=strict, **kwargs)

    def check(self, block_size: int, has_head: bool) -> None:
        """Set the options that are None to their defaults, in place. Raise `ValueError` for the
        first option that is invalid or not supported. The message gives its value and the remedy.

        Args:
            block_size: The block size of the model, which limits some options.
            has_head: Whether the model has a head. If not, modes that use one are invalid.
        """
        for option in OPTIONS:
            if getattr(self, option.name) is None:
                setattr(self, option.name, option.default)
            option.check(getattr(self, option.name), block_size)
        _check_values(vars(self))
        if str(self.decoding).startswith("mrp_") and not has_head:
            raise ValueError(
                f"decoding={self.decoding!r} needs an MRP head, and this model has none: load one "
                "with model.attach_head(head) or MRPForCausalLM.from_backbone(backbone, head=...), "
                "or use 'self_spec', which drafts without a head"
            )
        check_supported(vars(self))

    def mode(self, block_size: int, rows: int = 1) -> Mode:
        """Make the `Mode` that the options describe. They must have been checked (`check`).

        Args:
            block_size: The block size of the model.
            rows: The number of rows of the call. For many rows, the default of `draft_branches` is
                smaller.
        """
        options: Any = self  # checked options are not None
        name, with_head = options.decoding, options.decoding == "mrp_spec"
        if name == "mrp_direct":
            return Mode(rule_of(REFINED[name], self, block_size), Direct(options.mrp_steps))
        if name == "mrp_remask":
            tau, lower = (
                logit(options.confidence_threshold),
                logit(0.5 * options.confidence_threshold),
            )
            remasks: dict[str, Any] = {
                "reread": RereadRemask(tau, lower),
                "threshold": ThresholdRemask(tau),
            }
            remasks["residual"] = ResidualRemask(options.residual_delta)
            return Mode(rule_of(REFINED[name], self, block_size), remasks[options.remask_rule])
        if name not in DRAFTING:
            return Mode(rule_of(name, self, block_size))
        auto = options.num_draft_states == "auto"
        states = WIDTHS[-1] if auto else options.num_draft_states
        # with more states, a tree saves more time of forwards than it costs on the host
        chain = rows >= CROWD and (auto or states <= 4)
        branches = options.draft_branches or (1 if chain else BRANCHES)
        passes = min(options.draft_passes, states - 1) if with_head else 0
        drafting = Drafting(
            states,
            branches,
            passes,
            auto,
            options.draft_shortlist if with_head else None,
            options.prompt_lookup_num_tokens,
            options.max_matching_ngram_size,
            options.draft_next_block,
        )
        return Mode(rule_of(options.target, self, block_size), drafting=drafting)

    def get_generation_mode(self, assistant_model: Any = None) -> Any:
        """Return the generation mode, as `GenerationConfig.get_generation_mode` does. But prompt
        lookup does not select assisted generation here, because it drafts in this package's
        loop."""
        others = copy.copy(self)
        others.prompt_lookup_num_tokens = None
        return super(MRPGenerationConfig, others).get_generation_mode(assistant_model)

    @property
    def is_constrained(self) -> bool:
        """Whether the options restrict new texts to a language: whether `regex`, `choices`,
        `json_schema` or `grammar` is set."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    def eos_ids(self) -> list[int]:
        """Return the ids that end a row as a list. `eos_token_id` may be None, one id, several ids,
        or a tensor of ids."""
        return ids_in(self.eos_token_id)

    def pad_id(self) -> int:
        """Return the id that pads ended rows: `pad_token_id`, else the first eos id, else 0."""
        return self.pad_token_id if self.pad_token_id is not None else next(iter(self.eos_ids()), 0)

    def seeds(self, rows: int) -> list[int]:
        """Return one seed per row: those of the option `seed` if it is a list, `seed` + i for row i
        if it is an int. If it is None, draw them by torch, or return zeros if tokens are not
        sampled. Raise `ValueError` if `seed` is a list whose length is not the number of rows."""
        if self.seed is None:
            return torch.randint(1 << 62, (rows,)).tolist() if self.do_sample else [0] * rows
        seeds = (
            self.seed if isinstance(self.seed, list) else [self.seed + row for row in range(rows)]
        )
        if len(seeds) != rows:
            raise ValueError(
                f"seed has {len(seeds)} values for {rows} rows: give one per row (after "
                "num_return_sequences)"
            )
        return seeds


def _check_values(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` for the first option of this package or of transformers whose value is
    invalid for every model."""
    sampled = bool(fields.get("do_sample"))
    for option in (*OPTIONS, *OPTIONS_OF_TRANSFORMERS):
        value = fields.get(option.name)
        if value is not None:
            option.check(value, None, sampled or option.name not in OF_SAMPLING)


OPTION_NAMES = frozenset({*vars(GenerationConfig()), *(option.name for option in OPTIONS)})


def set_fields(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the fields that are set: not None, and not private to transformers (private names have
    a leading underscore)."""
    return {
        str(name): value
        for name, value in fields.items()
        if value is not None and not str(name).startswith("_")
    }


def resolved(
    model: Any, given: Any, kwargs: dict[str, Any]
) -> tuple[MRPGenerationConfig, dict[str, Any]]:
    """Return the checked config of a call, and the arguments of the call that are not fields of the
    config.

    Args:
        model: The model, whose own `generation_config` is used where the call sets nothing.
        given: The argument `generation_config` of the call: a config, a dict or None. It overrides
            the model's config.
        kwargs: The keyword arguments of the call, which override both.

    Raises:
        ValueError: for an argument that is unknown, unsupported or invalid.
    """
    if not isinstance(given, GenerationConfig | Mapping | None):
        raise ValueError(
            f"generation_config is {given!r}, of type {type(given).__name__}: pass a "
            "GenerationConfig or a dict"
        )
    given = vars(given) if isinstance(given, GenerationConfig) else given or {}
    asked = set_fields(given) | set_fields(kwargs)
    # as an argument, None means no eos; as a field, None would be replaced by the model's own eos
    if kwargs.get("eos_token_id", 0) is None:
        asked["eos_token_id"] = []
    config, fields = MRPGenerationConfig(), set_fields(vars(model.generation_config)) | asked
    for name in fields.keys() & OPTION_NAMES:
        setattr(config, name, fields[name])
    config.check(model.config.block_size, model.config.has_head)
    others = {name: value for name, value in asked.items() if name not in OPTION_NAMES}
    check_supported(others)
    if unknown := [
        f"{name}{closest_name(name, OPTION_NAMES)}" for name in sorted(others.keys() - _ARGUMENTS)
    ]:
        raise ValueError(
            f"{', '.join(unknown)}: not supported by generate here. Check the spelling, or leave "
            "it unset"
        )
    if others.get("draft_sources") and config.decoding not in DRAFTING:
        raise ValueError(
            f"decoding={config.decoding!r} drafts nothing: with draft_sources use "
            f"{' or '.join(map(repr, DRAFTING))}"
        )
    lookup = kwargs.get("prompt_lookup_num_tokens")
    if lookup and config.decoding in DRAFTING and not _left_to_right(config.target):
        logger.warning_once(
            f"prompt_lookup_num_tokens={lookup}: no effect with target={config.target!r}, whose "
            "order of reveals it does not know. Use target='sequential', or leave it out"
        )
    acting = [config.decoding]
    if config.decoding in DRAFTING:
        acting.append(config.target)
    idle = []
    for option in OPTIONS:
        acts = option.modes == DECODINGS or any(mode in option.modes for mode in acting)
        if kwargs.get(option.name) is not None and not acts:
            idle.append(option.name)
    if idle:
        logger.warning_once(
            f"{', '.join(idle)}: no effect with decoding={config.decoding!r} here. Leave out either"
        )
    check_callables(others)
    tokenizer, strings = others.get("tokenizer"), config.stop_strings
    if strings is not None and not hasattr(tokenizer, "get_vocab"):
        raise ValueError(
            f"stop_strings={strings!r} need the tokenizer: pass tokenizer=... to generate, not "
            f"{tokenizer!r}"
        )
    if strings is not None:  # transformers would lose the tokenizer on the way to a custom loop
        criteria = [*others.get("stopping_criteria", []), stop_strings_of(tokenizer, strings)]
        others["stopping_criteria"] = StoppingCriteriaList(criteria)
    ids_of = {"eos_token_id": config.eos_ids(), "pad_token_id": [config.pad_id()]}
    ids_of["suppress_tokens"] = ids_in(config.suppress_tokens)
    for name, ids in ids_of.items():
        if outside := [token for token in ids if not 0 <= token < model.config.vocab_size]:
            raise ValueError(
                f"{name} holds {outside[0]}, outside the vocabulary of {model.config.vocab_size}: "
                "use one inside"
            )
    if (mask_id := model.config.mask_token_id) in config.eos_ids():
        raise ValueError(
            f"eos_token_id holds the mask id {mask_id}, which is never picked: leave it out"
        )
    return config, others


def _left_to_right(target: str | RevealRule | None) -> bool:
    """Return whether a target, given by name or as a rule, may reveal from left to right."""
    return target.left_to_right if isinstance(target, RevealRule) else target == "sequential"


def check_callables(arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless `logits_processor` and `stopping_criteria`, if given, are lists of
    callables, and `draft_sources`, if given, is a list of objects with a method `propose`."""
    for name in ("logits_processor", "stopping_criteria"):
        value = arguments.get(name, [])
        for part in value if isinstance(value, list | tuple) else [None]:
            if not callable(part):
                raise ValueError(
                    f"{name} is {reprlib.repr(value)}: pass a list of callables, none of them None"
                )
    sources = arguments.get("draft_sources", [])
    for source in sources if isinstance(sources, list | tuple) else [None]:
        if not callable(getattr(source, "propose", None)):
            raise ValueError(
                f"draft_sources is {reprlib.repr(sources)}: pass a list of objects with a method "
                f"`propose`"
            )


def stop_strings_of(tokenizer: Any, strings: Any) -> StopStringCriteria:
    """Make the stopping criterion for stop strings. Raise `ValueError` for a tokenizer with whose
    tokens transformers cannot match them."""
    try:
        return StopStringCriteria(tokenizer, strings)
    except ValueError as error:
        raise ValueError(
            f"stop_strings={strings!r} cannot be matched with the tokens of this "
            f"{type(tokenizer).__name__}, as transformers learns how they join from 'abcdef', "
            f"which it cannot write ({error}): pass a StoppingCriteria of your own as "
            "stopping_criteria, which decodes the ids and looks for them"
        ) from error


def check_ids(ids: Any, attention_mask: Any, config: Any, infilled: int | None = None) -> Tensor:
    """Check the ids of prompts (`input_ids`) or of infills (`infill_ids`).

    Args:
        ids: int64 or int32 [rows, n], the ids.
        attention_mask: [rows, n], 1 for real tokens and 0 for padding; None if there is no padding.
        config: The model's config.
        infilled: For infills, the number of rows that they must have; None for prompts.

    Returns:
        A bool mask [rows, n] that is True at real tokens.

    Raises:
        ValueError: if the ids or the mask have another type or shape, an id is outside the
            vocabulary, or a prompt contains the mask id.
    """
    name = "input_ids" if infilled is None else "infill_ids"
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.long, torch.int):
        hint = (
            ". Of what a tokenizer returns with return_tensors='pt', pass **inputs"
            if hasattr(ids, "keys")
            else ""
        )
        kind = str(ids.dtype) if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} are {kind}: pass a [rows, n] tensor of ids, torch.long{hint}")
    if ids.dim() != 2 or not ids.numel() or len(ids) != (infilled or len(ids)):
        hint = f". For one row pass {name}[None]" if ids.dim() == 1 else ""
        raise ValueError(
            f"{name} have shape {list(ids.shape)}: pass [{infilled or 'rows'}, n], n of 1 or "
            f"more{hint}"
        )
    real = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
            given = (
                list(attention_mask.shape)
                if isinstance(attention_mask, Tensor)
                else type(attention_mask).__name__
            )
            raise ValueError(
                f"attention_mask is {given} for {name} of {list(ids.shape)}: pass 0 and 1 of the "
                "same shape"
            )
        real = attention_mask.bool()
    for one in ids[real & ((ids < 0) | (ids >= config.vocab_size))]:
        raise ValueError(
            f"{name} hold the id {int(one)}, outside the vocabulary of {config.vocab_size}: use "
            "its tokenizer"
        )
    if infilled is None and bool(((ids == config.mask_token_id) & real).any()):
        raise ValueError(
            f"input_ids hold the mask id {config.mask_token_id}: pass to generate what begins with "
            "the first mask as infill_ids, and to score whole texts; for logits at a mask call the "
            "model"
        )
    return real


def check_rows(real: Tensor, new_tokens: int, max_positions: int) -> None:
    """Raise `ValueError` if a prompt has no token, has padding between its tokens, or is too long.

    Args:
        real: bool [rows, length], True at tokens of the prompts and False at padding.
        new_tokens: The number of tokens to generate after each prompt.
        max_positions: The largest number of tokens of a prompt with its new ones.
    """
    for row in (~real.any(-1)).nonzero():
        raise ValueError(
            f"row {int(row)} has no token (its attention_mask is all zeros): drop the row"
        )
    for row in ((real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1).nonzero():
        raise ValueError(
            f"attention_mask of row {int(row)} has holes: tokens must be contiguous, padded on one "
            "side or both"
        )
    longest = int(real.sum(-1).max())
    if longest + new_tokens > max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new ones make {longest + new_tokens}, "
            f"which exceeds max_position_embeddings={max_positions}: shorten the prompt or lower "
            "max_new_tokens (or max_length)"
        )
