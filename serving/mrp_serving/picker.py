"""Picks from the engine's logits, as its own algorithms make them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from modeling_mrp.kernels.pick import Unembedding, pick_rows
from modeling_mrp.networks.picker import Picker, Picks


@dataclass(frozen=True)
class EngineUnembedding(Unembedding):
    """The engine's own logits.

    Attributes:
        unembed: Computes logits [n, vocab] of final hidden states [n, hidden_size].
    """

    unembed: Callable[[Tensor], Tensor] = field(kw_only=True)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Unembedding.logits`; the mask id stays in the softmax, as the engine's own algorithms have it."""
        return self.unembed(hidden).float()


@dataclass(frozen=True)
class EnginePicker(Picker):
    """Greedy picks with the mask id in the softmax, judged by probabilities that are rounded to float32.

    So compare the engine's own algorithms, and where probabilities round to the same number the leftmost position is revealed
    first. The mask id is never picked: where it is the likeliest, they reveal nothing and go on forever.

    Attributes:
        unembed: As of `EngineUnembedding`.
        rounded: Whether `odds` are those of the rounded probability, else they are exact.
    """

    unembed: Callable[[Tensor], Tensor] = field(kw_only=True)
    rounded: bool = field(default=True, kw_only=True)

    @cached_property
    def unembedding(self) -> Unembedding:
        """See `Picker.unembedding`."""
        return EngineUnembedding(self.lm_head_weight, self.mask_token_id, unembed=self.unembed)

    def _pick(self, logits: Tensor, keys: Tensor | None) -> Picks:
        shown = logits.clone()
        shown[:, self.mask_token_id] = -torch.inf
        token, odds = pick_rows(self.unembedding, shown, shown, None, None, self.dispatch)
        probability = logits.softmax(-1)
        if self.rounded:
            odds = probability.gather(1, token[:, None])[:, 0].double().logit()
        else:  # the mask id joins the others
            own = logits.gather(1, token[:, None])[:, 0]
            odds = own - torch.logaddexp(own - odds, logits[:, self.mask_token_id])
        picks = Picks(token, odds, torch.special.entr(probability).sum(-1) if self.entropy else None)
        return self._listed(picks, logits, shown, None)


__all__ = ["EnginePicker", "EngineUnembedding"]
