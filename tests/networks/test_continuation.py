"""Going on from the cache that an earlier `generate` gave: the text is the one without it, and prefill is saved."""

import copy
import gc
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


def decode(model: MRPForCausalLM, rows: list[list[int]], **options: Any) -> Any:
    """The output, which the mask id pads: it is never generated."""
    return model.generate(**left_padded(rows), pad_token_id=MASK, return_dict_in_generate=True, **options)


def answers(out: Any, rows: list[list[int]]) -> list[list[int]]:
    return [[token for token in new if token != MASK] for new in out.sequences[:, max(map(len, rows)) :].tolist()]


@pytest.mark.parametrize("decoding", ["static", "mrp_spec"])
def test_what_is_prefilled(random_model: MRPForCausalLM, decoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward a block of 4. Of 20 tokens and 3 more row 0 kept 16 and row 1, which was changed at token 5, kept 4: blocks 4
    to 20 are computed for both, but row 0 takes part from block 16 on. Without the head's layers in the cache, a mode with the
    head prefills all."""
    monkeypatch.setattr("modeling_mrp.networks.networks.PREFILL_CHUNK", 4)
    prompts = [[*range(1, 9)], [*range(11, 19)]]
    first = decode(random_model, prompts, max_new_tokens=12)
    assert first.stats.forwards == {"prefill": 3, "denoise": 11, "verify": 0, "head": 0}
    said = [[*row, 7, 8, 9] for row in first.sequences.tolist()]
    said[1][5] = 55
    out = decode(random_model, said, past_key_values=first.past_key_values, decoding=decoding, max_new_tokens=5)
    if decoding == "static":
        assert out.stats.forwards["prefill"] == 5
        assert out.stats.row_forwards.tolist() == [2 + 4, 5 + 4]
    else:
        assert out.stats.forwards["prefill"] == 6
        assert (out.past_key_values is not first.past_key_values, out.past_key_values.head_layers) == (True, 2)


def test_a_cache_with_room_is_used_in_place(random_model: MRPForCausalLM) -> None:
    """A cache made in advance, in inference mode or not, serves the whole conversation; one that is too small is replaced by a
    bigger one."""
    roomy, said = random_model.block_cache(2, 64, 16, with_head=True), [PROMPTS[0], PROMPTS[2]]
    size = roomy.nbytes
    for mode in ("mrp_spec", "static", "mrp_remask"):
        out = decode(random_model, said, past_key_values=roomy, decoding=mode, max_new_tokens=10)
        assert (out.past_key_values is roomy, roomy.nbytes) == (True, size)
        said = [row + answer for row, answer in zip(said, answers(out, said), strict=True)]
    with torch.inference_mode():
        small = decode(random_model, said, max_new_tokens=3).past_key_values
    out = decode(random_model, said, past_key_values=small, max_new_tokens=30)
    assert out.sequences.equal(decode(random_model, said, max_new_tokens=30).sequences)
    assert out.past_key_values.capacity == 72 > small.capacity  # 40 + 30 tokens in whole blocks
    wider = decode(random_model, said, past_key_values=out.past_key_values, decoding="self_spec", num_draft_states=5)
    assert wider.past_key_values.scratch == 20 > out.past_key_values.scratch


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another kind": (lambda _: DynamicCache(), r"are not those that generate\(..., return_dict_in_generate=True\)"),
    "another model": (lambda _: decode(make_model(), [[1, 2]]).past_key_values, "of this very model gave"),
    "other rows": (lambda model: decode(model, [[1], [2]]).past_key_values, "hold 2 rows, and input_ids have 1, .*same order"),
    "another dtype": (
        lambda model: model.float().block_cache(1, 8, 8, False),
        "another dtype .*float32.* now, .*float64",
    ),
}


@pytest.mark.parametrize("cache", OTHERS)
def test_a_cache_of_something_else_is_refused(cache: str) -> None:
    model, (make, said) = make_model(), OTHERS[cache]
    given = make(model)
    model.double()
    with pytest.raises(ValueError, match=f"{said}.*leave them unset"):
        model.generate(torch.tensor([[1, 2, 3]]), past_key_values=given, max_new_tokens=3)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "written to": (lambda model: model.model.layers[0].mlp.up_proj.weight.detach().add_(1), "weights of model, which have"),
    "assigned": (lambda model: model.load_state_dict(make_model(1).state_dict(), assign=True), "weights of model, which have"),
    "other dtype and back": (lambda model: model.float().double(), "weights of model, which have changed"),
    "another head": (lambda model: with_new_head(model, 2), "older than the weights of mrp_head, which have changed"),
    "a deeper head": (lambda model: with_new_head(model, 3), "a head of 2 layers, and the model's has 3"),
    "another adapter": (lambda model: model.set_adapter("other"), "older than the weights of model, which have changed"),
    "adapters off": (lambda model: model.base_model.disable_adapter_layers(), "weights of model, which have changed"),
    "a scaled adapter": (
        lambda model: [layer.set_scale("default", 3.0) for layer in model.modules() if hasattr(layer, "lora_A")],
        "weights of model, which have changed",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_that_no_longer_fits(change: str) -> None:
    """What it holds was computed with other weights: going on from it would give another text, and nobody would know."""
    model: Any = make_model()
    if "adapter" in change:
        lora = LoraConfig(target_modules=r"model\.layers.*up_proj", init_lora_weights=False)
        model = get_peft_model(model, lora)
        model.add_adapter("other", lora)
        model.set_adapter("default")
    options: dict[str, Any] = {"decoding": "mrp_spec", "max_new_tokens": 8}
    out = model.generate(torch.tensor([PROMPTS[0]]), return_dict_in_generate=True, **options)
    kept = [copy.deepcopy(out.past_key_values) for _ in range(2)]
    on = model.generate(out.sequences, past_key_values=kept[0], **options)
    assert on.equal(model.generate(out.sequences, max_new_tokens=8))
    change_model, message = CHANGES[change]
    change_model(model)
    for past in kept:
        with pytest.raises(ValueError, match=f"{message}.*: leave them unset"):
            model.generate(out.sequences, past_key_values=past, max_new_tokens=5)
    gone = out.past_key_values.owner
    del model
    gc.collect()
    assert gone() is None, "the cache does not keep the model"


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
