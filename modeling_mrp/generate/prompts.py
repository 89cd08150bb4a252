"""Checks of the prompts of `generate`, their mask, the tokens that stand behind them already, and what else goes along."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..networks.cache import BlockCache, devices_of_layers


def check_prompt(prompt: Any, attention_mask: Tensor | None, mask_token_id: int, vocab_size: int) -> None:
    """Raise `ValueError` unless `prompt` is [rows, length] ids, and `attention_mask` None or as large."""
    if prompt is None:
        raise ValueError("generate needs input_ids: pass a [rows, length] tensor of ids")
    _check_type("input_ids", prompt, "[rows, length]")
    if prompt.dim() == 1:
        raise ValueError(
            f"input_ids have shape {list(prompt.shape)}, without a dimension of rows: pass input_ids[None] for one row"
        )
    if prompt.dim() != 2 or prompt.shape[0] == 0 or prompt.shape[1] == 0:
        raise ValueError(
            f"input_ids have shape {list(prompt.shape)}: pass [rows, length], at least one row with at least one token"
        )
    real = torch.ones_like(prompt, dtype=torch.bool)
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or not _is_plain(attention_mask):
            raise ValueError(f"attention_mask is {_kind(attention_mask)}: pass a dense [rows, length] tensor of 0 and 1")
        if attention_mask.dim() != 2 or attention_mask.shape != prompt.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)} for input_ids of {list(prompt.shape)}: "
                "generate takes a 2-D mask of the same shape (a 4-D mask works with forward only)"
            )
        if bool((odd := (attention_mask != 0) & (attention_mask != 1)).any()):
            raise ValueError(f"attention_mask holds {attention_mask[odd][0].item()}: it must be 1 at tokens and 0 at padding")
        real = attention_mask.bool()
    if bool(((prompt == mask_token_id) & real).any()):
        raise ValueError(
            f"the prompt holds the mask id {mask_token_id}: pass what stands before the first mask as input_ids, and the rest, "
            "masks and given tokens, as infill_ids"
        )
    _check_range("the prompt holds", prompt[real], vocab_size)


def check_infill(infill_ids: Any, rows: int, vocab_size: int) -> None:
    """Raise `ValueError` unless `infill_ids` are [rows, n] ids."""
    _check_type("infill_ids", infill_ids, "[rows, n]")
    if infill_ids.dim() != 2 or len(infill_ids) != rows or infill_ids.shape[1] == 0:
        raise ValueError(
            f"infill_ids have shape {list(infill_ids.shape)} for {rows} prompts: pass [{rows}, n], with n of 1 or more"
        )
    _check_range("infill_ids hold", infill_ids, vocab_size)


def check_rows(real: Tensor, new_tokens: int, max_positions: int) -> None:
    """Check the attention mask that transformers was given or inferred, [rows, length] bool, and the room for the text.

    Raises:
        ValueError: for a row without a token or with holes, and for more tokens than positions.
    """
    empty = ~real.any(-1)
    if bool(empty.any()):
        raise ValueError(f"row {int(empty.nonzero()[0])} has no token (its attention_mask is all zeros): drop the row")
    holes = (real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0] > 1
    if bool(holes.any()):
        raise ValueError(
            f"attention_mask of row {int(holes.nonzero()[0])} has holes: a row's tokens must be contiguous, with padding on "
            "one side or both"
        )
    longest = int(real.sum(-1).max())
    if longest + new_tokens > max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new ones make {longest + new_tokens}, which exceeds "
            f"max_position_embeddings={max_positions}: shorten the prompt or lower max_new_tokens (or max_length)"
        )


def check_adapter(prepare_inputs: Any) -> None:
    """Raise `ValueError` if inputs are prepared by a peft model that puts vectors of its own before them."""
    config: Any = getattr(getattr(prepare_inputs, "__self__", None), "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"an adapter of type {config.peft_type.value} has no effect on generate, which decodes from ids alone: train an "
            "adapter of the weights instead, such as LoRA, or decode without it under model.disable_adapter()"
        )


def check_functions(name: str, functions: Any) -> None:
    """Raise `ValueError` unless processors or criteria are a list of functions."""
    if not isinstance(functions, list) or not all(map(callable, functions)):
        raise ValueError(f"{name} is {functions!r}: pass a list of functions, or of transformers' own")


def check_stop_strings(strings: Any, tokenizer: Any) -> None:
    """Raise `ValueError` unless these are texts, and a tokenizer is there to find them."""
    texts = [strings] if isinstance(strings, str) else strings
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"stop_strings is {strings!r}: it must be a text or a list of texts, none of them empty")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = "" if tokenizer is None else f", and tokenizer is {tokenizer!r}"
        raise ValueError(f"stop_strings={strings!r} need the tokenizer{given}: pass tokenizer=... to generate")


def check_special_ids(eos: list[int], pad: int, mask_token_id: int, vocab_size: int) -> None:
    """Raise `ValueError` for an eos or padding outside the vocabulary, or an eos that is the mask."""
    for name, ids in (("eos_token_id", eos), ("pad_token_id", [pad])):
        if outside := [one for one in ids if not 0 <= one < vocab_size]:
            raise ValueError(f"{name} holds {outside[0]}, outside the vocabulary of {vocab_size}: use one inside")
    if mask_token_id in eos:
        raise ValueError(f"eos_token_id holds the mask id {mask_token_id}, which is never picked: leave it out")


def check_past(past_key_values: Any, model: Any, rows: int) -> None:
    """Raise `ValueError` unless one may go on from a cache, for so many prompts."""
    if not isinstance(past_key_values, BlockCache):
        raise ValueError(
            f"past_key_values are a {type(past_key_values).__name__}: pass those that "
            "generate(..., return_dict_in_generate=True) gave, or leave them unset"
        )
    owned = past_key_values.owner is not None and past_key_values.owner() is model
    if not owned:
        raise ValueError(
            "past_key_values come from another model, or out of a pickle: pass those of this one's generate, or leave them "
            "unset"
        )
    if past_key_values.rows != rows:
        raise ValueError(
            f"past_key_values hold {past_key_values.rows} rows, and input_ids have {rows}: pass the same conversations in "
            "the same order, or leave them unset"
        )
    depth = 0 if model.mrp_head is None else len(model.mrp_head.layers)
    if past_key_values.head_layers not in (0, depth):
        raise ValueError(
            f"past_key_values hold those of a head of {past_key_values.head_layers} layers, and the model's has {depth}: "
            "leave them unset"
        )
    devices = devices_of_layers(model, bool(past_key_values.head_layers))
    if past_key_values.dtype != model.dtype or past_key_values.layer_devices != devices:
        raise ValueError(
            f"past_key_values are {past_key_values.dtype} on {_names(past_key_values.layer_devices)}, and the model is now "
            f"{model.dtype} on {_names(devices)}: leave them unset"
        )
    for name, seen in past_key_values.weights.items():
        if not seen.same(getattr(model, name)):
            raise ValueError(f"past_key_values are older than the weights of {name}, which have changed: leave them unset")


def _names(devices: tuple[torch.device, ...]) -> str:
    return ", ".join(map(str, dict.fromkeys(devices)))


def _check_type(name: str, ids: Any, shape: str) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.long, torch.int) or not _is_plain(ids):
        hint = ". Of what a tokenizer returns with return_tensors='pt', pass **inputs" if hasattr(ids, "keys") else ""
        raise ValueError(f"{name} are {_kind(ids)}: pass a {shape} tensor of ids, torch.long{hint}")


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta


def _kind(value: Any) -> str:
    """Say what is given in place of a plain tensor."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    odd = ("nested" if value.is_nested else "on the meta device" if value.is_meta else str(value.layout)) * (
        not _is_plain(value)
    )
    return f"a tensor that is {odd}" if odd else str(value.dtype)


def _check_range(what: str, ids: Tensor, vocab_size: int) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if bool(outside.any()):
        raise ValueError(
            f"{what} the id {int(ids[outside][0])}, outside the vocabulary of {vocab_size}: use this model's tokenizer"
        )


__all__ = [
    "check_adapter",
    "check_functions",
    "check_infill",
    "check_past",
    "check_prompt",
    "check_rows",
    "check_special_ids",
    "check_stop_strings",
]
