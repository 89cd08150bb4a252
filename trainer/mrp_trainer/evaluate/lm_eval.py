"""The model `mrp` for lm-eval. Log-likelihood tasks use the model's method `score`. Texts are
decoded in a batch that a waiting text joins as soon as another one ends. Everything else is as in
lm-eval's own model `hf`.

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
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
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
    """lm-eval's `HFLM` for models of this package, under the name `mrp`. It takes the arguments of
    `HFLM`, and differs in two points:

    1. A log-likelihood is that of decoding from left to right, one token per step.
    2. Texts are decoded in a batch. When a text ends, the next one takes its place at once.
    """

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens in a text, minus one. lm-eval adds one to it, because
        autoregressive models do not read the last token."""
        length: int = super().max_length
        return length - 1

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        return ROWS

    @property
    def _rows(self) -> int:
        """The number of texts that are decoded at the same time: lm-eval's batch size, or `ROWS` if
        this is `auto`."""
        return self.batch_size if isinstance(self.batch_size, int) else ROWS

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Decode a text for each request, and cut it before its first stop string. Requests with
        the longest contexts are decoded first, and `batch_size` texts at the same time; the
        returned texts are in the order of the requests. If the option `seed` is given, request i
        has the seed `seed + i`. If lm-eval's mixed precision is on, `HFLM` decodes the texts
        instead.

        Raises:
            ValueError: for options that `generate` refuses.
            RuntimeError: if decoding a text fails, such as where it has no token to choose.
        """
        if self.mixed_precision_dtype is not None:  # autocast applies to one thread only
            return list(super().generate_until(requests, disable_tqdm))
        prepared = []
        for index, request in enumerate(requests):
            prepared.append(self._options_of(request.args, index))
        order = sorted(range(len(requests)), key=lambda index: -len(prepared[index][0]))
        progress = tqdm(total=len(order), disable=disable_tqdm or self.rank != 0, desc="Generating")
        texts: dict[int, str] = {}
        manager = self.model.init_continuous_batching({"max_batch_size": self._rows})
        manager.start()
        try:
            for index in order:
                ids, _, options = prepared[index]
                manager.add_request(ids, str(index), **options)
            while len(texts) < len(order):
                output = manager.get_result()
                if output is None or output.error is not None:
                    raise RuntimeError(output.error if output else str(manager.fatal_error))
                index = int(output.request_id)
                texts[index] = self._answer_of(output.generated_tokens, prepared[index][1])
                self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
                progress.update()
        finally:
            manager.stop(hard_stop=True)  # all texts are complete, or nobody waits for them
            progress.close()
        return [texts[index] for index in range(len(order))]

    def _options_of(
        self, request: tuple[str, dict[str, Any]], index: int
    ) -> tuple[list[int], list[str], dict[str, Any]]:
        """Read a request as lm-eval's `hf` does; return the ids of its context, its stop strings,
        and the arguments of `generate`. `index` is the index of the request."""
        context, given = request
        options: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stops = [text for text in handle_stop_sequences(options.pop("until", None), eos) if text]
        count = options.pop("max_gen_toks")
        room = self.max_length + 1 - count
        if room < 1:
            raise ValueError(
                f"max_gen_toks is {count}: a text has {self.max_length + 1} tokens with its "
                "context, so ask for fewer"
            )
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=room, truncation=self.truncation
        )
        if not options.get("temperature"):
            options.pop("temperature", None)
        if "max_length" not in options:
            options["max_new_tokens"] = count
        if isinstance(seed := options.get("seed"), int):
            options["seed"] = seed + index
        options |= {"stop_strings": stops, "tokenizer": self.tokenizer}
        return ids[0].tolist(), stops, options

    def _answer_of(self, ids: list[int], stops: list[str]) -> str:
        """Convert the ids of a text to an answer: its text up to the first stop string, without the
        part in which the model thinks."""
        end = self.think_end_token
        if not isinstance(end, int):
            answer: str = postprocess_generated_text(self.tok_decode(ids), stops, end)
            return answer
        if end in ids:
            ids = ids[len(ids) - ids[::-1].index(end) :]
        answer = postprocess_generated_text(self.tok_decode(ids).lstrip(), stops, None)
        return answer

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Encoded],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score the continuation of each request's context. For each request, return the
        log-probability of the continuation, and whether greedy decoding would produce it."""
        rows = override_bs or self._rows
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
