"""The two training objectives, as functions of a model and a packed batch. They return sums over
tokens, which the Trainer divides by the number of tokens."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.model.diffusion import taken_from
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.picker import Picker

from .attention import TILES, TRAINING_FLEX, Tiles
from .losses import (
    BLANK,
    forward_kl,
    order_kl,
    over_vocabulary,
    project,
    top_token_log_odds,
    weighted_cross_entropy,
)
from .packed import CleanCache, PackedBatch, noisy_copies, noisy_length, sparse_mask
from .reveals import Reveals, block_numbers

# By name, a sum and the number of its terms.
Measured = dict[str, tuple[Tensor, Tensor]]


def packed_masks(model: MRPForCausalLM, batch: PackedBatch) -> tuple[Any, Any]:
    """Make two attention masks of a batch: one for the queries of all columns, and one for those of
    the noisy copies only. The keys are those of all columns in both. A mask is a `BlockMask` if the
    model has flex attention, `Tiles` if it has tiled attention, and otherwise a bool tensor
    [batch, 1, queries, length] that is True where a query sees a key."""
    rule = batch.rule()
    if model.config._attn_implementation in ("flex_attention", TRAINING_FLEX):
        return sparse_mask(rule, batch.input_ids.shape[1]), sparse_mask(rule, noisy_length(batch))
    mask = rule.dense()
    noisy = mask[:, :, : noisy_length(batch)]
    if model.config._attn_implementation == TILES:
        return Tiles.of(mask), Tiles.of(noisy)
    return mask, noisy


def block_diffusion(model: MRPForCausalLM, batch: PackedBatch) -> tuple[Tensor, Measured]:
    """Compute the backbone's loss (SDAR, equation 3). Return the weighted sum of the
    cross-entropies at masked positions, a scalar that is not yet divided by their number, and an
    empty dict in place of measurements."""
    hidden = model.backbone(batch.input_ids, batch.position_ids, packed_masks(model, batch)[0])
    if model.model.shifted:
        hidden = taken_from(hidden, batch.before())
    chosen = batch.supervised
    return weighted_cross_entropy(
        hidden[chosen], model.lm_head.weight, batch.target_ids[chosen], batch.weight[chosen]
    ), {}


@dataclass(frozen=True)
class HeadObjective:
    """The head's loss: after each of K reveals, the divergence of the logits that the head
    estimates from the logits that the backbone computes. A call takes a model and a `PackedBatch`,
    and returns the loss and measurements.

    The symbols are those of MRP, section 4. A are the backbone's logits before the reveals, and B
    its logits after a reveal. C is the head's correction of A, so A + C is the head's estimate of
    B, and the loss is KL(B || A + C). h_A, h_B and h_C are the hidden states that give A, B and C.

    Attributes:
        reveals: The rule of the reveals. They make the states at which the head is compared with
            the backbone.
        unroll: K, the number of reveals; the losses after them are averaged.
        order_weight: Weight of the loss on the order of reveals, which compares head and backbone
            by the position of each block that they would reveal next (`order_kl`).
        reread_weight: Weight of the leave-one-out loss. It trains the head at a revealed token to
            estimate the logits that the backbone would have if this one token were still masked.
            After the first reveal, one such token of each block contributes.
    """

    reveals: Reveals
    unroll: int = 1
    order_weight: float = 0.0
    reread_weight: float = 1.0

    def __call__(self, model: MRPForCausalLM, batch: PackedBatch) -> tuple[Tensor, Measured]:
        """Return the loss, a scalar, and measurements. The backbone computes h_A first; after each
        of K reveals, the head computes its estimate, and the backbone h_B."""
        passes = _Passes(model, batch)
        noisy = passes.noisy
        sampler = Picker(model.lm_head.weight, model.config.mask_token_id)
        ids = noisy.input_ids
        masked = noisy.supervised
        estimate = passes.h_a
        losses: list[Tensor] = []
        measured: Measured = {}
        for step in range(self.unroll):
            masked_before = masked
            ids, masked = self.reveals(noisy, ids, masked, estimate.detach(), sampler, step)
            estimate = estimate + passes.head(ids, estimate)
            loss, notes = _divergence(
                passes,
                masked,
                passes.backbone(ids),
                estimate,
                self.order_weight,
                measured=step == 0,
            )
            losses.append(loss)
            measured.update(notes)
            if step == 0 and self.reread_weight:
                left_out = self.reveals.one_per_block(noisy, masked_before & ~masked)
                remasked_ids = ids.masked_fill(left_out, model.config.mask_token_id)
                loss, notes = _divergence(passes, left_out, passes.backbone(remasked_ids), estimate)
                losses.append(self.reread_weight * loss)
                measured.update({f"reread_{name}": note for name, note in notes.items()})
        return torch.stack(losses).sum() / self.unroll, measured


@dataclass(frozen=True)
class SequentialObjective:
    """The head's loss for the target `sequential`, at every state that decoding a text passes
    through. A call takes a model and a `PackedBatch`, and returns the loss and measurements.

    The target reveals the leftmost masked position, so the states of a block are known beforehand:
    state j shows the first j tokens. Each state is a noisy copy of the batch, and one pass of the
    backbone computes the logits of all states. From each state, the head follows the text for
    `unroll` reveals. After each reveal, it estimates the logits of the state that is reached. The
    loss is the divergence of this estimate from the backbone's logits of that state, only at the
    position that the target reveals next.

    Attributes:
        unroll: Number of reveals from each state; the losses after them are averaged.
    """

    unroll: int = 1

    def __call__(self, model: MRPForCausalLM, batch: PackedBatch) -> tuple[Tensor, Measured]:
        """Return the loss, a scalar, and measurements after one reveal, as `HeadObjective` does."""
        passes = _Passes(model, batch)
        noisy = passes.noisy
        following = noisy.next_view()
        column = torch.arange(noisy.input_ids.shape[1], device=noisy.input_ids.device)
        column = column.expand_as(noisy.input_ids)
        exists = torch.ones_like(noisy.supervised)
        estimate = passes.h_a
        losses: list[Tensor] = []
        measured: Measured = {}
        for step in range(self.unroll):
            moved = following.gather(1, column)
            exists = exists & (moved >= 0)
            column = torch.where(exists, moved, column)
            ids = noisy.input_ids.gather(1, column)
            estimate = estimate + passes.head(ids, estimate)
            teacher = passes.h_a.gather(1, column[..., None].expand_as(passes.h_a))
            weight = torch.where(exists, noisy.weight.gather(1, column), 0)
            loss, notes = _divergence(
                passes,
                weight > 0,
                teacher,
                estimate,
                measured=step == 0,
                token_weight=weight,
            )
            losses.append(loss)
            measured.update(notes)
        return torch.stack(losses).sum() / self.unroll, measured


def _divergence(
    passes: "_Passes",
    selected: Tensor,
    teacher: Tensor,
    estimate: Tensor,
    order_weight: float = 0.0,
    measured: bool = True,
    token_weight: Tensor | None = None,
) -> tuple[Tensor, Measured]:
    """Compute the loss at the positions `selected`, bool [batch, length].

    If `measured`, also return sums and counts of these measurements: `KL(B || A)`,
    `KL(B || A + C)`, how often A + C and B have the same likeliest token, and, if
    `order_weight` is not 0, the divergence of the order.

    Args:
        passes: The passes over the batch, which hold h_A.
        selected: bool [batch, length], the positions to compare.
        teacher: [batch, length, hidden_size], the backbone's hidden states h_B.
        estimate: [batch, length, hidden_size], the head's estimate of them.
        order_weight: Weight of `order_kl`.
        measured: Whether to return measurements; otherwise they are empty.
        token_weight: [batch, length], the weight of each position's loss; None: the batch's.
    """
    weight = passes.model.lm_head.weight
    config = passes.model.config

    def token_loss(student: Tensor, teacher: Tensor, stale: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            teacher_logits = project(teacher, weight)
        values = [forward_kl(student, teacher_logits)]
        notes = []
        if order_weight:
            odds, of_teacher = top_token_log_odds(student, teacher_logits, config.mask_token_id)
            values.append(odds)
            notes.append(of_teacher)
        if measured:
            with torch.no_grad():
                notes.append(values[0].detach())
                notes.append(forward_kl(project(stale, weight), teacher_logits))
                notes.append((student.argmax(-1) == teacher_logits.argmax(-1)).to(student.dtype))
        return torch.stack(values, 1), torch.stack(notes, 1) if notes else student.new_zeros(
            len(student), 0
        )

    batch = passes.noisy
    values, notes = over_vocabulary(
        token_loss, estimate[selected], weight, teacher[selected], passes.h_a[selected]
    )
    weights = batch.weight if token_weight is None else token_weight
    loss = (values[:, 0] * weights[selected]).sum()
    order_measured = {}
    if order_weight:
        has_token = batch.target_ids[selected] != BLANK
        blocks = block_numbers(batch)[selected][has_token]
        order = order_kl(values[has_token, 1], notes[has_token, 0], blocks, selected.numel())
        loss = loss + order_weight * order
        # Count distinct blocks on the device: each sets the entry of its number to 1.
        order_measured["kl_order"] = (
            order,
            torch.zeros(selected.numel(), device=selected.device).index_fill(0, blocks, 1.0).sum(),
        )
    if not measured:
        return loss, {}
    sums = notes[:, -3:].sum(0)
    count = selected.sum()
    return loss, order_measured | {
        name: (sums[i], count) for i, name in enumerate(("kl_head", "kl_stale", "agreement"))
    }


@dataclass
class _Passes:
    """The forward passes of backbone and head over one batch. The first pass of each network
    includes the columns of the clean text; later passes cover only the noisy copies."""

    model: MRPForCausalLM
    batch: PackedBatch
    noisy: PackedBatch = field(init=False)
    h_a: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._length = noisy_length(self.batch)
        self._mask, self._noisy_mask = packed_masks(self.model, self.batch)
        self._of_backbone = CleanCache(self._length)
        self._of_head = CleanCache(self._length)
        with torch.no_grad():
            hidden = self.model.backbone(
                self.batch.input_ids, self.batch.position_ids, self._mask, self._of_backbone
            )
        self.noisy = noisy_copies(self.batch)
        self._before = self.batch.before() if self.model.model.shifted else None
        self._clean = hidden[:, self._length :]
        if self._before is not None:
            hidden = taken_from(hidden, self._before)
        self.h_a = hidden[:, : self._length]
        self._clean_hidden = hidden[:, self._length :]

    @torch.no_grad()
    def backbone(self, ids: Tensor) -> Tensor:
        """Return the backbone's hidden states h_B, [batch, noisy length, hidden_size], for noisy
        copies that hold `ids` in place of their own ids."""
        hidden = self.model.backbone(
            ids, self.noisy.position_ids, self._noisy_mask, self._of_backbone
        )
        if self._before is None:
            return hidden
        return taken_from(torch.cat([hidden, self._clean], 1), self._before[:, : self._length])

    def head(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the head's residual h_C, [batch, noisy length, hidden_size], with gradients. It is
        the correction to add to `hidden`, an estimate of the noisy copies' hidden states before a
        reveal, to estimate those after it. `ids` are the noisy copies' ids after the reveal."""
        if self._of_head.filled:
            return self.model.residual(
                ids, hidden, self.noisy.position_ids, self._noisy_mask, self._of_head
            )
        ids = torch.cat([ids, self.batch.input_ids[:, self._length :]], 1)
        hidden = torch.cat([hidden, self._clean_hidden], 1)
        return self.model.residual(ids, hidden, self.batch.position_ids, self._mask, self._of_head)[
            :, : self._length
        ]
