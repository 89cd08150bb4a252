"""Logits processors that `generate` can call: those whose answer is a function of the ids and the
scores of each position alone."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..networks.picker import check_scores
from .option_table import UNSUPPORTED

# Processors of transformers that an option makes which is not supported.
_OF_OPTIONS = {
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
}
_CONTRACT = (
    "it is called with positions as rows, some of them of drafts that are given up, as often as "
    "there are forwards, and has to answer to the ids and scores of each alone. Write it so, "
    "without memory or an index of rows, or use regex, choices, json_schema or grammar"
)


def check_processor(processor: Any, prompts: Sequence[Tensor], weight: Tensor) -> None:
    """Raise `ValueError` for a logits processor that `generate` cannot honour: one that makes what
    no option may ask for, or, of other libraries, one whose answers to a probe depend on more than
    ids and scores.

    The probe calls a copy, if it can be copied, a few times.

    Args:
        processor: The processor.
        prompts: Ids of the prompts, without padding.
        weight: [vocab, hidden_size], that of `lm_head`; the scores have its vocabulary and device.
    """
    name = type(processor).__name__
    for kind in type(processor).__mro__:
        if (option := _OF_OPTIONS.get(kind.__name__)) is None:
            continue
        raise ValueError(
            f"the logits processor {name} does what {option} does, which is not supported: "
            f"{UNSUPPORTED[option]}. Leave it out"
        )
    if type(processor).__module__.startswith("transformers."):
        return
    copied = copied_processor(processor)
    ids = prompts[0]
    longer = torch.cat([ids, ids[-1:]])
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(weight), generator=generator).to(weight.device)

    def answer(context: Tensor, rows: int) -> Tensor:
        repeated = scores.repeat(rows, 1)
        answered = copied(context.repeat(rows, 1), repeated.clone())
        return check_scores(processor, answered, repeated)

    first = answer(ids, 2)  # what it cannot take at all it says itself
    try:
        answer(longer, 3)
        answers = [first[:1], first[1:], answer(ids, 1), *answer(ids, 2).split(1)]
    except Exception as error:
        raise ValueError(
            f"the logits processor {name} failed when it was called again, with other numbers of "
            f"rows ({type(error).__name__}: {error}): {_CONTRACT}"
        ) from error
    for other in answers[1:]:
        if not torch.equal(other.nan_to_num(), answers[0].nan_to_num()):
            raise ValueError(
                f"the logits processor {name} answers the same ids and scores differently, by row "
                f"or from call to call: {_CONTRACT}"
            )


def copied_processor(processor: Any) -> Any:
    """Copy a processor, but for networks that it holds; return itself if that fails."""
    networks = {}
    for value in getattr(processor, "__dict__", {}).values():
        if isinstance(value, nn.Module):
            networks[id(value)] = value
    try:
        return copy.deepcopy(processor, networks)
    except Exception:  # of any library: what cannot be copied may raise anything
        return processor
