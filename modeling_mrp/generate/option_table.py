"""The options of `generate`, each declared once as a field of `DecodingOptions`; the rules;
unsupported options.

The fields are also those of `MRPGenerationConfig`. Help, defaults, checks, command-line flags and
the table of docs/decoding.md are derived from them. Of this package, this module imports nothing
that imports torch, so that a command prints its help at once.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import getdoc
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_type_hints

from ..rules.costs import TABLE, RoundCosts
from ..rules.options import COUNT, POSITIVE, STEPS, Option, Values
from ..rules.published import FastDLLM
from ..rules.reveal import RULES, CheckedRule, RevealRule

TARGETS = tuple(RULES)
PUBLISHED = TARGETS[list(RULES.values()).index(FastDLLM) :]  # the rules from papers
DECODINGS = (*TARGETS, "self_spec", "mrp_direct", "mrp_spec", "mrp_remask")
REMASK_RULES = ("reread", "threshold", "residual")
DRAFTING = ("self_spec", "mrp_spec")
# Modes that refine the reveals of a rule, each with that rule.
REFINED = {"mrp_direct": "static", "mrp_remask": "dynamic"}


# With blocks of 4, the shortest published, the kernels hold at most 256 states.
_STATES = Values(
    int | str,
    lambda value, _: value == "auto" or value in range(1, 257),
    "it must be 'auto' or an int from 1 to 256",
)
_LISTED = Values(int, lambda value, _: 0 <= value <= 1024, "it must be an int from 0 to 1024")
_FLAG = Values(
    object,
    lambda v, _: getattr(v, "ndim", 0) == 0 and v in (0, 1),
    "it must be True or False",
)
_TRUE_OR_FALSE = Values(bool, lambda *_: True, "it must be True or False")
_SWITCH = Values(
    bool,
    lambda *_: True,
    "use None (where they can be used), True (or an error) or False (never)",
)
_SEED = Values(
    int | list,
    lambda value, _: all(
        type(seed) is int and 0 <= seed < 1 << 62
        for seed in (value if isinstance(value, list) else [value])
    ),
    "use None, an int of 0 or more and below 2**62, or a list of one such int per row",
)


def _is_table(value: dict[str, Any], _: int) -> bool:
    try:
        RoundCosts.from_dict(value)
    except ValueError:
        return False
    return True


_COSTS = Values(dict, _is_table, TABLE)


def _by_row(holds: Callable[[Any], bool]) -> Callable[[Any, int], bool]:
    """Extend a predicate of values so that it also holds for a list of such values, one per row. In
    a list, None stands for a row without a value."""

    def all_hold(value: Any, _: int) -> bool:
        values = value if isinstance(value, list | tuple) else [value]
        return bool(values) and all(each is None or holds(each) for each in values)

    return all_hold


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_schema(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return isinstance(value, dict) and value != {}


def _are_choices(value: Any, _: int) -> bool:
    """Return whether a value is a list of texts, or a list of such lists, one per row. In the
    latter, None stands for a row without choices."""
    if all(isinstance(choice, str) for choice in value):
        return bool(value)
    return all(
        choices is None
        or (isinstance(choices, list | tuple) and choices and _are_choices(choices, 0))
        for choices in value
    )


_LANGUAGE = Values(
    str | list | tuple,
    _by_row(_is_text),
    "use a text, or a list of one per prompt, None for none",
)
_SCHEMA = Values(
    str | dict | list | tuple,
    _by_row(_is_schema),
    "use a schema, a dict or its JSON, or a list of one per prompt, None for none",
)
_CHOICES = Values(
    list | tuple,
    _are_choices,
    "use a list of texts, or a list of such lists, one per prompt, None for none",
)


def _one_of(names: tuple[str, ...]) -> Values:
    return Values(str, lambda value, _: value in names, f"choose one of {', '.join(names)}")


def _rule_or_one_of(names: tuple[str, ...]) -> Values:
    return Values(
        str | RevealRule,
        lambda value, _: isinstance(value, RevealRule) or value in names,
        f"choose one of {', '.join(names)}, or pass a RevealRule",
    )


# Options that restrict the texts that may be generated.
CONSTRAINTS = ("regex", "choices", "json_schema", "grammar")


class DecodingOptions:
    """The options of block-diffusion decoding.

    An option that is None takes its value from the model's own config or, if it is None there, too,
    from its default. Options that reveal rules declare (`RevealRule.options`) are fields as well.

    Attributes:
        decoding: the mode: a name, or a reveal rule as an object
        target: the mode whose text the drafts give, in fewer forwards: a name, or a reveal rule as
            an object
        mrp_steps: reveals of the head after each backbone step, unverified
        num_draft_states: K: states a row submits per round, at most: the next one, and drafts;
            `auto`: as many as their expected gain is worth, no drafts if none is (at most 8)
        draft_branches: followers considered per state; 1 drafts a chain; None: 3, but 1 for 16 rows
            or more if K is at most 4 or `auto`, where host time would add up
        draft_passes: head passes per round, at most; each re-reads what is drafted so far
        draft_shortlist: size of the list of likeliest tokens among which a head pass chooses at a
            position, if no processors or bans act; 0: all tokens; None: 16 (sampling: 64) if the
            vocabulary has more than 16,384, else all
        prompt_lookup_num_tokens: with the target `sequential`, one token a step: tokens that are
            drafted from an earlier place of prompt and text with the same last tokens, at most,
            beside other drafts; None or 0: none
        max_matching_ngram_size: how many last tokens have to be the same, at most; the longest
            match counts
        draft_next_block: whether drafts go on into the next block, whose first state is scored
            behind the unfinished one where other drafts are unlikely
        round_costs: for `auto`: what forwards cost by their number of states (`RoundCosts`), as
            `mrp doctor` measures it; None: as is predicted from the model's shape and device
        remask_rule: `reread`, `threshold` or `residual`
        residual_delta: for the rule `residual`, in logits
        max_batch_size: rows that are decoded at once; the others wait, and each takes the place of
            one that has ended; None: all
        regex: a pattern, in the syntax of Rust's `regex`, that the whole new text matches; this and
            the next three need `tokenizer=` and the extra `constraints`, and take a list of one per
            prompt, too
        choices: texts, one of which the new text is
        json_schema: a JSON schema, a dict or its text, of which the new text is a value
        grammar: a grammar, of Lark or GBNF, whose text the new text is or, cut at
            `max_new_tokens`, begins
        seed: with `do_sample`: an int s seeds row i with s + i, a list each row, None draws by
            torch
        kernels: Triton kernels: None: if possible; True: required; False: never
        graphs: CUDA graphs: None: if possible; True: required; False: never
    """

    decoding: Annotated[str | RevealRule | None, "static", _rule_or_one_of(DECODINGS)] = None
    target: Annotated[str | RevealRule | None, "static", _rule_or_one_of(TARGETS), DRAFTING] = None
    mrp_steps: Annotated[int | None, 1, STEPS, ("mrp_direct",)] = None
    num_draft_states: Annotated[int | Literal["auto"] | None, "auto", _STATES, DRAFTING] = None
    draft_branches: Annotated[int | None, None, COUNT, DRAFTING] = None
    draft_passes: Annotated[int | None, 1, COUNT, ("mrp_spec",)] = None
    draft_shortlist: Annotated[int | None, None, _LISTED, ("mrp_spec",)] = None
    prompt_lookup_num_tokens: Annotated[int | None, 0, _LISTED, DRAFTING] = None
    max_matching_ngram_size: Annotated[int | None, 2, COUNT, DRAFTING] = None
    draft_next_block: Annotated[bool | None, False, _TRUE_OR_FALSE, DRAFTING] = None
    round_costs: Annotated[dict[str, Any] | None, None, _COSTS, DRAFTING] = None
    remask_rule: Annotated[str | None, "reread", _one_of(REMASK_RULES), ("mrp_remask",)] = None
    residual_delta: Annotated[float | None, 1.0, POSITIVE, ("mrp_remask",)] = None
    max_batch_size: Annotated[int | None, None, COUNT] = None
    regex: Annotated[str | list[str | None] | None, None, _LANGUAGE] = None
    choices: Annotated[list[Any] | None, None, _CHOICES] = None
    json_schema: Annotated[str | dict[str, Any] | list[Any] | None, None, _SCHEMA] = None
    grammar: Annotated[str | list[str | None] | None, None, _LANGUAGE, ("sequential",)] = None
    seed: Annotated[int | list[int] | None, None, _SEED] = None
    kernels: Annotated[bool | None, None, _SWITCH] = None
    graphs: Annotated[bool | None, None, _SWITCH] = None


def _own_options() -> list[Option]:
    """List the options that `DecodingOptions` declares."""
    described = getdoc(DecodingOptions) or ""
    meanings = dict(re.findall(r"^    (\w+): (.+(?:\n     .+)*)", described, re.MULTILINE))
    options = []
    for name, hint in get_type_hints(DecodingOptions, include_extras=True).items():
        default, values, *modes = hint.__metadata__
        meaning = " ".join(meanings.get(name, "").split())
        options.append(Option(name, default, values, meaning, modes[0] if modes else DECODINGS))
    return options


def _options_of_rules() -> list[Option]:
    """List the options that rules declare, and make each of them a field of `DecodingOptions`."""
    declared: dict[str, Option] = {}
    for rule in RULES.values():
        for option in rule.options:
            if declared.setdefault(option.name, option) is not option:
                raise TypeError(f"two rules declare the option {option.name}: let them share it")
    options = []
    for option in declared.values():
        setattr(DecodingOptions, option.name, None)
        modes = []
        for mode in DECODINGS:
            rule_of_mode = RULES.get(REFINED.get(mode, mode))
            if rule_of_mode is not None and option in rule_of_mode.options:
                modes.append(mode)
        options.append(replace(option, modes=tuple(modes)))
    return options


_OWN = _own_options()
OPTIONS = (*_OWN[:2], *_options_of_rules(), *_OWN[2:])


def rule_of(choice: str | RevealRule, options: Any, block_size: int) -> RevealRule:
    """Return the reveal rule for a value of `decoding` or `target`.

    Args:
        choice: The name of a rule, or a rule object.
        options: The checked options, from which a rule that is given by name is made.
        block_size: The block size of the model.

    Returns:
        For a name, the rule of that name. For a rule object, a `CheckedRule` around it, which
        reveals the same but raises `ValueError` for columns that cannot be revealed.
    """
    if isinstance(choice, RevealRule):
        return CheckedRule(choice)
    return RULES[choice].from_options(options, block_size)


def ids_in(value: Any) -> list[Any]:
    """Return the ids in the value of an option as a list. The value may be None, one id, or several
    ids in a list, a tuple, a set or a tensor."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    return [] if ids is None else list(ids) if isinstance(ids, list | tuple | set) else [ids]


def _are_ids(value: Any, _: int) -> bool:
    ids = ids_in(value)
    return all(
        isinstance(token, Integral) and not isinstance(token, bool) and abs(int(token)) < 1 << 31
        for token in ids
    )


def _are_texts(value: Any, _: int) -> bool:
    return len(value) > 0 and all(isinstance(text, str) and text for text in value)


def _are_biases(value: Any, _: int) -> bool:
    return isinstance(value, dict) or all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    )


_LIMIT = Values(Integral, lambda v, _: v >= 1, "it must be an int of 1 or more")
_AT_LEAST = Values(Integral, lambda v, _: v >= 0, "it must be an int of 0 or more (0: off)")
_SHARE = Values(Real, lambda v, _: 0 <= v <= 1, "it must be a probability, a number from 0 to 1")
_IDS = Values(object, _are_ids, "use an id, or a list of ids, ints from this model's tokenizer")
_ID = Values(
    object,
    lambda v, _: not isinstance(v, list | tuple) and _are_ids(v, _),
    "use an id, an int of this model's tokenizer",
)
_ID_LIST = Values(
    object,
    lambda v, _: hasattr(v, "__iter__") and _are_ids(v, _),
    "use a list of ids, ints of this model's tokenizer",
)
_TEXTS = Values(
    str | list | tuple,
    _are_texts,
    "use a text, or a list of texts, none of them empty",
)

# Options of transformers that have an effect here, with checks of values that transformers does not
# check, or compares before it looks at their types. All other checks are left to transformers.
OPTIONS_OF_TRANSFORMERS = tuple(
    Option(name, None, values)
    for names, values in {
        "max_new_tokens max_length num_return_sequences": _LIMIT,
        "min_new_tokens min_length no_repeat_ngram_size": _AT_LEAST,
        "top_p min_p typical_p top_h epsilon_cutoff eta_cutoff": _SHARE,
        "top_k": Values(Integral, lambda *_: True, "it must be an int (0: off)"),
        "temperature": Values(
            Real,
            lambda v, _: 0 <= v < float("inf"),
            "it must be a finite number, above 0 with do_sample",
        ),
        "repetition_penalty": Values(
            Real,
            lambda v, _: 0 < v < float("inf"),
            "it must be a finite number above 0 (1: off)",
        ),
        "max_time": Values(Real, lambda v, _: v >= 0, "it must be a number of seconds, 0 or more"),
        "eos_token_id bos_token_id decoder_start_token_id": _IDS,
        "pad_token_id": _ID,
        "suppress_tokens": _ID_LIST,
        "bad_words_ids": Values(
            list | tuple,
            lambda v, _: [] not in v and () not in v,
            "use a list of lists of ids, none empty",
        ),
        "sequence_bias": Values(
            dict | list | tuple,
            _are_biases,
            "use a dict of tuples of ids, or a list of pairs [ids, bias]",
        ),
        "stop_strings": _TEXTS,
        "do_sample return_dict_in_generate output_scores output_logits use_cache": _FLAG,
        "remove_invalid_values renormalize_logits": _FLAG,
        "assistant_ensemble_weight": Values(
            Real,
            lambda v, _: 0 < v < 1,
            "leave it unset, as there is no assistant",
        ),
        "watermarking_config": Values(
            object,
            lambda v, _: isinstance(v, dict) or hasattr(v, "validate"),
            "leave it unset",
        ),
        "early_stopping": Values(
            object,
            lambda v, _: v in (0, 1, "never"),
            "leave it unset, as there are no beams",
        ),
    }.items()
    for name in names.split()
)
# Options of transformers that have an effect only with `do_sample`.
OF_SAMPLING = frozenset(
    ["temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"]
)

_PREFIXES = (
    "it needs prefixes that grow from the left; there are num_return_sequences with do_sample, and "
    "infill_ids"
)
_COLUMNS = "it acts at a column of the padded batch; there are suppress_tokens and min_new_tokens"
_ROUNDS = (
    "a forward scores many positions of drafted states side by side; the forward of the model "
    "returns what it computes"
)
_REASONS = {
    "num_beams num_beam_groups penalty_alpha constraints force_words_ids watermarking_config "
    "token_healing": _PREFIXES,
    "prefix_allowed_tokens_fn": _PREFIXES,
    "exponential_decay_length_penalty begin_suppress_tokens forced_bos_token_id "
    "forced_eos_token_id": _COLUMNS,
    "use_mtp assistant_early_exit": "decoding='self_spec' or 'mrp_spec' drafts",
    "assistant_model is_assistant": "decoding='self_spec' or 'mrp_spec' drafts",
    "guidance_scale negative_prompt_ids dola_layers output_attentions "
    "output_hidden_states": _ROUNDS,
    "cache_implementation prefill_chunk_size": "keys and values lie in a BlockCache; prompts are "
    "read in chunks of blocks",
    "encoder_repetition_penalty encoder_no_repeat_ngram_size": "there is no encoder; without "
    "encoder_ it sees the prompt, too",
    "inputs_embeds position_ids": "pass ids as input_ids; positions are counted from the first "
    "token of each row",
}
# Options and arguments of transformers that are not supported here, and why not.
UNSUPPORTED = {one: why for several, why in _REASONS.items() for one in several.split()}
# The value, other than None, that switches an unsupported option off.
OFF = {"num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0, "guidance_scale": 1}
OFF |= {"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0}
OFF |= dict.fromkeys(
    ("token_healing", "use_mtp", "is_assistant", "output_attentions", "output_hidden_states"), False
)


def check_supported(values: Mapping[str, Any]) -> None:
    """Raise `ValueError` for the first option or argument among `values` that is not supported. The
    message gives its value and the reason."""
    for name, why in UNSUPPORTED.items():
        if (value := values.get(name)) not in (None, OFF.get(name)):
            raise ValueError(
                f"{name}={reprlib.repr(value)} is not supported: {why}. Leave {name} unset"
            )


def closest_name(name: str, names: Iterable[str]) -> str:
    """Return a suggestion of the name most similar to `name`, as words to append to a message; ""
    if none is similar."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""
