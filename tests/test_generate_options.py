"""What `generate`'s options do to the text: values, derived by hand or from a second way to the same answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generation_mrp import DECODINGS, MRPGenerationConfig

MASK, VOCAB, BLOCK = 60, 64, 4  # of make_model
LOSSLESS = ("static", "self_spec", "mrp_spec")
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]
# Random weights repeat themselves when greedy; sampled texts vary, and the thresholds let every mode do what it is for.
LIVELY: dict[str, Any] = {"do_sample": True, "top_k": 0, "confidence_threshold": 0.04, "entropy_threshold": 5.0}

every_mode = pytest.mark.parametrize("mode", DECODINGS)


def left_padded(prompts: Sequence[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def generate(model: MRPForCausalLM, prompts: Sequence[list[int]], **options: Any) -> Any:
    return model.generate(**left_padded(prompts), return_dict_in_generate=True, **options)


def texts(model: MRPForCausalLM, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """The generated tokens of every row, without padding."""
    out = generate(model, prompts, **options)
    width = max(map(len, prompts))
    return [row[width:][steps >= 0].tolist() for row, steps in zip(out.sequences, out.reveal_step, strict=True)]


def text(model: MRPForCausalLM, prompt: list[int], **options: Any) -> list[int]:
    return texts(model, [prompt], **options)[0]


def inside_a_block(prompt: list[int], tokens: list[int]) -> int:
    """The index of a token that is new to the text and neither first nor last in its block."""
    return next(
        i for i in range(1, len(tokens)) if tokens[i] not in tokens[:i] and (len(prompt) + i) % BLOCK in range(1, BLOCK - 1)
    )


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


def test_eos_ends_the_text_where_it_first_stands(random_model: MRPForCausalLM) -> None:
    """From left to right an eos changes nothing before it, so the text is a prefix of the one without eos."""
    options = {"decoding": "sequential", "max_new_tokens": 16, "seed": 4, **LIVELY}
    free = text(random_model, PROMPTS[0], **options)
    first, second = free[5], free[9]
    assert first not in free[:5]
    assert second not in free[:9]
    for eos, end in ((first, 6), ([first], 6), (second, 10), ([second], 10), ([second, first], 6), ([second, 99], 10)):
        assert text(random_model, PROMPTS[0], eos_token_id=eos, **options) == free[:end]


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


@pytest.mark.parametrize("mode", ["static", "sequential", "mrp_spec", "mrp_remask"])
@pytest.mark.parametrize("limit", ["min_new_tokens", "min_length"])
def test_no_eos_before_the_minimum(random_model: MRPForCausalLM, mode: str, limit: str) -> None:
    """With most ids an eos, a text ends right behind its minimum, or a little later where no eos happens to be drawn."""
    eos = [*range(55)]
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]
    minimum = {"min_new_tokens": 6} if limit == "min_new_tokens" else {"min_length": 5 + 6}
    options = {"decoding": mode, "max_new_tokens": 20, "eos_token_id": eos, "seed": 1, **LIVELY}
    ends = []
    for tokens in texts(random_model, prompts, **minimum, **options):
        assert [token for token in tokens[:6] if token in eos] == []
        ends.append(len(tokens))
    assert min(ends) == 7
    assert max(map(len, texts(random_model, prompts, **options))) < 7, "without the minimum they end sooner"


# Stopping criteria


class StopAfter(StoppingCriteria):
    """Stops behind a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


class Watch(StoppingCriteria):
    """Never stops; remembers what it was asked."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@every_mode
def test_a_stopping_criterion_stops_inside_a_block(random_model: MRPForCausalLM, mode: str) -> None:
    options = {"decoding": mode, "max_new_tokens": 18, **LIVELY}
    free = texts(random_model, PROMPTS, seed=[4, 5, 6], **options)
    at = inside_a_block(PROMPTS[0], free[0])
    token = free[0][at]
    criteria = StoppingCriteriaList([StopAfter(token)])
    alone = text(random_model, PROMPTS[0], seed=4, stopping_criteria=criteria, **options)
    assert alone == free[0][: at + 1]
    together = texts(random_model, PROMPTS, seed=[4, 5, 6], stopping_criteria=criteria, **options)
    assert together == [tokens[: tokens.index(token) + 1] if token in tokens else tokens for tokens in free]


@every_mode
def test_a_criterion_is_asked_once_at_every_length(random_model: MRPForCausalLM, mode: str) -> None:
    """With the row's own ids, without padding; rows in turn, lengths in order."""
    watch = Watch()
    options = {"decoding": mode, "max_new_tokens": 9, "seed": 1, **LIVELY}
    free = texts(random_model, PROMPTS, stopping_criteria=StoppingCriteriaList([watch]), **options)
    for prompt, tokens in zip(PROMPTS, free, strict=True):
        assert [ids for (ids,) in watch.seen if ids[: len(prompt)] == prompt] == [prompt + tokens[:n] for n in range(1, 10)]
    assert len(watch.seen) == 9 * len(PROMPTS)


def test_a_criterion_behind_an_eos_changes_nothing(random_model: MRPForCausalLM) -> None:
    """One step reveals a whole block at once: token 1 of it is an eos, token 3 meets the criterion."""
    options = {"denoising_steps": 1, "max_new_tokens": 12, "seed": 0, **LIVELY}
    block = text(random_model, [1, 2, 3, 4], **options)[:4]
    assert len(set(block)) == 4
    criteria = StoppingCriteriaList([StopAfter(block[3])])
    assert text(random_model, [1, 2, 3, 4], eos_token_id=block[1], **options) == block[:2]
    assert text(random_model, [1, 2, 3, 4], eos_token_id=block[1], stopping_criteria=criteria, **options) == block[:2]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One word per id. transformers tokenises "abcdef" to learn how words join, so that is one of them."""
    words = {f"w{i:02d}": i for i in range(VOCAB - 2)} | {"abcdef": VOCAB - 2, "[UNK]": VOCAB - 1}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.mark.parametrize("mode", ["static", "mrp_spec"])
def test_stop_strings(random_model: MRPForCausalLM, tokenizer: PreTrainedTokenizerFast, mode: str) -> None:
    options = {"decoding": mode, "max_new_tokens": 14, **LIVELY}
    free = texts(random_model, PROMPTS, seed=[4, 5, 6], **options)
    at = inside_a_block(PROMPTS[0], free[0])
    for stop in (f"w{free[0][at]:02d}", f"w{free[0][at - 1]:02d} w{free[0][at]:02d}"):
        stopped = texts(random_model, PROMPTS, seed=[4, 5, 6], stop_strings=[stop], tokenizer=tokenizer, **options)
        assert stopped[0] == free[0][: at + 1]
        for prompt, tokens, got in zip(PROMPTS, free, stopped, strict=True):
            ends = [n for n in range(1, 15) if tokenizer.decode(prompt + tokens[:n]).endswith(stop)]
            assert got == tokens[: min([14, *ends])]


# Logits processors


class Forbid(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


class Record(LogitsProcessor):
    """Changes nothing; remembers the ids of every call and how many positions it had."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape == (len(input_ids), VOCAB)
        assert (input_ids == input_ids[0]).all(), "all positions of a call belong to one row"
        self.calls.append((input_ids[0].tolist(), len(input_ids)))
        return scores


@pytest.mark.parametrize("mode", [*LOSSLESS, "mrp_direct", "mrp_remask"])
def test_a_forbidden_token_never_appears(random_model: MRPForCausalLM, mode: str) -> None:
    options = {"decoding": mode, "max_new_tokens": 16, "confidence_threshold": 0.04}
    free = text(random_model, PROMPTS[0], **options)
    token = max(set(free), key=free.count)
    processors = LogitsProcessorList([Forbid(token)])
    tokens = text(random_model, PROMPTS[0], logits_processor=processors, **options)
    assert len(tokens) == 16
    assert token not in tokens
    if mode in LOSSLESS:
        static = text(random_model, PROMPTS[0], logits_processor=processors, **{**options, "decoding": "static"})
        assert tokens == static


def test_what_a_processor_sees_by_hand(random_model: MRPForCausalLM) -> None:
    """A prompt of 6: block 4..7 starts with two masks, block 8..11 with four, and each forward reveals one."""
    record = Record()
    prompt = [1, 2, 3, 4, 5, 6]
    ids = prompt + text(random_model, prompt, max_new_tokens=6, logits_processor=LogitsProcessorList([record]))
    assert record.calls == [(ids[:4], 2), (ids[:4], 1), (ids[:8], 4), (ids[:8], 3), (ids[:8], 2), (ids[:8], 1)]


@pytest.mark.parametrize("mode", [*LOSSLESS, "mrp_direct", "mrp_remask"])
def test_a_processor_sees_committed_blocks_without_padding(random_model: MRPForCausalLM, mode: str) -> None:
    record = Record()
    options = {"decoding": mode, "max_new_tokens": 10, "seed": 2, **LIVELY}
    recorded = texts(random_model, PROMPTS, logits_processor=LogitsProcessorList([record]), **options)
    assert recorded == texts(random_model, PROMPTS, **options), "recording changes nothing"
    seen = set()
    for ids, positions in record.calls:
        known = max(0, len(ids) - BLOCK) if mode in ("self_spec", "mrp_spec") else len(ids)  # behind a draft: a guessed block
        owners = [r for r, prompt in enumerate(PROMPTS) if ids[:known] == (prompt + recorded[r])[:known]]
        assert owners, "the ids are the beginning of no row"
        assert MASK not in ids
        assert len(ids) % BLOCK == 0
        assert 1 <= positions <= BLOCK
        seen |= {(row, len(ids)) for row in owners if ids == (PROMPTS[row] + recorded[row])[: len(ids)]}
    starts = {(r, n) for r, prompt in enumerate(PROMPTS) for n in range(len(prompt) // BLOCK * BLOCK, len(prompt) + 10, BLOCK)}
    assert seen >= starts, "every block of every row was scored behind its own ids"


@pytest.mark.parametrize("mode", LOSSLESS)
def test_repetition_penalty(random_model: MRPForCausalLM, mode: str) -> None:
    """A penalty of 1e6 leaves a seen token no chance: none of an earlier block comes back."""
    options = {"decoding": mode, "max_new_tokens": 23}

    def repeats(tokens: list[int]) -> list[int]:
        ids = PROMPTS[0] + tokens
        return [i for i in range(len(PROMPTS[0]), len(ids)) if ids[i] in ids[: i // BLOCK * BLOCK]]

    assert repeats(text(random_model, PROMPTS[0], **options))
    assert not repeats(text(random_model, PROMPTS[0], repetition_penalty=1e6, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 5.0},
        {"min_new_tokens": 6, "eos_token_id": [*range(58)], "max_new_tokens": 12},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[2], [42]]},
        {"suppress_tokens": [2, 42]},
        {"sequence_bias": [[[7], 9.0]]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_of_options_act_on_a_padded_row_as_alone(random_model: MRPForCausalLM, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 10, **options}
    alone = [text(random_model, prompt, **options) for prompt in PROMPTS[:2]]
    name = next(iter(options.keys() - {"max_new_tokens", "eos_token_id"}))
    assert alone != texts(random_model, PROMPTS[:2], **{k: v for k, v in options.items() if k != name}), "it acts at all"
    assert texts(random_model, PROMPTS[:2], **options) == alone


# Sampling


@every_mode
def test_sampling_among_one_token_is_greedy(random_model: MRPForCausalLM, mode: str) -> None:
    options = {"decoding": mode, "max_new_tokens": 17, "confidence_threshold": 0.04, "entropy_threshold": 5.0}
    greedy = generate(random_model, PROMPTS, **options)
    sampled = generate(random_model, PROMPTS, do_sample=True, top_k=1, seed=3, **options)
    assert sampled.sequences.equal(greedy.sequences)
    assert sampled.reveal_step.equal(greedy.reveal_step)


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


# Streamers


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


@every_mode
def test_a_streamer_receives_blocks_in_order(random_model: MRPForCausalLM, mode: str) -> None:
    """A prompt of 6 and 9 tokens: the rest of block 4..7, block 8..11, and three of block 12..15."""
    options = {"decoding": mode, "max_new_tokens": 9, "seed": 0, **LIVELY}
    prompt = [1, 2, 3, 4, 5, 6]
    tokens = text(random_model, prompt, **options)
    streamer = Blocks()
    random_model.generate(torch.tensor([prompt]), streamer=streamer, **options)
    assert streamer.events == [("put", [prompt]), ("put", tokens[:2]), ("put", tokens[2:6]), ("put", tokens[6:]), ("end", [])]


@pytest.mark.parametrize("mode", ["static", "mrp_spec", "mrp_remask"])
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


def test_a_text_streamer_prints_the_text(
    random_model: MRPForCausalLM, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_new_tokens": 9, "seed": 0, **LIVELY}
    tokens = text(random_model, PROMPTS[0], **options)
    random_model.generate(torch.tensor([PROMPTS[0]]), streamer=TextStreamer(tokenizer, skip_prompt=True), **options)
    assert capsys.readouterr().out == tokenizer.decode(tokens) + "\n"


@pytest.mark.parametrize("mode", ["static", "sequential", "mrp_direct", "mrp_spec", "mrp_remask"])
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
    assert shown == [("draft", 2), ("draft", 1), ("put", 0), ("draft", 3), ("draft", 2), ("draft", 1), ("put", 0)]


# Where options come from


FIELDS: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 6, "denoising_steps": 2, "seed": 11}


def same(a: Any, b: Any) -> bool:
    """Whether two calls gave the same text at the same cost."""
    return a.sequences.equal(b.sequences) and a.stats.forwards == b.stats.forwards and a.reveal_step.equal(b.reveal_step)


@pytest.mark.parametrize("config_class", [MRPGenerationConfig, GenerationConfig])
def test_a_generation_config_object(random_model: MRPForCausalLM, config_class: type[GenerationConfig]) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "return_dict_in_generate": True, **FIELDS}
    ids = torch.tensor([PROMPTS[0]])
    expected = random_model.generate(ids, **options)
    assert expected.stats.forwards["head"] > 0
    config = config_class(**options)
    before = config.to_dict()
    assert same(random_model.generate(ids, generation_config=config), expected)
    overridden = random_model.generate(ids, generation_config=config, denoising_steps=4, seed=12)
    assert same(overridden, random_model.generate(ids, **{**options, "denoising_steps": 4, "seed": 12}))
    assert not same(overridden, expected)
    assert config.to_dict() == before


@pytest.fixture
def configured_model(tmp_path: Path) -> MRPForCausalLM:
    """A model whose generation_config.json holds the fields, read as transformers reads it."""
    model = make_model()
    (tmp_path / "generation_config.json").write_text(json.dumps({**FIELDS, "pad_token_id": 0, "do_sample": True, "top_k": 0}))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert type(model.generation_config) is GenerationConfig
    return model


def test_fields_of_the_models_generation_config(random_model: MRPForCausalLM, configured_model: MRPForCausalLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, **FIELDS}
    expected = generate(random_model, PROMPTS, **options)
    assert same(generate(configured_model, PROMPTS, max_new_tokens=12), expected)
    changes = {"decoding": "static", "denoising_steps": 4, "seed": 12, "num_draft_states": 1, "do_sample": False}
    for name, value in changes.items():
        overridden = generate(configured_model, PROMPTS, max_new_tokens=12, **{name: value})
        assert same(overridden, generate(random_model, PROMPTS, **{**options, name: value}))
        assert not same(overridden, expected)


@pytest.mark.parametrize("config_class", [GenerationConfig, MRPGenerationConfig])
def test_what_an_object_leaves_open_comes_from_the_model(
    configured_model: MRPForCausalLM, config_class: type[GenerationConfig]
) -> None:
    ids = torch.tensor([PROMPTS[0]])
    expected = configured_model.generate(ids, max_new_tokens=12, return_dict_in_generate=True)
    config = config_class(max_new_tokens=12, return_dict_in_generate=True)
    assert same(configured_model.generate(ids, generation_config=config), expected)


def test_pad_and_eos_that_an_object_leaves_open_come_from_the_model() -> None:
    model = make_model()
    free = text(model, PROMPTS[0], max_new_tokens=12)
    model.generation_config.eos_token_id = free[4]
    config = MRPGenerationConfig(max_new_tokens=12, decoding="sequential")
    got = model.generate(torch.tensor([PROMPTS[0]]), generation_config=config)[0, 5:].tolist()
    assert got[-1] == free[4]
    assert len(got) < 12


def test_a_config_survives_saving(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "decoding": "mrp_remask",
        "denoising_steps": 3,
        "confidence_threshold": 0.04,
        "entropy_threshold": 0.5,
        "mrp_steps": 2,
        "num_draft_states": 7,
        "remask_rule": "residual",
        "residual_delta": 0.25,
        "seed": [4, 5, 6],
        "max_new_tokens": 9,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }
    defaults = MRPGenerationConfig()
    saved = MRPGenerationConfig(**fields)
    saved.save_pretrained(tmp_path)
    loaded = MRPGenerationConfig.from_pretrained(tmp_path)
    assert type(loaded) is MRPGenerationConfig
    for name, value in fields.items():
        assert getattr(defaults, name) != value, "a default would survive without being saved"
        assert getattr(loaded, name) == value
    assert loaded == saved


@pytest.mark.parametrize("config_class", [GenerationConfig, MRPGenerationConfig])
def test_a_config_read_from_a_file(tmp_path: Path, random_model: MRPForCausalLM, config_class: type[GenerationConfig]) -> None:
    fields: dict[str, Any] = {**FIELDS, "max_new_tokens": 9, "do_sample": True, "top_k": 0, "return_dict_in_generate": True}
    config_class(**fields).save_pretrained(tmp_path)
    ids = torch.tensor([PROMPTS[0]])
    loaded = random_model.generate(ids, generation_config=config_class.from_pretrained(tmp_path))
    assert same(loaded, random_model.generate(ids, **fields))


# Schedules, counts and log-probabilities


SCHEDULES = {
    1: [16] + [0] * 15,
    3: [6, 5, 5] + [0] * 13,
    5: [4, 3, 3, 3, 3] + [0] * 11,
    7: [3, 3, 2, 2, 2, 2, 2] + [0] * 9,
    16: [1] * 16,
    None: [1] * 16,
}


@pytest.mark.parametrize("steps", SCHEDULES)
def test_schedule_by_hand(steps: int | None) -> None:
    assert MRPGenerationConfig(denoising_steps=steps).schedule(16).tolist() == SCHEDULES[steps]


@pytest.mark.parametrize("mode", [*LOSSLESS, "sequential"])
@pytest.mark.parametrize("steps", [3, 5, 16])
def test_the_schedule_is_followed(mode: str, steps: int) -> None:
    """A whole block of 16: its k-th step reveals the k-th number of the schedule."""
    model = make_model(block_size=16)
    out = generate(model, [list(range(1, 17))], decoding=mode, denoising_steps=steps, max_new_tokens=16)
    assert out.reveal_step[0].bincount().tolist() == SCHEDULES[steps][:steps]


def test_counts_of_static_by_hand(random_model: MRPForCausalLM) -> None:
    """A prompt of 6 and 10 tokens, two a step: blocks of 2, 4 and 4 masks take 1 + 2 + 2 steps, the first in the prefill.

    Of the four rounds two score a clean block and the all-mask state behind it: two states; the others score one.
    """
    out = generate(random_model, [[1, 2, 3, 4, 5, 6]], denoising_steps=2, max_new_tokens=10)
    assert out.stats.forwards == {"prefill": 1, "denoise": 4, "verify": 0, "head": 0}
    assert out.stats.row_forwards.tolist() == [5]
    assert out.stats.row_head_forwards.tolist() == [0]
    assert out.stats.accepted_lengths.tolist() == [[0, 2, 2]]
    assert out.tokens_per_forward.tolist() == [2.0]


@pytest.mark.parametrize(
    ("mode", "drafts"), [("static", 4), *((mode, drafts) for mode in ("self_spec", "mrp_spec") for drafts in (1, 2, 3, 8))]
)
def test_every_state_is_accepted_once(random_model: MRPForCausalLM, mode: str, drafts: int) -> None:
    """However many states a round accepts, a row passes through the same ones.

    Prompts of 6 and 2 tokens and 10 new: blocks of 2, 4 and 4 masks, so 10 states with masks, of which the prefill scores
    one, and two clean ones: 11.
    """
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8]]
    stats = generate(random_model, prompts, decoding=mode, num_draft_states=drafts, max_new_tokens=10).stats
    lengths = torch.arange(stats.accepted_lengths.shape[1])
    assert (stats.accepted_lengths * lengths).sum(1).tolist() == [11, 11]
    rounds = stats.accepted_lengths.sum(1)
    assert rounds.equal(stats.row_forwards - 1), "every forward but the prefill is a round"
    assert int(stats.row_forwards.max()) == sum(stats.forwards[role] for role in ("prefill", "denoise", "verify"))
    assert (stats.accepted <= stats.drafted).all()
    # A round's states are its first, right drafts, and at most one all-mask state behind a clean one.
    assert (rounds + stats.accepted <= 11).all()
    assert (rounds + stats.accepted + 2 >= 11).all()
    drafting = mode != "static" and drafts > 1
    assert bool((stats.drafted > 0).all()) == drafting
    assert (stats.forwards["verify"] > 0) == drafting
    assert (stats.forwards["head"] > 0) == (drafting and mode == "mrp_spec")


@every_mode
def test_counts_agree_with_each_other(random_model: MRPForCausalLM, mode: str) -> None:
    options = {"decoding": mode, "max_new_tokens": 15, "eos_token_id": [5, 6], "remask_rule": "residual", **LIVELY}
    out = generate(random_model, PROMPTS, seed=3, residual_delta=0.1, **options)
    stats, generated = out.stats, (out.reveal_step >= 0).sum(1)
    assert out.tokens_per_forward.allclose(generated / stats.row_forwards)
    assert int(stats.row_forwards.max()) == sum(stats.forwards[role] for role in ("prefill", "denoise", "verify"))
    assert int(stats.row_head_forwards.max()) <= stats.forwards["head"]
    assert bool((stats.row_head_forwards > 0).all()) == (mode in ("mrp_direct", "mrp_spec", "mrp_remask"))
    assert bool(stats.drafted.sum() > 0) == (mode in ("self_spec", "mrp_spec"))
    assert bool(stats.revoked.sum() > 0) == (mode == "mrp_remask")
    alone = generate(random_model, PROMPTS[1:2], seed=4, residual_delta=0.1, **options)
    assert alone.reveal_step[0].tolist() == out.reveal_step[1, : generated[1]].tolist()
    for name in ("row_forwards", "row_head_forwards", "drafted", "accepted", "revoked", "accepted_lengths"):
        assert getattr(alone.stats, name)[0].tolist() == getattr(stats, name)[1].tolist(), name


def first_block(model: MRPForCausalLM, prompt: list[int]) -> Tensor:
    """[masks, vocab] logits of the masked rest of the prompt's last block, from `forward`; the mask id at -inf."""
    masks = BLOCK - len(prompt) % BLOCK
    with torch.no_grad():
        logits = model(torch.tensor([prompt + [MASK] * masks])).logits[0, len(prompt) :]
    logits[:, MASK] = -torch.inf
    return logits


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4, 5], [9, 8, 7], [1, 2, 3, 4]], ids=len)
@pytest.mark.parametrize("mode", [*LOSSLESS, "sequential", "dynamic", "entropy_bound"])
def test_the_first_reveal_by_hand(random_model: MRPForCausalLM, mode: str, prompt: list[int]) -> None:
    """Greedy: the first step takes each position's best token, at its log-softmax; which positions is the strategy's choice."""
    out = generate(random_model, [prompt], decoding=mode, max_new_tokens=8, confidence_threshold=0.3, entropy_threshold=3.0)
    assert (out.token_logprobs <= 0).all()
    best = first_block(random_model, prompt).log_softmax(-1).max(-1)
    first = (out.reveal_step[0, : len(best.values)] == 0).nonzero()[:, 0]
    assert len(first) >= 1
    assert not (out.reveal_step[0, len(best.values) :] == 0).any()
    assert out.sequences[0, len(prompt) + first].equal(best.indices[first])
    assert out.token_logprobs[0, first].double().allclose(best.values[first], atol=1e-6)
    if mode in LOSSLESS:
        assert first.tolist() == [int(best.values.argmax())]
    if mode == "sequential":
        assert first.tolist() == [0]
    if mode == "dynamic":
        assert set(first.tolist()) == {int(best.values.argmax()), *(best.values.exp() > 0.3).nonzero()[:, 0].tolist()}


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"do_sample": True, "temperature": 0.5, "top_k": 0}, 0.5),
        ({"do_sample": True, "temperature": 2.0, "top_k": 0}, 2.0),
        ({"do_sample": True, "temperature": 1.0, "top_k": 0}, 1.0),
        ({"do_sample": False, "temperature": 0.5}, 1.0),
        ({"do_sample": True, "top_k": 3}, 1.0),
        ({"do_sample": True, "top_k": 0, "top_p": 0.5}, 1.0),
        ({"do_sample": True, "top_k": 0, "top_h": 0.3}, 1.0),
        ({"do_sample": True, "top_k": 0, "min_p": 0.5}, 1.0),
        ({"do_sample": True, "top_k": 0, "typical_p": 0.5}, 1.0),
        ({"do_sample": True, "top_k": 0, "epsilon_cutoff": 0.05}, 1.0),
        ({"do_sample": True, "top_k": 0, "eta_cutoff": 0.5}, 1.0),
    ],
    ids=str,
)
def test_log_probabilities_see_the_temperature_but_no_truncation(
    random_model: MRPForCausalLM, options: dict[str, Any], temperature: float
) -> None:
    expected = (first_block(random_model, PROMPTS[0]) / temperature).log_softmax(-1)
    out = generate(random_model, [PROMPTS[0]] * 8, max_new_tokens=3, seed=0, **options)
    for tokens, steps, logprobs in zip(out.sequences[:, len(PROMPTS[0]) :], out.reveal_step, out.token_logprobs, strict=True):
        first = int((steps == 0).nonzero())
        token = int(tokens[first])
        assert float(logprobs[first]) == pytest.approx(float(expected[first, token]), abs=1e-6)
        if options.get("top_k"):
            assert token in expected[first].topk(options["top_k"]).indices.tolist()


def test_a_temperature_without_sampling_changes_nothing(random_model: MRPForCausalLM) -> None:
    plain = generate(random_model, PROMPTS, max_new_tokens=9)
    warm = generate(random_model, PROMPTS, max_new_tokens=9, temperature=0.5)
    assert warm.sequences.equal(plain.sequences)
    assert warm.token_logprobs.equal(plain.token_logprobs)
