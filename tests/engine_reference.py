"""The engine's `LowConfidence` step by step, without its cache and batches: its text, and how close each of its choices was.

Parts of it can be swapped for `generate`'s, so that a text that differs tells by which.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from reference import Row, State, options_of
from torch import Tensor

from modeling_mrp import MRPForCausalLM


@dataclass(frozen=True)
class Rules:
    """Where the engine decodes otherwise than `generate`.

    Attributes:
        behind_eos: Positions behind a revealed eos are revealed too, and read by the others until then.
        mask_counts: The mask id has a share of the softmax.
        rounds: Confidences are probabilities of float32, which are 1 from log-odds of 17 on: the leftmost of those goes first.
    """

    behind_eos: bool = True
    mask_counts: bool = True
    rounds: bool = True


ENGINE, GENERATE = Rules(), Rules(behind_eos=False, mask_counts=False, rounds=False)


@dataclass
class Decoded:
    """A text, and for each of its tokens how little a probability would have to change to change its block (`closest`)."""

    tokens: list[int]
    closest: list[float]


@torch.no_grad()
def low_confidence(
    model: MRPForCausalLM, prompt: Sequence[int], threshold: float, new_tokens: int, eos: Collection[int], rules: Rules = ENGINE
) -> Decoded:
    """Decode one prompt up to the first eos or the limit.

    Args:
        model: In the precision that is wanted.
        prompt: Its ids.
        threshold: What `LowConfidence` calls so; reveals are surer than it, or the surest.
        new_tokens: At most.
        eos: Ids that end the text.
        rules: The engine's, or others.
    """
    row = Row(model, prompt, (), options_of({"eos_token_id": list(eos), "max_new_tokens": new_tokens}))
    state, closest = row.first(), list[float]()
    while True:
        close = 1.0
        while open_ := [i for i in row.masked(state) if rules.behind_eos or i < (row.end(state) or len(state))]:
            state, gap = _step(row, state, open_, threshold, rules)
            close = min(close, gap)
        closest += [close] * (len(state) - len(prompt) - len(closest))
        if (end := min(row.end(state) or row.limit, row.limit)) <= len(state):
            return Decoded(list(state[len(prompt) : end]), closest[: end - len(prompt)])
        state = row.opened(state)


def _step(row: Row, state: State, open_: list[int], threshold: float, rules: Rules) -> tuple[State, float]:
    """Reveal as the engine does, and tell by how little it did not do otherwise."""
    logits, ids = row.model.lm_head(row.backbone(state)[open_]), list(state)
    if not rules.mask_counts:
        logits[:, row.model.config.mask_token_id] = -torch.inf
    best = logits.softmax(-1).topk(2)
    sure = best.values[:, 0].float() if rules.rounds else _log_odds(logits)
    over = sure > (threshold if rules.rounds else torch.tensor(threshold, dtype=sure.dtype).logit())
    shown = over if over.any() else torch.arange(len(open_)) == sure.argmax()
    for i in shown.nonzero()[:, 0].tolist():
        ids[open_[i]] = int(best.indices[i, 0])
    confidence = best.values[:, 0]
    gaps = [*(confidence - threshold).abs().tolist(), *(best.values[shown, 0] - best.values[shown, 1]).tolist()]
    if not over.any() and len(open_) > 1:
        first, second = confidence.topk(2).values.tolist()
        gaps.append(first - second)
    return tuple(ids), min(gaps)


def _log_odds(logits: Tensor) -> Tensor:
    top = logits.max(-1, keepdim=True)
    others = logits.scatter(-1, top.indices, -torch.inf)
    return top.values[:, 0] - others.logsumexp(-1)


def what_differs(
    model: MRPForCausalLM, prompt: Sequence[int], threshold: float, new_tokens: int, eos: Collection[int], other: list[int]
) -> list[str]:
    """Name the engine's rules each of which, or all of which swapped for `generate`'s, turn its text into another one."""
    for names in ([name] for name in vars(ENGINE)):
        rules = replace(ENGINE, **dict.fromkeys(names, False))
        if low_confidence(model, prompt, threshold, new_tokens, eos, rules).tokens == other:
            return names
    return list(vars(ENGINE)) if low_confidence(model, prompt, threshold, new_tokens, eos, GENERATE).tokens == other else []
