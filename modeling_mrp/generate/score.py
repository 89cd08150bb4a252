"""Log-probabilities of given texts under `sequential`.

A token is scored at a state that shows all tokens to its left, and masks from its position to the
end of its block. A given text determines all states: one pass over the text gives the keys and
values they attend to, then they are scored side by side.
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
from ..networks.networks import prefill_chunks
from .generation import check_weights
from .options import check_ids, check_rows


@dataclass
class MRPScoreOutput(ModelOutput):
    """The output of `score`.

    Attributes:
        logprobs: [batch, length] float32 (float64 for a float64 model), log-probability of each
            scored token, in nats; 0 elsewhere.
        scored: [batch, length] bool, which tokens were scored.
        greedy: [batch, length] bool, which scored tokens were the likeliest at their state.
        sums: [batch], the summed log-probability of a row's scored tokens.
        perplexity: [batch], exp of minus the mean log-probability of a row's scored tokens, NaN
            where none was.
        forwards: Forwards of the whole batch by role, `prefill` and `score`.
    """

    logprobs: Tensor | None = None
    scored: Tensor | None = None
    greedy: Tensor | None = None
    sums: Tensor | None = None
    perplexity: Tensor | None = None
    forwards: dict[str, int] | None = None


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
    ) -> MRPScoreOutput:
        """Compute the log-probabilities of given texts under `sequential`, without gradients.

        `generate(decoding="sequential", do_sample=True)` draws by these, one token a step, without
        processors or truncation.

        Args:
            input_ids: [batch, length] long, whole texts: prompts and what follows them.
            attention_mask: [batch, length], 1 for real tokens, with padding on either side.
            labels: [batch, length] long, `input_ids` where a token is to be scored and -100
                elsewhere, for instance in the prompt, which scored tokens still see; None: all real
                tokens are scored.
            temperature: Divides the logits.
            tokens_per_forward: The most tokens in a forward of the batch, to bound memory, but at
                least one block per row.

        Raises:
            ValueError: for arguments that do not fit, a model in training mode, or a token without
                a log-probability.
        """
        block, mask_id = self.config.block_size, self.config.mask_token_id
        real = check_ids(input_ids, attention_mask, self.config)
        check_rows(real, 0, self.config.max_position_embeddings)
        if labels is not None and (
            not isinstance(labels, Tensor) or labels.shape != input_ids.shape
        ):
            kind = (
                list(labels.shape) if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
            )
            raise ValueError(
                f"labels are {kind} for input_ids of {list(input_ids.shape)}: pass a tensor of the "
                "same shape"
            )
        scored = real if labels is None else (labels != -100) & real
        if labels is not None and len(where := (scored & (labels != input_ids)).nonzero()):
            raise ValueError(
                f"labels differ from input_ids at row and column {where[0].tolist()}: pass "
                "input_ids, without a shift, and -100 where nothing is scored"
            )
        if not isinstance(temperature, Real) or not 0 < temperature < float("inf"):
            raise ValueError(f"temperature is {temperature!r}: it must be a finite number above 0")
        if not isinstance(tokens_per_forward, Integral) or tokens_per_forward < 1:
            raise ValueError(
                f"tokens_per_forward is {tokens_per_forward!r}: it must be an int of 1 or more"
            )
        if self.training:
            raise ValueError(
                "score was called in training mode, with dropout and without a cache: call "
                "model.eval() first"
            )
        check_weights(self)
        with weights_on_device(self.lm_head):
            weight = self.lm_head.weight
            ids, real, scored = (part.to(weight.device) for part in (input_ids, real, scored))
            width = int(real.sum(-1).max())
            held = torch.arange(width + -width % block, device=ids.device) < real.sum(
                -1, keepdim=True
            )
            # no padding on the left
            texts, asked = (
                torch.full(held.shape, mask_id, device=ids.device),
                torch.zeros_like(held),
            )
            texts[held], asked[held] = ids[real].long(), scored[real]
            count = int(asked.sum(-1).max())
            # by row, columns that are asked first
            at = asked.byte().argsort(dim=-1, descending=True, stable=True)[:, :count]
            # what states may look at
            length = int(asked.nonzero()[:, 1].max()) // block * block if count else 0
            states = max(1, tokens_per_forward // (len(ids) * block))
            cache = BlockCache(
                self, len(ids), texts.shape[1], min(states, count) * block, with_head=False
            )
            forwards = {"prefill": 0, "score": 0}
            for begin, end, *given in prefill_chunks(
                cache, texts[:, :length], 0, states * block, block
            ):
                hidden = self.backbone(*given, cache)
                forwards["prefill"] += 1
                if cache.shifted:
                    cache.hidden[:, begin + 1 : end + 1] = hidden
            unembedding = Unembedding(weight, mask_id, float(temperature))
            found = torch.zeros_like(texts, dtype=torch.promote_types(weight.dtype, torch.float32))
            likeliest = torch.zeros_like(asked)
            # `scatter_` needs that on GPUs
            for places in map(Tensor.contiguous, at.split(states, 1) if count else ()):
                hidden = _hidden_at(self, texts, places, length, cache)
                forwards["score"] += 1
                scores = unembedding.tempered(unembedding.logits(hidden.flatten(0, 1))).unflatten(
                    0, places.shape
                )
                token = texts.gather(1, places)
                found.scatter_(
                    1, places, scores.log_softmax(-1).gather(2, token[..., None])[..., 0]
                )
                likeliest.scatter_(1, places, scores.argmax(-1) == token)
        logprobs, greedy = torch.zeros_like(ids, dtype=found.dtype), torch.zeros_like(scored)
        logprobs[scored], greedy[scored] = found[asked], likeliest[asked]
        if len(where := logprobs.isnan().nonzero()):
            raise ValueError(
                f"the token {where[0, 1]} of row {where[0, 0]} has no log-probability: the weights "
                f"are NaN or infinite, or {weight.dtype} overflows. Load or train them again, or "
                "load a wider dtype"
            )
        sums = logprobs.sum(-1)
        return MRPScoreOutput(
            logprobs, scored, greedy, sums, (-sums / scored.sum(-1)).exp(), forwards
        )


def _hidden_at(model: Any, texts: Tensor, places: Tensor, length: int, cache: BlockCache) -> Tensor:
    """Compute hidden states [batch, n, hidden_size] that predict the tokens at `places` [batch, n]
    long, each at a state of its own: the text before the place, and masks from there to the end of
    the block."""
    block, (rows, states) = model.config.block_size, places.shape
    where = (places // block * block)[..., None] + torch.arange(block, device=texts.device)
    ids = (
        texts.gather(1, where.flatten(1))
        .view_as(where)
        .masked_fill(where >= places[..., None], model.config.mask_token_id)
    )
    slot = torch.arange(states, device=texts.device).repeat_interleave(block)
    before = torch.arange(length, device=texts.device) < where[..., :1].expand(
        -1, -1, block
    ).reshape(rows, -1, 1)
    mask = torch.cat([before, (slot[:, None] == slot).expand(rows, -1, -1)], -1)[:, None]
    cache.target(length, states * block, prefill=True)
    hidden = model.backbone(ids.flatten(1), where.flatten(1), mask, cache).to(texts.device)
    column = slot[::block] * block + places % block
    if not cache.shifted:
        return taken_from(hidden, column)
    first = places % block == 0  # predicted by the last token of the block before
    ends = taken_from(cache.hidden.to(texts.device), torch.where(first, places, -1))
    return ends + taken_from(hidden, torch.where(first, -1, column - 1))
