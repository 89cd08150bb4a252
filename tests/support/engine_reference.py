"""The engine's `LowConfidence` step by step, without its cache and batches: its text, and how close
each of its choices was.

It differs from `generate` in three ways. Positions after a revealed eos are revealed, too. The mask
id has a share of the softmax. Confidences are probabilities: in float32 they round to 1 from
log-odds of 17 on, and of equal ones the leftmost is revealed first.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from modeling_mrp import MRPForCausalLM
from tests.support.reference import Row, State, log_odds, logit, options_of


@dataclass
class Decoded:
    """A text, and by token the least change of a probability that would change the token's block
    (`closest`)."""

    tokens: list[int]
    closest: list[float]


@torch.no_grad()
def low_confidence(
    model: MRPForCausalLM,
    prompt: Sequence[int],
    threshold: float,
    new_tokens: int,
    eos: Collection[int],
    exact: bool = False,
) -> Decoded:
    """Decode one prompt up to the first eos or the limit.

    Args:
        model: The model, in the precision to decode in.
        prompt: Ids of the prompt.
        threshold: The threshold of `LowConfidence`: a step reveals all tokens above it, or else the
            surest.
        new_tokens: Most new tokens.
        eos: Ids that end the text.
        exact: Whether confidences are compared by their log-odds, which do not round to the same
            number.
    """
    row = Row(
        model, prompt, (), options_of({"eos_token_id": list(eos), "max_new_tokens": new_tokens})
    )
    state, closest = row.first(), list[float]()
    while True:
        close = 1.0
        while open_ := row.masked(state):
            state, gap = _step(row, state, open_, threshold, exact)
            close = min(close, gap)
        closest += [close] * (len(state) - len(prompt) - len(closest))
        if (end := min(row.end(state) or row.limit, row.limit)) <= len(state):
            return Decoded(list(state[len(prompt) : end]), closest[: end - len(prompt)])
        state = row.opened(state)


def _step(
    row: Row, state: State, open_: list[int], threshold: float, exact: bool
) -> tuple[State, float]:
    """Reveal as the engine does; return the state, and the least change of a probability that would
    change the reveal."""
    logits, ids = row.model.lm_head(row.backbone(state)[open_]), list(state)
    best = logits.softmax(-1).topk(2)
    confidence = best.values[:, 0]
    sure = (
        torch.tensor(log_odds(logits, best.indices[:, 0]), dtype=torch.float64)
        if exact
        else confidence.float()
    )
    over = sure > (logit(threshold) if exact else threshold)
    shown = over if over.any() else torch.arange(len(open_)) == sure.argmax()
    for i in shown.nonzero()[:, 0].tolist():
        ids[open_[i]] = int(best.indices[i, 0])
    gaps = [
        *(confidence - threshold).abs().tolist(),
        *(best.values[shown, 0] - best.values[shown, 1]).tolist(),
    ]
    if not over.any() and len(open_) > 1:
        first, second = confidence.topk(2).values.tolist()
        gaps.append(first - second)
    return tuple(ids), min(gaps)
