"""Acceptance of drafts: accepted lengths, and acceptance by depth.

In a round the backbone scores a row's current state and drafted states. Its reveals lead from the
current state through one draft after another; draft k is accepted if the reveals pass through k
drafts. Drafts that the previous round scored but refused can be accepted, too.

Acceptance at depth k is a share of the rounds in which at least k - 1 drafts were accepted and a
k-th was on offer. A k-th draft was on offer if it was accepted, or if the round scored a draft that
could follow the (k - 1)-th accepted draft (for k = 1, the current state). A draft can follow a
state if it keeps every token revealed there, and reveals more.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .decoded import Decoded, decode_prompts
from .intervals import Interval, ratio_of_sums

# K where the model's config says `auto`, whose number of states depends on the device.
USUAL_STATES = 4


def acceptance_by_depth(decoded: Decoded) -> list[tuple[int, Interval]]:
    """Measure how often drafts are accepted at each depth. A round accepts drafts one after
    another; the first has depth 1, the next has depth 2, and so on.

    A draft of depth k is on offer in a round that accepts k - 1 drafts and has also scored a draft
    that can follow them. A draft that is accepted counts as on offer. For example, a round that
    accepts two drafts, and has scored a third that can follow these, has drafts of the depths 1, 2
    and 3 on offer.

    Returns:
        A list with a pair for each depth 1, 2, ...: the number of rounds in which a draft of this
        depth was on offer, and the share of these rounds in which it was accepted, with the
        interval of a bootstrap over problems. The list ends before the first depth at which no
        draft was on offer. It is empty for modes without drafts.
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
    """Compute the mean number of denoising steps that a row makes in a round, with a confidence
    interval. A round makes one step, and one more for each draft that is accepted. Return None if
    there are no rounds."""
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

    This can be called during training: gradients are off, and no random number is drawn. `options`
    are options of `generate`. By default `num_draft_states` is that of the model's generation
    config, or 4 if it is `auto` there.

    Returns:
        A dict with `mean_accepted_length` (denoising steps per round; 1 if no draft was accepted),
            `tokens_per_forward`, and `first_draft_acceptance` (the share of the rounds with a draft
            on offer in which the first draft was accepted; 0 if there were no such rounds).

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
