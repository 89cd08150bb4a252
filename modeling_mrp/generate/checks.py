"""Checks of what `generate` is given beside its options: prompts, masks, caches, functions, special ids, adapters, weights."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..networks.cache import BlockCache, devices_of_layers


def check_prompt(prompt: Any, attention_mask: Any, mask_token_id: int, vocab_size: int) -> None:
    """Raise `ValueError` unless `prompt` is [rows, length] ids, and `attention_mask` None or as large."""
    if prompt is None:
        raise ValueError("generate needs input_ids: pass a [rows, length] tensor of ids")
    _check_type("input_ids", prompt, "[rows, length]")
    if prompt.dim() == 1:
        raise ValueError(
            f"input_ids have shape {list(prompt.shape)}, without a dimension of rows: pass input_ids[None] for one row"
        )
    if prompt.dim() != 2 or not prompt.numel():
        raise ValueError(
            f"input_ids have shape {list(prompt.shape)}: pass [rows, length], at least one row with at least one token"
        )
    real = torch.ones_like(prompt, dtype=torch.bool)
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != prompt.shape:
            given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(
                f"attention_mask is {given} for input_ids of {list(prompt.shape)}: generate takes a 2-D tensor of 0 and 1 of "
                "the same shape (a 4-D mask works with forward only)"
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
    if infill_ids.dim() != 2 or len(infill_ids) != rows or not infill_ids.numel():
        raise ValueError(
            f"infill_ids have shape {list(infill_ids.shape)} for {rows} prompts: pass [{rows}, n], with n of 1 or more"
        )
    _check_range("infill_ids hold", infill_ids, vocab_size)


def check_rows(real: Tensor, new_tokens: int, max_positions: int) -> None:
    """Check the attention mask that transformers was given or inferred, [rows, length] bool, and the room for the text.

    Raises:
        ValueError: for a row without a token or with holes, and for more tokens than positions.
    """
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


def check_adapter(model: Any) -> None:
    """Raise `ValueError` if an adapter is active that needs a prompt read token by token, or vectors before it."""
    wrapper: Any = getattr(model.prepare_inputs_for_generation, "__self__", None)  # a peft model puts its own there
    config: Any = getattr(wrapper, "active_peft_config", None)
    kind, why = None, "an adapter of the prompt, and generate decodes from ids alone"
    if getattr(config, "is_prompt_learning", False):
        kind = config.peft_type.value
    adapters = getattr(model, "peft_config", None) or {}
    invoked = {name for name, one in adapters.items() if getattr(one, "alora_invocation_tokens", None)}
    layers = [module for module in model.modules() if hasattr(module, "lora_A")] if invoked else []
    if any(not layer.disable_adapters and invoked & set(layer.active_adapters) for layer in layers):
        kind, why = "aLoRA (alora_invocation_tokens)", "it starts behind the last invocation of a text that grows from the left"
    if kind is not None:
        raise ValueError(
            f"an adapter of type {kind} has no effect on generate: {why}. Train an adapter of the weights instead, such as "
            "LoRA, or decode without it under model.disable_adapter()"
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


def check_past(past: Any, model: Any, rows: int) -> None:
    """Raise `ValueError` unless one may go on from a cache, for so many prompts."""
    depth, why = 0 if model.mrp_head is None else len(model.mrp_head.layers), None
    owned = isinstance(past, BlockCache) and past.owner is not None and past.owner() is model
    if not isinstance(past, BlockCache):
        why = f"are a {type(past).__name__}, not those that generate(..., return_dict_in_generate=True) gave"
    elif not owned:
        why = "come from another model, or out of a pickle, not from this one's generate"
    elif past.rows != rows:
        why = f"hold {past.rows} rows, and input_ids have {rows}, not the same conversations in the same order"
    elif past.head_layers not in (0, depth):
        why = f"hold those of a head of {past.head_layers} layers, and the model's has {depth}"
    elif (past.dtype, past.layer_devices) != (now := (model.dtype, devices_of_layers(model, past.head_layers > 0))):
        why = f"are {_placed(past.dtype, past.layer_devices)}, and the model is now {_placed(*now)}"
    elif changed := [name for name, seen in past.weights.items() if not seen.same(getattr(model, name))]:
        why = f"are older than the weights of {changed[0]}, which have changed"
    if why is not None:
        raise ValueError(f"past_key_values {why}: leave them unset")


def check_unembedding(lm_head: Any) -> None:
    """Raise `ValueError` for an `lm_head` that bitsandbytes has packed: rows of its weight are read."""
    if not lm_head.weight.is_floating_point():
        raise ValueError(
            f"lm_head is a {type(lm_head).__name__} with weights in {lm_head.weight.dtype}, which generate cannot read: keep "
            "it as it was, with 'lm_head' in llm_int8_skip_modules where that is given"
        )


def mixed_tokens(quantization: Any) -> str | None:
    """Say how a quantization lets the tokens of a forward change each other's results, and the remedy; None: it does not.

    Args:
        quantization: The `quantization_config` of a model's config, or None.
    """
    scales = getattr(scheme := getattr(quantization, "quant_type", None), "granularity", None)  # of torchao
    of_activations = scales[0] if isinstance(scales, list | tuple) else scales
    if getattr(quantization, "load_in_8bit", False) and quantization.llm_int8_threshold > 0:
        how = "LLM.int8 takes columns with an activation above llm_int8_threshold out of int8 for all tokens of a forward"
        remedy = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
    elif "DynamicActivation" in type(scheme).__name__ and type(of_activations).__name__ == "PerTensor":
        how, remedy = "torchao's PerTensor scales the activations of all tokens of a forward alike", "granularity=PerRow()"
    else:
        return None
    return (
        f"{how}: drafted text may differ from its target's, and the text of a row from what it is in another batch. Load with "
        f"{remedy} for the same text"
    )


def _placed(dtype: torch.dtype, devices: tuple[torch.device, ...]) -> str:
    return f"{dtype} on {', '.join(map(str, dict.fromkeys(devices)))}"


def _check_type(name: str, ids: Any, shape: str) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.long, torch.int):
        hint = ". Of what a tokenizer returns with return_tensors='pt', pass **inputs" if hasattr(ids, "keys") else ""
        kind = str(ids.dtype) if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise ValueError(f"{name} are {kind}: pass a {shape} tensor of ids, torch.long{hint}")


def _check_range(what: str, ids: Tensor, vocab_size: int) -> None:
    for outside in ids[(ids < 0) | (ids >= vocab_size)]:
        raise ValueError(f"{what} the id {int(outside)}, outside the vocabulary of {vocab_size}: use this model's tokenizer")


__all__ = [
    "check_adapter",
    "check_functions",
    "check_infill",
    "check_past",
    "check_prompt",
    "check_rows",
    "check_special_ids",
    "check_stop_strings",
    "check_unembedding",
    "mixed_tokens",
]
