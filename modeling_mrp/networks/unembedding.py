"""From hidden states to tokens: the distributions of an unembedding, and log-odds without cancellation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of logits that are alive at once: 64 MB in float32.
_LOGITS_AT_ONCE = 1 << 24


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

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab] of hidden states [n, hidden_size], the mask id at -inf; on a GPU in at least float32."""
        short = hidden.dtype in (torch.bfloat16, torch.float16) and type(self.weight) in (Tensor, torch.nn.Parameter)
        if short and hidden.is_cuda:
            logits = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        else:
            logits = F.linear(hidden, self.weight)
        if self.token_ids is None:
            logits[:, self.mask_token_id] = -torch.inf
        return logits

    def barred(self, logits: Tensor, no_eos: Tensor | None) -> Tensor:
        """Bar an eos from logits [n, vocab], by -inf, where `no_eos` [n] bool says so."""
        if no_eos is not None:
            ids = torch.arange(logits.shape[1], device=logits.device) if self.token_ids is None else self.token_ids
            for eos in self.eos_token_ids:  # numbers, not a tensor of them, for whose copy to a device the host would wait
                logits = logits.masked_fill(no_eos[:, None] & (ids == eos), -torch.inf)
        return logits

    def tempered(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in at least float32."""
        logits = widened(logits)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def named(self, place: Tensor) -> Tensor:
        """Look up the ids [...] long of places [...] in the unembedding's vocabulary."""
        return place if self.token_ids is None else self.token_ids[place]

    def chunks(self, rows: int) -> list[slice]:
        """Cut `rows` into slices so small that their logits are no burden; none gives one slice, empty."""
        step = max(1, _LOGITS_AT_ONCE // self.weight.shape[0])
        return [slice(start, start + step) for start in range(0, max(1, rows), step)]


def widened(logits: Tensor) -> Tensor:
    """Widen logits to float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_odds(scores: Tensor, token: Tensor, picked: bool = False) -> Tensor:
    """Compute log p - log (1 - p), [n], of tokens [n] under scores [n, vocab]; 1 - p sums the other tokens.

    Of tokens that were `picked` it is NaN where their own score is not finite: there was nothing to pick.
    """
    own = scores.gather(1, token[:, None])
    others = scores.scatter(1, token[:, None], -torch.inf).logsumexp(-1, keepdim=True)
    odds = own - others + 0 * own if picked else own - others
    return odds[:, 0]
