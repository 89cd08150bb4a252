"""What modes do to a text, by hand, on the embedded checkpoint and by arguments that `test_fuzz.py`
does not draw."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation
from modeling_mrp.generate.loop import Decoder
from modeling_mrp.networks.networks import Networks
from modeling_mrp.rules.gain import Fixed
from tests.support.helpers import LIVELY, MASK, PROMPTS, generate, text, texts
from tests.support.random_cases import dampened, make_model, random_prompts
from tests.support.reference import reference_decode


def test_where_nothing_is_drafted_a_round_is_the_targets(
    random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a clean block the next one's first state rides along, also if drafts may be
    made and none is."""
    monkeypatch.setattr(generation, "draft_amount", lambda *_: Fixed())
    alone, undrafted = (
        generate(random_model, PROMPTS, decoding=mode, num_draft_states="auto", max_new_tokens=12)
        for mode in ("static", "mrp_spec")
    )
    assert undrafted.stats.row_forwards.equal(alone.stats.row_forwards)


@pytest.mark.parametrize("mode", ["static", "mrp_spec"])
def test_scored_states_are_kept_for_drafts_alone(
    random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Their scores hold hidden states of a whole round."""
    accept = Decoder.accept
    kept = []

    def watched(self: Decoder, rows: Any, *others: Any) -> Any:
        pending_reveals = accept(self, rows, *others)
        for row in rows:
            kept.append(len(row.memory))
        return pending_reveals

    monkeypatch.setattr(Decoder, "accept", watched)
    generate(random_model, PROMPTS, decoding=mode, num_draft_states=4, max_new_tokens=12)
    assert len(kept) > 4
    assert any(kept) == (mode == "mrp_spec")


def test_the_model_keeps_nothing_of_a_call(random_model: MRPForCausalLM) -> None:
    before = set(vars(random_model)) | set(vars(random_model.generation_config))
    config = random_model.generation_config.to_dict()
    given = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=0.5)
    kept = given.to_dict()
    random_model.generate(torch.tensor([[1, 2]]), decoding="mrp_spec", generation_config=given)
    assert set(vars(random_model)) | set(vars(random_model.generation_config)) == before
    assert random_model.generation_config.to_dict() == config
    assert given.to_dict() == kept


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NoBadWordsLogitsProcessor, {"bad_words_ids": [[7, 7], [3], [9, 4, 9]]}),
        (NoRepeatNGramLogitsProcessor, {"no_repeat_ngram_size": 2}),
        (NoRepeatNGramLogitsProcessor, {"no_repeat_ngram_size": 3}),
    ],
    ids=str,
)
def test_bans_from_left_to_right_are_transformers_own(kind: Any, options: dict[str, Any]) -> None:
    """Under `sequential`, drafted or not: what its processors do to an autoregressive model."""
    given = {"max_new_tokens": 25, "do_sample": True, "top_k": 0, "temperature": 0.3, "seed": 5}
    acted = 0
    for trial in range(4):
        model, (prompt,) = (
            dampened(make_model(trial, block_size=8), 0.5),
            random_prompts(random.Random(trial), 1, 23),
        )
        processors = [kind(next(iter(options.values())))]
        theirs = reference_decode(
            model, prompt, decoding="sequential", logits_processor=processors, **given
        ).tokens
        acted += theirs != reference_decode(model, prompt, decoding="sequential", **given).tokens
        for mode in ({"decoding": "sequential"}, {"decoding": "mrp_spec", "target": "sequential"}):
            assert text(model, prompt, **given, **mode, **options) == theirs
    assert acted > 0


@pytest.mark.parametrize("target", ["dynamic", "sequential"])
def test_no_pair_of_the_readme_that_is_forbidden_is_written(
    target: str, tiny_model_float64: Any, tiny_tokenizer: Any
) -> None:
    """Each pair of the prompt and of its text in turn, and sequences that would come twice; drafted
    as undrafted."""
    chat = [{"role": "user", "content": "Sum the numbers of a list that are even, each plus 5."}]
    prompt = tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]

    def written(**options: Any) -> list[int]:
        options |= {"max_new_tokens": 24, "confidence_threshold": 0.6}
        tokens = text(tiny_model_float64, prompt, decoding=target, **options)
        assert (
            text(tiny_model_float64, prompt, decoding="mrp_spec", target=target, **options)
            == tokens
        )
        return tokens

    for pair in dict.fromkeys([*pairwise(prompt), *pairwise([prompt[-1], *written()])]):
        assert pair not in pairwise([prompt[-1], *written(bad_words_ids=[list(pair)])])
    for size in (2, 3):
        whole = [*prompt, *written(no_repeat_ngram_size=size)]
        grams = [tuple(whole[at : at + size]) for at in range(len(whole) - size + 1)]
        before = len(prompt) - size + 1
        assert all(gram not in grams[: before + at] for at, gram in enumerate(grams[before:]))


def test_torch_manual_seed_governs_unseeded_sampling(random_model: MRPForCausalLM) -> None:
    """And no other: with a seed, or greedily, the generator of torch is left alone."""

    def draw(manual: int | None, **options: Any) -> list[list[int]]:
        if manual is not None:
            torch.manual_seed(manual)
        return texts(
            random_model, PROMPTS, decoding="mrp_spec", max_new_tokens=12, **{**LIVELY, **options}
        )

    first, following = draw(0), draw(None)
    assert draw(0) == first
    assert draw(1) != first
    assert following != draw(1), "a second call goes on in the stream"
    before = torch.get_rng_state()
    draw(None, seed=3)
    draw(None, do_sample=False)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("mode", ["mrp_direct", "mrp_spec"])
def test_several_answers_to_a_prompt(random_model: MRPForCausalLM, mode: str) -> None:
    """Rows come prompt by prompt, and the seeds count on through them; of a cache every copy of a
    row gets what the row held, and it stays as it was."""
    options = {"decoding": mode, "max_new_tokens": 12, **LIVELY}
    out = generate(random_model, PROMPTS[:2], seed=7, **options)
    rows = texts(random_model, PROMPTS[:2], seed=7, num_return_sequences=3, **options)
    assert len(set(map(tuple, rows))) == 6
    assert text(random_model, PROMPTS[1], seed=11, **options) == rows[4]
    past = out.past_key_values
    for _ in range(2):
        again = generate(
            random_model,
            PROMPTS[:2],
            seed=7,
            num_return_sequences=3,
            past_key_values=past,
            **options,
        )
        assert again.sequences[:, 5:].equal(torch.tensor(rows))
        assert (again.past_key_values.rows, past.rows) == (6, 2)


def test_length_without_a_limit(random_model: MRPForCausalLM) -> None:
    """As many tokens as are to be filled in, or transformers' 20."""
    infill = torch.tensor([[MASK, 7, MASK, MASK, 8, MASK]], dtype=torch.int)
    assert random_model.generate(torch.tensor([[1, 2, 3]]), infill_ids=infill).shape[1] == 3 + 6
    assert random_model.generate(torch.tensor([[1, 2, 3]])).shape[1] == 3 + 20


def test_a_row_that_ends_early_ends_its_stream(random_model: MRPForCausalLM) -> None:
    """The row whose last block is given but for one mask ends in its first round; the other is
    decoded for long after."""
    order: list[str] = []
    streamers = [
        SimpleNamespace(
            put=lambda _, n=n: order.append(n), end=lambda n=n: order.append(f"end {n}")
        )
        for n in "ab"
    ]
    infill = torch.tensor([[5, 6, 7, 8, 5, 6, 7, MASK], [MASK] * 8])
    random_model.generate(torch.tensor([[1, 2, 3, 4]] * 2), infill_ids=infill, streamer=streamers)
    assert order == ["a", "b", "a", "end a", "b", "b", "end b"]


class Drafts:
    """A streamer that keeps what was sent, and how much of the text each draft reaches."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.reached: list[int] = []

    def put(self, ids: torch.Tensor) -> None:
        self.sent += ids.flatten().tolist()

    def put_draft(self, ids: torch.Tensor) -> None:
        self.reached.append(len(self.sent) + ids.shape[1])

    def end(self) -> None:
        self.reached.append(len(self.sent))


def test_a_streamed_draft_goes_from_what_was_sent_to_the_end_of_its_block(
    random_model: MRPForCausalLM,
) -> None:
    stream, prompt = Drafts(), torch.tensor([[1, 2, 3, 4, 5]])
    random_model.generate(prompt, max_new_tokens=7, streamer=stream, decoding="sequential")
    assert set(stream.reached) == {8, 12}
    assert stream.reached == sorted(stream.reached)


def test_criteria_see_what_a_row_that_they_ended_has_said(random_model: MRPForCausalLM) -> None:
    """Its last token and padding behind it, where the rows' next tokens were decoded in one step,
    too."""
    seen: list[list[list[int]]] = []

    def end_the_first(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.tolist())
        return torch.tensor([True, False])

    prompts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    options: dict[str, Any] = {"max_new_tokens": 8, "denoising_steps": 1, "pad_token_id": 0}
    text = random_model.generate(prompts, stopping_criteria=[end_the_first], **options).tolist()
    assert text[0][5:] == [0] * 7
    assert seen == [[row[:length] for row in text] for length in range(5, 13)]


@pytest.mark.parametrize("decoding", ["static", "self_spec", "mrp_spec"])
def test_row_states_are_those_that_forwards_scored(
    decoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what `Networks.score` is given, row by row; a prompt's forward scores one state."""
    model = make_model()
    counted = [1, 1]
    score = Networks.score

    def noted(networks: Networks, rows: Any, drafts: Any) -> Any:
        for row, nodes in zip(rows, drafts, strict=True):
            counted[row.place] += len(nodes)
        return score(networks, rows, drafts)

    monkeypatch.setattr(Networks, "score", noted)
    options = {} if decoding == "static" else {"num_draft_states": 3}
    out = generate(
        model, [[1, 2, 3, 4, 5, 6, 7], [1, 2]], decoding=decoding, max_new_tokens=13, **options
    )
    assert out.stats.row_states.tolist() == counted
    assert (out.stats.row_states > out.stats.row_forwards).all(), "first states of next blocks, too"
