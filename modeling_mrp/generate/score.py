"""Log-probabilities of given texts, exact under `sequential`: all states of a text that is known are known before any forward.

The state at which a token is revealed shows what was revealed before it, and masks elsewhere in its block; it sees the text of
earlier blocks. So one pass over the text gives the keys and values that all states look at, and the states of all tokens lie
side by side in as few forwards as memory allows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from ..kernels.noise import noise_keys
from ..kernels.pick import Unembedding
from ..model.diffusion import block_causal_mask
from ..model.offloading import fetched
from .generation import check_adapters, check_unembedding
from .options import check_ids, check_rows

SAMPLED_ORDERS = 8  # of order="sampled", unless told
MOST_POSITIONS = 1 << 31  # of a text: a position and the 32 bits that order it fit an int64


@dataclass
class MRPScoreOutput(ModelOutput):
    """The output of `score`.

    Attributes:
        logprobs: [batch, length] float32 (float64 of a model in that), log-probability of each token that was scored, in nats;
            0 elsewhere. Of sampled orders the mean.
        scored: [batch, length] bool, which tokens were.
        greedy: [batch, length] bool, which of these were the likeliest at their state, in all sampled orders.
        sample_sums: [samples, batch], of each sampled order the log-probability of all that was scored of a row; their mean is
            `sums`, and their spread says how far that may be off. None under `sequential`.
        forwards: Forwards of the whole batch by role, `prefill` and `score`.
    """

    logprobs: Tensor | None = None
    scored: Tensor | None = None
    greedy: Tensor | None = None
    sample_sums: Tensor | None = None
    forwards: dict[str, int] | None = None

    @property
    def sums(self) -> Tensor:
        """[batch], the log-probability of all that was scored of a row; of sampled orders the bound."""
        assert self.logprobs is not None
        return self.logprobs.sum(-1)

    @property
    def perplexity(self) -> Tensor:
        """[batch], exp of minus the mean log-probability of a row's scored tokens, NaN where none was."""
        assert self.scored is not None
        return (-self.sums / self.scored.sum(-1)).exp()


class Texts:
    """Texts by absolute position, and which of their tokens are scored.

    Args:
        input_ids: [batch, length] long.
        real: [batch, length] bool; False for padding, on one side of a row or both.
        scored: [batch, length] bool, among the real ones.
        block_size: Tokens of a block.
        mask_id: The mask's id, which stands behind each text.

    Attributes:
        ids: [batch, capacity] long, in whole blocks.
        scored: [batch, capacity] bool.
        places: [batch, n] long, positions of scored tokens from left to right, n those of the row with most; then others.
    """

    def __init__(self, input_ids: Tensor, real: Tensor, scored: Tensor, block_size: int, mask_id: int) -> None:
        self.real, self.block_size, self.mask_id = real, block_size, mask_id
        self.capacity = -(-int(real.sum(-1).max()) // block_size) * block_size
        self.rows, self.at = real.nonzero().T[0], (real.cumsum(-1) - 1)[real]
        self.ids = self._absolute(input_ids, mask_id)
        self.scored = self._absolute(scored, False)
        order = (~self.scored).byte().argsort(dim=-1, stable=True)
        self.places = order[:, : int(self.scored.sum(-1).max())]

    def _absolute(self, values: Tensor, fill: Any) -> Tensor:
        made = values.new_full((len(values), self.capacity), fill)
        made[self.rows, self.at] = values[self.real]
        return made

    def given_back(self, values: Tensor) -> Tensor:
        """Values [batch, capacity] where the tokens were given, [batch, length]; 0 in padding."""
        out = values.new_zeros(self.real.shape)
        out[self.real] = values[self.rows, self.at]
        return out

    def states(self, ranks: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Make the states at which the tokens of places `at` [batch, n] are revealed.

        A state shows the scored tokens of its block that have a lower rank ([batch, capacity] long), others where they lie to
        the left.

        Returns:
            Ids and positions, [batch, n, block_size] long both.
        """
        where = at[..., None] // self.block_size * self.block_size + torch.arange(self.block_size, device=at.device)
        ids, scored, rank = (part.gather(1, where.flatten(1)).view_as(where) for part in (self.ids, self.scored, ranks))
        shown = torch.where(scored, rank < ranks.gather(1, at)[..., None], where < at[..., None])
        return ids.masked_fill(~shown, self.mask_id), where


class Scorer:
    """The forwards of one call of `score`.

    Args:
        model: Whose forwards these are.
        texts: What is scored.
        unembedding: The distributions of the model's tokens.
        at_once: Tokens of a forward, at most; a state of each row where these are more.
    """

    def __init__(self, model: Any, texts: Texts, unembedding: Unembedding, at_once: int) -> None:
        self.model, self.texts, self.unembedding = model, texts, unembedding
        (rows, most), self.block = texts.places.shape, texts.block_size
        self.states = max(1, at_once // (rows * self.block))
        last = int(texts.scored.nonzero()[:, 1].amax()) if most else 0
        self.length = last // self.block * self.block  # what states may look at
        self.cache = model.block_cache(rows, texts.capacity, min(self.states, most) * self.block, False, fixed=False)
        self.shifted = self.cache.every > 0  # hidden states are those of the next position
        self.forwards = {"prefill": 0, "score": 0}
        self._prefill()

    def _prefill(self) -> None:
        """Compute the keys and values of all blocks that a scored one has before it."""
        positions = torch.arange(self.length, device=self.texts.ids.device).expand(len(self.texts.ids), -1)
        for begin in range(0, self.length, step := self.states * self.block):
            end = min(self.length, begin + step)
            here, seen = positions[:, begin:end], positions[:, :end]
            mask = block_causal_mask(here, seen, torch.ones_like(seen, dtype=torch.bool), self.block)
            self.cache.target(begin, end - begin, prefill=True)
            hidden = self.model.backbone(self.texts.ids[:, begin:end], here, mask, self.cache)
            self.forwards["prefill"] += 1
            if self.shifted:
                self.cache.ends[:, begin // self.block : end // self.block] = hidden[:, self.block - 1 :: self.block]

    def logprobs(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log-probability of each scored token at the state where those of a lower rank are revealed.

        Args:
            ranks: [capacity] long, of positions.

        Returns:
            [batch, length] as the texts were given, 0 where nothing is scored; and bool, which were the likeliest.
        """
        texts = self.texts
        dtype = torch.promote_types(self.unembedding.weight.dtype, torch.float32)
        logprobs, greedy = torch.zeros_like(texts.ids, dtype=dtype), torch.zeros_like(texts.scored)
        for first in range(0, texts.places.shape[1], self.states):
            at = texts.places[:, first : first + self.states]
            hidden = self._forward(*texts.states(ranks.expand_as(texts.ids), at))
            if self.shifted:  # a block's first token is predicted by the last one before it
                block = (at // self.block)[..., None].to(self.cache.ends.device)
                before = self.cache.ends.gather(1, (block - 1).clamp(min=0).expand(-1, -1, hidden.shape[-1]))
                before = before.masked_fill(block == 0, 0).to(hidden.device)
                hidden = torch.cat([before[:, :, None], hidden[:, :, :-1]], 2)
            column = (at % self.block)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
            said, likeliest = self._said(hidden.gather(2, column)[:, :, 0], texts.ids.gather(1, at))
            logprobs.scatter_(1, at, said)
            greedy.scatter_(1, at, likeliest)
        return texts.given_back(logprobs.masked_fill(~texts.scored, 0)), texts.given_back(greedy & texts.scored)

    def _forward(self, ids: Tensor, where: Tensor) -> Tensor:
        """Hidden states [batch, states, block, hidden_size] at states, which see the text before their block."""
        rows, states, block = where.shape
        slot = torch.arange(states, device=ids.device).repeat_interleave(block)
        before = torch.arange(self.length, device=ids.device) < where[..., :1].expand(-1, -1, block).reshape(rows, -1, 1)
        mask = torch.cat([before, (slot[:, None] == slot).expand(rows, -1, -1)], -1)[:, None]
        self.cache.target(self.length, states * block, prefill=True)
        hidden = self.model.backbone(ids.flatten(1), where.flatten(1), mask, self.cache)
        self.forwards["score"] += 1
        return hidden.view(rows, states, block, -1).to(ids.device)

    def _said(self, hidden: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of tokens [batch, n] under hidden states [batch, n, hidden_size], and which are the likeliest."""
        wide, flat = hidden.flatten(0, 1), token.flatten()
        parts, likeliest = [], []
        for at in self.unembedding.chunks(len(wide)):
            scores = self.unembedding.tempered(self.unembedding.logits(wide[at]))
            parts.append(scores.log_softmax(-1).gather(1, flat[at, None])[:, 0])
            likeliest.append(scores.argmax(-1) == flat[at])
        return torch.cat(parts).view_as(token), torch.cat(likeliest).view_as(token)


class MRPScoringMixin:
    """`score` of an MRP model."""

    @torch.no_grad()
    def score(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        order: str = "sequential",
        samples: int | None = None,
        seed: int | None = None,
        temperature: float = 1.0,
        tokens_per_forward: int = 512,
    ) -> MRPScoreOutput:
        """Compute the log-probabilities of given texts, without gradients.

        Under `sequential` they are exact: the chance that `generate(decoding="sequential", do_sample=True)` makes this text,
        token by token, one a step, without processors or truncation. A token is predicted from all that is to its left, with
        masks from its own place to the end of its block.

        Under `sampled` orders the scored tokens of each block are revealed one at a time in an order that is drawn evenly. The
        mean over orders estimates a lower bound, as an ELBO is, on the log-probability that decoding in such orders has: not on
        that of `sequential`, nor of `static` or `dynamic`, whose orders follow the text.

        Args:
            input_ids: [batch, length] long, whole texts: prompts with what follows them.
            attention_mask: [batch, length], 1 for real tokens, with padding on either side.
            labels: [batch, length] long, `input_ids` where a token is to be scored and -100 elsewhere, for instance in the
                prompt; None: all real tokens. What is not scored is seen from the right of it alone.
            order: `sequential` or `sampled`.
            samples: Of `sampled`, how many orders (default 8).
            seed: Of `sampled`; a seed gives the same orders at the same positions of every row. None: torch's generator.
            temperature: Divides the logits.
            tokens_per_forward: Tokens of a forward of the whole batch, at most, which bounds its memory; one block of each row
                where these are more.

        Returns:
            `MRPScoreOutput`.

        Raises:
            ValueError: for ids, a mask or labels that do not fit, an option that is out of range or has no effect, a model in
                training mode, or a token without a log-probability.
        """
        block, mask_id = self.config.block_size, self.config.mask_token_id
        real = check_ids(input_ids, attention_mask, self.config.vocab_size)
        check_rows(real, 0, self.config.max_position_embeddings)
        scored = _scored(input_ids, real, labels, mask_id)
        _check_options(order, samples, seed, temperature, tokens_per_forward)
        if self.training:
            raise ValueError("score was called in training mode, with dropout and without a cache: call model.eval() first")
        check_adapters(self, len(input_ids))
        check_unembedding(self.lm_head)
        orders = 1 if order == "sequential" else samples or SAMPLED_ORDERS
        with fetched(self.lm_head):
            weight = self.lm_head.weight
            ids, real, scored = (part.to(weight.device) for part in (input_ids, real, scored))
            texts = Texts(ids, real, scored, block, mask_id)
            scorer = Scorer(self, texts, Unembedding(weight, mask_id, float(temperature)), tokens_per_forward)
            position = torch.arange(texts.capacity, device=weight.device)
            if order == "sequential":
                ranks = [position]
            else:
                if seed is None and (getattr(self, "_tp_size", None) or 1) > 1:
                    raise ValueError(
                        "seed is None, and each process of tensor parallelism would draw other orders: pass a seed"
                    )
                seed = int(torch.randint(1 << 62, ())) if seed is None else seed
                ranks = [_drawn(position, seed, turn) for turn in range(orders)]
            logprobs, greedy = (torch.stack(part) for part in zip(*map(scorer.logprobs, ranks), strict=True))
        if len(where := logprobs.isnan().any(0).nonzero()):
            raise ValueError(
                f"the token {where[0, 1]} of row {where[0, 0]} has no log-probability: the weights are NaN or infinite, or "
                f"{weight.dtype} overflows. Load or train them again, or load a wider dtype"
            )
        sums = None if order == "sequential" else logprobs.sum(-1)
        return MRPScoreOutput(logprobs.mean(0), scored, greedy.all(0), sums, scorer.forwards)


def _scored(input_ids: Tensor, real: Tensor, labels: Tensor | None, mask_id: int) -> Tensor:
    """Tell which tokens are scored, [batch, length] bool."""
    if bool(((input_ids == mask_id) & real).any()):
        raise ValueError(
            f"input_ids hold the mask id {mask_id}: score takes whole texts, and puts masks itself. For logits at a mask call "
            "the model"
        )
    if labels is None:
        return real
    if not isinstance(labels, Tensor) or labels.shape != input_ids.shape:
        given = list(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"labels are {given} for input_ids of {list(input_ids.shape)}: pass a tensor of the same shape")
    scored = (labels != -100) & real
    if len(where := (scored & (labels != input_ids)).nonzero()):
        row, column = where[0].tolist()
        raise ValueError(
            f"labels hold {int(labels[row, column])} at row {row}, column {column}, and input_ids "
            f"{int(input_ids[row, column])}: pass input_ids, without a shift, and -100 where nothing is scored"
        )
    return scored


def _check_options(order: Any, samples: Any, seed: Any, temperature: Any, tokens_per_forward: Any) -> None:
    if order not in ("sequential", "sampled"):
        raise ValueError(f"order is {order!r}: it must be 'sequential', which is exact, or 'sampled', a bound")
    if order == "sequential" and (samples is not None or seed is not None):
        raise ValueError(
            f"samples={samples} and seed={seed} have no effect under 'sequential': leave them unset, or pass order='sampled'"
        )
    for name, value in (("samples", samples), ("tokens_per_forward", tokens_per_forward)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}: it must be an integer of at least 1")
    if seed is not None and not isinstance(seed, int):
        raise ValueError(f"seed is {seed!r}: it must be an integer or None")
    if not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature!r}: it must be a number above 0")


def _drawn(position: Tensor, seed: int, turn: int) -> Tensor:
    """Draw an order of positions [n] long: ranks, a pure function of position, seed and which of the orders it is."""
    drawn = noise_keys(torch.full_like(position, seed), position, torch.full_like(position, turn))
    return drawn * MOST_POSITIONS + position
