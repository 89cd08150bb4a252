"""A slow and obvious decoder of block-diffusion language models: the yardstick for the fast one.

One row, no cache, no packing: every step runs everything committed so far and the current block through the model.
x is the state before a reveal, x' the state after it, h_A the backbone's hidden states at x (MRP, arXiv 2605.18817).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels.noise import gumbel_noise, noise_keys


@dataclass
class Reference:
    """What follows the prompt, up to and including the eos that ends it: each token's step and log-probability, and the totals.

    Tokens that were given have step -1 and log-probability 0. `revocations` are (index behind the prompt, token), in order.
    """

    tokens: list[int]
    reveal_step: list[int]
    logprobs: list[float]
    steps: int
    revocations: list[tuple[int, int]]

    @property
    def revoked(self) -> int:
        """How many reveals were taken back."""
        return len(self.revocations)


@dataclass
class Options:
    """The keyword options of `reference_decode`."""

    eos_ids: Collection[int] = ()
    denoising_steps: int | None = None
    confidence_threshold: float = 0.9
    entropy_threshold: float = 0.35
    mrp_steps: int = 1
    remask_rule: str = "reread"
    residual_delta: float = 1.0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass
class Row:
    """One row's state: `ids` are whole blocks, the last of them the current one. `given` is what the user fixed behind the
    prompt, by position.
    """

    model: MRPForCausalLM
    ids: list[int]
    prompt_len: int
    given: dict[int, int]
    options: Options


@dataclass
class Pick:
    """The token that one distribution picks at one position, and how sure it is (before top-k and top-p)."""

    position: int
    token: int
    log_odds: float
    logprob: float
    entropy: float


def append_block(row: Row) -> None:
    """Fills the sequence up with given tokens, and masks elsewhere, to the end of a new block."""
    size = row.model.config.block_size
    end = (len(row.ids) // size + 1) * size
    row.ids += [row.given.get(i, row.model.config.mask_token_id) for i in range(len(row.ids), end)]


def masked_positions(row: Row) -> list[int]:
    """Generated positions that are not revealed; all lie in the current block."""
    return [i for i in range(row.prompt_len, len(row.ids)) if row.ids[i] == row.model.config.mask_token_id]


def free_from(row: Row) -> int:
    """The position behind everything the user fixed."""
    return max(row.given, default=row.prompt_len - 1) + 1


def end_of(row: Row, limit: int) -> int:
    """The position after the first revealed eos behind the prompt and all given tokens, at most `limit`."""
    eos = [i for i in range(free_from(row), len(row.ids)) if row.ids[i] in row.options.eos_ids]
    return min([limit] + [i + 1 for i in eos])


def is_done(row: Row, limit: int) -> bool:
    """Whether every position before the row's end is revealed."""
    end = end_of(row, limit)
    return end <= len(row.ids) and all(i >= end for i in masked_positions(row))


def candidates(row: Row) -> list[int]:
    """Masked positions before the eos that ends the text; the limit on new tokens plays no part."""
    return [i for i in masked_positions(row) if i < end_of(row, len(row.ids))]


def inputs(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, block-causal mask and positions of the whole sequence."""
    positions = torch.arange(len(row.ids), device=row.model.device)
    block = positions // row.model.config.block_size
    return torch.tensor([row.ids], device=row.model.device), (block <= block[:, None])[None, None], positions[None]


def backbone(row: Row) -> Tensor:
    """h_A [length, hidden] at the row's state."""
    ids, mask, positions = inputs(row)
    masks = {"full_attention": mask}
    return row.model.model(input_ids=ids, attention_mask=masks, position_ids=positions, use_cache=False).last_hidden_state[0]


def head(row: Row, hidden: Tensor) -> Tensor:
    """The head's residual [length, hidden] at the row's state, given hidden states [length, hidden]."""
    ids, mask, positions = inputs(row)
    embeds = row.model.model.embed_tokens(ids)
    return row.model.mrp_head(embeds, hidden[None], mask, row.model.model.rotary_emb(embeds, positions), None)[0]


def add_residual(row: Row, hidden: Tensor) -> Tensor:
    """Adds the head's residual in the current block; clean blocks keep the backbone's hidden states."""
    start = len(row.ids) - row.model.config.block_size
    return torch.cat([hidden[:start], hidden[start:] + head(row, hidden)[start:]])


def scores_at(row: Row, hidden: Tensor, position: int) -> Tensor:
    """Logits [vocab] of a position's own token: no mask id, no end before a given token, over the temperature when sampling."""
    scores = row.model.lm_head(hidden[position]).clone()
    scores[row.model.config.mask_token_id] = -torch.inf
    if position < free_from(row):
        scores[list(row.options.eos_ids)] = -torch.inf
    return scores / row.options.temperature if row.options.do_sample else scores


def log_odds(scores: Tensor, token: int) -> float:
    """log(p / (1 - p)) of a token, without ever computing 1 - p."""
    others = scores.clone()
    others[token] = -torch.inf
    return (scores[token] - others.logsumexp(0)).item()


def logit(p: float) -> float:
    """The log-odds of a probability."""
    return torch.tensor(p, dtype=torch.float64).logit().item()


def perturbed(row: Row, scores: Tensor, position: int) -> Tensor:
    """Scores truncated by top-k, then top-p, plus the Gumbel noise of the position and the masks left in the block."""
    kept = scores[None]
    if row.options.top_k:
        kept = TopKLogitsWarper(row.options.top_k)(None, kept)
    if row.options.top_p is not None and row.options.top_p < 1:
        kept = TopPLogitsWarper(row.options.top_p)(None, kept)
    numbers = torch.tensor([[row.options.seed], [position], [len(masked_positions(row))]], device=scores.device)
    return (kept + gumbel_noise(noise_keys(*numbers), len(scores), scores.dtype))[0]


def pick_all(row: Row, hidden: Tensor) -> list[Pick]:
    """What hidden states make of each candidate at the row's state, from left to right."""
    picks = []
    for i in candidates(row):
        scores = scores_at(row, hidden, i)
        token = int((perturbed(row, scores, i) if row.options.do_sample else scores).argmax())
        entropy = torch.special.entr(scores.softmax(0)).sum().item()
        picks.append(Pick(i, token, log_odds(scores, token), scores.log_softmax(0)[token].item(), entropy))
    return picks


def most_confident(picks: list[Pick], count: int) -> list[Pick]:
    """The `count` most confident picks, of equals the leftmost."""
    return sorted(picks, key=lambda pick: (-pick.log_odds, pick.position))[:count]


def choose(row: Row, picks: list[Pick], decoding: str, count: int) -> list[Pick]:
    """The picks that the backbone's step reveals; `count` is the schedule's number for this step."""
    if decoding in ("static", "mrp_direct"):
        return most_confident(picks, count)
    if decoding == "sequential":
        return picks[:count]
    if decoding in ("dynamic", "mrp_remask"):
        threshold = logit(row.options.confidence_threshold)
        return [pick for pick in picks if pick.log_odds > threshold] or most_confident(picks, 1)
    if decoding != "entropy_bound":
        raise ValueError(f"the reference has no decoding {decoding!r}")
    ranked = sorted(picks, key=lambda pick: (pick.entropy, pick.position))
    sums = [sum(pick.entropy for pick in ranked[: n + 1]) for n in range(len(ranked))]
    return [pick for pick, total in zip(ranked, sums, strict=True) if total < row.options.entropy_threshold] or ranked[:1]


def reveal(row: Row, picks: list[Pick]) -> None:
    """Writes picks into the row's state."""
    for pick in picks:
        row.ids[pick.position] = pick.token


def extend_by_head(row: Row, h_a: Tensor) -> list[Pick]:
    """Reveals one more token per head step, by the accumulated estimate of the hidden states."""
    extra, acc = [], h_a
    for _ in range(row.options.mrp_steps):
        acc = add_residual(row, acc)
        best = most_confident(pick_all(row, acc), 1)
        reveal(row, best)
        extra += best
    return extra


def beliefs(row: Row, h_a: Tensor, given: list[Pick], fresh: list[Pick]) -> dict[int, float]:
    """The head's log-odds of the fresh picks, by position, at the state where only the given ones of them are revealed."""
    for pick in fresh:
        row.ids[pick.position] = row.model.config.mask_token_id
    reveal(row, given)
    h_b = add_residual(row, h_a)
    return {pick.position: log_odds(scores_at(row, h_b, pick.position), pick.token) for pick in fresh}


def kept_by_belief(row: Row, h_a: Tensor, fresh: list[Pick]) -> list[Pick]:
    """The fresh reveals that the head, shown all of them, still believes in; at least one."""
    seen, threshold = beliefs(row, h_a, fresh, fresh), logit(row.options.confidence_threshold)
    best = min(fresh, key=lambda pick: (-seen[pick.position], pick.position))
    return [pick for pick in fresh if not seen[pick.position] < threshold] or [best]


def kept_by_rereading(row: Row, h_a: Tensor, fresh: list[Pick]) -> list[Pick]:
    """The fresh reveals without the worst, again and again while any but the most believed is doubted under all that are left;
    of these the surest, and those that it alone makes half as credible as tau."""
    tau, kept = row.options.confidence_threshold, fresh
    while True:
        seen = beliefs(row, h_a, kept, fresh)
        _, *others = sorted(kept, key=lambda pick: (-seen[pick.position], pick.position))
        doubted = [pick for pick in others if seen[pick.position] < logit(tau)]
        if not doubted:
            break
        worst = min(doubted, key=lambda pick: (seen[pick.position], pick.position))
        kept = [pick for pick in kept if pick is not worst]
    surest = most_confident(kept, 1)
    seen = beliefs(row, h_a, surest, fresh)
    return [pick for pick in kept if pick in surest or not seen[pick.position] < logit(tau / 2)]


def kept_by_residual(row: Row, residual: Tensor, fresh: list[Pick]) -> list[Pick]:
    """The fresh reveals whose own logit the head's residual at x moves by no more than delta; at least one."""
    moves = {pick.position: row.model.lm_head(residual[pick.position])[pick.token].abs().item() for pick in fresh}
    return [pick for pick in fresh if not moves[pick.position] > row.options.residual_delta] or most_confident(fresh, 1)


@torch.no_grad()
def reference_decode(
    model: MRPForCausalLM, prompt: list[int], decoding: str, max_new_tokens: int, infill: Sequence[int] = (), **options: Any
) -> Reference:
    """Decodes one prompt, and what is to be filled in behind it: ids, with the mask id where a token is to be generated.

    The options are those of `Options`. Needs SDPA: eager attention takes no boolean mask.
    """
    assert model.config._attn_implementation == "sdpa", model.config._attn_implementation
    given = {len(prompt) + i: token for i, token in enumerate(infill) if token != model.config.mask_token_id}
    row = Row(model, list(prompt), len(prompt), given, Options(**options))
    assert row.options.remask_rule in ("reread", "threshold", "residual"), row.options.remask_rule
    size, limit = model.config.block_size, len(prompt) + max_new_tokens
    schedule = row.options.denoising_steps or size
    committed: dict[int, tuple[int, float]] = {}  # position -> (step, log-probability)
    steps = block_step = 0
    revocations: list[tuple[int, int]] = []
    append_block(row)
    while not is_done(row, limit):
        if not masked_positions(row):
            append_block(row)
            block_step = 0
            continue  # its tokens may all be given
        h_a = backbone(row)
        residual = head(row, h_a) if decoding == "mrp_remask" and row.options.remask_rule == "residual" else None  # at x
        fresh = choose(row, pick_all(row, h_a), decoding, size // schedule + (block_step < size % schedule))
        reveal(row, fresh)
        if decoding == "mrp_direct":
            fresh = fresh + extend_by_head(row, h_a)
        if decoding == "mrp_remask":
            by_belief = kept_by_belief if row.options.remask_rule == "threshold" else kept_by_rereading
            kept = by_belief(row, h_a, fresh) if residual is None else kept_by_residual(row, residual, fresh)
            for pick in fresh:
                row.ids[pick.position] = model.config.mask_token_id
            reveal(row, kept)
            revocations += [(pick.position - len(prompt), pick.token) for pick in fresh if pick not in kept]
            fresh = kept
        committed |= {pick.position: (steps, pick.logprob) for pick in fresh}
        steps += 1
        block_step += 1
    generated = range(len(prompt), end_of(row, limit))
    reveal_step, logprobs = zip(*(committed.get(i, (-1, 0.0)) for i in generated), strict=True)
    return Reference([row.ids[i] for i in generated], list(reveal_step), list(logprobs), steps, revocations)
