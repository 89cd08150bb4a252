"""Picks: the token and its confidence at every masked position, greedy or sampled, reproducible to the bit.

A sampled pick is a Gumbel-max whose noise is a pure function of (the row's seed, absolute position, masks left in
the block, token id). So two decoders that reach the same state draw the same token, whatever way they came there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import LogitsProcessorList

_UINT32 = 0xFFFFFFFF
# Elements of logits that are alive at once: 64 MB in float32.
_LOGITS_AT_ONCE = 1 << 24

# For logits processors: for a slice of positions, pairs of (indices into the slice, committed ids [1, length]).
Context = Callable[[slice], list[tuple[Tensor, Tensor]]]


@dataclass
class Picks:
    """What the model says at n positions.

    Attributes:
        token: [n] long.
        logprob: [n] float; log-probability of the token after temperature and processors, before truncation.
        confidence: [n] float; the log-odds of that probability. It orders positions as the probability does, but
            keeps its precision where the probability rounds to 1.
        entropy: [n] float, in nats; 0 where the picker computes none.
    """

    token: Tensor
    logprob: Tensor
    confidence: Tensor
    entropy: Tensor


def mix32(x: Tensor) -> Tensor:
    """A 32-bit integer hash (two multiply-xorshift rounds) of int64 tensors that hold unsigned 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _UINT32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _UINT32
    return x ^ (x >> 16)


def noise_keys(seed: Tensor, position: Tensor, masks_left: Tensor) -> Tensor:
    """[n] keys of the noise at a state's position; all arguments [n] long."""
    key = mix32(seed & _UINT32)
    key = mix32(key ^ ((seed >> 32) & _UINT32))
    key = mix32(key ^ (position & _UINT32))
    return mix32(key ^ (masks_left & _UINT32) ^ 0x9E3779B9)


def gumbel_noise(keys: Tensor, tokens: int | Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise for token ids at each key.

    Args:
        keys: [n] long, from `noise_keys`.
        tokens: The first so many ids, or [m] long, which ids.
        dtype: float32 or float64; both see the same 32 random bits.

    Returns:
        [n, m].
    """
    tokens = torch.arange(tokens, device=keys.device) if isinstance(tokens, int) else tokens
    bits = mix32(mix32(tokens * 0x9E3779B1 & _UINT32) ^ keys[:, None])
    # -log(u) for u = (bits + 1/2) / 2^32, from whichever end of the unit interval keeps the precision.
    lower = bits < 1 << 31
    nearest = (torch.where(lower, bits, _UINT32 - bits).to(dtype) + 0.5) * 2.0**-32
    return -torch.where(lower, -nearest.log(), -torch.log1p(-nearest)).log()


@dataclass(frozen=True)
class Picker:
    """Turns hidden states into picks with one set of sampling options.

    Attributes:
        lm_head_weight: [vocab, hidden_size].
        mask_token_id: Never picked, and outside the softmax.
        temperature: Divides the logits.
        sample: Add Gumbel noise, else take the arg max.
        processors: The user's logits processors, applied before temperature.
        truncation: top-k, top-p and their kin, applied after the confidence is taken.
        eos_token_ids: Ids that positions before a minimum length must not take.
        token_ids: [vocab] long, the ids that the rows of `lm_head_weight` stand for; None: their places.
        entropy: Whether to compute it.
    """

    lm_head_weight: Tensor
    mask_token_id: int
    temperature: float = 1.0
    sample: bool = False
    processors: LogitsProcessorList | None = None
    truncation: LogitsProcessorList | None = None
    eos_token_ids: tuple[int, ...] = ()
    token_ids: Tensor | None = None
    entropy: bool = True

    def restricted(self, token_ids: Tensor) -> "Picker":
        """One that picks among some tokens [m] only, without the mask id."""
        return replace(self, lm_head_weight=self.lm_head_weight[token_ids], token_ids=token_ids, entropy=False)

    def __call__(self, hidden: Tensor, keys: Tensor, context: Context | None = None, no_eos: Tensor | None = None) -> Picks:
        """Picks at n positions, walked in chunks so that no [n, vocab] logits exist for large n.

        Args:
            hidden: [n, hidden_size] final hidden states.
            keys: [n] long, from `noise_keys`; unused when greedy.
            context: For processors: gives, for a slice of the n positions, pairs (index into the slice, committed ids).
            no_eos: [n] bool, positions before the minimum length.
        """
        rows = max(1, _LOGITS_AT_ONCE // self.lm_head_weight.shape[0])
        parts = [
            self._pick(self._scores(hidden[at], at, context, no_eos), keys[at])
            for at in (slice(start, start + rows) for start in range(0, max(1, len(hidden)), rows))
        ]
        return Picks(
            *(torch.cat([getattr(part, name) for part in parts]) for name in ("token", "logprob", "confidence", "entropy"))
        )

    def token_log_odds(
        self, hidden: Tensor, token: Tensor, context: Context | None = None, no_eos: Tensor | None = None
    ) -> Tensor:
        """[n] log-odds of given tokens [n] under the same softmax: what `confidence` is for a picked token."""
        rows = max(1, _LOGITS_AT_ONCE // self.lm_head_weight.shape[0])
        parts = [
            log_odds(self._scores(hidden[at], at, context, no_eos), token[at])[1]
            for at in (slice(start, start + rows) for start in range(0, max(1, len(hidden)), rows))
        ]
        return torch.cat(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] in at least float32, the mask id at -inf."""
        logits = F.linear(hidden, self.lm_head_weight)
        if logits.dtype != torch.float64:
            logits = logits.float()
        if self.token_ids is None:
            logits[:, self.mask_token_id] = -torch.inf
        return logits

    def _scores(self, hidden: Tensor, at: slice, context: Context | None, no_eos: Tensor | None) -> Tensor:
        """Logits after processors, temperature and the minimum length; `at` says which of the positions `hidden` belongs to."""
        scores = self.logits(hidden)
        for index, committed in context(at) if self.processors and context else []:
            assert self.processors is not None
            processed = self.processors(committed.expand(len(index), -1), scores[index])
            scores[index] = processed.masked_fill(processed.isnan(), -torch.inf)
            scores[index, self.mask_token_id] = -torch.inf
        if no_eos is not None:
            ids = torch.arange(scores.shape[1], device=scores.device) if self.token_ids is None else self.token_ids
            for eos in self.eos_token_ids:  # numbers, not a tensor of them, for whose copy to a device the host would wait
                scores = scores.masked_fill(no_eos[at][:, None] & (ids == eos), -torch.inf)
        return scores if self.temperature == 1.0 else scores / self.temperature

    def _pick(self, scores: Tensor, keys: Tensor) -> Picks:
        shown = scores
        if self.truncation:
            shown = self.truncation(keys[:, None], shown.clone())
        if self.sample:
            noise = gumbel_noise(keys, shown.shape[1] if self.token_ids is None else self.token_ids, shown.dtype)
            shown = shown + noise
        token = shown.argmax(-1)
        logprob, confidence = log_odds(scores, token)
        entropy = torch.zeros_like(logprob)
        if self.entropy:
            logp = scores.log_softmax(-1)
            entropy = -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
        return Picks(token if self.token_ids is None else self.token_ids[token], logprob, confidence, entropy)


def log_odds(scores: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log p - log (1 - p) of one token per row, where 1 - p is summed over the other tokens."""
    own = scores.gather(1, token[:, None])
    others = scores.scatter(1, token[:, None], -torch.inf).logsumexp(-1, keepdim=True)
    odds = own - others
    return F.logsigmoid(odds)[:, 0], odds[:, 0]


__all__ = ["Picker", "Picks", "gumbel_noise", "log_odds", "mix32", "noise_keys"]
