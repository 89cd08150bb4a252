"""How far drafts carry.

Acceptance by depth: in a round the backbone's own reveals lead from a row's next state, which is known, from draft to draft.
Draft k is accepted if they lead through k drafts. The chance of that, given that k - 1 were accepted, is counted over the
rounds that had a k-th to offer: some state that was submitted (in this round or, in vain, in the one before) lies k denoising
steps behind the row's next state and keeps everything that the (k - 1)-th accepted one shows.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.budget import UNTIMED_STATES

from .decoded import Decoded, decode_prompts
from .intervals import Interval, ratio_of_sums


def acceptance_by_depth(decoded: Decoded) -> list[tuple[int, Interval]]:
    """Count by depth the rounds that had a k-th draft to offer, and give the share of them in which it was accepted.

    Depths that were never offered, and modes without drafts, have none. Intervals are over problems.
    """
    offered, accepted = decoded.offered_at_depth.T, decoded.accepted_at_depth.T
    rates = [(int(one.sum()), ratio_of_sums(right, one)) for one, right in zip(offered, accepted, strict=True)]
    return [(count, rate) for count, rate in rates if rate is not None]


def mean_accepted_length(decoded: Decoded) -> Interval | None:
    """Give the denoising steps that a row takes in a round: the one that every round makes, and one for each accepted draft."""
    steps = [rounds + accepted for rounds, accepted in zip(decoded.rounds, decoded.accepted, strict=True)]
    return ratio_of_sums(steps, decoded.rounds)


def measure_acceptance(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    batch_size: int = 16,
    **options: Any,
) -> dict[str, float]:
    """Decode a few prompts with `mrp_spec`, greedily, and measure how far its drafts carry.

    For use while training: gradients are off, and no random number is drawn. A row drafts as many states as
    `num_draft_states` says, or the checkpoint's config; 4 where that says `auto`. `options` are for `generate`.

    Returns:
        `mean_accepted_length` (denoising steps per round, 1 where no draft is right), `tokens_per_forward` and
        `first_draft_acceptance` (of the rounds with a draft, the share in which the first was right; 0 if there were none).
    """
    own = getattr(model.generation_config, "num_draft_states", None)
    asked = {"decoding": "mrp_spec", "do_sample": False, "num_draft_states": own if isinstance(own, int) else UNTIMED_STATES}
    decoded = decode_prompts(model, tokenizer, prompts, None, max_new_tokens, batch_size, **{**asked, **options})
    offered, accepted = (at[:, :1].sum() for at in (decoded.offered_at_depth, decoded.accepted_at_depth))
    rounds = sum(decoded.rounds)
    return {
        "mean_accepted_length": 1 + sum(decoded.accepted) / rounds if rounds else 1.0,
        "tokens_per_forward": decoded.tokens_per_forward,
        "first_draft_acceptance": float(accepted / offered) if offered else 0.0,
    }
