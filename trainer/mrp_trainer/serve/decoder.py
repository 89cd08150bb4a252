"""The one thread of `mrp serve` that decodes: what waits together, with the same options, is decoded together."""

import asyncio
import copy
import logging
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import TextStreamer

from .requests import Asked

_BATCH_ROWS, _BATCH_TOKENS = 32, 65_536  # of requests that are put together


class Row(TextStreamer):
    """One text while it is decoded.

    Args:
        tokenizer: What makes ids into text.
        tell: Called with each part of the text, and True behind the last.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tell: Callable[[str, bool], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_finalized_text = lambda text, stream_end=False: tell(text, stream_end)
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt, which is left out, and then each block."""
        if not self.next_tokens_are_prompt:
            self.ids += value.tolist()
        super().put(value)


class Job:
    """A request that waits or is decoded; to be made in the event loop that follows it.

    Attributes:
        rows: Its texts.
        events: (row, part of its text, whether that was the last), None once log-probabilities are there, or the error that
            ended it.
        gone: Whether nobody waits for it any more: its rows end at their next token.
    """

    def __init__(self, asked: Asked, tokenizer: PreTrainedTokenizerBase) -> None:
        self.asked, self.key = asked, asked.config.to_json_string()
        self.events: asyncio.Queue[tuple[int, str, bool] | Exception | None] = asyncio.Queue()
        self.rows = [Row(tokenizer, self._teller(row)) for row in range(len(asked.prompts))]
        self.gone = False
        self._loop = asyncio.get_running_loop()

    def _teller(self, row: int) -> Callable[[str, bool], None]:
        return lambda text, last: self.tell((row, text, last))

    def tell(self, event: tuple[int, str, bool] | Exception | None) -> None:
        """Put an event, from any thread."""
        with suppress(RuntimeError):  # the loop has ended: nobody listens
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class _Gone(StoppingCriteria):
    """The criterion that ends the rows of requests whose clients are gone."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([job.gone for job in self.jobs for _ in job.rows], device=input_ids.device)


class Decoder:
    """The queue of one model, and the thread that decodes it.

    Args:
        model: An `MRPForCausalLM`.
        tokenizer: Its tokenizer.

    Attributes:
        counts: Totals by name, and of drafts by name and depth, up to `depth`.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.counts: Counter[str | tuple[str, int]] = Counter()
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._ending = False
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait, and for which somebody waits."""
        return sum(not job.gone for job in self._waiting)

    @property
    def running(self) -> int:
        """Requests that are decoded now."""
        return len(self._running)

    def add(self, asked: Asked) -> Job:
        """Queue a request.

        Raises:
            ConnectionAbortedError: if the server is shutting down.
        """
        job = Job(asked, self.tokenizer)
        with self._change:
            if self._ending:
                raise _shutting_down()
            self._waiting.append(job)
            self._change.notify()
        return job

    def stop(self) -> None:
        """End all that runs at its next token, and tell all that wait."""
        with self._change:
            self._ending = True
            for job in self._waiting + self._running:
                job.tell(_shutting_down())
                job.gone = True
            self._change.notify()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, so long at most."""
        self._thread.join(seconds)

    def _work(self) -> None:
        while batch := self._next():
            try:
                self._decode(batch)
            except Exception as error:
                logging.getLogger("uvicorn.error").exception("decoding failed")
                for job in batch:
                    job.tell(error)

    def _next(self) -> list[Job]:
        """Wait for requests, and take the first with all that can be decoded with it; none at the end."""
        with self._change:
            self._running = []
            while not self._ending:
                self._waiting = [job for job in self._waiting if not job.gone]
                batch: list[Job] = []
                for job in self._waiting:
                    if not batch or (job.key == batch[0].key and _fits([*batch, job])):
                        batch.append(job)
                if batch:
                    self._waiting = [job for job in self._waiting if job not in batch]
                    self._running = batch
                    return batch
                self._change.wait()
            return []

    @torch.inference_mode()
    def _decode(self, batch: list[Job]) -> None:
        prompts = [torch.tensor(ids) for job in batch for ids in job.asked.prompts]
        rows = [row for job in batch for row in job.rows]
        config = copy.deepcopy(batch[0].asked.config)
        config.update(seed=[seed for job in batch for seed in job.asked.seeds], return_dict_in_generate=True)
        output = self.model.generate(
            self._padded(prompts),
            attention_mask=self._padded([torch.ones_like(prompt) for prompt in prompts]),
            generation_config=config,
            tokenizer=self.tokenizer,
            streamer=rows,
            stopping_criteria=StoppingCriteriaList([_Gone(batch)]),
        )
        for row, logprobs in zip(rows, output.token_logprobs.tolist(), strict=True):
            row.logprobs = logprobs[: len(row.ids)]
        self._count(output.stats, sum(map(len, prompts)), sum(len(row.ids) for row in rows))
        for job in batch:
            job.tell(None)

    def _padded(self, rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_side="left").to(self.model.device)

    def _count(self, stats: Any, prompt_tokens: int, tokens: int) -> None:
        self.counts["batches"] += 1
        self.counts["prompt_tokens"] += prompt_tokens
        self.counts["tokens"] += tokens
        self.counts["forwards"] += int(stats.row_forwards.sum())
        self.counts["head_forwards"] += int(stats.row_head_forwards.sum())
        for name in ("offered", "accepted"):
            for depth, count in enumerate(getattr(stats, f"{name}_at_depth").sum(0).tolist(), 1):
                self.counts[name, depth] += count
                self.counts["depth"] = max(self.counts["depth"], depth)


def _fits(batch: list[Job]) -> bool:
    """Tell if requests are few and short enough to be decoded together."""
    lengths = [len(ids) for job in batch for ids in job.asked.prompts]
    tokens = len(lengths) * (max(lengths) + batch[0].asked.config.max_new_tokens)
    return len(lengths) <= _BATCH_ROWS and tokens <= _BATCH_TOKENS


def _shutting_down() -> ConnectionAbortedError:
    return ConnectionAbortedError("the server is shutting down: ask again later")


__all__ = ["Decoder", "Job", "Row"]
