"""Going on from the cache that an earlier `generate` gave: the text is the one without it, and prefill is saved."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import MASK, PROMPTS, generate, left_padded, texts
from mrp_trainer.heads import with_new_head
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from modeling_mrp import MRPForCausalLM
from modeling_mrp.networks.cache import BlockCache


@pytest.fixture
def _block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward per block of the prompt, so that the count of prefill forwards tells which blocks were computed."""
    monkeypatch.setattr("modeling_mrp.networks.networks.PREFILL_CHUNK", 4)


def decode(model: MRPForCausalLM, rows: list[list[int]], **options: Any) -> Any:
    """The output, which the mask id pads: it is never generated."""
    return model.generate(**left_padded(rows), pad_token_id=MASK, return_dict_in_generate=True, **options)


def answers(out: Any, rows: list[list[int]]) -> list[list[int]]:
    return [[token for token in new if token != MASK] for new in out.sequences[:, max(map(len, rows)) :].tolist()]


def assert_same(got: Any, expected: Any) -> None:
    assert got.sequences.equal(expected.sequences)
    assert got.reveal_step.equal(expected.reveal_step)
    torch.testing.assert_close(got.token_logprobs, expected.token_logprobs, rtol=0, atol=1e-5)


# What it saves, by hand: blocks of 4, one prefill forward a block


@pytest.mark.usefixtures("_block_by_block")
def test_what_is_prefilled_by_hand(random_model: MRPForCausalLM) -> None:
    """8 tokens and 12 new: blocks 8 and 12 were scored clean, block 16 was complete without that. With 3 tokens more, prefill
    scores block 16 and the first state of block 20, and not the four blocks before."""
    first = decode(random_model, [[*range(1, 9)]], max_new_tokens=12)
    assert first.stats.forwards == {"prefill": 3, "denoise": 11, "verify": 0, "head": 0}
    said = [[*first.sequences[0].tolist(), 7, 8, 9]]
    assert decode(random_model, said, max_new_tokens=5).stats.forwards["prefill"] == 6
    out = decode(random_model, said, past_key_values=first.past_key_values, max_new_tokens=5)
    assert out.stats.forwards == {"prefill": 2, "denoise": 4, "verify": 0, "head": 0}
    assert out.stats.row_forwards.tolist() == [6]
    assert out.tokens_per_forward.tolist() == pytest.approx([5 / 6])


@pytest.mark.usefixtures("_block_by_block")
def test_rows_that_reuse_more_wait_for_the_others(random_model: MRPForCausalLM) -> None:
    """Row 0 kept 16 of its tokens and row 1, which was changed at token 5, kept 4. Blocks 4 to 20 are computed for both, but
    row 0 takes part from block 16 on."""
    prompts = [[*range(1, 9)], [*range(11, 19)]]
    first = decode(random_model, prompts, max_new_tokens=12)
    said = [[*row, 7, 8, 9] for row in first.sequences.tolist()]
    said[1][5] = 55
    out = decode(random_model, said, past_key_values=first.past_key_values, max_new_tokens=5)
    assert out.stats.forwards["prefill"] == 5
    assert out.stats.row_forwards.tolist() == [2 + 4, 5 + 4]


@pytest.mark.usefixtures("_block_by_block")
def test_without_the_heads_layers_everything_is_prefilled(random_model: MRPForCausalLM) -> None:
    first = decode(random_model, [[*range(1, 9)]], max_new_tokens=12)
    said = [[*first.sequences[0].tolist(), 7, 8, 9]]
    options = {"decoding": "mrp_spec", "max_new_tokens": 5}
    out = decode(random_model, said, past_key_values=first.past_key_values, **options)
    assert out.stats.forwards["prefill"] == 6
    assert out.past_key_values is not first.past_key_values
    assert out.past_key_values.head_layers == 2


# The cache itself


def test_a_cache_with_room_is_used_in_place(random_model: MRPForCausalLM) -> None:
    """A cache made in advance serves the whole conversation; one that is too small is replaced by a bigger one."""
    roomy = random_model.block_cache(2, 64, 16, with_head=True)
    size, said = roomy.nbytes, [PROMPTS[0], PROMPTS[2]]
    for turn, mode in enumerate(("mrp_spec", "static", "mrp_remask")):
        out = decode(random_model, said, past_key_values=roomy, decoding=mode, max_new_tokens=10 + turn)
        assert out.past_key_values is roomy
        said = [row + answer for row, answer in zip(said, answers(out, said), strict=True)]
    assert roomy.nbytes == size
    small = decode(random_model, said, max_new_tokens=3).past_key_values
    out = decode(random_model, said, past_key_values=small, max_new_tokens=30)
    assert out.past_key_values is not small
    assert out.past_key_values.capacity == 76 > small.capacity  # 43 + 30 tokens in whole blocks
    wider = decode(random_model, said, past_key_values=out.past_key_values, decoding="self_spec", num_draft_states=5)
    assert wider.past_key_values.scratch == 20 > out.past_key_values.scratch
    assert_same(wider, decode(random_model, said, decoding="self_spec", num_draft_states=5))


def test_a_cache_made_in_inference_mode(random_model: MRPForCausalLM) -> None:
    with torch.inference_mode():
        roomy = random_model.block_cache(1, 64, 16, with_head=True)
        first = decode(random_model, [[*range(1, 9)]], past_key_values=roomy, max_new_tokens=12)
    said = [first.sequences[0].tolist()]
    out = decode(random_model, said, past_key_values=first.past_key_values, max_new_tokens=5)
    assert_same(out, decode(random_model, said, max_new_tokens=5))


def test_the_cache_does_not_keep_the_model() -> None:
    model = make_model()
    out = decode(model, [[1, 2]], max_new_tokens=2)
    assert out.past_key_values.owner() is model
    del model
    assert out.past_key_values.owner() is None


def handmade() -> BlockCache:
    return BlockCache(1, 2, 8, [torch.device("cpu")] * 2, 16, 8, torch.float64)


def on_meta(model: MRPForCausalLM) -> BlockCache:
    cache = model.block_cache(1, 8, 8, with_head=False)
    cache.layer_devices = (torch.device("meta"),) * 2
    return cache


@pytest.mark.parametrize(
    ("cache", "value", "remedy"),
    [
        (lambda model: DynamicCache(), r"are not those that generate\(..., return_dict_in_generate=True\)", r"unset"),
        (lambda model: ((torch.zeros(1),),), r"are not those", r"unset"),
        (lambda model: decode(make_model(), [[1, 2]]).past_key_values, r"of this very model gave", r"unset"),
        (lambda model: handmade(), r"of this very model gave", r"unset"),
        (lambda model: decode(model, [[1], [2]]).past_key_values, r"hold 2 rows, and input_ids have 1", r"the same order"),
        (lambda model: model.float().block_cache(1, 8, 8, False), r"another dtype .*float32.* now, .*torch.float64", r"unset"),
        (on_meta, r"or other devices, .*meta.* now, .*cpu", r"unset"),
    ],
    ids=["another kind", "a tuple", "another model", "no model", "other rows", "another dtype", "another device"],
)
def test_errors(cache: Any, value: str, remedy: str) -> None:
    model = make_model()
    given = cache(model)
    model.double()
    with pytest.raises(ValueError, match=value) as caught:
        model.generate(torch.tensor([[1, 2, 3]]), past_key_values=given, max_new_tokens=3)
    assert re.search(remedy, str(caught.value))
    assert re.search("leave them unset", str(caught.value))


def written(model: MRPForCausalLM) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1


def trained(model: MRPForCausalLM) -> None:
    """A step of training."""
    model(torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[-100, 2, 3, 4]])).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


CHANGES: dict[str, tuple[Callable[[MRPForCausalLM], Any], str]] = {
    "written to": (written, "older than the weights of model, which have changed"),
    "trained": (trained, "older than the weights of model, which have changed"),
    "assigned": (
        lambda model: model.load_state_dict(make_model(1).state_dict(), assign=True),
        "weights of model, which have changed",
    ),
    "other dtype and back": (lambda model: model.float().double(), "weights of model, which have changed"),
    "another head": (lambda model: with_new_head(model, 2), "older than the weights of mrp_head, which have changed"),
    "a deeper head": (lambda model: with_new_head(model, 3), "a head of 2 layers, and the model's has 3"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_no_longer_fits(change: str) -> None:
    """What it holds was computed with other weights: going on from it would give another text, and nobody would know."""
    model = make_model()
    out = decode(model, [PROMPTS[0]], decoding="mrp_spec", max_new_tokens=8)
    said = torch.tensor([[*PROMPTS[0], *answers(out, [PROMPTS[0]])[0], 7]])
    kept = [copy.deepcopy(out.past_key_values) for _ in range(2)]
    going_on = model.generate(said, past_key_values=kept[0], decoding="mrp_spec", max_new_tokens=5)
    assert torch.equal(going_on, model.generate(said, max_new_tokens=5))
    change_model, message = CHANGES[change]
    change_model(model)
    for past in (kept[0], kept[1]):
        with pytest.raises(ValueError, match=f"{message}: leave them unset"):
            model.generate(said, past_key_values=past, max_new_tokens=5)


def scale(model: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "lora_A"):
            layer.set_scale("default", 3.0)


ADAPTED: dict[str, Callable[[Any], Any]] = {
    "off": lambda model: model.base_model.disable_adapter_layers(),
    "another": lambda model: model.set_adapter("other"),
    "scaled": scale,
    "merged": lambda model: model.merge_adapter(),
}


@pytest.mark.parametrize("change", ADAPTED)
def test_a_cache_does_not_outlive_its_adapter(change: str) -> None:
    """No weight is written to where an adapter is switched."""
    lora = LoraConfig(target_modules=r"model\.layers.*up_proj", init_lora_weights=False)
    model: Any = get_peft_model(make_model(), lora)
    model.add_adapter("other", lora)
    out = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, return_dict_in_generate=True)
    kept, options = copy.deepcopy(out.past_key_values), {"max_new_tokens": 5}
    model.set_adapter("default")
    model.generate(out.sequences, past_key_values=out.past_key_values, **options)
    ADAPTED[change](model)
    with pytest.raises(ValueError, match="older than the weights of model, which have changed: leave them unset"):
        model.generate(out.sequences, past_key_values=kept, **options)


@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("decoding", ["mrp_spec", "mrp_remask"])
def test_a_row_that_left_its_batch_early_goes_on_beside_one_that_did_not(decoding: str) -> None:
    """What the head has read of the one lies beside memory of the other that nobody has written: it must not count."""
    model, prompts = make_model(5, block_size=4), [[1, 2, 3, 4, 5], [9, 8, 7]]
    options: dict[str, Any] = {"decoding": decoding, "num_draft_states": 3, "do_sample": True, "top_k": 0, "seed": 2}
    long, short = texts(model, prompts, max_new_tokens=40, eos_token_id=None, **options)
    eos = next(token for token in short[:6] if token not in long)
    out = generate(model, prompts, max_new_tokens=40, eos_token_id=eos, **options)
    changed = [prompts[0] + long + [40] * 3, prompts[1] + short[:8]]
    options |= {"max_new_tokens": 12, "eos_token_id": None}
    assert texts(model, changed, past_key_values=out.past_key_values, **options) == texts(model, changed, **options)
