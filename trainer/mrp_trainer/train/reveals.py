"""Reveals in noisy copies: which positions are revealed, and with which tokens. The reveals make
the states on which a head is trained."""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling_mrp.networks.picker import Picker

from .losses import BLANK
from .options import RevealRule
from .packed import PackedBatch, uniform

# Range of the random thresholds of eager reveals.
_EAGER_FROM, _EAGER_TO = 0.2, 0.95


def block_numbers(batch: PackedBatch) -> Tensor:
    """Number the blocks of a batch consecutively over rows and copies. Return the number of each
    token's block, int64 [batch, length], below batch * length."""
    begins = batch.begins
    return begins.flatten().cumsum(0).view_as(begins) - 1


@dataclass(frozen=True)
class Reveals:
    """A rule that reveals the next positions of each block. A call takes ids and masked positions,
    and returns them as they are after the reveals. Positions after the end of a text are never
    revealed.

    Attributes:
        rule: `on_policy` reveals as decoding does: the most confident position, with the token that
            the model picks. `random` reveals a random position, with its true token (as published).
        eager_share: Under `on_policy`, the share of blocks in which all positions with a confidence
            above a random threshold are revealed, as `dynamic` does. Such states occur in drafts
            under `dynamic`, and in the modes `mrp_remask` and `mrp_direct`.
    """

    rule: RevealRule
    eager_share: float

    @torch.no_grad()
    def __call__(
        self,
        batch: PackedBatch,
        ids: Tensor,
        masked: Tensor,
        hidden: Tensor,
        sampler: Picker,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        """Reveal the next positions of each block.

        Args:
            batch: The noisy copies.
            ids: int64 [batch, length], the current tokens and masks.
            masked: bool [batch, length], True at positions that may be revealed.
            hidden: [batch, length, hidden_size], the model's hidden states for `ids`.
            sampler: Picks the model's token at a position, and computes its log-odds.
            step: Number of the reveal, counted from 0. `random` draws new numbers at each step;
                under `on_policy`, a block keeps its threshold for eager reveals in all steps.

        Returns:
            `ids` and `masked` after the reveals.
        """
        open_ = (masked & (batch.target_ids != BLANK)).nonzero(as_tuple=True)
        group = block_numbers(batch)[open_]
        groups = ids.numel()
        if self.rule == "on_policy":
            picks = sampler(hidden[open_])
            token = picks.token
            score = picks.log_odds
            draw = uniform(batch, 1, batch.block)[open_]
            threshold = (
                _EAGER_FROM + (_EAGER_TO - _EAGER_FROM) * uniform(batch, 2, batch.block)[open_]
            )
            chosen = (_rank(score, group, groups) < 1) | (
                (draw < self.eager_share) & (score > threshold.logit())
            )
        else:
            token = batch.target_ids[open_]
            score = uniform(batch, 16 + step, batch.position_ids)[open_]
            chosen = _rank(score, group, groups) < 1
        row, column = open_[0][chosen], open_[1][chosen]
        ids = ids.clone()
        ids[row, column] = token[chosen]
        masked = masked.clone()
        masked[row, column] = False
        return ids, masked

    def one_per_block(self, batch: PackedBatch, selected: Tensor) -> Tensor:
        """Choose at random one of the `selected` positions of each block that has any. `selected`
        is bool [batch, length]; return a tensor of the same form, True at the chosen positions."""
        marked = selected.nonzero(as_tuple=True)
        draw = uniform(batch, 3, batch.position_ids)[marked]
        first = _rank(draw, block_numbers(batch)[marked], selected.numel()) < 1
        return torch.zeros_like(selected).index_put_(marked, first)


def _rank(score: Tensor, group: Tensor, groups: int) -> Tensor:
    """Rank scores, [n], within groups; return int64 [n]. The highest score of a group has rank 0,
    and equal scores are ranked from left to right. `group`, int64 [n], holds the number of each
    score's group, below `groups`."""
    order = score.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    size = torch.zeros(groups, dtype=torch.long, device=group.device).index_add(
        0, group, torch.ones_like(group)
    )
    rank = torch.arange(len(group), device=group.device) - (size.cumsum(0) - size)[group[order]]
    return torch.empty_like(rank).index_put_((order,), rank)
