"""What a request asks for: whether it can be served, where its text ends, and whether it has."""

from collections.abc import Sequence
from typing import Any

GREEDY = {"temperature": 0.0}  # of requests that give none


def refusal(req: Any) -> str | None:
    """Say why the algorithm cannot serve a request, and the remedy; None if it can."""
    asked = req.sampling_params
    unserved = {
        "temperature above 0 (this server decodes greedily: send temperature=0, or top_k=1)": asked.temperature > 0
        and asked.top_k != 1,
        "frequency_penalty, presence_penalty or repetition_penalty": (
            asked.frequency_penalty or asked.presence_penalty or asked.repetition_penalty != 1
        ),
        "logit_bias": asked.logit_bias,
        "min_new_tokens": asked.min_new_tokens,
        "json_schema, regex, ebnf or structural_tag": asked.json_schema or asked.regex or asked.ebnf or asked.structural_tag,
        "a custom logits processor": getattr(req, "custom_logit_processor", None),
        "input_embeds": getattr(req, "input_embeds", None) is not None,
        "logprobs": req.return_logprob,
        "hidden states": getattr(req, "return_hidden_states", False),
        "several beams": (getattr(asked, "beam_width", None) or 1) > 1,
        "the mask token in its prompt": req.dllm_config.mask_id in req.origin_input_ids,
    }
    wrong = [what for what, asked_for in unserved.items() if asked_for]
    return f"MRP does not serve requests with {'; '.join(wrong)}. Leave that out" if wrong else None


def committed_ids(req: Any) -> list[int]:
    """List the ids of a request's text so far."""
    return [*req.origin_input_ids, *req.output_ids]


def end_of_text(req: Any, block: int, context_length: int) -> int:
    """Find where the last block ends that a request can have."""
    wanted = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return min(-(-wanted // block) * block, context_length // block * block)


def stop_ids(req: Any) -> set[int]:
    """List the ids at which the engine ends a request's text."""
    asked, tokenizer = req.sampling_params, req.tokenizer
    if asked.ignore_eos:
        return set()
    found = {*(asked.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if tokenizer is not None:
        found |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
    return found


def block_is_text(req: Any, ids: Sequence[int], start: int, mask_id: int) -> bool:
    """Tell if the engine will show nothing more of a block than what is revealed.

    What lies behind an end is cut off, so it need not be decoded, and of a block that the text does not fill no keys and values
    are kept. Not so where a stop string may end it first, by what lies behind an eos.

    Args:
        req: Whose block it is.
        ids: [block], where it is.
        start: Its absolute position.
        mask_id: The mask's id.
    """
    asked, prompt, stops = req.sampling_params, len(req.origin_input_ids) - start, stop_ids(req)
    if asked.stop_strs or asked.stop_regex_strs:
        return False
    first = next((column + 1 for column, token in enumerate(ids) if column >= prompt and token in stops), len(ids))
    end = min(first, prompt + asked.max_new_tokens)
    return end < len(ids) and mask_id not in ids[: max(end, 0)]


__all__ = ["GREEDY", "block_is_text", "committed_ids", "end_of_text", "refusal", "stop_ids"]
