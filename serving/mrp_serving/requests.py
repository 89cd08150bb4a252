"""Requests of the engine: whether a request can be served, the options by which its text is
decoded, the end of its text, and its progress."""

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
class RequestOptions:
    """The options by which a request's text is decoded.

    Attributes:
        mode: The decoding mode: reveal rule, refinement and drafting.
        sampling: The sampling options, by which tokens are picked.
        seed: The seed of the noise.
        eos: Ids that end the text; empty if the text is decoded in the way of the engine's own
            algorithms, which do not stop at an eos.
        min_new_tokens: The minimum number of generated tokens, among which there is no eos.
        reveal_step: Whether the response contains the step that revealed each token.
        provisional: Whether the response contains the block that is being decoded.
    """

    mode: Mode
    sampling: Sampling
    seed: int
    eos: frozenset[int]
    min_new_tokens: int
    reveal_step: bool
    provisional: bool


class EngineRow(Row):
    """The row of a request of the engine.

    Attributes:
        options: How the request's text is decoded.
        single_state: Whether a round scores only one state of the row.
    """

    options: RequestOptions
    single_state: bool

    @property
    def sampling(self) -> Sampling:
        """The sampling options of the request."""
        return self.options.sampling


class Progress:
    """The progress of a request. It outlives the request's row: if the request gets another row, it
    keeps its progress.

    Attributes:
        options: How the request's text is decoded.
        counts: Counts of forwards and drafts.
        logprob, step: For each generated token in finished blocks, its log-confidence, and the
            denoising step that revealed it.
        block: The ids of the block that is being decoded, without those of the prompt.
        single_state: Whether a round scores only one state of the request.
    """

    def __init__(self, options: RequestOptions, counts: Counts) -> None:
        self.options = options
        self.counts = counts
        self.logprob: list[float] = []
        self.step: list[int] = []
        self.block: list[int] = []
        self.single_state = False

    @property
    def steps(self) -> int:
        """The number of denoising steps in finished blocks."""
        return max(self.step, default=-1) + 1

    def finish(self, row: Row, end: int) -> int:
        """Record the log-confidences and denoising steps of a row's generated tokens before the
        position `end`, which are final now. Return the number of tokens that were not recorded
        before."""
        begin = len(self.step)
        size = max(0, end - row.prompt)
        self.logprob += row.logprob[begin:size]
        self.step += row.step[begin:size]
        self.block = []
        return len(self.step) - begin


def parse_options(req: Any, settings: Settings) -> RequestOptions:
    """Return the options by which a request's text is decoded. They come from the parameters of the
    request and the settings of the server.

    Raises:
        ValueError: if the `custom_params` of the request are invalid or unsupported; the message
            gives the value and the remedy.
    """
    params = req.sampling_params
    custom_params = req.sampling_params.custom_params or {}
    ends = stop_ids(req)
    config = settings.config_of(custom_params, ends)
    sampled = params.top_k != _TOP_1
    changed = params.logit_bias or params.min_new_tokens or params.repetition_penalty != 1
    penalised = bool(params.frequency_penalty or params.presence_penalty)
    stock = not (sampled or changed or penalised) and decodes_as_stock(config, settings.block_size)
    if stock:  # the engine compares in float32
        config.confidence_threshold = float(np.float32(config.confidence_threshold))
    mode = settings.mode_of(config)
    stock = stock and mode.refine is None
    sampling = Sampling(
        stock=stock,
        sample=sampled,
        temperature=float(params.temperature) if sampled else 1.0,
        top_k=params.top_k if sampled and params.top_k < _TOP_ALL else 0,
        top_p=params.top_p if sampled else 1.0,
        min_p=params.min_p if sampled else 0.0,
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        prompt=len(req.origin_input_ids) if penalised else 0,
        logit_bias=tuple(
            (int(token), float(bias)) for token, bias in (params.logit_bias or {}).items()
        ),
        eos=tuple(sorted(ends)) if params.min_new_tokens else (),
        entropy=mode.rule.needs_entropy,
        drafts=mode.drafting is not None,
    )
    seed = seed_of(req.rid) if params.sampling_seed is None else params.sampling_seed
    return RequestOptions(
        mode=mode,
        sampling=sampling,
        seed=seed,
        eos=frozenset() if stock else frozenset(ends),
        min_new_tokens=params.min_new_tokens,
        reveal_step=bool(custom_params.get("return_reveal_step")),
        provisional=bool(custom_params.get("return_provisional")),
    )


def seed_of(rid: str) -> int:
    """For a request without a seed, derive one from the request's id, so that the seed is the same
    on all devices."""
    return int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest()) >> 2


def refusal(req: Any) -> str | None:
    """Return the reason why the plugin cannot serve `req`, a request (`Req`) of the engine, with a
    remedy. Return None if it can."""
    try:
        if unserved := [feature for feature, requested in _unserved(req).items() if requested]:
            return f"MRP does not serve requests with {'; '.join(unserved)}. Leave that out"
        sampling = parse_options(req, req.dllm_config.mrp_settings).sampling
        sampling.processors(), sampling.truncation()
    except ValueError as error:
        return str(error)
    except (AttributeError, TypeError) as error:
        return f"sampling_params hold a value of the wrong type: {error}"
    return None


def _unserved(req: Any) -> dict[str, Any]:
    """Map a description of each feature that the plugin does not serve to a truthy value if the
    request uses this feature, and to a falsy one otherwise."""
    params = req.sampling_params
    counts = {name: getattr(params, name) for name in ("max_new_tokens", "min_new_tokens", "top_k")}
    return {
        "json_schema, regex, ebnf or structural_tag": params.json_schema
        or params.regex
        or params.ebnf
        or params.structural_tag,
        "a custom logits processor": getattr(req, "custom_logit_processor", None),
        "a watermark": getattr(params, "watermark", None),
        "input_embeds": getattr(req, "input_embeds", None) is not None,
        "logprobs of other tokens than the text's (top_logprobs_num, "
        "token_ids_logprob)": req.return_logprob
        and (req.logprob.top_logprobs_num or req.logprob.token_ids_logprob),
        "a sampling mask": getattr(req, "return_sampling_mask", False),
        "hidden states": getattr(req, "return_hidden_states", False),
        "several beams": (getattr(params, "beam_width", None) or 1) > 1,
        "ids outside of the vocabulary in its prompt": not all(
            0 <= token < req.vocab_size for token in req.origin_input_ids
        ),
        "the mask token in its prompt": req.dllm_config.mask_id in req.origin_input_ids,
        "a logit_bias outside -100 to 100": any(
            not -100 <= bias <= 100 for bias in (params.logit_bias or {}).values()
        ),
        "a temperature above 1000": params.temperature > 1000,
        "a repetition_penalty below 0.01": params.repetition_penalty < 0.01,
        "min_new_tokens where every token ends the text": params.min_new_tokens
        and len(stop_ids(req)) >= req.vocab_size - 1,
        **{
            f"a {name} that is no int": value is not None and not isinstance(value, int)
            for name, value in counts.items()
        },
    }


def refusal_of_body(body: Any, prompt: Sequence[int]) -> str | None:
    """Return the reason to refuse a request that the engine would accept although it cannot be
    served: it asks for log-probabilities of prompt tokens, or has a `stop_regex` that is no regular
    expression. Return None if neither is so.

    Args:
        body: The engine's `GenerateReqInput` of one request.
        prompt: The ids of the request's prompt.
    """
    first = body.logprob_start_len
    if body.return_logprob and first is not None and 0 <= first < len(prompt):
        return (
            f"logprob_start_len is {first}, and MRP has no log-probabilities of the prompt, which "
            f"has {len(prompt)} tokens: leave it out (and echo, with logprobs)"
        )
    patterns = body.sampling_params.get("stop_regex") or ()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            return f"stop_regex has {pattern!r}, which is no regular expression: {error}"
    return None


def end_of_text(req: Any, block: int, context_length: int) -> int:
    """Compute the position of the end of the last block that the text of a request can reach.

    Args:
        req: The request.
        block: The number of tokens of a block.
        context_length: The largest number of tokens of a text, prompt included. Only whole blocks
            within it are decoded.
    """
    length = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return min(-(-length // block) * block, context_length // block * block)


def stop_ids(req: Any) -> set[int]:
    """Return the set of ids at which the engine ends a request's text."""
    params = req.sampling_params
    tokenizer = req.tokenizer
    if params.ignore_eos:
        return set()
    ids = {*(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if tokenizer is not None:
        ids |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return ids - {None}


def text_of_block(
    req: Any, options: RequestOptions, ids: Sequence[int], start: int, mask_id: int
) -> list[int] | None:
    """Find out whether the text of a request ends within a block and is final. If so, return the
    final ids of the whole block.

    A text ends after the first generated token that ends it, such as an eos, or once it has
    `max_new_tokens` generated tokens.

    Args:
        req: The request.
        options: How the request's text is decoded.
        ids: The present ids of the block, masks included.
        start: The absolute position where the block begins.
        mask_id: The id of the mask.

    Returns:
        None if the text does not end before the end of the block, or if a mask is left before the
        end of the text. Otherwise, a list [block]:

        - In general, `ids` up to the end of the text, and then masks. Ids after the end need no
          decoding, since the engine keeps no keys and values of a block that the text does not
          fill.
        - If the text is decoded in the way of the engine's own algorithms (`Sampling.stock`), all
          of `ids`, unchanged. These algorithms go on after an eos, so ids after the end may be
          tokens or masks. If such a request has stop strings, the result is None instead: a stop
          string may end the text earlier, but is not searched for here.
    """
    params = req.sampling_params
    prompt = len(req.origin_input_ids) - start
    stops = options.eos if not options.sampling.stock else stop_ids(req)
    if options.sampling.stock and (params.stop_strs or params.stop_regex_strs):
        return None
    first = next(
        (column + 1 for column, token in enumerate(ids) if column >= prompt and token in stops),
        len(ids),
    )
    end = max(min(first, prompt + params.max_new_tokens), 0)
    if end >= len(ids) or mask_id in ids[:end]:
        return None
    return list(ids) if options.sampling.stock else [*ids[:end], *[mask_id] * (len(ids) - end)]
