"""What a streamer is put: the prompt, every block in order, the drafts between, and nothing behind the end."""

import threading
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import LIVELY, MASK, PROMPTS, StopAfter, inside_a_block, left_padded, text, texts
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPForCausalLM


class Blocks(BaseStreamer):
    """Remembers the prompt it was put, then every block."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[Any]]] = []

    def put(self, value: Tensor) -> None:
        self.events.append(("put", value.tolist()))

    def end(self) -> None:
        self.events.append(("end", []))


class Drafts(Blocks):
    def put_draft(self, value: Tensor) -> None:
        self.events.append(("draft", value[0].tolist()))


@pytest.mark.parametrize("mode", ["static", "mrp_spec", "mrp_direct"])
def test_a_streamer_receives_blocks_in_order(random_model: MRPForCausalLM, mode: str) -> None:
    """A prompt of 6 and 9 tokens: the rest of block 4..7, block 8..11, and three of block 12..15."""
    options = {"decoding": mode, "max_new_tokens": 9, "seed": 0, **LIVELY}
    prompt = [1, 2, 3, 4, 5, 6]
    tokens = text(random_model, prompt, **options)
    streamer = Blocks()
    random_model.generate(torch.tensor([prompt]), streamer=streamer, **options)
    assert streamer.events == [("put", [prompt]), ("put", tokens[:2]), ("put", tokens[2:6]), ("put", tokens[6:]), ("end", [])]


@pytest.mark.parametrize("mode", ["mrp_spec", "mrp_remask"])
def test_a_stream_ends_with_the_text(random_model: MRPForCausalLM, mode: str) -> None:
    """An eos or a criterion cuts the last block; nothing behind the cut was ever streamed."""
    options = {"decoding": mode, "max_new_tokens": 18, "seed": 4, **LIVELY}
    free = text(random_model, PROMPTS[0], **options)
    stop = StopAfter(free[inside_a_block(PROMPTS[0], free)])
    for cut in ({"eos_token_id": [*range(1, 15)]}, {"stopping_criteria": StoppingCriteriaList([stop])}):
        tokens = text(random_model, PROMPTS[0], **cut, **options)
        assert len(tokens) < 18
        streamer = Blocks()
        random_model.generate(torch.tensor([PROMPTS[0]]), streamer=streamer, **cut, **options)
        assert [token for _, block in streamer.events[1:] for token in block] == tokens


@pytest.mark.parametrize("mode", ["mrp_direct", "mrp_spec", "mrp_remask"])
def test_a_streamer_of_drafts_sees_the_states_between(random_model: MRPForCausalLM, mode: str) -> None:
    """Each state reveals more of the block that is put next, and hides the rest behind the mask id."""
    model = make_model(block_size=8)
    options = {"decoding": mode, "max_new_tokens": 19, "seed": 1, "num_draft_states": 2, **LIVELY}
    plain = text(model, PROMPTS[0], **options)
    streamer = Drafts()
    model.generate(torch.tensor([PROMPTS[0]]), streamer=streamer, **options)
    events = streamer.events[1:]
    assert events.pop() == ("end", [])
    assert [token for kind, block in events if kind == "put" for token in block] == plain
    masks_left = []
    drafts: list[list[int]] = []
    for kind, tokens in events:
        if kind == "draft":
            drafts.append(tokens)
            continue
        masks = [draft.count(MASK) for draft in drafts]
        assert masks == sorted(set(masks), reverse=True), "every state reveals more than the one before"
        for draft in drafts:
            assert all(known in (MASK, token) for known, token in zip(draft, tokens, strict=True))
        masks_left += masks
        drafts = []
    assert not drafts
    assert sum(left > 0 for left in masks_left) >= 4


def test_states_of_static_by_hand(random_model: MRPForCausalLM) -> None:
    """Whole blocks of four: the prefill and three forwards reveal one token each, and a put follows a complete block."""
    streamer = Drafts()
    random_model.generate(torch.tensor([[1, 2, 3, 4]]), streamer=streamer, max_new_tokens=8)
    shown = [(kind, tokens.count(MASK)) for kind, tokens in streamer.events[1:] if kind == "put" or MASK in tokens]
    assert shown == [*[("draft", 3), ("draft", 2), ("draft", 1), ("put", 0)] * 2]


# Several rows


@pytest.mark.parametrize("mode", ["dynamic", "mrp_spec", "mrp_remask"])
def test_each_row_has_a_stream_of_its_own(random_model: MRPForCausalLM, mode: str) -> None:
    """What a row's streamer is put is what it is put where the row is decoded alone, prompt and drafts included."""
    options = {"decoding": mode, "max_new_tokens": 11, "eos_token_id": [*range(1, 8)], **LIVELY}
    alone = []
    for row, prompt in enumerate(PROMPTS):
        alone.append(Drafts())
        random_model.generate(torch.tensor([prompt]), streamer=alone[-1], seed=3 + row, **options)
    together = [Drafts() for _ in PROMPTS]
    random_model.generate(**left_padded(PROMPTS), streamer=together, seed=3, **options)
    assert [streamer.events for streamer in together] == [streamer.events for streamer in alone]
    assert len({len(streamer.events) for streamer in together}) > 1, "rows should end at different times"


def test_a_row_that_ends_early_ends_its_stream(random_model: MRPForCausalLM) -> None:
    """The row whose last block is given but for one mask ends in its first round; the other is decoded for long after."""
    order: list[str] = []

    class Named(Blocks):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def put(self, value: Tensor) -> None:
            order.append(self.name)

        def end(self) -> None:
            order.append(f"end of {self.name}")

    infill = torch.tensor([[5, 6, 7, 8, 5, 6, 7, MASK], [MASK] * 8])
    random_model.generate(torch.tensor([[1, 2, 3, 4]] * 2), infill_ids=infill, streamer=(Named("a"), Named("b")))
    assert order == ["a", "b", "a", "end of a", "b", "b", "end of b"]


def test_texts_are_read_row_by_row_while_they_are_made(
    random_model: MRPForCausalLM, id_tokenizer: PreTrainedTokenizerFast
) -> None:
    options = {"max_new_tokens": 9, "seed": 0, **LIVELY}
    expected = [id_tokenizer.decode(tokens) for tokens in texts(random_model, PROMPTS, **options)]
    streamers = [TextIteratorStreamer(id_tokenizer, skip_prompt=True, timeout=60) for _ in PROMPTS]
    given = {**left_padded(PROMPTS), "streamer": streamers, **options}
    thread = threading.Thread(target=random_model.generate, kwargs=given)
    thread.start()
    assert ["".join(streamer) for streamer in streamers] == expected
    thread.join()
