"""Picks: the token and its confidence at every masked position, greedy or sampled, reproducible to the bit.

A sampled pick is a Gumbel-max whose noise is a pure function of (the row's seed, absolute position, masks left in
the block, token id). So two decoders that reach the same state draw the same token, whatever way they came there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..kernels.dispatch import AUTOMATIC, Dispatch
from ..kernels.pick import pick, pick_above, token_log_odds
from ..kernels.unembedding import Unembedding, log_odds, widened

# For logits processors: for a slice of positions, pairs of (indices into the slice, committed ids [1, length]).
Context = Callable[[slice], list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Truncation:
    """A kind of truncation.

    Attributes:
        keeps_the_likeliest: Of any scores it keeps the likeliest tokens, however many: behind a top-k it needs its k logits.
        recorded: It is tensor code from end to end, and numbers, so that a round with it can be recorded.
    """

    keeps_the_likeliest: bool = False
    recorded: bool = False


TRUNCATIONS: dict[type, Truncation] = {
    TopKLogitsWarper: Truncation(keeps_the_likeliest=True, recorded=True),
    TopPLogitsWarper: Truncation(keeps_the_likeliest=True, recorded=True),
    MinPLogitsWarper: Truncation(keeps_the_likeliest=True, recorded=True),
    EpsilonLogitsWarper: Truncation(keeps_the_likeliest=True),
    EtaLogitsWarper: Truncation(keeps_the_likeliest=True),
    TopHLogitsWarper: Truncation(),
    TypicalLogitsWarper: Truncation(),
}

# Tokens of a position that a sampled draft chooses among: all that transformers' own top-k of 50 leaves.
LIKELIEST = 64


@dataclass
class Picks:
    """Picks at n positions.

    Attributes:
        token: [n] long.
        logprob: [n] float; log-probability of the token after temperature and processors, before truncation.
        confidence: [n] float; the log-odds of that probability. It orders positions as the probability does, but
            keeps its precision where the probability rounds to 1.
        entropy: [n] float, in nats; 0 where the sampler computes none.
        judged: [n] float, what reveal rules judge by in place of `confidence`; None: that. A serving engine's rules compare
            rounded probabilities, ties included.
    """

    token: Tensor
    logprob: Tensor
    confidence: Tensor
    entropy: Tensor
    judged: Tensor | None = None


@dataclass(frozen=True)
class Sampler:
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
        dispatch: Kernels or PyTorch, without processors and entropy: no logits are written, or under a `top_k` those of the
            weights' dtype.
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
    def unembedding(self) -> Unembedding:
        """The distributions before any processors."""
        return Unembedding(self.lm_head_weight, self.mask_token_id, self.temperature, self.eos_token_ids, self.token_ids)

    @property
    def blanks(self) -> bool:
        """True where positions that are not active get token 0 with log-probability and confidence -inf."""
        return not (self.processors or self.truncation or self.entropy)

    def restricted(self, token_ids: Tensor, weight: Tensor) -> "Sampler":
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
        """Picks at n positions; no [n, vocab] logits exist for large n, and none for any n where `pick`'s kernel runs.

        Args:
            hidden: [n, hidden_size] final hidden states.
            keys: [n] long, from `noise_keys`; unused when greedy.
            context: For processors: gives, for a slice of the n positions, pairs (index into the slice, committed ids).
            no_eos: [n] bool, positions before the minimum length.
            active: [n] bool, positions whose picks are wanted; what the others get is left open.
        """
        if self.blanks:
            picked = pick(self.unembedding, hidden, keys if self.sample else None, no_eos, active, self.dispatch)
            return Picks(*picked, torch.zeros_like(picked.logprob))
        top_k = None if self.processors or self.entropy else self._top_k()
        parts = []
        for at in self.unembedding.chunks(len(hidden)):
            if top_k is None:
                parts.append(self._pick(self._scores(hidden[at], at, context, no_eos), keys[at]))
            else:
                logits = self._logits(hidden[at], at, context, no_eos)
                parts.append(self._pick_top(logits, keys[at], top_k, None if active is None else active[at]))
        return Picks(
            *(torch.cat([getattr(part, name) for part in parts]) for name in ("token", "logprob", "confidence", "entropy"))
        )

    def likeliest(
        self, hidden: Tensor, context: Context | None = None, no_eos: Tensor | None = None, active: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Find the likeliest tokens that may be sampled, and their log-odds before truncation, [n, m] both.

        The log-odds of tokens that truncation leaves out are -inf. Arguments are those of a call.
        """
        unembedding, top_k, found = self.unembedding, self._top_k(), []
        for at in unembedding.chunks(len(hidden)):
            logits = self._logits(hidden[at], at, context, no_eos)
            top = logits.topk(min(top_k or LIKELIEST, logits.shape[1]))
            lowest = torch.full_like(top.values[:, 0], -torch.inf)
            some = None if active is None else active[at]
            best = pick_above(unembedding, logits, lowest, None, some, self.dispatch)
            scores = unembedding.tempered(widened(top.values), None)
            log_p = best.logprob[:, None] + scores - scores[:, :1]
            odds = torch.cat([best.log_odds[:, None], (log_p - torch.log1p(-log_p.exp()))[:, 1:]], 1)
            if self.truncation and len(logits):
                shown = scores if top_k else unembedding.tempered(widened(logits), None)
                shown = self._truncated(top.indices[:, 0], shown.clone())
                odds = odds.masked_fill((shown if top_k else shown.gather(1, top.indices)) == -torch.inf, -torch.inf)
            found.append((top.indices[:, :LIKELIEST], odds[:, :LIKELIEST]))
        token, odds = (torch.cat(parts) for parts in zip(*found, strict=True))
        return token if self.token_ids is None else self.token_ids[token], odds

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
            return token_log_odds(self.unembedding, hidden, token, no_eos, active, self.dispatch)
        parts = [
            log_odds(self._scores(hidden[at], at, context, no_eos), token[at])[1] for at in self.unembedding.chunks(len(hidden))
        ]
        return torch.cat(parts)

    def _logits(self, hidden: Tensor, at: slice, context: Context | None, no_eos: Tensor | None) -> Tensor:
        """Logits after processors, in the weights' dtype where there are none, with no eos before the minimum length.

        `at` says which of the positions `hidden` belongs to.
        """
        logits = self.unembedding.product(hidden)
        if self.processors:
            logits = widened(logits)
        for index, committed in context(at) if self.processors and context else []:
            assert self.processors is not None
            processed = logits[index]
            for processor in self.processors:
                processed = _answer(processor, processor(committed.expand(len(index), -1), processed), processed.shape)
            logits[index] = processed.masked_fill(processed.isnan(), -torch.inf)
            logits[index, self.mask_token_id] = -torch.inf
        return self.unembedding.barred(logits, None if no_eos is None else no_eos[at])

    def _scores(self, hidden: Tensor, at: slice, context: Context | None, no_eos: Tensor | None) -> Tensor:
        """`_logits` in at least float32, divided by the temperature."""
        return self.unembedding.tempered(widened(self._logits(hidden, at, context, no_eos)), None)

    def _top_k(self) -> int | None:
        """The k of a truncation that begins with a top-k, and goes on with what its k logits suffice for."""
        warpers = self.truncation or []
        if not all(_kind_of(warper).keeps_the_likeliest and warper.filter_value == -torch.inf for warper in warpers):
            return None
        first = next(iter(warpers), None)
        return first.top_k if isinstance(first, TopKLogitsWarper) else None

    def _pick_top(self, logits: Tensor, keys: Tensor, top_k: int, active: Tensor | None) -> Picks:
        """`_pick` from logits in the weights' dtype: those that it keeps are those not under one, which is found among k."""
        unembedding = self.unembedding
        top = logits.topk(min(top_k, logits.shape[1])).values
        kept = self._truncated(keys, unembedding.tempered(widened(top), None)) > -torch.inf
        least = top.masked_fill(~kept, torch.inf).amin(-1)
        picked = pick_above(unembedding, logits, least, keys if self.sample else None, active, self.dispatch)
        return Picks(*picked, torch.zeros_like(picked.logprob))

    def _truncated(self, keys: Tensor, scores: Tensor) -> Tensor:
        """Truncate scores [n, vocab]; some warpers (eta cutoff, top-h) take no empty ones."""
        assert self.truncation is not None
        return self.truncation(keys[:, None], scores) if len(scores) else scores

    def _pick(self, scores: Tensor, keys: Tensor) -> Picks:
        shown = self._truncated(keys, scores.clone()) if self.truncation else scores
        token = self.unembedding.shown(shown, keys if self.sample else None).argmax(-1)
        logprob, confidence = log_odds(scores, token, picked=True)
        entropy = torch.zeros_like(logprob)
        if self.entropy:
            logp = scores.log_softmax(-1)
            entropy = -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
        return Picks(token if self.token_ids is None else self.token_ids[token], logprob, confidence, entropy)


def _answer(processor: Any, answer: Any, shape: torch.Size) -> Tensor:
    """Check what a logits processor returned."""
    if not isinstance(answer, Tensor) or answer.shape != shape or not answer.is_floating_point():
        got = f"{answer.dtype} of {list(answer.shape)}" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
        raise ValueError(
            f"the logits processor {type(processor).__name__} returned {got}: it must return float scores of the shape it was "
            f"given, {list(shape)}"
        )
    return answer


def _kind_of(warper: LogitsProcessor) -> Truncation:
    """Look up a truncation by its very class: what a subclass does is not known."""
    return TRUNCATIONS.get(type(warper), Truncation())


def may_be_recorded(truncation: LogitsProcessorList | None) -> bool:
    """Tell if a round that truncates so can be recorded."""
    return all(_kind_of(warper).recorded for warper in truncation or [])


__all__ = ["LIKELIEST", "TRUNCATIONS", "Picks", "Sampler", "may_be_recorded"]
