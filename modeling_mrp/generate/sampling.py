"""Picks: the token and its confidence at every masked position, greedy or sampled, reproducible to the bit.

A sampled pick is a Gumbel-max whose noise is a pure function of (the row's seed, absolute position, masks left in
the block, token id). So two decoders that reach the same state draw the same token, whatever way they came there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.generation import LogitsProcessorList

from ..kernels.dispatch import AUTOMATIC, Dispatch
from ..kernels.pick import pick, token_log_odds
from ..kernels.unembedding import Readout, log_odds

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
        dispatch: Kernels or PyTorch, where no logits are written: without processors, truncation and entropy.
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
    dispatch: Dispatch = AUTOMATIC

    @property
    def readout(self) -> Readout:
        """The distributions before any processors."""
        return Readout(self.lm_head_weight, self.mask_token_id, self.temperature, self.eos_token_ids, self.token_ids)

    def restricted(self, token_ids: Tensor, weight: Tensor) -> "Picker":
        """One that picks among some tokens [m] only, without the mask id; `weight` are their rows of `lm_head`."""
        return replace(self, lm_head_weight=weight, token_ids=token_ids, entropy=False)

    def __call__(
        self,
        hidden: Tensor,
        keys: Tensor,
        context: Context | None = None,
        no_eos: Tensor | None = None,
        active: Tensor | None = None,
    ) -> Picks:
        """Picks at n positions; no [n, vocab] logits exist for large n, and none for any n where kernels run.

        Args:
            hidden: [n, hidden_size] final hidden states.
            keys: [n] long, from `noise_keys`; unused when greedy.
            context: For processors: gives, for a slice of the n positions, pairs (index into the slice, committed ids).
            no_eos: [n] bool, positions before the minimum length.
            active: [n] bool, positions whose picks are wanted; what the others get is left open.
        """
        if not (self.processors or self.truncation or self.entropy):
            picked = pick(self.readout, hidden, keys if self.sample else None, no_eos, active, self.dispatch)
            return Picks(*picked, torch.zeros_like(picked.logprob))
        parts = [self._pick(self._scores(hidden[at], at, context, no_eos), keys[at]) for at in self.readout.chunks(len(hidden))]
        return Picks(
            *(torch.cat([getattr(part, name) for part in parts]) for name in ("token", "logprob", "confidence", "entropy"))
        )

    def token_log_odds(
        self,
        hidden: Tensor,
        token: Tensor,
        context: Context | None = None,
        no_eos: Tensor | None = None,
        active: Tensor | None = None,
    ) -> Tensor:
        """[n] log-odds of given tokens [n] under the same softmax: what `confidence` is for a picked token."""
        if not self.processors:
            return token_log_odds(self.readout, hidden, token, no_eos, active, self.dispatch)
        parts = [
            log_odds(self._scores(hidden[at], at, context, no_eos), token[at])[1] for at in self.readout.chunks(len(hidden))
        ]
        return torch.cat(parts)

    def _scores(self, hidden: Tensor, at: slice, context: Context | None, no_eos: Tensor | None) -> Tensor:
        """Logits after processors, temperature and the minimum length; `at` says which of the positions `hidden` belongs to."""
        scores = self.readout.logits(hidden)
        for index, committed in context(at) if self.processors and context else []:
            assert self.processors is not None
            processed = self.processors(committed.expand(len(index), -1), scores[index])
            scores[index] = processed.masked_fill(processed.isnan(), -torch.inf)
            scores[index, self.mask_token_id] = -torch.inf
        return self.readout.tempered(scores, None if no_eos is None else no_eos[at])

    def _pick(self, scores: Tensor, keys: Tensor) -> Picks:
        shown = self.truncation(keys[:, None], scores.clone()) if self.truncation else scores
        token = self.readout.shown(shown, keys if self.sample else None).argmax(-1)
        logprob, confidence = log_odds(scores, token)
        entropy = torch.zeros_like(logprob)
        if self.entropy:
            logp = scores.log_softmax(-1)
            entropy = -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
        return Picks(token if self.token_ids is None else self.token_ids[token], logprob, confidence, entropy)


__all__ = ["Picker", "Picks"]
