"""The published algorithm that benchmarks compare with: lossless too, and as costly as its description says."""

import json
import random

import pytest
import torch
from conftest import make_model
from helpers import left_padded
from mrp_trainer.decoded import NEW_TOKENS

from benchmarks import drafts
from benchmarks.yardstick import decode_published
from modeling_mrp import MRPForCausalLM


@pytest.mark.parametrize("states", [1, 3, 6])
def test_the_published_algorithm_gives_the_text_of_static(states: int) -> None:
    rng = random.Random(states)
    for trial in range(6):
        model = make_model(trial, block_size=rng.choice((4, 8)))
        prompts = [[rng.randrange(1, 50) for _ in range(rng.randint(1, 19))] for _ in range(rng.choice((1, 4)))]
        eos = rng.choice(([], [7, 11], list(range(1, 12))))
        new = rng.randint(1, 25)
        out = model.generate(**left_padded(prompts), max_new_tokens=new, eos_token_id=eos or None, return_dict_in_generate=True)
        generated = out.sequences[:, max(map(len, prompts)) :]
        expected = [row[steps >= 0].tolist() for row, steps in zip(generated, out.reveal_step, strict=True)]
        texts, *_ = decode_published(model, prompts, states, new, eos)
        assert texts == expected


def test_its_forwards_by_hand() -> None:
    """Blocks of 4 whose positions do not look at each other, so that every draft is right: with K = 4 a block takes a seed
    forward, a verify and a store; the last one needs no store, and the prompt's block one forward of its own."""
    model = make_model()
    for layer in (*model.model.layers, *model.mrp_head.layers):
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    _, forwards, _ = decode_published(model, [[1, 2, 3, 4]], 4, 12, [])
    assert forwards == [1 + 3 * 3 - 1]


def test_the_slowest_row_holds_the_batch(random_model: MRPForCausalLM) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 50) for _ in range(8)] for _ in range(5)]
    alone = sum(decode_published(random_model, [prompt], 3, 16, [])[1][0] for prompt in prompts)
    assert sum(decode_published(random_model, prompts, 3, 16, [])[1]) > alone


def test_what_became_of_drafts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares that must add up: a draft is right, or only its order is wrong, or its token is. Texts are short."""
    for family in NEW_TOKENS:
        monkeypatch.setitem(NEW_TOKENS, family, 24)
    drafts.main(["--count", "2"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["family"], line["mode"]) for line in lines] == [
        (family, mode) for family in ("math", "code", "source") for mode in ("self_spec", "mrp_spec")
    ]
    for line in lines:
        assert line["states"] > 10
        assert line["all right"] + line["only the order wrong"] == pytest.approx(line["token right"], abs=0.15)
        assert line["all right"] <= line["position expected in place 1"] + 0.05
