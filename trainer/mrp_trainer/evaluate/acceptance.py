"""Acceptance of drafts: accepted lengths, and acceptance by depth.

In a round the backbone scores a row's current state and drafted states. Its reveals lead from the
current state through one draft after another; draft k is accepted if the reveals pass through k
drafts. Acceptance at depth k is a share of the rounds in which k - 1 drafts were accepted and a
k-th was on offer: a scored state (of this round, or refused in the previous one) that lies k
denoising steps after the current state and keeps every token of the (k - 1)-th accepted draft.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .decoded import Decoded, decode_prompts
from .intervals import Interval, ratio_of_sums

# K where the model's config says `auto`, whose number of states depends on the device.
USUAL_STATES = 4


def acceptance_by_depth(decoded: Decoded) -> list[tuple[int, Interval]]:
    """List for each depth k the number of rounds with a k-th draft on offer, and the share of these
    that accepted it.

    Depths without a draft on offer are left out, so modes without drafts have none. Intervals are
    over problems.
    """
    rates = []
    for offered, accepted in zip(
        decoded.offered_at_depth.T, decoded.accepted_at_depth.T, strict=True
    ):
        rate = ratio_of_sums(accepted, offered)
        if rate is not None:
            rates.append((int(offered.sum()), rate))
    return rates


def mean_accepted_length(decoded: Decoded) -> Interval | None:
    """Compute the mean denoising steps of a row per round: one, plus its accepted drafts; None
    without rounds."""
    steps = [
        rounds + accepted for rounds, accepted in zip(decoded.rounds, decoded.accepted, strict=True)
    ]
    return ratio_of_sums(steps, decoded.rounds)


def measure_acceptance(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    batch_size: int = 16,
    **options: Any,
) -> dict[str, float]:
    """Decode a few prompts (lists of ids) greedily in mode `mrp_spec`, and measure the acceptance
    of the drafts.

    It can be called while training: gradients are off, and no random number is drawn. `options` are
    options of `generate`. By default `num_draft_states` is that of the model's generation config,
    or 4 if that is `auto`.

    Returns:
        `mean_accepted_length` (denoising steps per round, 1 where no draft is right),
            `tokens_per_forward` and `first_draft_acceptance` (of the rounds with a draft, the share
            in which the first was right; 0 if there were none).

    Raises:
        ValueError: without a prompt or a head, or for options that `generate` refuses.
    """
    states = getattr(model.generation_config, "num_draft_states", None)
    if not isinstance(states, int):
        states = USUAL_STATES
    defaults = {"decoding": "mrp_spec", "do_sample": False, "num_draft_states": states}
    decoded = decode_prompts(
        model, tokenizer, prompts, None, max_new_tokens, batch_size, **{**defaults, **options}
    )
    offered = decoded.offered_at_depth[:, :1].sum()
    accepted = decoded.accepted_at_depth[:, :1].sum()
    rounds = sum(decoded.rounds)
    return {
        "mean_accepted_length": 1 + sum(decoded.accepted) / rounds if rounds else 1.0,
        "tokens_per_forward": decoded.tokens_per_forward,
        "first_draft_acceptance": float(accepted / offered) if offered else 0.0,
    }
