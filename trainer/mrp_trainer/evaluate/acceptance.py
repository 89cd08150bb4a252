"""How far drafts carry, and whether `mrp_remask` takes back the right reveals.

Acceptance by depth: in a round the backbone's own reveals lead from a row's next state, which is known, from draft to draft.
Draft k is accepted if they lead through k drafts. The chance of that, given that k - 1 were accepted, is counted over the
rounds that had a k-th to offer: some state that was submitted (in this round or, in vain, in the one before) lies k denoising
steps behind the row's next state and keeps everything that the (k - 1)-th accepted one shows.

A revoked reveal is compared with the text of `static` for the same prompt. If the blocks before its own are the same in both
texts, taking back a token that `static` has at that position was wrong, and any other was right (also where `static` ends
before it). Behind the place where the texts part, and behind the limit of new tokens, there is nothing to compare with.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.budget import UNTIMED_STATES

from .decoded import Decoded, decode_prompts
from .intervals import Interval, ratio_of_sums


@dataclass(frozen=True)
class DepthAcceptance:
    """One depth.

    Attributes:
        depth: k, from 1.
        offered: Rounds in which k - 1 drafts were accepted and there was a k-th.
        rate: The share of these in which a k-th was accepted.
    """

    depth: int
    offered: int
    rate: Interval


def acceptance_by_depth(decoded: Decoded) -> list[DepthAcceptance]:
    """Every depth that was ever offered, with intervals over problems; none for modes without drafts."""
    depths: list[DepthAcceptance] = []
    for depth, (offered, accepted) in enumerate(zip(decoded.offered_at_depth.T, decoded.accepted_at_depth.T, strict=True), 1):
        if (rate := ratio_of_sums(accepted, offered)) is not None:
            depths.append(DepthAcceptance(depth, int(offered.sum()), rate))
    return depths


def mean_accepted_length(decoded: Decoded) -> Interval | None:
    """Denoising steps that a row takes in a round: the one that every round makes, and one for each accepted draft."""
    steps = [rounds + accepted for rounds, accepted in zip(decoded.rounds, decoded.accepted, strict=True)]
    return ratio_of_sums(steps, decoded.rounds)


@dataclass(frozen=True)
class Revocations:
    """Reveals taken back, by problem."""

    right: list[int]
    wrong: list[int]
    not_comparable: list[int]

    def right_share(self) -> Interval | None:
        """Right ones over those that can be compared; None if none can."""
        return ratio_of_sums(self.right, [r + w for r, w in zip(self.right, self.wrong, strict=True)])


def judged_revocations(decoded: Decoded, static: Decoded, block_size: int) -> Revocations:
    """Compares each reveal that was taken back with the text of `static` for the same prompt."""
    counts = Revocations([], [], [])
    rows = zip(decoded.revocations, decoded.ids, static.ids, decoded.prompt_lengths, strict=True)
    for events, text, static_text, prompt_length in rows:
        verdicts = [
            _verdict(column, token, text, static_text, prompt_length, block_size, static.max_new_tokens)
            for column, token in events
        ]
        counts.right.append(verdicts.count("right"))
        counts.wrong.append(verdicts.count("wrong"))
        counts.not_comparable.append(verdicts.count("not comparable"))
    return counts


def _verdict(
    column: int,
    token: int,
    text: Sequence[int],
    static_text: Sequence[int],
    prompt_length: int,
    block_size: int,
    max_new_tokens: int,
) -> str:
    before = max(0, (prompt_length + column) // block_size * block_size - prompt_length)
    if column >= max_new_tokens or text[:before] != static_text[:before]:
        return "not comparable"
    return "wrong" if column < len(static_text) and static_text[column] == token else "right"


def measure_acceptance(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    batch_size: int = 16,
    **options: Any,
) -> dict[str, float]:
    """Really decodes a few prompts with `mrp_spec`, greedily, and says how far its drafts carry.

    For use while training: gradients are off, every module's train or eval mode is as before afterwards, and no random number
    is drawn. A row drafts as many states as `num_draft_states` says, or the checkpoint's config; 4 where that says `auto`.

    Args:
        model: An `MRPForCausalLM` with a head, on any device, also inside a peft model or a distributed wrapper with `module`.
        tokenizer: Its tokenizer.
        prompts: The ids of each.
        max_new_tokens: Per prompt.
        batch_size: Prompts per `generate`.
        options: For `generate`, such as `num_draft_states`.

    Returns:
        `mean_accepted_length` (denoising steps per round, 1 where no draft is right), `tokens_per_forward` and
        `first_draft_acceptance` (of the rounds with a draft, the share in which the first was right; 0 if there were none).

    Raises:
        ValueError: without a prompt or a head, or for options that `generate` refuses.
    """
    plain = unwrapped(model)
    own = getattr(plain.generation_config, "num_draft_states", None)
    options = {"num_draft_states": own if isinstance(own, int) else UNTIMED_STATES, **options}
    with _in_eval_mode(plain):
        decoded = decode_prompts(
            plain,
            tokenizer,
            prompts,
            None,
            max_new_tokens,
            batch_size,
            **{"decoding": "mrp_spec", "do_sample": False, **options},
        )
    offered, accepted = (at[:, :1].sum() for at in (decoded.offered_at_depth, decoded.accepted_at_depth))
    rounds = sum(decoded.rounds)
    return {
        "mean_accepted_length": 1 + sum(decoded.accepted) / rounds if rounds else 1.0,
        "tokens_per_forward": decoded.tokens_per_forward,
        "first_draft_acceptance": float(accepted / offered) if offered else 0.0,
    }


def unwrapped(model: Any) -> Any:
    """The model inside distributed, compiled and peft wrappers; adapters of the LoRA kind stay where they are in it."""
    while True:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif "module" in (inside := dict(model.named_children())):
            model = inside["module"]
        elif "_orig_mod" in inside:
            model = inside["_orig_mod"]
        else:
            return model


@contextmanager
def _in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Every module in eval mode, and each as it was afterwards: a trainer may keep a frozen part in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


__all__ = [
    "DepthAcceptance",
    "Revocations",
    "acceptance_by_depth",
    "judged_revocations",
    "mean_accepted_length",
    "measure_acceptance",
    "unwrapped",
]
