"""What `generate`'s options do to the text: values, derived by hand or from a second way to the same answer."""

from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import (
    LIVELY,
    MASK,
    MODES,
    PROMPTS,
    VOCAB,
    generate,
    inside_a_block,
    left_padded,
    text,
    texts,
)
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria

from modeling_mrp import MRPForCausalLM

# Length, eos and padding


def test_max_length_counts_the_prompt(random_model: MRPForCausalLM) -> None:
    longest = text(random_model, PROMPTS[0], max_new_tokens=30)
    assert text(random_model, PROMPTS[0], max_length=5 + 7) == longest[:7]
    assert text(random_model, PROMPTS[0]) == longest[:20], "transformers' default"


@pytest.mark.parametrize("pad", [None, 55])
def test_padding_and_eos(pad: int | None) -> None:
    """Behind a text stands the padding, or the first eos where there is none; the prompt's own stays; an eos in the prompt ends
    nothing, and None, or no eos, goes before the model's."""
    model = make_model()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = pad, [*range(1, 15)]
    out = generate(model, PROMPTS, max_new_tokens=13, seed=7, **LIVELY)
    padding = out.sequences[:, 10:][out.reveal_step < 0].tolist()
    assert padding == [pad or 1] * len(padding) != []
    assert out.sequences[:, :10].equal(left_padded(PROMPTS)["input_ids"])
    assert out.token_logprobs[out.reveal_step < 0].eq(0).all()
    for off in ([], None):
        assert len(text(model, PROMPTS[0], max_new_tokens=13, eos_token_id=off, seed=7, **LIVELY)) == 13


# Stopping criteria


class Watch(StoppingCriteria):
    """Never stops; remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(("mode", "side"), [(mode, ("left", "right")[place % 2]) for place, mode in enumerate(MODES)])
def test_what_a_criterion_is_shown(random_model: MRPForCausalLM, mode: str, side: str) -> None:
    """The batch as it was given and n tokens behind: every length of every row once it is final, in order; the mask id where a
    row has fewer tokens, and padding behind one that has ended (the last row ends at its fifth token)."""
    options = {"decoding": mode, "max_new_tokens": 9, "seed": 1, "pad_token_id": 55, **LIVELY}
    free = texts(random_model, PROMPTS, **options)
    end = inside_a_block(PROMPTS[2], free[2])
    options["eos_token_id"] = free[2][end]
    free = texts(random_model, PROMPTS, **options)
    assert len(free[2]) == end + 1
    watch, width = Watch(), max(map(len, PROMPTS))
    given = [[0] * (width - len(p)) + p if side == "left" else p + [0] * (width - len(p)) for p in PROMPTS]
    mask = (torch.tensor(given) != 0).long()
    random_model.generate(torch.tensor(given), attention_mask=mask, stopping_criteria=[watch], **options)
    at = [0, 0, 0]
    for ids in watch.seen:
        length = len(ids[0]) - width
        for row, (shown, tokens) in enumerate(zip(ids, free, strict=True)):
            assert shown[:width] == given[row]
            known = [token for token in shown[width:] if token != MASK]
            assert shown[width:] == known + [MASK] * (length - len(known))
            assert known == (tokens + [55] * 9)[: len(known)]
            if len(known) == length <= len(tokens):
                assert length <= at[row] + 1, "every length is shown before the next"
                at[row] = max(at[row], length)
    last = watch.seen[-1][2][width:]
    assert last == (free[2] + [55] * 9)[: len(last)]
    assert at == [len(tokens) for tokens in free]
    assert len(watch.seen) <= sum(at)


class AllRowsDone(StoppingCriteria):
    """As evaluation harnesses have it: built for a prompt's width and a number of rows, it remembers which rows have come to
    one of the tokens, and stops all at once."""

    def __init__(self, tokens: set[int], width: int, rows: int) -> None:
        self.tokens, self.width, self.done = tokens, width, [False] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        last = input_ids[:, self.width :][:, -2:].tolist()
        for row in range(len(self.done)):
            self.done[row] = self.done[row] or not self.tokens.isdisjoint(last[row])
        return False not in self.done


@pytest.mark.parametrize("mode", ["mrp_spec", "mrp_remask"])
def test_a_criterion_that_counts_rows_and_columns(random_model: MRPForCausalLM, mode: str) -> None:
    """The prompts end in such tokens, which must not count. A row goes on at least to its first of them; some row comes to its
    own last of all, and ends there. Alone, every row ends there."""
    options = {"decoding": mode, "max_new_tokens": 24, **LIVELY}
    free = texts(random_model, PROMPTS, seed=[3, 8, 5], **options)
    stops = {tokens[5] for tokens in free} | {prompt[-1] for prompt in PROMPTS}
    first = [min(i for i, token in enumerate(tokens, 1) if token in stops) for tokens in free]
    together = texts(random_model, PROMPTS, seed=[3, 8, 5], stopping_criteria=[AllRowsDone(stops, 10, 3)], **options)
    for tokens, whole, until in zip(together, free, first, strict=True):
        assert tokens == whole[: len(tokens)]
        assert until <= len(tokens) < 24
    assert any(len(tokens) == until for tokens, until in zip(together, first, strict=True))
    for prompt, whole, until, seed in zip(PROMPTS, free, first, (3, 8, 5), strict=True):
        alone = text(random_model, prompt, seed=seed, stopping_criteria=[AllRowsDone(stops, len(prompt), 1)], **options)
        assert alone == whole[:until]


@pytest.mark.parametrize("mode", ["static", "mrp_spec"])
def test_stop_strings(random_model: MRPForCausalLM, id_tokenizer: PreTrainedTokenizerFast, mode: str) -> None:
    options = {"decoding": mode, "max_new_tokens": 14, **LIVELY}
    free = texts(random_model, PROMPTS, seed=[4, 5, 6], **options)
    at = inside_a_block(PROMPTS[0], free[0])
    for stop in (f"w{free[0][at]:02d}", f"w{free[0][at - 1]:02d} w{free[0][at]:02d}"):
        stopped = texts(random_model, PROMPTS, seed=[4, 5, 6], stop_strings=[stop], tokenizer=id_tokenizer, **options)
        assert stopped[0] == free[0][: at + 1]
        for prompt, tokens, got in zip(PROMPTS, free, stopped, strict=True):
            ends = [n for n in range(1, 15) if id_tokenizer.decode(prompt + tokens[:n]).endswith(stop)]
            assert got == tokens[: min([14, *ends])]


# Logits processors


class Record(LogitsProcessor):
    """Changes nothing; remembers the ids before every position that it was asked about."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape == (len(input_ids), VOCAB)
        self.seen += input_ids.tolist()
        return scores


def test_what_a_processor_sees_by_hand(random_model: MRPForCausalLM) -> None:
    """Block 4..7 starts with two masks: at each of them what stands before it, with a mask where nothing is known."""
    record, prompt = Record(), [1, 2, 3, 4, 5, 6]
    out = random_model.generate(
        torch.tensor([prompt]), max_new_tokens=2, logits_processor=[record], return_dict_in_generate=True
    )
    left_first = out.reveal_step[0].tolist() == [0, 1]
    assert record.seen == [prompt, [*prompt, MASK], out.sequences[0, :7].tolist() if left_first else prompt]


# Sampling


def test_torch_manual_seed_governs_unseeded_sampling(random_model: MRPForCausalLM) -> None:
    """And no other: with a seed, or greedily, the generator of torch is left alone."""

    def draw(manual: int | None, **options: Any) -> list[list[int]]:
        if manual is not None:
            torch.manual_seed(manual)
        return texts(random_model, PROMPTS, decoding="mrp_spec", max_new_tokens=12, **{**LIVELY, **options})

    first = draw(0)
    following = draw(None)
    assert draw(0) == first
    assert draw(1) != first
    assert following != draw(1), "a second call goes on in the stream"
    before = torch.get_rng_state()
    draw(None, seed=3)
    draw(None, do_sample=False)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("mode", ["mrp_direct", "mrp_spec"])
def test_seeds_belong_to_rows(random_model: MRPForCausalLM, mode: str) -> None:
    """Rows come prompt by prompt, and the seeds count on through them."""
    options = {"decoding": mode, "max_new_tokens": 12, **LIVELY}
    rows = texts(random_model, PROMPTS[:2], seed=7, num_return_sequences=3, **options)
    assert len(set(map(tuple, rows))) == 6
    assert text(random_model, PROMPTS[1], seed=11, **options) == rows[4]
    assert texts(random_model, [PROMPTS[0]] * 3, seed=[9, 7, 9], **options) == [rows[2], rows[0], rows[2]]
