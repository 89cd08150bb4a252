"""What `generate`'s options do to the text: values, derived by hand or from a second way to the same answer."""

from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import (
    BLOCK,
    LIVELY,
    LOSSLESS,
    MASK,
    PROMPTS,
    VOCAB,
    StopAfter,
    every_mode,
    generate,
    inside_a_block,
    left_padded,
    text,
    texts,
)
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

from modeling_mrp import MRPForCausalLM

# Length, eos and padding


@every_mode
def test_max_new_tokens_is_exact(random_model: MRPForCausalLM, mode: str) -> None:
    """Without eos every limit gives exactly so many tokens, and they are the first of the longest text."""
    prompts = [[11], [12, 13, 14], [15, 16, 17, 18], [21, 22, 23, 24, 25]]  # 1, block - 1, block, block + 1
    options = {"decoding": mode, "seed": 0, **LIVELY}
    longest = texts(random_model, prompts, max_new_tokens=11, **options)
    assert [len(tokens) for tokens in longest] == [11] * 4
    inputs = left_padded(prompts)
    for limit in (1, BLOCK - 1, BLOCK, BLOCK + 1):
        ids = random_model.generate(**inputs, max_new_tokens=limit, **options)
        assert ids.tolist() == [row + tokens[:limit] for row, tokens in zip(inputs["input_ids"].tolist(), longest, strict=True)]


def test_max_length_counts_the_prompt(random_model: MRPForCausalLM) -> None:
    longest = text(random_model, PROMPTS[0], max_new_tokens=30)
    assert text(random_model, PROMPTS[0], max_length=5 + 7) == longest[:7]
    assert text(random_model, PROMPTS[0]) == longest[:20], "transformers' default"


def test_a_tensor_unless_a_dict_is_asked_for(random_model: MRPForCausalLM) -> None:
    ids = torch.tensor([PROMPTS[0]])
    plain = random_model.generate(ids, max_new_tokens=6)
    assert type(plain) is Tensor
    assert plain.dtype == torch.long
    full = random_model.generate(ids, max_new_tokens=6, return_dict_in_generate=True)
    assert torch.equal(full.sequences, plain)


@every_mode
def test_nothing_follows_the_first_eos_but_padding(random_model: MRPForCausalLM, mode: str) -> None:
    eos = [*range(1, 15)]
    options = {"decoding": mode, "max_new_tokens": 13, "seed": 7, **LIVELY}
    out = generate(random_model, PROMPTS, eos_token_id=eos, pad_token_id=55, **options)
    assert out.sequences[:, :10].equal(left_padded(PROMPTS)["input_ids"]), "the prompt's own padding stays"
    generated = out.sequences[:, 10:]
    ends = []
    for tokens, steps, logprobs in zip(generated.tolist(), out.reveal_step.tolist(), out.token_logprobs.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), 13)
        ends.append(end)
        assert tokens[end:] == [55] * len(tokens[end:])
        assert [step >= 0 for step in steps] == [True] * end + [False] * (len(tokens) - end)
        assert logprobs[end:] == [0.0] * (len(tokens) - end)
        assert MASK not in tokens
    assert len(set(ends)) > 1, "rows should end at different places, or nothing is padded"
    assert generated.shape[1] == max(ends)


def test_padding_is_the_eos_where_there_is_no_pad_token() -> None:
    model = make_model()
    model.generation_config.pad_token_id = None
    eos = [*range(1, 15)]
    out = generate(model, PROMPTS, eos_token_id=eos, max_new_tokens=13, seed=7, **LIVELY)
    padding = out.sequences[:, 10:][out.reveal_step < 0].tolist()
    assert padding == [eos[0]] * len(padding) != []


def test_an_eos_in_the_prompt_does_not_end_the_text(random_model: MRPForCausalLM) -> None:
    free = text(random_model, [1, 2, 50, 4, 50], max_new_tokens=9)
    assert 50 not in free
    assert text(random_model, [1, 2, 50, 4, 50], max_new_tokens=9, eos_token_id=50) == free


@pytest.mark.parametrize(
    "off",
    [[], None],
)
def test_no_eos_overrides_the_models(off: list[int] | None) -> None:
    model = make_model()
    free = text(model, PROMPTS[0], max_new_tokens=10)
    model.generation_config.eos_token_id = free[2]
    assert len(text(model, PROMPTS[0], max_new_tokens=10)) < 10
    assert text(model, PROMPTS[0], max_new_tokens=10, eos_token_id=off) == free


# Stopping criteria


class Watch(StoppingCriteria):
    """Never stops; remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@every_mode
@pytest.mark.parametrize("side", ["left", "right"])
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


@every_mode
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


def test_a_criterion_behind_an_eos_changes_nothing(random_model: MRPForCausalLM) -> None:
    """One step reveals a whole block at once: token 1 of it is an eos, token 3 meets the criterion."""
    options = {"denoising_steps": 1, "max_new_tokens": 12, "seed": 0, **LIVELY}
    block = text(random_model, [1, 2, 3, 4], **options)[:4]
    assert len(set(block)) == 4
    criteria = StoppingCriteriaList([StopAfter(block[3])])
    assert text(random_model, [1, 2, 3, 4], eos_token_id=block[1], **options) == block[:2]
    assert text(random_model, [1, 2, 3, 4], eos_token_id=block[1], stopping_criteria=criteria, **options) == block[:2]


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


@pytest.mark.parametrize("mode", [*LOSSLESS, "sequential", "mrp_direct", "mrp_remask"])
def test_a_processor_sees_what_its_state_shows_without_padding(random_model: MRPForCausalLM, mode: str) -> None:
    """The beginning of a row's text, some of whose last block is hidden; in drafts that block is guessed, and one before it."""
    record = Record()
    options = {"decoding": mode, "max_new_tokens": 10, "seed": 2, **LIVELY}
    recorded = texts(random_model, PROMPTS, logits_processor=LogitsProcessorList([record]), **options)
    assert recorded == texts(random_model, PROMPTS, **options), "recording changes nothing"
    guessed = BLOCK if mode in ("self_spec", "mrp_spec") else 0
    for ids in record.seen:
        known = len(ids) // BLOCK * BLOCK - guessed
        owners = [prompt + tokens for prompt, tokens in zip(PROMPTS, recorded, strict=True)]
        assert any(ids[: max(known, 0)] == text[: max(known, 0)] for text in owners)
        assert MASK not in ids[: len(ids) // BLOCK * BLOCK]
        if mode == "sequential":  # all that is known is on the left
            assert ids == sorted(ids, key=lambda token: token == MASK)
    assert max(map(len, record.seen)) >= max(len(p) + 9 for p in PROMPTS)


# Sampling


@pytest.mark.parametrize("options", [{"decoding": "sequential"}, {"denoising_steps": 1}], ids=str)
@pytest.mark.parametrize("top_k", [0, 9])
def test_sampling_at_temperature_zero_is_greedy(random_model: MRPForCausalLM, options: dict[str, Any], top_k: int) -> None:
    """In modes whose order does not rest on confidence, which the temperature changes."""
    options = {"max_new_tokens": 17, **options}
    greedy = texts(random_model, PROMPTS, **options)
    options |= {"do_sample": True, "top_k": top_k, "seed": 3}
    assert texts(random_model, PROMPTS, temperature=1e-7, **options) == greedy
    assert texts(random_model, PROMPTS, temperature=1.0, **options) != greedy


@pytest.mark.parametrize("mode", ["static", "mrp_spec"])
def test_torch_manual_seed_governs_unseeded_sampling(random_model: MRPForCausalLM, mode: str) -> None:
    def draw(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return texts(random_model, PROMPTS, decoding=mode, max_new_tokens=12, **LIVELY)

    first = draw(0)
    assert draw(0) == first
    assert draw(1) != first
    following = texts(random_model, PROMPTS, decoding=mode, max_new_tokens=12, **LIVELY)
    assert following != draw(1), "a second call goes on in the stream"


def test_a_seed_leaves_the_generator_of_torch_alone(random_model: MRPForCausalLM) -> None:
    for options in ({"seed": 3, **LIVELY}, {"do_sample": False}):
        before = torch.get_rng_state()
        text(random_model, PROMPTS[0], max_new_tokens=5, **options)
        assert torch.get_rng_state().equal(before)
    before = torch.get_rng_state()
    text(random_model, PROMPTS[0], max_new_tokens=5, **LIVELY)
    assert not torch.get_rng_state().equal(before)


@pytest.mark.parametrize("mode", ["static", "mrp_direct", "mrp_spec", "mrp_remask"])
def test_seeds_belong_to_rows(random_model: MRPForCausalLM, mode: str) -> None:
    options = {"decoding": mode, "max_new_tokens": 12, **LIVELY}
    counted = texts(random_model, [PROMPTS[0]] * 3, seed=7, **options)
    assert len(set(map(tuple, counted))) == 3
    assert text(random_model, PROMPTS[0], seed=8, **options) == counted[1]
    assert texts(random_model, [PROMPTS[0]] * 3, seed=[9, 7, 9], **options) == [counted[2], counted[0], counted[2]]


def test_num_return_sequences(random_model: MRPForCausalLM) -> None:
    """Rows come prompt by prompt, and the seeds count on through them."""
    options = {"max_new_tokens": 12, **LIVELY}
    rows = texts(random_model, PROMPTS[:2], seed=5, num_return_sequences=3, **options)
    assert len(set(map(tuple, rows))) == 6
    for i in (0, 2, 3, 5):
        assert rows[i] == text(random_model, PROMPTS[i // 3], seed=5 + i, **options)
