"""Requests of the engine: whether each can be served, how its text is decoded and where it ends,
and its progress."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modeling_mrp.generate.loop import Mode
from modeling_mrp.rules.state import Counts, Row

from .options import Settings, decodes_as_stock
from .picker import Sampling

GREEDY = {"temperature": 0.0}  # for requests without a temperature
# The top-k in `SamplingParams` for a temperature of 0, and for no top-k.
_TOP_1, _TOP_ALL = 1, 1 << 30


@dataclass(frozen=True)
class Asked:
    """The options by which a request's text is decoded.

    Attributes:
        mode: The decoding mode: what is revealed, refined and drafted.
        sampling: How tokens are picked.
        seed: Seed of the noise.
        eos: Ids that end the text; empty if it is decoded as by the engine's own algorithms, which
            do not stop at an eos.
        least: Minimum number of generated tokens, within which no eos is picked.
        reveal_step: Whether the answer has the step that revealed each token.
        provisional: Whether the answer shows the block that is being decoded.
    """

    mode: Mode
    sampling: Sampling
    seed: int
    eos: frozenset[int]
    least: int
    reveal_step: bool
    provisional: bool


class EngineRow(Row):
    """The row of a request.

    Attributes:
        asked: How the request's text is decoded.
        alone: Whether a round scores only one state of the row.
    """

    asked: Asked
    alone: bool

    @property
    def sampling(self) -> Sampling:
        """The sampling options of the request."""
        return self.asked.sampling


class Progress:
    """The progress of a request, which outlives the rows in which it is decoded.

    Attributes:
        asked: How the request's text is decoded.
        counts: Counts of forwards and drafts.
        logprob, step: Log-confidence and denoising step of each token in finished blocks.
        block: The ids of the block that is being decoded, from the first generated one on.
        alone: Whether a round scores only one state of the request.
    """

    def __init__(self, asked: Asked, counts: Counts) -> None:
        self.asked, self.counts = asked, counts
        self.logprob: list[float] = []
        self.step: list[int] = []
        self.block: list[int] = []
        self.alone = False

    @property
    def steps(self) -> int:
        """Number of denoising steps in finished blocks."""
        return max(self.step, default=-1) + 1

    def finish(self, row: Row, end: int) -> int:
        """Record log-confidence and step of a row's tokens before `end`, now finished; return the
        number of new ones."""
        begin, size = len(self.step), max(0, end - row.prompt)
        self.logprob += row.logprob[begin:size]
        self.step += row.step[begin:size]
        self.block = []
        return len(self.step) - begin


def interpreted(req: Any, settings: Settings) -> Asked:
    """Return the options by which a request's text is decoded, from its parameters and the server's
    settings.

    Raises:
        ValueError: if its `custom_params` cannot be honoured; the message gives value and remedy.
    """
    asked, told = req.sampling_params, req.sampling_params.custom_params or {}
    ends = stop_ids(req)
    config = settings.config_of(told, ends)
    drawn = asked.top_k != _TOP_1
    changed = asked.logit_bias or asked.min_new_tokens or asked.repetition_penalty != 1
    penalised = bool(asked.frequency_penalty or asked.presence_penalty)
    stock = not (drawn or changed or penalised) and decodes_as_stock(config, settings.block_size)
    if stock:  # the engine compares in float32
        config.confidence_threshold = float(np.float32(config.confidence_threshold))
    mode = settings.mode_of(config)
    stock = stock and mode.refine is None
    sampling = Sampling(
        stock=stock,
        sample=drawn,
        temperature=float(asked.temperature) if drawn else 1.0,
        top_k=asked.top_k if drawn and asked.top_k < _TOP_ALL else 0,
        top_p=asked.top_p if drawn else 1.0,
        min_p=asked.min_p if drawn else 0.0,
        repetition_penalty=float(asked.repetition_penalty),
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        prompt=len(req.origin_input_ids) if penalised else 0,
        logit_bias=tuple(
            (int(token), float(bias)) for token, bias in (asked.logit_bias or {}).items()
        ),
        eos=tuple(sorted(ends)) if asked.min_new_tokens else (),
        entropy=mode.rule.needs_entropy,
        drafts=mode.drafting is not None,
    )
    seed = seed_of(req.rid) if asked.sampling_seed is None else asked.sampling_seed
    shown = [bool(told.get(name)) for name in ("return_reveal_step", "return_provisional")]
    return Asked(
        mode,
        sampling,
        seed,
        frozenset() if stock else frozenset(ends),
        asked.min_new_tokens,
        *shown,
    )


def seed_of(rid: str) -> int:
    """Derive a seed for a request without one from the request's id, so that it is the same on all
    devices."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest()) >> 2


def refusal(req: Any) -> str | None:
    """Explain why the algorithm cannot serve a request, with the remedy; return None if it can."""
    try:
        if wrong := [what for what, asked_for in _unserved(req).items() if asked_for]:
            return f"MRP does not serve requests with {'; '.join(wrong)}. Leave that out"
        sampling = interpreted(req, req.dllm_config.mrp_settings).sampling
        sampling.processors(), sampling.truncation()
    except ValueError as error:
        return str(error)
    except (AttributeError, TypeError) as error:
        return f"sampling_params hold a value of the wrong type: {error}"
    return None


def _unserved(req: Any) -> dict[str, Any]:
    """Map each feature that is not served to whether a request asks for it."""
    asked = req.sampling_params
    counts = {name: getattr(asked, name) for name in ("max_new_tokens", "min_new_tokens", "top_k")}
    return {
        "json_schema, regex, ebnf or structural_tag": asked.json_schema
        or asked.regex
        or asked.ebnf
        or asked.structural_tag,
        "a custom logits processor": getattr(req, "custom_logit_processor", None),
        "a watermark": getattr(asked, "watermark", None),
        "input_embeds": getattr(req, "input_embeds", None) is not None,
        "logprobs of other tokens than the text's (top_logprobs_num, "
        "token_ids_logprob)": req.return_logprob
        and (req.logprob.top_logprobs_num or req.logprob.token_ids_logprob),
        "a sampling mask": getattr(req, "return_sampling_mask", False),
        "hidden states": getattr(req, "return_hidden_states", False),
        "several beams": (getattr(asked, "beam_width", None) or 1) > 1,
        "ids outside of the vocabulary in its prompt": not all(
            0 <= token < req.vocab_size for token in req.origin_input_ids
        ),
        "the mask token in its prompt": req.dllm_config.mask_id in req.origin_input_ids,
        "a logit_bias outside -100 to 100": any(
            not -100 <= bias <= 100 for bias in (asked.logit_bias or {}).values()
        ),
        "a temperature above 1000": asked.temperature > 1000,
        "a repetition_penalty below 0.01": asked.repetition_penalty < 0.01,
        "min_new_tokens where every token ends the text": asked.min_new_tokens
        and len(stop_ids(req)) >= req.vocab_size - 1,
        **{
            f"a {name} that is no int": value is not None and not isinstance(value, int)
            for name, value in counts.items()
        },
    }


def refusal_of_body(asked: Any, prompt: Sequence[int]) -> str | None:
    """Explain why a request that the engine would wrongly accept is refused; return None if it is
    served.

    Args:
        asked: The engine's `GenerateReqInput` of one request.
        prompt: The ids of its prompt.
    """
    first = asked.logprob_start_len
    if asked.return_logprob and first is not None and 0 <= first < len(prompt):
        return (
            f"logprob_start_len is {first}, and MRP has no log-probabilities of the prompt, which "
            f"has {len(prompt)} tokens: leave it out (and echo, with logprobs)"
        )
    given = asked.sampling_params.get("stop_regex") or ()
    for pattern in [given] if isinstance(given, str) else given:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            return f"stop_regex has {pattern!r}, which is no regular expression: {error}"
    return None


def end_of_text(req: Any, block: int, context_length: int) -> int:
    """Compute the end position of the last block that a request can reach."""
    wanted = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return min(-(-wanted // block) * block, context_length // block * block)


def stop_ids(req: Any) -> set[int]:
    """Return the set of ids at which the engine ends a request's text."""
    asked, tokenizer = req.sampling_params, req.tokenizer
    if asked.ignore_eos:
        return set()
    found = {*(asked.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if tokenizer is not None:
        found |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return found - {None}


def text_of_block(
    req: Any, asked: Asked, ids: Sequence[int], start: int, mask_id: int
) -> list[int] | None:
    """Return the final ids of a block in which the text ends, if no mask is left before that end;
    else None.

    Tokens after the end are cut off, so they need no decoding: masks stand in for them, and the
    engine keeps no keys and values of a block that the text does not fill. If the text is decoded
    as by the engine's own algorithms, which do not stop at an eos, all ids stay as they are, and
    the result is None with stop strings, since one may end the text first.

    Args:
        req: The request.
        asked: How the request's text is decoded.
        ids: [block], the ids so far.
        start: The block's absolute position.
        mask_id: The mask's id.
    """
    given, prompt = req.sampling_params, len(req.origin_input_ids) - start
    stops = asked.eos if not asked.sampling.stock else stop_ids(req)
    if asked.sampling.stock and (given.stop_strs or given.stop_regex_strs):
        return None
    first = next(
        (column + 1 for column, token in enumerate(ids) if column >= prompt and token in stops),
        len(ids),
    )
    end = max(min(first, prompt + given.max_new_tokens), 0)
    if end >= len(ids) or mask_id in ids[:end]:
        return None
    return list(ids) if asked.sampling.stock else [*ids[:end], *[mask_id] * (len(ids) - end)]
