"""Quantized models: what decoding needs of their unembedding, and whose tokens change each other's results."""

from typing import Any


def check_unembedding(lm_head: Any) -> None:
    """Refuse an `lm_head` whose weight is no matrix of floating point numbers: rows of it are read.

    Raises:
        ValueError: if bitsandbytes has packed it.
    """
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
    if getattr(quantization, "load_in_8bit", False) and quantization.llm_int8_threshold > 0:
        how = "LLM.int8 takes columns with an activation above llm_int8_threshold out of int8 for all tokens of a forward"
        remedy = "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
    elif _one_scale(getattr(quantization, "quant_type", None)):
        how, remedy = "torchao's PerTensor scales the activations of all tokens of a forward alike", "granularity=PerRow()"
    else:
        return None
    return (
        f"{how}: drafted text may differ from its target's, and the text of a row from what it is in another batch. Load with "
        f"{remedy} for the same text"
    )


def _one_scale(scheme: Any) -> bool:
    """Tell if a scheme of torchao scales activations by one number, found in each forward."""
    scales = getattr(scheme, "granularity", None)  # of activations and weights, or for both
    of_activations = scales[0] if isinstance(scales, list | tuple) else scales
    return "DynamicActivation" in type(scheme).__name__ and type(of_activations).__name__ == "PerTensor"


__all__ = ["check_unembedding", "mixed_tokens"]
