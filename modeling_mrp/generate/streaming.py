"""Streaming of texts while they are decoded, each row to a streamer of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .decode_state import DecodeState, Request


class Streams:
    """The feeding of streamers: the prompt, finished blocks in order, and drafts to a streamer that has `put_draft`.

    Args:
        streamers: One for each row.
        prompts: Of each row a 1-D long tensor of ids, without padding: what its streamer is put first, as [1, length].
        request: What was asked for.
        block_size: Tokens of a block.
    """

    def __init__(self, streamers: Sequence[BaseStreamer], prompts: list[Tensor], request: Request, block_size: int) -> None:
        self.open, self.block_size = dict(enumerate(streamers)), block_size
        self.sent, self.limit = request.prompt_length.tolist(), request.limit.tolist()
        for streamer, prompt in zip(streamers, prompts, strict=True):
            streamer.put(prompt[None].cpu())

    def on_round(self, state: DecodeState, rows: list[int]) -> None:
        """Put what a round has finished, and end the streams of rows that have ended; `rows` are those of the state."""
        current, text = state.current, state.text
        starts, stops, going = torch.stack([current.start, text.stop, current.valid.long()]).tolist()
        for place, row in enumerate(rows):
            if (streamer := self.open.get(row)) is None:
                continue
            start, sent = starts[place], self.sent[row]
            upto = min(start, stops[place]) if going[place] else stops[place]
            if upto > sent:
                streamer.put(text.tokens[place, sent:upto].cpu())
                self.sent[row] = upto
            if not going[place]:
                self.open.pop(row).end()
            elif (put_draft := getattr(streamer, "put_draft", None)) is not None:
                begin, end = max(start, self.sent[row]), min(start + self.block_size, self.limit[row])
                put_draft(text.tokens[place : place + 1, begin:end].cpu())


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
