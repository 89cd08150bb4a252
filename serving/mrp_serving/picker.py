"""Picks of tokens from the engine's logits, made as the engine's own algorithms make them or as
`generate` does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modeling_mrp.kernels.pick import Unembedding, likeliest_tokens, upcast
from modeling_mrp.networks.picker import LIKELIEST, Picker, Picks


@dataclass(frozen=True)
class Sampling:
    """The sampling options of a request. Tokens of requests with equal options are picked together.

    Attributes:
        stock: Whether to pick greedily, as the engine's own algorithms do; the sampling options
            below then have their default values.
        sample: Whether to sample.
        temperature, top_k, top_p, min_p: As in transformers; a top_k or a min_p of 0 means none.
        repetition_penalty: The penalty on all tokens before a position, including those of the
            prompt.
        frequency_penalty, presence_penalty: The penalties on the generated tokens before a
            position.
        prompt: The position of the first generated token, if penalties need it; else 0.
        logit_bias: Pairs of a token id and the number that is added to the logit of this token.
        eos: Ids that must not be picked at positions before a minimum length.
        entropy: Whether the reveal rule needs entropies.
        drafts: Whether states are drafted.
    """

    stock: bool = False
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    eos: tuple[int, ...] = ()
    entropy: bool = False
    drafts: bool = False

    def processors(self) -> LogitsProcessorList:
        """Make the logits processors for these options, in the order of transformers."""
        processors = LogitsProcessorList()
        if self.logit_bias:
            processors.append(
                SequenceBiasLogitsProcessor({(token,): bias for token, bias in self.logit_bias})
            )
        if self.repetition_penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.frequency_penalty or self.presence_penalty:
            processors.append(
                CountPenalties(self.prompt, self.frequency_penalty, self.presence_penalty)
            )
        return processors

    def truncation(self) -> LogitsProcessorList:
        """Make the processors that limit which tokens may be drawn, in the order of
        transformers."""
        warpers = LogitsProcessorList()
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def picker(self, unembed: Callable[[Tensor], Tensor], shortlist: int, **fixed: Any) -> Picker:
        """Make the picker for these options.

        Args:
            unembed: Computes logits [n, vocab] of final hidden states [n, hidden_size].
            shortlist: The number of tokens among which the head's drafts choose, if there are no
                logits processors; 0 for all tokens.
            fixed: Arguments that all requests share: `lm_head_weight`, `mask_token_id` and
                `dispatch`.
        """
        if self.stock:
            return StockPicker(
                entropy=self.entropy,
                candidates=shortlist,
                shortlist=shortlist,
                unembed=unembed,
                **fixed,
            )
        processors = self.processors()
        shortlist = 0 if processors else shortlist
        drawable = LIKELIEST if self.sample and self.drafts else 0
        return EnginePicker(
            temperature=self.temperature,
            sample=self.sample,
            processors=processors or None,
            truncation=self.truncation() or None,
            eos_token_ids=self.eos,
            entropy=self.entropy,
            candidates=max(drawable, shortlist),
            shortlist=shortlist,
            unembed=unembed,
            **fixed,
        )


class CountPenalties(LogitsProcessor):
    """Frequency and presence penalties as OpenAI defines them, which transformers lacks.

    The logit of a token that occurs n > 0 times between the prompt and a position is reduced by n
    times the frequency penalty plus once the presence penalty.

    Args:
        prompt: The number of tokens of the prompt.
        frequency, presence: The penalties, which are subtracted from logits.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt = prompt
        self.frequency = frequency
        self.presence = presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Subtract the penalties at n positions.

        Args:
            input_ids: [n, length], the ids before each position, including those of the prompt.
            scores: [n, vocab], the logits at each position.
        """
        counts = torch.zeros_like(scores).scatter_add_(
            1,
            generated := input_ids[:, self.prompt :],
            torch.ones_like(generated, dtype=scores.dtype),
        )
        penalised: Any = scores - self.frequency * counts - self.presence * (counts > 0)
        return penalised


@dataclass(frozen=True)
class EngineUnembedding(Unembedding):
    """An `Unembedding` whose logits the engine computes.

    Attributes:
        unembed: Computes logits [n, vocab] of final hidden states [n, hidden_size].
        with_mask: Whether the mask id keeps its logit, so that it counts in the softmax, as in the
            engine's own algorithms.
    """

    unembed: Callable[[Tensor], Tensor] = field(kw_only=True)
    with_mask: bool = field(default=False, kw_only=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [n, vocab] of hidden states [n, hidden_size] on the engine, in at
        least float32. Unless `with_mask`, the mask id gets -inf."""
        logits = upcast(self.unembed(hidden))
        if not self.with_mask:
            logits[:, self.mask_token_id] = -torch.inf
        return logits


@dataclass(frozen=True)
class EnginePicker(Picker):
    """A `Picker` that picks from the engine's logits as `generate` does from the model's.

    Attributes:
        unembed: Computes logits [n, vocab] of final hidden states [n, hidden_size].
    """

    unembed: Callable[[Tensor], Tensor] = field(kw_only=True)

    @cached_property
    def unembedding(self) -> Unembedding:
        """The map from hidden states to the engine's logits, before any processors."""
        return EngineUnembedding(
            self.lm_head_weight,
            self.mask_token_id,
            self.temperature,
            self.eos_token_ids,
            unembed=self.unembed,
        )


@dataclass(frozen=True)
class StockPicker(EnginePicker):
    """A greedy picker that picks tokens as the engine's own algorithms do, with one exception: it
    never picks the mask id. Where the mask id is the likeliest, the engine's own algorithms reveal
    nothing and never end.

    Log-odds are computed from the token's probability in a softmax that includes the mask id. This
    probability has the dtype of the logits, which is at least float32. So positions whose
    probabilities round to the same number have equal log-odds, and the leftmost of them is revealed
    first.
    """

    @cached_property
    def unembedding(self) -> Unembedding:
        """The map from hidden states to the engine's logits, in which the mask id keeps its
        logit."""
        return EngineUnembedding(
            self.lm_head_weight, self.mask_token_id, unembed=self.unembed, with_mask=True
        )

    def _pick(self, logits: Tensor, keys: Tensor | None) -> Picks:
        """Pick tokens greedily from logits [n, vocab]. As these are the largest tensor of a round,
        this makes few passes over memory."""
        mask_logits = logits[:, self.mask_token_id].clone()
        logits[:, self.mask_token_id] = -torch.inf
        token = logits.argmax(-1, keepdim=True)
        logits[:, self.mask_token_id] = mask_logits
        probability = logits.softmax(-1)
        odds = probability.gather(1, token)[:, 0].double().logit()
        entropy = torch.special.entr(probability).sum(-1) if self.entropy else None
        return Picks(
            token[:, 0],
            odds,
            entropy,
            candidates=self._candidates(logits, probability) if self.candidates else None,
        )

    def _candidates(self, logits: Tensor, probability: Tensor) -> Tensor:
        """Make `Picks.candidates` from logits [n, vocab] and their probabilities [n, vocab]. The
        probabilities are overwritten."""
        best, ids = likeliest_tokens(logits, self.candidates)
        total = best[:, :1] - probability.gather(1, ids[:, :1]).log()
        mask_probability = probability[:, self.mask_token_id].clone()
        rest_probability = probability.scatter_(1, ids, 0.0)
        rest_probability[:, self.mask_token_id] = (
            mask_probability  # the mask is never picked, but counts in the sum
        )
        best_logits = best.masked_fill(ids == self.mask_token_id, -torch.inf)
        return torch.cat(
            [
                ids.to(best_logits.dtype),
                best_logits,
                rest_probability.sum(-1, keepdim=True).log() + total,
            ],
            1,
        )


class Pickers:
    """The pickers of a round, one for each distinct `Sampling` among the requests of the round.

    Args:
        lm_head_weight: [vocab, hidden_size], from which logits of single tokens are computed.
        make: Makes the picker of a `Sampling`.
    """

    def __init__(self, lm_head_weight: Tensor, make: Callable[[Sampling], Picker]) -> None:
        self.lm_head_weight = lm_head_weight
        self.make = make
        self.pickers: dict[Sampling, Picker] = {}

    def of(self, sampling: Sampling) -> Picker:
        """Return the picker of a `Sampling`, which is made at its first use."""
        if sampling not in self.pickers:
            self.pickers[sampling] = self.make(sampling)
        return self.pickers[sampling]

    def of_row(self, row: Any) -> Picker:
        """Return the picker of an `EngineRow`, by its sampling options."""
        return self.of(row.sampling)
