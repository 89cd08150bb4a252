"""Picks from the engine's logits, as its own algorithms make them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.generate.sampling import Picks, Sampler
from modeling_mrp.kernels.unembedding import log_odds


@dataclass(frozen=True)
class EngineSampler(Sampler):
    """Greedy picks whose rules judge by rounded probabilities, with the mask id in the softmax.

    So compare the engine's own algorithms, and where probabilities round to the same number the leftmost position is revealed
    first. The mask id is never picked: where it is the likeliest, they reveal nothing and go on forever.

    Attributes:
        unembed: Computes logits [n, vocab] of final hidden states [n, hidden_size].
    """

    unembed: Callable[[Tensor], Tensor] = field(kw_only=True)

    @property
    def blanks(self) -> bool:
        """False: nothing is known of positions that are not active."""
        return False

    def __call__(self, hidden: Tensor, keys: Tensor, *context: Any) -> Picks:
        """Pick at n positions."""
        return Picks(*self._in_chunks(self._picks, hidden))

    def token_log_odds(self, hidden: Tensor, token: Tensor, *context: Any) -> Tensor:
        """[n] log-odds of given tokens [n] under the same softmax."""
        return self._in_chunks(lambda scores, at: (log_odds(scores, token[at])[1],), hidden)[0]

    def _picks(self, scores: Tensor, at: slice) -> tuple[Tensor, ...]:
        probability = scores.softmax(-1)
        token = scores.index_fill(1, scores.new_tensor([self.mask_token_id], dtype=torch.long), -torch.inf).argmax(-1)
        entropy = torch.special.entr(probability).sum(-1) if self.entropy else torch.zeros_like(scores[:, 0])
        return token, *log_odds(scores, token), entropy, probability.gather(1, token[:, None])[:, 0]

    def _in_chunks(self, read: Callable[[Tensor, slice], tuple[Tensor, ...]], hidden: Tensor) -> tuple[Tensor, ...]:
        """Read the scores of so few positions at once that they are no burden."""
        parts = [read(self.unembed(hidden[at]).float(), at) for at in self.unembedding.chunks(len(hidden))]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


__all__ = ["EngineSampler"]
