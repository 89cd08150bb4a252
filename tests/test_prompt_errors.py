"""Prompts, masks and lengths that `generate` refuses before the backbone runs, naming the value and the remedy."""

import re
from typing import Any

import pytest
import torch
from conftest import make_model
from refusals import EMBEDS, PAIR, PROMPT, ForwardRan, guarded, model, rejected
from torch import Tensor
from transformers import BatchEncoding, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPForCausalLM

__all__ = ["model"]  # fixtures


@pytest.fixture(scope="module")
def short_model() -> MRPForCausalLM:
    return guarded(make_model(max_position_embeddings=16))


# Lengths


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        (0, r"an int of 1 or more"),
        (-3, r"an int of 1 or more"),
        (2.5, r"an int of 1 or more"),
        (True, r"an int of 1 or more"),
    ],
)
def test_max_new_tokens(model: MRPForCausalLM, limit: Any, remedy: str) -> None:
    rejected(lambda: model.generate(PROMPT, max_new_tokens=limit), rf"max_new_tokens.* is {limit}", remedy)


@pytest.mark.parametrize("prompt_length", [5, 15, 16, 17])
def test_prompt_and_new_tokens_exceed_the_positions(short_model: MRPForCausalLM, prompt_length: int) -> None:
    new = max(1, 17 - prompt_length)
    rejected(
        lambda: short_model.generate(torch.ones(1, prompt_length, dtype=torch.long), max_new_tokens=new),
        rf"prompt of {prompt_length} tokens and {new} new ones .*max_position_embeddings=16",
        r"shorten the prompt or lower max_new_tokens",
    )


@pytest.mark.parametrize("padding", [0, 30])
def test_the_last_position_can_be_used(short_model: MRPForCausalLM, padding: int) -> None:
    """5 + 11 = 16 tokens fit; padding takes no position."""
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), PROMPT], 1)
    with pytest.raises(ForwardRan):
        short_model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=11)


@pytest.mark.parametrize("where", ["kwarg", "model.generation_config"])
def test_max_length_exceeds_the_positions(short_model: MRPForCausalLM, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_length": 17}
    if where == "model.generation_config":
        monkeypatch.setattr(short_model, "generation_config", GenerationConfig(**options))
        options = {}
    rejected(lambda: short_model.generate(PROMPT, **options), r"17.*max_position_embeddings=16", r"shorten|lower max_length")


def test_max_length_not_above_the_prompt(model: MRPForCausalLM) -> None:
    rejected(lambda: model.generate(PROMPT, max_length=5), r"is 5, but `max_length` is set to 5", r"increasing `max_length`")


# Prompts


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (1, 2, 3)], ids=str)
def test_prompts_without_a_token_or_a_row(model: MRPForCausalLM, shape: tuple[int, ...]) -> None:
    rejected(
        lambda: model.generate(torch.ones(shape, dtype=torch.long), max_new_tokens=4),
        rf"shape {re.escape(str(list(shape)))}",
        r"at least one row with at least one token",
    )


def test_a_prompt_without_a_dimension_of_rows(model: MRPForCausalLM) -> None:
    rejected(
        lambda: model.generate(PROMPT[0], max_new_tokens=4), r"shape \[5\], without a dimension of rows", r"input_ids\[None\]"
    )


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (PROMPT.float(), "torch.float32"),
        (PROMPT.bool(), "torch.bool"),
        (PROMPT.tolist(), "a list"),
        (PROMPT.numpy(), "a ndarray"),
        ("Ana has 3 pens", "a str"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_prompts_that_are_no_ids(model: MRPForCausalLM, ids: Any, kind: str) -> None:
    for call in (lambda: model.generate(ids, max_new_tokens=4), lambda: model.generate(input_ids=ids, max_new_tokens=4)):
        rejected(call, f"input_ids are {kind}", r"pass a \[rows, length\] tensor of ids, torch\.long$")


def test_what_a_tokenizer_returns_in_place_of_ids(model: MRPForCausalLM) -> None:
    inputs = BatchEncoding({"input_ids": PROMPT})
    rejected(lambda: model.generate(inputs, max_new_tokens=4), "input_ids are a BatchEncoding", r"pass \*\*inputs")


def test_ids_of_32_bits(model: MRPForCausalLM) -> None:
    with pytest.raises(ForwardRan):
        model.generate(PROMPT.int(), max_new_tokens=4)


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_is_all_padding(model: MRPForCausalLM, row: int) -> None:
    mask = torch.ones_like(PAIR)
    mask[row] = 0
    rejected(
        lambda: model.generate(PAIR, attention_mask=mask, max_new_tokens=4), rf"row {row} has no token", r"[Dd]rop the row"
    )


@pytest.mark.parametrize("mask_row", [[1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]], ids=str)
def test_a_mask_with_holes(model: MRPForCausalLM, mask_row: list[int]) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    rejected(
        lambda: model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1], mask_row]), max_new_tokens=4),
        r"attention_mask of row 1 has holes",
        r"must be contiguous",
    )


@pytest.mark.parametrize("mask_row", [[0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]], ids=str)
def test_padding_on_either_side_or_both_is_no_hole(model: MRPForCausalLM, mask_row: list[int]) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(ForwardRan):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1], mask_row]), max_new_tokens=4)


@pytest.mark.parametrize(
    ("ids", "value", "remedy"),
    [
        ([[5, 0, 7]], r"row 0 has holes", r"contiguous"),
        ([[0, 0, 0], [1, 2, 3]], r"row 0 has no token", r"[Dd]rop"),
    ],
)
def test_the_mask_that_transformers_infers(model: MRPForCausalLM, ids: list[list[int]], value: str, remedy: str) -> None:
    rejected(lambda: model.generate(torch.tensor(ids), pad_token_id=0, max_new_tokens=4), value, remedy)


@pytest.mark.parametrize("shape", [(2, 1, 3, 3), (1, 2, 3), (2, 4), (2, 2), (1, 3), (3,)], ids=str)
def test_a_mask_of_another_shape(model: MRPForCausalLM, shape: tuple[int, ...]) -> None:
    rejected(
        lambda: model.generate(PAIR, attention_mask=torch.ones(shape, dtype=torch.long), max_new_tokens=4),
        rf"{re.escape(str(list(shape)))} for input_ids of \[2, 3\]",
        r"2-D mask of the same shape",
    )


@pytest.mark.parametrize("column", [0, 2])
def test_the_mask_id_in_the_prompt(model: MRPForCausalLM, column: int) -> None:
    ids = PAIR.clone()
    ids[1, column] = 60
    rejected(lambda: model.generate(ids, max_new_tokens=4), r"mask id 60", r"infill_ids")


@pytest.mark.parametrize("padding", [60, 64, -1])
def test_what_padding_holds_does_not_matter(model: MRPForCausalLM, padding: int) -> None:
    ids = PAIR.clone()
    ids[1, 0] = padding
    with pytest.raises(ForwardRan):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]), max_new_tokens=4)


@pytest.mark.parametrize("token", [64, 99, -1])
def test_an_id_outside_the_vocabulary(model: MRPForCausalLM, token: int) -> None:
    ids = PAIR.clone()
    ids[1, 1] = token
    value = rf"id {token}, outside the vocabulary of 64"
    rejected(lambda: model.generate(ids, max_new_tokens=4), value, r"use this model's tokenizer")


def test_no_ids(model: MRPForCausalLM) -> None:
    rejected(lambda: model.generate(max_new_tokens=4), r"needs input_ids", r"pass a \[rows, length\] tensor")


def test_embeddings_in_place_of_ids(model: MRPForCausalLM) -> None:
    rejected(
        lambda: model.generate(inputs_embeds=EMBEDS, max_new_tokens=4), r"^inputs_embeds are not supported", r"as input_ids"
    )


class SilentStreamer(BaseStreamer):
    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("inputs", "options"),
    [(PAIR, {}), (PROMPT, {"do_sample": True, "num_return_sequences": 2})],
)
def test_a_streamer_with_two_rows(model: MRPForCausalLM, inputs: Tensor, options: dict[str, Any]) -> None:
    rejected(
        lambda: model.generate(inputs, max_new_tokens=4, streamer=SilentStreamer(), **options),
        r"the batch has 2",
        r"stream one prompt at a time",
    )
