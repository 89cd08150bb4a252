"""Log-probabilities of given texts under `sequential`.

A token is scored at a state that shows all tokens to its left, and masks from its position to the
end of its block. A given text determines all these states. So one pass over the text computes the
keys and values to which they attend; then the states are scored side by side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..model.loading import weights_on_device
from ..networks.inspection import check_weights
from ..networks.networks import networks_for
from ..networks.picker import Picker
from ..networks.uploads import upload_all
from ..rules.state import State
from .options import check_ids, check_rows


@dataclass
class MRPScoreOutput(ModelOutput):
    """The output of `score`.

    Attributes:
        logprobs: float32 [batch, length] (float64 for a float64 model), the log-probability of each
            scored token, in nats; 0 elsewhere.
        scored: bool [batch, length], whether each token was scored.
        greedy: bool [batch, length], whether each scored token was the likeliest one at its state;
            False elsewhere.
        sums: [batch], the summed log-probability of each row's scored tokens.
        perplexity: [batch], exp of minus the mean log-probability of each row's scored tokens; NaN
            for a row without scored tokens.
        forwards: Number of forwards of the whole batch: those that computed keys and values of the
            texts under the key `prefill`, those that scored tokens under `score`.
        top_ids, top_logprobs: [batch, length, top_tokens], if `top_tokens` is given: the likeliest
            tokens at the state of each scored token, and their log-probabilities; 0 elsewhere.
    """

    logprobs: Tensor | None = None
    scored: Tensor | None = None
    greedy: Tensor | None = None
    sums: Tensor | None = None
    perplexity: Tensor | None = None
    forwards: dict[str, int] | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class MRPScoringMixin:
    """Adds the method `score` to an MRP model. It computes the log-probabilities of given texts."""

    @torch.no_grad()
    def score(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        tokens_per_forward: int = 512,
        top_tokens: int = 0,
    ) -> MRPScoreOutput:
        """Compute the log-probabilities of given texts under the mode `sequential`, which reveals
        tokens from left to right. No gradients are computed.

        `generate(decoding="sequential", do_sample=True)` draws tokens with these probabilities, one
        token per step, if there are no processors and no truncation.

        Args:
            input_ids: int64 [batch, length], complete texts: the prompts and their continuations.
            attention_mask: [batch, length], 1 for real tokens, with padding on either side.
            labels: int64 [batch, length], equal to `input_ids` where a token is to be scored, and
                -100 elsewhere, for instance in the prompt. Scored tokens still attend to the tokens
                that are not scored. None: all real tokens are scored.
            temperature: Divides the logits.
            tokens_per_forward: The largest number of tokens in a forward of the batch, which bounds
                memory. A forward has at least one block per row, though.
            top_tokens: Number of likeliest tokens that are returned for each state.

        Raises:
            ValueError: for invalid arguments, a model in training mode, or a token without a
                log-probability.
        """
        mask_id = self.config.mask_token_id
        real = check_ids(input_ids, attention_mask, self.config)
        check_rows(real, 0, self.config.max_position_embeddings)
        if labels is not None and (
            not isinstance(labels, Tensor) or labels.shape != input_ids.shape
        ):
            kind: Any = f"a {type(labels).__name__}"
            if isinstance(labels, Tensor):
                kind = list(labels.shape)
            raise ValueError(
                f"labels are {kind} for input_ids of {list(input_ids.shape)}: pass a tensor of the "
                "same shape"
            )
        scored = real if labels is None else (labels != -100) & real
        if labels is not None:
            differences = (scored & (labels != input_ids)).nonzero()
            if len(differences):
                raise ValueError(
                    f"labels differ from input_ids at row and column {differences[0].tolist()}: "
                    "pass input_ids, without a shift, and -100 where nothing is scored"
                )
        if not isinstance(temperature, Real) or not 0 < temperature < float("inf"):
            raise ValueError(f"temperature is {temperature!r}: it must be a finite number above 0")
        if not isinstance(tokens_per_forward, Integral) or tokens_per_forward < 1:
            raise ValueError(
                f"tokens_per_forward is {tokens_per_forward!r}: it must be an int of 1 or more"
            )
        vocab_size = self.config.vocab_size
        if not isinstance(top_tokens, Integral) or not 0 <= top_tokens <= vocab_size:
            raise ValueError(
                f"top_tokens is {top_tokens!r}: it must be an int from 0 to {vocab_size}"
            )
        if self.training:
            raise ValueError(
                "score was called in training mode, with dropout and without a cache: call "
                "model.eval() first"
            )
        check_weights(self)
        texts = []
        for ids, is_real, is_scored in zip(input_ids.cpu(), real.cpu(), scored.cpu(), strict=True):
            columns = is_real.nonzero()[:, 0].tolist()
            asked = is_scored[is_real].nonzero()[:, 0].tolist()
            texts.append(ScoredText(ids[is_real].tolist(), columns, asked))
        with weights_on_device(self.lm_head):
            weight = self.lm_head.weight
            scored = scored.to(weight.device)
            dtype = torch.promote_types(weight.dtype, torch.float32)
            logprobs = torch.zeros(input_ids.shape, dtype=dtype, device=weight.device)
            greedy = torch.zeros_like(scored)
            top_logprobs = logprobs[..., None].repeat(1, 1, top_tokens)
            top_ids = torch.zeros_like(top_logprobs, dtype=torch.long)
            forwards = {"prefill": 0, "score": 0}
            picker = Picker(weight, mask_id, float(temperature))
            for row, column, token, scores in _scores_of(
                self, picker, texts, tokens_per_forward, forwards
            ):
                logprobs[row, column] = scores.gather(1, token[:, None])[:, 0]
                greedy[row, column] = scores.argmax(-1) == token
                if top_tokens:
                    best = scores.topk(top_tokens)
                    top_ids[row, column] = best.indices
                    top_logprobs[row, column] = best.values
        nan_positions = logprobs.isnan().nonzero()
        if len(nan_positions):
            raise ValueError(
                f"the token {nan_positions[0, 1]} of row {nan_positions[0, 0]} has no "
                f"log-probability: the weights are NaN or infinite, or {weight.dtype} overflows. "
                "Load or train them again, or load a wider dtype"
            )
        sums = logprobs.sum(-1)
        perplexity = (-sums / scored.sum(-1)).exp()
        output = MRPScoreOutput(logprobs, scored, greedy, sums, perplexity, forwards)
        if top_tokens:
            output.top_ids = top_ids
            output.top_logprobs = top_logprobs
        return output


class ScoredText(NamedTuple):
    """A text, and which of its tokens are scored.

    Attributes:
        ids: The tokens of the text.
        columns: For each token, its column in `input_ids`.
        asked: The positions of the tokens to score, in increasing order.
    """

    ids: list[int]
    columns: list[int]
    asked: list[int]

    def state_before(self, position: int, block_size: int, mask_id: int) -> State:
        """Return the state that shows the tokens before a position, and masks from that position to
        the end of its block."""
        start = position // block_size * block_size
        masks = start + block_size - position
        ids = (*self.ids[start:position], *[mask_id] * masks)
        return State((start, ids), (position - start,), block_size, masks, 0)


def _scores_of(
    model: Any,
    picker: Picker,
    texts: Sequence[ScoredText],
    tokens_per_forward: int,
    forwards: dict[str, int],
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Read the texts, then score the state before each token that is asked for.

    Yields, for n tokens at a time, four tensors: their rows, their columns of `input_ids` and their
    ids, int64 [n] each, and the log-probabilities at their states, [n, vocab]. `forwards` counts
    the forwards by role.
    """
    count = max(len(text.asked) for text in texts)
    if not count:
        return
    block_size = model.config.block_size
    width = max(1, tokens_per_forward // (len(texts) * block_size))
    # the blocks before the last one with a token to score
    length = max(text.asked[-1] for text in texts if text.asked) // block_size * block_size
    size = (len(texts), length + block_size, min(width, count) * block_size)
    with networks_for(model, picker, False, None, *size, with_head=False) as networks:
        for _ in networks.read([text.ids for text in texts], 0, length, chunk=width * block_size):
            forwards["prefill"] += 1
        for first in range(0, count, width):
            states: list[list[State]] = []
            numbers: list[tuple[int, ...]] = []
            for index, text in enumerate(texts):
                states.append([])
                for slot, position in enumerate(text.asked[first : first + width]):
                    states[-1].append(text.state_before(position, block_size, picker.mask_token_id))
                    numbers.append(
                        (index, text.columns[position], text.ids[position], slot, position)
                    )
            hidden = networks.hidden(states, length)
            forwards["score"] += 1
            rows, columns, tokens, slots, positions = upload_all(
                list(np.array(numbers).T), hidden.device
            )
            asked = hidden[rows, slots, positions % block_size]
            for chunk in picker.unembedding.chunks(len(asked)):
                logits = picker.unembedding.tempered(picker.unembedding.logits(asked[chunk]))
                yield rows[chunk], columns[chunk], tokens[chunk], logits.log_softmax(-1)
