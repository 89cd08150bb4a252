"""Streaming of texts while they are decoded, each row to a streamer of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..rules.state import Row


class Streams:
    """The feeding of streamers: the prompt, finished blocks in order, and drafts to a streamer that has `put_draft`.

    Args:
        streamers: One for each row.
        prompts: Of each row a 1-D long tensor of ids, without padding: what its streamer is put first, as [1, length].
    """

    def __init__(self, streamers: Sequence[BaseStreamer], prompts: list[Tensor]) -> None:
        self.open = dict(enumerate(streamers))
        self.sent = [len(prompt) for prompt in prompts]
        for streamer, prompt in zip(streamers, prompts, strict=True):
            streamer.put(prompt[None].cpu())

    def on_round(self, rows: Sequence[Row]) -> None:
        """Put what a round has finished, and end the streams of rows that have ended."""
        for row in rows:
            if (streamer := self.open.get(row.place)) is None:
                continue
            sent = self.sent[row.place]
            upto = row.stop if row.stop is not None else row.state.start
            if upto > sent:
                streamer.put(torch.tensor(row.text[sent:upto]))
                self.sent[row.place] = upto
            if row.stop is not None:
                self.open.pop(row.place).end()
            elif (put_draft := getattr(streamer, "put_draft", None)) is not None:
                start = row.state.start
                put_draft(torch.tensor([row.text[max(start, self.sent[row.place]) : min(start + row.block_size, row.limit)]]))


def listed_streamers(streamer: Any, rows: int) -> list[BaseStreamer]:
    """List the streamers of a call, one for each row.

    Raises:
        ValueError: for what is no streamer, another number of them, or one that is to take two rows.
    """
    streamers = list(streamer) if isinstance(streamer, list | tuple) else [streamer]
    for one in streamers:
        if not all(callable(getattr(one, name, None)) for name in ("put", "end")):
            raise ValueError(f"streamer is {one!r}: it must have put and end, as a transformers.TextStreamer has")
    different = len(set(map(id, streamers)))
    if not len(streamers) == different == rows:
        raise ValueError(
            f"a streamer takes one row, the batch has {rows}, and streamer holds {different}: pass a list of {rows} different "
            "ones, or stream one prompt at a time"
        )
    return streamers


__all__ = ["Streams", "listed_streamers"]
