"""Running means of measurements in a training run, and the meaning of the keys in its log."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from .packed import widest

# The meaning of the keys in a run's log, without the prefixes `eval_` (held-out data), `train_`
# (the whole run), `reread_` (the leave-one-out loss) and `verdict_TARGET_` (drafts at the end, K =
# 8). A and B are the backbone's logits before and after a reveal, A + C is the head's estimate of
# B.
LOG_KEYS = {
    "loss": "what training lowers, per learned token",
    "grad_norm": "norm of the gradient; steady, or slowly falling",
    "learning_rate": "the rate of this step",
    "epoch": "passes over the data so far",
    "kl_stale": "KL(B || A), nats: what the backbone's old logits miss after a reveal",
    "kl_head": "KL(B || A + C), nats: what is still missed with the head",
    "gap_closed": "1 - kl_head / kl_stale: 0 for a head that adds nothing, 1 for a perfect one",
    "agreement": "share of positions where A + C and B have the same likeliest token",
    "kl_order": "nats per block: how wrong the head is about which position comes next",
    "mean_accepted_length": "denoising steps per forward of drafts on held-out prompts; 1: none",
    "tokens_per_forward": "tokens per forward of these drafts, with the head",
    "stale_tokens_per_forward": "the same without the head (`self_spec`), which it has to beat",
    "first_draft_acceptance": "share of first drafts that were right",
    "tokens_per_unit": "tokens per unit of predicted time, with states and passes charged",
    "stale_tokens_per_unit": "the same without the head",
    "runtime": "seconds",
    "samples_per_second": "rows a second",
    "steps_per_second": "steps, or batches of an evaluation, a second",
    "total_flos": "the Trainer's count of operations; 0, as it knows no count of this model",
}


class Measures:
    """Running sums of measurements, such as losses and agreements, and the number of terms in each
    sum. They stay on the device until `take` returns them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, measured: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add measurements. `measured` maps the name of each to a sum and the number of its terms,
        both scalar tensors."""
        for name, (total, count) in measured.items():
            dtype = widest(total.device)
            sum_and_count = torch.stack([total.detach().to(dtype), count.to(total.device, dtype)])
            self._sums[name] = self._sums.get(name, 0) + sum_and_count

    def take(self, accelerator: Accelerator) -> dict[str, tuple[float, float]]:
        """Return, for each name, the sum of a measurement and the number of its terms, over all
        processes since the last call. Every process must call this, with the same names."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name] for name in names])
        self._sums = {}
        reduced = accelerator.reduce(totals, reduction="sum").tolist()
        measured = {}
        for name, (total, count) in zip(names, reduced, strict=True):
            measured[name] = (total, count)
        return measured
