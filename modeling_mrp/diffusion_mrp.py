"""Block diffusion: which token may see which, and the training pass that holds noisy and clean tokens together.

Positions are absolute and count from 0 at a sequence's first real token; the block of a position is
``position // block_size``. Masks here are boolean, True where a query may look at a key.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .sampling_mrp import log_odds

IGNORE_INDEX = -100
BLANK = -1  # the target behind the end of a text: no token is more likely than another
CLEAN_VIEW = 0  # views above 0 are noisy copies
NO_VIEW = -1  # padding


def block_causal_mask(query_positions: Tensor, key_positions: Tensor, key_valid: Tensor, block_size: int) -> Tensor:
    """Every token sees the earlier blocks and the whole of its own block (SDAR, section 3).

    Args:
        query_positions: [batch, queries] absolute positions.
        key_positions: [batch, keys] absolute positions.
        key_valid: [batch, keys] bool; False for padding.
        block_size: Tokens per block.

    Returns:
        [batch, 1, queries, keys] bool.
    """
    not_later = key_positions[:, None, :] // block_size <= query_positions[:, :, None] // block_size
    return (not_later & key_valid[:, None, :])[:, None]


def packed_mask(view: Tensor, block: Tensor, sample: Tensor) -> Tensor:
    """The mask of a pass that holds noisy copies and the clean sequence: [x_t | x_0] (SDAR, section 3; MRP, section 4).

    A noisy token sees its own noisy block and the clean tokens of earlier blocks; a clean token sees the clean tokens
    of its own and earlier blocks; nothing crosses from one sample to another. Padding (view -1) sees only itself.

    Args:
        view: [batch, length] long: 0 clean, 1, 2, ... the noisy copy, -1 padding.
        block: [batch, length] long: the token's block index.
        sample: [batch, length] long: the sample a token belongs to, when several share a row.

    Returns:
        [batch, 1, length, length] bool.
    """
    query_view, key_view = view[:, :, None], view[:, None, :]
    query_block, key_block = block[:, :, None], block[:, None, :]
    clean_key = (key_block < query_block) | ((query_view == CLEAN_VIEW) & (key_block == query_block))
    noisy_key = (key_view == query_view) & (key_block == query_block)
    sees = torch.where(key_view == CLEAN_VIEW, clean_key, noisy_key)
    sees &= (sample[:, :, None] == sample[:, None, :]) & (key_view != NO_VIEW) & (query_view != NO_VIEW)
    itself = torch.eye(view.shape[1], dtype=torch.bool, device=view.device)
    return (sees | itself)[:, None]


@dataclass
class PackedBatch:
    """One training pass [x_t | x_0] (noisy copies first, then the clean sequence), padded to a common length.

    Attributes:
        input_ids: [batch, length] long; masked positions hold `mask_token_id`.
        target_ids: [batch, length] long; the true token; `BLANK` behind the end of a text in noisy copies.
        position_ids: [batch, length] long; absolute positions.
        view: [batch, length] long; 0 clean, 1, 2, ... noisy copies, -1 padding.
        sample: [batch, length] long; which sample of the row a token belongs to.
        weight: [batch, length] float32; the loss weight of a masked position, 0 elsewhere.
        response_tokens: How many response tokens the batch supervises: the loss is divided by it.
    """

    input_ids: Tensor
    target_ids: Tensor
    position_ids: Tensor
    view: Tensor
    sample: Tensor
    weight: Tensor
    response_tokens: Tensor

    def attention_mask(self, block_size: int) -> Tensor:
        """[batch, 1, length, length] bool: see `packed_mask`."""
        return packed_mask(self.view, self.position_ids // block_size, self.sample)

    @property
    def supervised(self) -> Tensor:
        """[batch, length] bool: masked positions that carry loss."""
        return self.weight > 0

    @property
    def noisy_length(self) -> int:
        """How many columns the noisy copies take: the clean sequence begins behind them."""
        return int((self.view == CLEAN_VIEW).any(0).int().argmax())

    def noisy(self) -> "PackedBatch":
        """The columns of the noisy copies alone."""
        length = self.noisy_length
        return replace(self, **{f: getattr(self, f)[:, :length] for f in vars(self) if f != "response_tokens"})


def pack_noisy(
    input_ids: Tensor, response: Tensor, valid: Tensor, masked: Tensor, weight: Tensor, mask_token_id: int
) -> PackedBatch:
    """Packs a batch of sequences (one sample a row) with one noisy copy: [x_t | x_0].

    Args:
        input_ids: [batch, length] long, left-aligned (position = column).
        response: [batch, length] bool: the tokens that are learned.
        valid: [batch, length] bool: False for padding.
        masked: [batch, length] bool: response tokens hidden in the noisy copy.
        weight: [batch, length] float: loss weight of each masked token (published: 1 / t).
        mask_token_id: The mask's id.
    """
    batch, length = input_ids.shape
    positions = torch.arange(length, device=input_ids.device).expand(batch, length)
    hidden = masked & response & valid
    noisy_view = torch.where(valid, 1, NO_VIEW)
    clean_view = torch.where(valid, CLEAN_VIEW, NO_VIEW)
    return PackedBatch(
        input_ids=torch.cat([input_ids.masked_fill(hidden, mask_token_id), input_ids], 1),
        target_ids=torch.cat([input_ids, input_ids], 1),
        position_ids=torch.cat([positions, positions], 1),
        view=torch.cat([noisy_view, clean_view], 1),
        sample=torch.zeros(batch, 2 * length, dtype=torch.long, device=input_ids.device),
        weight=torch.cat([torch.where(hidden, weight.float(), 0.0), torch.zeros_like(weight, dtype=torch.float32)], 1),
        response_tokens=(response & valid).sum(),
    )


def weighted_cross_entropy(
    hidden: Tensor, lm_head_weight: Tensor, targets: Tensor, weight: Tensor, normaliser: Tensor
) -> Tensor:
    """Sum of weighted cross-entropies over a normaliser: the block-diffusion loss (SDAR, equation 3).

    A `BLANK` target stands for the uniform distribution. A model so trained has no confidence behind the end of its text, and
    decoding, which reveals the most confident positions first, spends no step there.

    Args:
        hidden: [tokens, hidden_size] final hidden states at masked positions.
        lm_head_weight: [vocab, hidden_size].
        targets: [tokens] long, `BLANK` included.
        weight: [tokens] float.
        normaliser: Scalar; the number of response tokens.

    Returns:
        A scalar, 0 (with a graph) if there are no tokens.
    """
    log_probs = F.linear(hidden, lm_head_weight).float().log_softmax(-1)
    of_target = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    losses = -torch.where(targets == BLANK, log_probs.mean(-1), of_target)
    return (losses * weight).sum() / normaliser.clamp(min=1)


def residual_kl(student: Tensor, teacher: Tensor, lm_head_weight: Tensor, weight: Tensor, normaliser: Tensor) -> Tensor:
    """Forward KL( softmax(B) || softmax(A + C) ), weighted and normalised (MRP, section 3).

    Args:
        student: [tokens, hidden_size], h_A + h_C.
        teacher: [tokens, hidden_size], h_B.
        lm_head_weight: [vocab, hidden_size], frozen.
        weight: [tokens] float.
        normaliser: Scalar; the number of response tokens.
    """
    student_logp = F.linear(student, lm_head_weight).float().log_softmax(-1)
    teacher_logp = F.linear(teacher, lm_head_weight).float().log_softmax(-1)
    divergence = F.kl_div(student_logp, teacher_logp, log_target=True, reduction="none").sum(-1)
    return (divergence * weight).sum() / normaliser.clamp(min=1)


def order_kl(
    student: Tensor, teacher: Tensor, lm_head_weight: Tensor, block: Tensor, normaliser: Tensor, mask_token_id: int
) -> Tensor:
    """How far the student is from the teacher about which position of a block is revealed next.

    Decoding reveals the most confident position first. Where several tokens are all but certain, `residual_kl` is blind to
    their order, and it is the order that most drafts get wrong. Here each block's positions share a probability of being
    first, in proportion to the odds p / (1 - p) of the teacher's token, and the divergences KL(teacher || student) of
    these are summed.

    Args:
        student: [tokens, hidden_size], h_A + h_C at masked positions.
        teacher: [tokens, hidden_size], h_B.
        lm_head_weight: [vocab, hidden_size], frozen.
        block: [tokens] long, a number for each block.
        normaliser: Scalar; the number of response tokens.
        mask_token_id: Never picked, and outside the softmax.
    """

    def logits(hidden: Tensor) -> Tensor:
        scores = F.linear(hidden, lm_head_weight).float()
        return scores.index_fill(1, torch.tensor([mask_token_id], device=scores.device), -torch.inf)

    with torch.no_grad():
        of_teacher = logits(teacher)
        token = of_teacher.argmax(-1)
        wanted = _log_softmax_within(log_odds(of_teacher, token)[1], block)
    given = _log_softmax_within(log_odds(logits(student), token)[1], block)
    return (wanted.exp() * (wanted - given)).sum() / normaliser.clamp(min=1)


def _log_softmax_within(values: Tensor, group: Tensor) -> Tensor:
    """[n] log-softmax of values [n] over the members of each one's group [n]."""
    groups = int(group.max()) + 1 if len(group) else 0
    largest = values.new_full((groups,), -torch.inf).scatter_reduce(0, group, values.detach(), "amax")
    total = values.new_zeros(groups).index_add(0, group, (values - largest[group]).exp())
    return values - largest[group] - total[group].log()


__all__ = [
    "BLANK",
    "CLEAN_VIEW",
    "IGNORE_INDEX",
    "NO_VIEW",
    "PackedBatch",
    "block_causal_mask",
    "order_kl",
    "pack_noisy",
    "packed_mask",
    "residual_kl",
    "weighted_cross_entropy",
]
