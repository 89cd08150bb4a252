"""Checks and calls of logits processors.

Any target can call a processor whose answer at a position depends only on the ids and the scores of
that position. Other processors need tokens to be revealed from left to right, one at a time, as in
an autoregressive model.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..networks.picker import Spots, check_scores
from ..rules.state import Row
from .option_table import UNSUPPORTED

# Processors of transformers that belong to unsupported options.
_OF_OPTIONS = {
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
}
CONTRACT = (
    "in this call its rows are positions, as often as there are forwards, and it has to answer to "
    "the ids and scores of each alone. Write it so, without memory or an index of rows; or use "
    "regex, choices, json_schema or grammar; or decode all rows at once with the target "
    "'sequential', one token a step, without infill_ids and without scores or logits in the "
    "output: there it is called as in an autoregressive model"
)


class InOrder:
    """Calls logits processors as an autoregressive model does: once for each token of the text, in
    order. Each time, a processor gets all rows of the batch in the order of their indices, also
    those that have ended.

    The object is called in place of the processors. It is given the logits at the first mask of
    each row that has not ended, and returns them as the processors change them.

    Args:
        processors: The processors.
        rows: All rows of the call. Each of them gets one token per round.
        width: Number of columns of the prompts, which are padded on the left.
        pad_token_id: The id that pads prompts on the left, and ended texts on the right.
    """

    def __init__(
        self, processors: Sequence[Any], rows: Sequence[Row], width: int, pad_token_id: int
    ) -> None:
        self.processors = processors
        self.rows = rows
        self.width = width
        self.pad_token_id = pad_token_id

    def __call__(self, spots: Spots, logits: Tensor) -> Tensor:
        """Process `logits` [states, vocab], which belong to the first masked position of each state
        that has one. A row has at most one such state."""
        texts: dict[int, list[int]] = {}
        for index, (row, state) in enumerate(spots.states):
            if state.free:
                ids = row.text_at(state, spots.parents[index] if spots.parents else None)
                texts[row.place] = ids[: state.start + state.free[0]]
        length = 0
        for row in self.rows:
            if row.place in texts:
                length = len(texts[row.place]) - row.prompt
        columns: list[list[int]] = []
        for row in self.rows:
            ids = texts.get(row.place, row.text[: row.stop])
            padding = [self.pad_token_id] * (self.width - row.prompt)
            ended = [self.pad_token_id] * (length + row.prompt - len(ids))
            columns.append([*padding, *ids, *ended])
        scores = logits.new_zeros(len(self.rows), logits.shape[1])
        places = torch.tensor(list(texts), device=logits.device)
        scores[places] = logits
        input_ids = torch.tensor(columns, device=logits.device)
        for processor in self.processors:
            scores = check_scores(processor, processor(input_ids, scores), scores)
        return scores[places]


def why_in_order(
    processors: Sequence[Any], prompts: Sequence[Tensor], weight: Tensor
) -> str | None:
    """Return why logits processors must be called once for each token in order (`InOrder`): the
    first reason that `check_processor` gives for one of them. Return None if it gives none.

    Args:
        processors: The processors.
        prompts, weight: As for `check_processor`.
    """
    reasons = [check_processor(processor, prompts, weight) for processor in processors]
    return next((reason for reason in reasons if reason is not None), None)


def check_processor(processor: Any, prompts: Sequence[Tensor], weight: Tensor) -> str | None:
    """Return the reason why the answers of a logits processor depend on more than the ids and the
    scores. Return None if a probe finds no such dependence.

    The probe calls a copy of the processor a few times. Processors of transformers are not probed.

    Args:
        processor: The processor.
        prompts: Ids of the prompts, without padding.
        weight: [vocab, hidden_size], the weight of `lm_head`. The scores have its vocabulary and
            device.

    Raises:
        ValueError: for a processor that does the same as an unsupported option.
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
        return None
    copied = copied_processor(processor)
    ids = prompts[0]
    longer = torch.cat([ids, ids[-1:]])
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(weight), generator=generator).to(weight.device)

    def answer(context: Tensor, rows: int) -> Tensor:
        repeated = scores.repeat(rows, 1)
        answered = copied(context.repeat(rows, 1), repeated.clone())
        return check_scores(processor, answered, repeated)

    first = answer(ids, len(prompts))  # a processor that cannot take these ids raises its own error
    try:
        answer(longer, 3)
        answers = [*first.split(1), answer(ids, 1), *answer(ids, 2).split(1)]
    except Exception as error:
        return (
            f"the logits processor {name} failed when it was called again, with other numbers of "
            f"rows ({type(error).__name__}: {error})"
        )
    for counterpart in answers[1:]:
        if not torch.equal(counterpart.nan_to_num(), answers[0].nan_to_num()):
            return (
                f"the logits processor {name} answers the same ids and scores differently, by row "
                "or from call to call"
            )
    return None


def copied_processor(processor: Any) -> Any:
    """Copy a processor. The copy shares the networks that the processor holds, and anything that
    cannot be copied."""
    networks = {}
    for value in getattr(processor, "__dict__", {}).values():
        if isinstance(value, nn.Module):
            networks[id(value)] = value
    try:
        return copy.deepcopy(processor, dict(networks))
    except Exception:  # objects of any library may raise any error when they cannot be copied
        pass
    try:
        copied = copy.copy(processor)
    except Exception:
        return processor
    for name, value in getattr(copied, "__dict__", {}).items():
        for copying in (partial(copy.deepcopy, memo=dict(networks)), copy.copy):
            try:
                copied.__dict__[name] = copying(value)
                break
            except Exception:
                continue
    return copied
