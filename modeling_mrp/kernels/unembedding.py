"""From hidden states to tokens: the distributions of an unembedding, and log-odds without cancellation."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .noise import gumbel_noise

# Elements of logits that are alive at once: 64 MB in float32.
_LOGITS_AT_ONCE = 1 << 24


class Picked(NamedTuple):
    """The picks at n positions.

    Attributes:
        token: [n] long.
        logprob: [n] float32 (float64 where the weights are), its log-probability after temperature.
        log_odds: [n], log p - log (1 - p), where 1 - p is summed over the other tokens, so that nothing cancels.
    """

    token: Tensor
    logprob: Tensor
    log_odds: Tensor


@dataclass(frozen=True)
class Unembedding:
    """The distributions over tokens that hidden states stand for.

    Attributes:
        weight: [vocab, hidden_size], those of `lm_head` or rows of it.
        mask_token_id: Outside the softmax, where `token_ids` is None.
        temperature: Divides the logits.
        eos_token_ids: Ids that some positions must not take.
        token_ids: [vocab] long, the ids that the rows of `weight` stand for; None: their places.
    """

    weight: Tensor
    mask_token_id: int
    temperature: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    token_ids: Tensor | None = None

    def product(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab] in the weights' dtype, the mask id at -inf."""
        logits = F.linear(hidden, self.weight)
        if self.token_ids is None:
            logits[:, self.mask_token_id] = -torch.inf
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab] in at least float32, the mask id at -inf."""
        return widened(self.product(hidden))

    def tempered(self, logits: Tensor, no_eos: Tensor | None) -> Tensor:
        """Divide logits [n, vocab] by the temperature, those of an eos at -inf where `no_eos` [n] says so."""
        logits = self.barred(logits, no_eos)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def barred(self, logits: Tensor, no_eos: Tensor | None) -> Tensor:
        """Bar an eos from logits [n, vocab], by -inf, where `no_eos` [n] says so."""
        if no_eos is not None:
            ids = torch.arange(logits.shape[1], device=logits.device) if self.token_ids is None else self.token_ids
            for eos in self.eos_token_ids:  # numbers, not a tensor of them, for whose copy to a device the host would wait
                logits = logits.masked_fill(no_eos[:, None] & (ids == eos), -torch.inf)
        return logits

    def chunks(self, rows: int) -> list[slice]:
        """Cut `rows` into slices so small that their logits are no burden; none gives one slice, empty."""
        step = max(1, _LOGITS_AT_ONCE // self.weight.shape[0])
        return [slice(start, start + step) for start in range(0, max(1, rows), step)]

    def shown(self, scores: Tensor, keys: Tensor | None) -> Tensor:
        """Add noise to scores [n, vocab], where there are keys [n]: the pick is the largest."""
        if keys is None:
            return scores
        return scores + gumbel_noise(keys, scores.shape[1] if self.token_ids is None else self.token_ids, scores.dtype)


def widened(logits: Tensor) -> Tensor:
    """Widen logits to float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_odds(scores: Tensor, token: Tensor, picked: bool = False) -> tuple[Tensor, Tensor]:
    """Compute log p and log p - log (1 - p), both [n], of tokens [n] under scores [n, vocab]; 1 - p sums the other tokens.

    Of tokens that were `picked` both are NaN where their own score is not finite: there was nothing to pick.
    """
    own = scores.gather(1, token[:, None])
    others = scores.scatter(1, token[:, None], -torch.inf).logsumexp(-1, keepdim=True)
    odds = own - others + 0 * own if picked else own - others
    return F.logsigmoid(odds)[:, 0], odds[:, 0]


__all__ = ["Picked", "Unembedding", "log_odds", "widened"]
