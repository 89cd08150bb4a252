"""Streamers and stopping criteria that remember what they are shown, and what that has to be."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Blocks(BaseStreamer):
    """Remembers the prompt it was put, then every block."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[Any]]] = []

    def put(self, value: Tensor) -> None:
        self.events.append(("put", value.tolist()))

    def end(self) -> None:
        self.events.append(("end", []))


class Drafts(Blocks):
    """And the states between, of one row."""

    def put_draft(self, value: Tensor) -> None:
        self.events.append(("draft", value[0].tolist()))


class Watch(StoppingCriteria):
    """Never stops; remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return torch.tensor(False)


def assert_streamed(
    events: list[tuple[str, list[Any]]], prompt: list[int], tokens: list[int], steps: list[int]
) -> None:
    """The prompt, the text block by block, and the end; between them a block's states, each of
    which shows just what the first so many steps had revealed, more and more."""
    assert events[0] == ("put", [prompt])
    assert [kind for kind, _ in events].count("end") == 1
    assert events[-1][0] == "end"
    sent, least = 0, 0
    for kind, shown in events[1:-1]:
        if kind == "put":
            assert shown == tokens[sent : sent + len(shown)]
            sent += len(shown)
            continue
        told = list(zip(shown, tokens[sent:], steps[sent:], strict=False))
        there = [step for one, token, step in told if one == token]
        least = max([least, *there])
        assert all(one == token or step > least for one, token, step in told)
    assert sent == len(tokens)


def assert_asked(
    seen: Sequence[list[list[int]]],
    given: list[list[int]],
    texts: Sequence[list[int]],
    mask: int,
    pad: int,
) -> None:
    """The batch as it was given and n tokens behind: every length of every row once it is final, in
    order; the mask id where a row has fewer tokens, and padding behind one that has ended."""
    width, at = len(given[0]), [0] * len(given)
    for ids in seen:
        length = len(ids[0]) - width
        for row, (shown, text) in enumerate(zip(ids, texts, strict=True)):
            assert shown[:width] == given[row]
            new = shown[width:]
            known = next((n for n, token in enumerate(new) if token == mask), length)
            assert new[known:] == [mask] * (length - known)
            assert new[:known] == (text + [pad] * length)[:known]
            if known == length <= len(text):
                assert length <= at[row] + 1, "every length is shown before the next"
                at[row] = max(at[row], length)
    assert at == list(map(len, texts))
    assert len(seen) <= sum(at)
