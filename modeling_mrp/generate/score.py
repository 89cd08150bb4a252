"""Log-probabilities of given texts under `sequential`.

A token is scored at a state that shows all tokens to its left, and masks from its position to the
end of its block. A given text determines all states: one pass over the text gives the keys and
values that they attend to, then they are scored side by side.
"""

from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..kernels.pick import Unembedding
from ..model.diffusion import taken_from
from ..model.loading import weights_on_device
from ..networks.cache import BlockCache
from ..networks.inspection import check_weights
from ..networks.networks import prefill_chunks
from .options import check_ids, check_rows


@dataclass
class MRPScoreOutput(ModelOutput):
    """The output of `score`.

    Attributes:
        logprobs: [batch, length] float32 (float64 for a float64 model), log-probability of each
            scored token, in nats; 0 elsewhere.
        scored: [batch, length] bool, whether a token was scored.
        greedy: [batch, length] bool, whether a scored token was the likeliest at its state.
        sums: [batch], the summed log-probability of a row's scored tokens.
        perplexity: [batch], exp of minus the mean log-probability of a row's scored tokens; NaN for
            a row without scored tokens.
        forwards: Forwards of the whole batch by role, `prefill` and `score`.
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
    """The method `score` of an MRP model."""

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
        """Compute the log-probabilities of given texts under `sequential`, without gradients.

        `generate(decoding="sequential", do_sample=True)` draws tokens with these probabilities, one
        token per step, if there are no processors and no truncation.

        Args:
            input_ids: [batch, length] long, complete texts: the prompts and their continuations.
            attention_mask: [batch, length], 1 for real tokens, with padding on either side.
            labels: [batch, length] long, `input_ids` where a token is to be scored and -100
                elsewhere, for instance in the prompt, which scored tokens still attend to; None:
                all real tokens are scored.
            temperature: Divides the logits.
            tokens_per_forward: The most tokens in a forward of the batch, which bounds memory; at
                least one block per row.
            top_tokens: Number of likeliest tokens that are returned for each state.

        Raises:
            ValueError: for invalid arguments, a model in training mode, or a token without a
                log-probability.
        """
        block_size = self.config.block_size
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
        with weights_on_device(self.lm_head):
            weight = self.lm_head.weight
            ids = input_ids.to(weight.device)
            real = real.to(weight.device)
            scored = scored.to(weight.device)
            lengths = real.sum(-1, keepdim=True)
            width = int(lengths.max())
            # texts in whole blocks, with no padding on the left
            in_text = torch.arange(width + -width % block_size, device=ids.device) < lengths
            texts = torch.full(in_text.shape, mask_id, device=ids.device)
            texts[in_text] = ids[real].long()
            queried = torch.zeros_like(in_text)
            queried[in_text] = scored[real]
            count = int(queried.sum(1).max())
            # by row, queried columns first
            query_columns = queried.byte().argsort(dim=-1, descending=True, stable=True)[:, :count]
            # the length of the earlier blocks, to which states attend
            length = int(queried.nonzero()[:, 1].max()) // block_size * block_size if count else 0
            states = max(1, tokens_per_forward // (len(ids) * block_size))
            cache = BlockCache(
                self, len(ids), texts.shape[1], min(states, count) * block_size, with_head=False
            )
            forwards = {"prefill": 0, "score": 0}
            for begin, end, *inputs in prefill_chunks(
                cache, texts[:, :length], 0, states * block_size, block_size
            ):
                hidden = self.backbone(*inputs, cache)
                forwards["prefill"] += 1
                if cache.shifted:
                    cache.hidden[:, begin + 1 : end + 1] = hidden
            unembedding = Unembedding(weight, mask_id, float(temperature))
            log_probs = torch.zeros_like(
                texts, dtype=torch.promote_types(weight.dtype, torch.float32)
            )
            likeliest = torch.zeros_like(queried)
            best_ids = torch.zeros(*texts.shape, top_tokens, dtype=torch.long, device=ids.device)
            best_log_probs = torch.zeros_like(best_ids, dtype=log_probs.dtype)
            for chunk in query_columns.split(states, 1) if count else ():
                positions = chunk.contiguous()  # `scatter_` needs that on GPUs
                hidden = _hidden_at(self, texts, positions, length, cache)
                forwards["score"] += 1
                logits = unembedding.tempered(unembedding.logits(hidden.flatten(0, 1)))
                scores = logits.unflatten(0, positions.shape)
                token = texts.gather(1, positions)
                scores = scores.log_softmax(-1)
                token_log_probs = scores.gather(2, token[..., None])[..., 0]
                log_probs.scatter_(1, positions, token_log_probs)
                likeliest.scatter_(1, positions, scores.argmax(-1) == token)
                if top_tokens:
                    best = scores.topk(top_tokens)
                    columns = positions[..., None].expand_as(best.indices)
                    best_ids.scatter_(1, columns, best.indices)
                    best_log_probs.scatter_(1, columns, best.values)
        logprobs = torch.zeros_like(ids, dtype=log_probs.dtype)
        logprobs[scored] = log_probs[queried]
        greedy = torch.zeros_like(scored)
        greedy[scored] = likeliest[queried]
        top_ids = torch.zeros(*ids.shape, top_tokens, dtype=torch.long, device=ids.device)
        top_ids[scored] = best_ids[queried]
        top_logprobs = torch.zeros_like(top_ids, dtype=log_probs.dtype)
        top_logprobs[scored] = best_log_probs[queried]
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


def _hidden_at(
    model: Any, texts: Tensor, positions: Tensor, length: int, cache: BlockCache
) -> Tensor:
    """Compute the hidden states [batch, n, hidden_size] that predict the tokens at `positions`
    [batch, n] long, each at a separate state: the text before the position, and masks from there to
    the end of the block."""
    block_size = model.config.block_size
    rows, states = positions.shape
    columns = torch.arange(block_size, device=texts.device)
    block_positions = (positions // block_size * block_size)[..., None] + columns
    ids = texts.gather(1, block_positions.flatten(1)).view_as(block_positions)
    ids = ids.masked_fill(block_positions >= positions[..., None], model.config.mask_token_id)
    state_index = torch.arange(states, device=texts.device).repeat_interleave(block_size)
    starts = block_positions[..., :1].expand(-1, -1, block_size).reshape(rows, -1, 1)
    earlier = torch.arange(length, device=texts.device) < starts
    same_state = (state_index[:, None] == state_index).expand(rows, -1, -1)
    mask = torch.cat([earlier, same_state], -1)[:, None]
    cache.target(length, states * block_size, prefill=True)
    hidden = model.backbone(ids.flatten(1), block_positions.flatten(1), mask, cache).to(
        texts.device
    )
    column = state_index[::block_size] * block_size + positions % block_size
    if not cache.shifted:
        return taken_from(hidden, column)
    is_first = positions % block_size == 0  # predicted by the last token of the previous block
    end_states = taken_from(cache.hidden.to(texts.device), torch.where(is_first, positions, -1))
    return end_states + taken_from(hidden, torch.where(is_first, -1, column - 1))
