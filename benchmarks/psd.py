"""Parallel speculative decoding's rule (PSD, arXiv 2605.15609): the deepest consistent draft is taken. It is not lossless.

Written from the abstract and reviews of the paper: a policy reveals what is confident; from the same predictions drafts of
several depths are made, each with more revealed than the one before; one forward scores them all; and of those the deepest is
kept that the new predictions agree with. Where these say no more, it is assumed that

- the policy is the threshold of `dynamic`, and a deeper draft reveals what the policy would at the stale predictions: once
  all above tau is revealed, that is the surest position left;
- a draft is consistent if every token that it has and the one before has not is what the model now predicts at the one before,
  however sure it is and whether or not the policy would reveal it next, and if all shallower drafts are consistent;
- at the deepest consistent draft the policy goes on with the predictions made there.

So K states a forward are depths 0 to K - 1. Blocks end as in this package: their keys and values cost no forward of their own.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modeling_mrp.generate.decode_state import Text
from modeling_mrp.generate.loop import begin, decode
from modeling_mrp.generate.modes import Amount, Drafting, Mode
from modeling_mrp.generate.pace import Fixed
from modeling_mrp.generate.scoring import Reader
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.revealing import RevealRule
from modeling_mrp.rules.states import Reveal, States

from .common import greedy_decode
from .loops import Made


@dataclass(frozen=True)
class DeepestConsistent(Reader):
    """Reads reveals of which a state's is what the draft behind it adds, where the tokens predicted there are the draft's."""

    def reveal(self, states: States, hidden: Tensor, text: Text, count: Tensor | None = None) -> Reveal:
        """See `Reader.reveal`; the drafts of a row are a chain, slot after slot."""
        said = super().reveal(states, hidden, text, count)
        return replace(said, where=deepest_consistent(states, said, self.mask_token_id))


def deepest_consistent(states: States, said: Reveal, mask_id: int) -> Tensor:
    """Choose what each state of a chain reveals.

    Args:
        states: [rows, n], by depth.
        said: [rows, n] what is predicted at each, and what the policy would reveal.
        mask_id: The mask's id.

    Returns:
        [rows, n, block] bool: what the next state adds, where all of that is predicted; else what the policy says.
    """
    masked = states.masked(mask_id)
    added = masked[:, :-1] & ~masked[:, 1:]
    before, behind = states.map(lambda t: t[:, :-1]), states.map(lambda t: t[:, 1:])
    same = (torch.where(added, said.token[:, :-1], before.ids) == behind.ids).all(-1) & added.any(-1)
    same &= (before.start == behind.start) & (before.parent == behind.parent) & before.valid & behind.valid
    return torch.cat([torch.where(same[..., None], added, said.where[:, :-1]), said.where[:, -1:]], 1)


@dataclass(frozen=True)
class ParallelSpeculative:
    """PSD as a `Loop`.

    Attributes:
        rule: The policy.
        states: K, scored a forward.
    """

    rule: RevealRule
    states: int

    @torch.inference_mode()
    def __call__(self, model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]) -> Made:
        """See `Loop`."""
        mode = Mode(self.rule, drafting=Drafting(self.states, 1))
        task, runner, text, current = greedy_decode(model, mode, prompts, new_tokens, eos, max(2, self.states))
        task = replace(task, reader=DeepestConsistent(**vars(task.reader)))
        state = begin(task, runner, text, current, torch.zeros_like(current.start))
        decoded = decode(task, runner, state, Fixed(Amount(self.states)))
        return Made.of(decoded.state.text, decoded.state.held, prompts)
