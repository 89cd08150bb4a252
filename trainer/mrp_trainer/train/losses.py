"""Losses over the vocabulary that never hold the logits of all tokens at the same time.

Each loss is a plain function of logits [n, vocab]. `over_vocabulary` applies it to hidden states,
one chunk of tokens at a time. So the logits of student and teacher, their softmaxes and their
gradients exist for only one chunk at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from modeling_mrp.kernels.pick import log_odds, logits_at_once

BLANK = -1  # the target after the end of a text: the uniform distribution
# (the student's logits [n, vocab], chunks of further arguments) -> values [n, m] with gradients,
# notes [n, k] without.
TokenLoss = Callable[..., tuple[Tensor, Tensor]]


def project(hidden: Tensor, lm_head_weight: Tensor) -> Tensor:
    """Compute the logits [n, vocab] of hidden states [n, hidden_size], in float32 or a wider
    dtype."""
    logits = F.linear(hidden, lm_head_weight)
    return logits if logits.dtype == torch.float64 else logits.float()


def over_vocabulary(
    loss: TokenLoss,
    hidden: Tensor,
    lm_head_weight: Tensor,
    *others: Tensor,
    at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply a loss, which is a function of logits, to hidden states, one chunk of tokens at a time.

    If `lm_head_weight` is frozen, only `hidden` gets gradients. The forward pass then computes the
    derivatives of the values with respect to `hidden`, [n, m, hidden_size], while the logits of a
    chunk exist, so that no logits are computed twice. If the weight is trainable, the logits of
    each chunk are computed again in the backward pass.

    Args:
        loss: The loss of a chunk, a function of the chunk's logits, [n, vocab], and of the chunk's
            rows of each of `others`. It returns values, [n, m], which have gradients, and *notes*,
            [n, k]: numbers without gradients. Tensors in its closure get no gradient.
        hidden: [n, hidden_size], the student's hidden states, from which the logits are computed.
        lm_head_weight: [vocab, hidden_size].
        others: Further arguments of the loss, such as targets or the teacher's hidden states; each
            is [n, ...], and is cut into the same chunks.
        at_once: The largest number of logits (single numbers) in a chunk, which holds at least one
            token; by default as many as fit into the device's free memory (`logits_at_once`).

    Returns:
        The values, [n, m], with gradients, and the notes, [n, k], without gradients; `loss` returns
            m values and k notes for each token.
    """
    # Each chunk reads all of `lm_head` several times, and holds about ten tensors of that size:
    # logits of student and teacher, their softmaxes, and gradients.
    at_once = at_once or logits_at_once(hidden.device)
    rows = max(1, at_once // len(lm_head_weight))
    chunks = [slice(start, start + rows) for start in range(0, max(1, len(hidden)), rows)]

    def cut(chunk: slice) -> list[Tensor]:
        return [tensor[chunk] for tensor in (hidden, *others)]

    def apply(hidden_chunk: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return loss(project(hidden_chunk, lm_head_weight), *tensors)

    if not torch.is_grad_enabled() or not (hidden.requires_grad or lm_head_weight.requires_grad):
        chunk_results = [apply(*cut(chunk)) for chunk in chunks]
    elif lm_head_weight.requires_grad:
        chunk_results = [checkpoint(apply, *cut(chunk), use_reentrant=False) for chunk in chunks]
    else:
        return _FrozenVocabulary.apply(apply, chunks, hidden, *others)
    values, notes = (torch.cat(results) for results in zip(*chunk_results, strict=True))
    return values, notes.detach()


class _FrozenVocabulary(torch.autograd.Function):
    """An autograd function that computes the derivatives with respect to the hidden states in its
    forward pass, so that logits are computed only once."""

    @staticmethod
    def forward(
        ctx: Any, apply: TokenLoss, chunks: list[slice], hidden: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        all_values = []
        all_notes = []
        slopes = []
        for chunk in chunks:
            with torch.enable_grad():
                hidden_chunk = hidden[chunk].detach().requires_grad_()
                values, notes = apply(hidden_chunk, *(tensor[chunk].detach() for tensor in others))
                columns = [column.sum() for column in values.unbind(-1)]
            by_column = []
            for column in columns:
                (slope,) = torch.autograd.grad(
                    column, hidden_chunk, retain_graph=column is not columns[-1]
                )
                by_column.append(slope)
            slopes.append(torch.stack(by_column, 1))
            all_values.append(values.detach())
            all_notes.append(notes.detach())
        ctx.save_for_backward(torch.cat(slopes))
        ctx.others = len(others)
        noted = torch.cat(all_notes)
        ctx.mark_non_differentiable(noted)
        return torch.cat(all_values), noted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        by_hidden = torch.einsum("nm,nmh->nh", gradients[0].to(slopes.dtype), slopes)
        return (None, None, by_hidden, *[None] * ctx.others)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross-entropy, [n], between `logits`, [n, vocab], and `targets`, int64 [n]. A
    target equal to `BLANK` stands for the uniform distribution over the vocabulary."""
    log_probs = logits.log_softmax(-1)
    of_target = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return -torch.where(targets == BLANK, log_probs.mean(-1), of_target)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(softmax(teacher) || softmax(student)), [n], from the logits of student and
    teacher, [n, vocab] each (MRP, section 3)."""
    return F.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)


def weighted_cross_entropy(
    hidden: Tensor, lm_head_weight: Tensor, targets: Tensor, weight: Tensor
) -> Tensor:
    """Compute the block-diffusion loss, a weighted sum of cross-entropies (SDAR, equation 3).

    A `BLANK` target stands for the uniform distribution. It teaches the model to have no confidence
    after the end of its text, so that decoding, which reveals the most confident positions first,
    spends no step there.

    Args:
        hidden: [tokens, hidden_size], the final hidden states at masked positions.
        lm_head_weight: [vocab, hidden_size].
        targets: int64 [tokens], the true tokens or `BLANK`.
        weight: float [tokens], the weight of each token's cross-entropy.

    Returns:
        The loss, a scalar. Without tokens it is 0, and still part of the autograd graph.
    """

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(logits, targets)[:, None], logits.new_zeros(len(logits), 0)

    losses, _ = over_vocabulary(loss, hidden, lm_head_weight, targets)
    return (losses[:, 0] * weight).sum()


def order_kl(student: Tensor, teacher: Tensor, block: Tensor, blocks: int) -> Tensor:
    """Compute how much student and teacher disagree on which position of a block is revealed next:
    KL(teacher || student) over the positions of a block, summed over blocks.

    Decoding reveals the most confident position first. Here, the probability that a position is
    revealed first in its block is proportional to the odds `p / (1 - p)` of the teacher's token
    there. This loss complements `forward_kl`, which is blind to the order where several tokens are
    nearly certain, while most wrong drafts are wrong about the order.

    Args:
        student, teacher: [tokens], the log-odds of the teacher's tokens under student and teacher
            (see `top_token_log_odds`).
        block: int64 [tokens], the number of each token's block.
        blocks: A number above all numbers in `block`.

    Returns:
        The divergence, a scalar, with gradients only for the student.
    """
    teacher_log_probs = _log_softmax_within(teacher.detach(), block, blocks)
    return (
        teacher_log_probs.exp() * (teacher_log_probs - _log_softmax_within(student, block, blocks))
    ).sum()


def top_token_log_odds(
    student: Tensor, teacher: Tensor, mask_token_id: int
) -> tuple[Tensor, Tensor]:
    """Compute the log-odds of the teacher's likeliest token, first under the student and then under
    the teacher, [n] each. `student` and `teacher` are logits [n, vocab]. The mask token is excluded
    from both."""
    mask = torch.tensor([mask_token_id], device=teacher.device)
    teacher = teacher.index_fill(1, mask, -torch.inf)
    student = student.index_fill(1, mask, -torch.inf)
    token = teacher.argmax(1)
    return log_odds(student, token), log_odds(teacher, token)


def _log_softmax_within(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Compute the log-softmax of `values`, [n], within groups. `group`, int64 [n], holds the number
    of each value's group; all numbers are below `groups`."""
    largest = values.new_full((groups,), -torch.inf).scatter_reduce(
        0, group, values.detach(), "amax"
    )
    total = values.new_zeros(groups).index_add(0, group, (values - largest[group]).exp())
    return values - largest[group] - total[group].log()
