"""Rows that wait for others (`max_batch_size`, `generate_batch`): each text, its steps and its
counts are those of a batch of all rows, in any order of arrival and with any number of places."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from modeling_mrp.generate.option_table import PUBLISHED, REMASK_RULES, TARGETS
from modeling_mrp.networks.networks import Networks
from tests.support.families import twin_of
from tests.support.random_cases import Sways, make_model

EOS = [3, 5, 9, 11, 20]
MODES: list[dict[str, Any]] = [
    *({"decoding": target} for target in TARGETS if target not in PUBLISHED),
    {"decoding": "credit"},
    {"decoding": "mrp_spec", "num_draft_states": 4},
    {
        "decoding": "mrp_spec",
        "target": "sequential",
        "num_draft_states": 8,
        "draft_passes": 2,
        "prompt_lookup_num_tokens": 5,
    },
    {"decoding": "mrp_spec", "target": "dynamic", "confidence_threshold": 0.05},
    {"decoding": "self_spec", "target": "slow_fast", "num_draft_states": 5},
    {"decoding": "mrp_direct", "mrp_steps": 2},
    *(
        {"decoding": "mrp_remask", "remask_rule": rule, "confidence_threshold": 0.05}
        for rule in REMASK_RULES
    ),
]


def padded(prompts: Sequence[Sequence[int]], right: bool = False) -> dict[str, Tensor]:
    """Prompts as a batch, padded on either side."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        room = [0] * (width - len(prompt))
        ids.append([*prompt, *room] if right else [*room, *prompt])
        real = [1] * len(prompt)
        mask.append([*real, *room] if right else [*room, *real])
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def random_prompts(seed: int, count: int = 9) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 50) for _ in range(rng.randint(1, 14))] for _ in range(count)]


def same(out: Any, alone: Any) -> None:
    """Texts, steps, log-probabilities, and each row's counts."""
    assert out.sequences.equal(alone.sequences)
    assert out.reveal_step.equal(alone.reveal_step)
    assert out.token_logprobs.allclose(alone.token_logprobs, atol=1e-6)
    for name in ("row_forwards", "row_head_forwards", "drafted", "accepted", "revoked"):
        assert getattr(out.stats, name).equal(getattr(alone.stats, name)), name


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_texts_and_counts_are_those_of_one_batch(mode: dict[str, Any]) -> None:
    name = repr(mode)
    rng = random.Random(name)
    model = make_model(rng.randrange(100))
    for sample in (False, True):
        options: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 23),
            "eos_token_id": EOS,
            "do_sample": sample,
            "seed": rng.randrange(99),
            "return_dict_in_generate": True,
            **mode,
        }
        call = padded(random_prompts(rng.randrange(99)), right=sample)
        together = model.generate(**call, **options)
        for at_once in (1, 2, 5, 8):
            out = model.generate(**call, max_batch_size=at_once, **options)
            same(out, together)
            assert (out.cache, out.stats.rounds) == (None, None)
        for at_once in (9, 99):
            assert model.generate(**call, max_batch_size=at_once, **options).cache is not None


def test_hidden_states_for_the_next_token(tmp_path: Path) -> None:
    """Those of a shifted family, of which a row's first state takes one from its prompt."""
    model = twin_of("fast_dllm_v2", 4, tmp_path).model
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 13, "return_dict_in_generate": True}
    call = padded(random_prompts(4, 6))
    for mode in ("static", "self_spec", "mrp_spec", "mrp_direct"):
        together = model.generate(**call, decoding=mode, num_draft_states=3, **options)
        out = model.generate(**call, decoding=mode, num_draft_states=3, max_batch_size=2, **options)
        same(out, together)


def test_places_are_used_while_rows_wait() -> None:
    """Of 24 texts of very different lengths, three places: no place is idle but at the end, where
    one batch of all has most of them idle."""
    model, rng = make_model(), random.Random(1)
    prompts = [[rng.randrange(1, 50)] * rng.randint(1, 4) for _ in range(24)]
    options: dict[str, Any] = {
        "max_new_tokens": 64,
        "eos_token_id": list(range(1, 14)),
        "do_sample": True,
        "seed": 3,
        "return_dict_in_generate": True,
    }
    stats = model.generate(**padded(prompts), max_batch_size=3, **options).stats
    taken, had = int(stats.row_forwards.sum()), stats.slot_forwards
    longest = int(stats.row_forwards.max())
    assert taken <= had <= taken + 2 * longest
    plain = [
        model.generate(**padded(prompts[begin : begin + 3]), **options).stats
        for begin in range(0, 24, 3)
    ]
    rounds = sum(one.forwards["denoise"] for one in plain)
    assert stats.forwards["denoise"] < 0.8 * rounds


class _Recorded(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.parts += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


class _After(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 7 == 0


def test_streams_criteria_processors_scores_and_infills() -> None:
    model, prompts = make_model(5), random_prompts(8)
    options: dict[str, Any] = {
        "decoding": "mrp_spec",
        "num_draft_states": 3,
        "max_new_tokens": 16,
        "eos_token_id": EOS,
        "min_new_tokens": 2,
        "stopping_criteria": [_After()],
        "logits_processor": [Sways(0.3)],
        "no_repeat_ngram_size": 3,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    holes = [[60 if (row + column) % 3 else 8 for column in range(10)] for row in range(9)]
    options["infill_ids"] = torch.tensor(holes)
    call = padded(prompts)
    streams: dict[int, list[_Recorded]] = {}
    outs = {}
    for at_once in (9, 4, 1):
        streams[at_once] = [_Recorded() for _ in prompts]
        outs[at_once] = model.generate(
            **call, max_batch_size=at_once, streamer=streams[at_once], **options
        )
    for at_once in (4, 1):
        same(outs[at_once], outs[9])
        for scores, together in zip(outs[at_once].scores, outs[9].scores, strict=True):
            assert torch.allclose(scores, together)
        for stream, together in zip(streams[at_once], streams[9], strict=True):
            assert (stream.parts, stream.ended) == (together.parts, 1)


def test_a_failed_call_leaves_the_model_as_it_was() -> None:
    """A criterion that raises once rows have joined."""
    model, call = make_model(2), padded(random_prompts(3))
    options: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 3, "max_new_tokens": 14}
    expected = model.generate(**call, **options)
    for last in (0, 1, 7, 20):
        calls = 0

        def fails(ids: Tensor, scores: Any, last: int = last) -> bool:
            nonlocal calls
            calls += 1
            if calls > last:
                raise RuntimeError("as asked")
            return False

        with pytest.raises(RuntimeError, match="as asked"):
            model.generate(**call, max_batch_size=2, stopping_criteria=[fails], **options)
        assert model.generate(**call, max_batch_size=2, **options).equal(expected)


def test_what_a_row_leaves_behind_reaches_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values that are NaN, in the place of a row that has ended: attention multiplies
    what it masks by 0, and 0 times NaN is NaN."""
    model, call = make_model(2), padded(random_prompts(3))
    options: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 3, "max_new_tokens": 14}
    expected = model.generate(**call, **options)
    prefill, poisoned = Networks.prefill, []

    def poisons(self: Any, rows: Any, reused: Any, first: int = 0) -> Any:
        if len(rows) < self.cache.active:
            poisoned.append(first)
            for buffer in self.cache._buffers.values():
                buffer[first] = torch.nan
        return prefill(self, rows, reused, first)

    monkeypatch.setattr(Networks, "prefill", poisons)
    assert model.generate(**call, max_batch_size=3, **options).equal(expected)
    assert len(poisoned) == 6


def test_what_goes_by_row_of_the_batch_is_refused() -> None:
    model, call = make_model(), padded(random_prompts(3))
    first = model.generate(**call, max_new_tokens=4, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="past_key_values hold an entry for each row"):
        model.generate(first.sequences, cache=first.cache, max_new_tokens=4, max_batch_size=2)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_generate_batch(sample: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers' result by request, with each text as `generate` gives it."""
    model, prompts = make_model(7), random_prompts(11)
    options: dict[str, Any] = {
        "decoding": "mrp_spec",
        "num_draft_states": 4,
        "max_new_tokens": 20,
        "eos_token_id": EOS,
        "do_sample": sample,
    }
    seeds = list(range(40, 49)) if sample else None
    results = model.generate_batch(
        prompts, max_batch_size=3, progress_bar=not sample, seed=seeds, **options
    )
    assert list(results) == [f"req_{index}" for index in range(9)]
    for index, (prompt, result) in enumerate(zip(prompts, results.values(), strict=True)):
        seed = seeds[index] if seeds else None
        alone = model.generate(
            torch.tensor([prompt]), seed=seed, return_dict_in_generate=True, **options
        )
        assert result.prompt_ids == prompt
        assert prompt + result.generated_tokens == alone.sequences[0].tolist()
        assert result.logprobs == pytest.approx(alone.token_logprobs[0].tolist(), abs=1e-5)
        assert result.is_finished()
    assert ("9/9" in capsys.readouterr().err) is not sample
    assert model.generate_batch([]) == {}
    with pytest.raises(ValueError, match="inputs hold no id in prompt 1"):
        model.generate_batch([[1], []])
    with pytest.raises(ValueError, match="infill_ids: what is given stands among"):
        model.generate_batch([[1]], infill_ids=torch.tensor([[60]]))
    model.generation_config.max_batch_size = 2
    by_config = model.generate_batch(prompts, seed=seeds, **options)
    assert by_config["req_8"].generated_tokens == results["req_8"].generated_tokens
    copies = model.generate_batch(prompts[:2], num_return_sequences=2, do_sample=True, seed=1)
    assert list(copies) == ["req_0", "req_0__child#1", "req_1", "req_1__child#1"]
