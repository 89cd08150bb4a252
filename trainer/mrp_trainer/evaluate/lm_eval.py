"""The model `mrp` of lm-eval: log-likelihood tasks use `score`, and all else is as with lm-eval's
own model `hf`.

``python -m mrp_trainer.evaluate.lm_eval run --model mrp --model_args
pretrained=FOLDER,trust_remote_code=True --tasks TASK`` is lm-eval's own command line. In Python,
import this module and call `lm_eval.simple_evaluate(model="mrp", ...)`.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from .decoded import pad_left

logger = logging.getLogger(__name__)

# Rows of a batch for lm-eval's `auto`: `score` itself bounds the memory of a forward.
ROWS = 16

# An encoded request of lm-eval: the request or None, ids of the context, and ids of the
# continuation.
Encoded = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("mrp")
class MRPLM(HFLM):
    """lm-eval's `HFLM` with the log-likelihoods of decoding from left to right, one token a
    step."""

    @property
    def max_length(self) -> int:
        """Return one less than the most tokens of a text: lm-eval adds one, as autoregressive
        models do not read the last."""
        length: int = super().max_length
        return length - 1

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        return ROWS

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Encoded],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score the continuation of each context; return its log-probability, and whether greedy
        decoding gives it."""
        rows = override_bs or (self.batch_size if isinstance(self.batch_size, int) else ROWS)
        texts = [[*context, *continuation] for _, context, continuation in requests]
        limit = self.max_length + 1
        if cut := sum(len(text) > limit for text in texts):
            logger.warning(
                f"{cut} texts are longer than {limit} tokens: their beginnings are left out"
            )
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        scores: dict[int, tuple[float, bool]] = {}
        for begin in tqdm(
            range(0, len(order), rows), disable=disable_tqdm or self.rank != 0, desc="Scoring"
        ):
            batch = order[begin : begin + rows]
            inputs = {
                name: value.to(self.device)
                for name, value in pad_left([texts[index][-limit:] for index in batch], 0).items()
            }
            ids = inputs["input_ids"]
            first = torch.tensor(
                [ids.shape[1] - len(requests[index][2]) for index in batch], device=ids.device
            )
            unscored = torch.arange(ids.shape[1], device=ids.device) < first[:, None]
            out = self.model.score(**inputs, labels=ids.masked_fill(unscored, -100))
            likeliest = (out.greedy | ~out.scored).all(-1)
            for index, total, greedy in zip(
                batch, out.sums.tolist(), likeliest.tolist(), strict=True
            ):
                scores[index] = total, greedy
                if (request := requests[index][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", request, scores[index])
        return [scores[index] for index in range(len(requests))]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
