"""Habits of Hugging Face users: greedy options of clients, peft adapters, other attention, offloading, pickles, batch calls."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import PROMPTS, left_padded, random_ids, text
from peft import LoraConfig, PrefixTuningConfig, ShadowConfig, get_peft_model
from refusals import PROMPT, rejected
from transformers import GenerationConfig

from modeling_mrp import MRPForCausalLM


def test_greedy_ignores_the_options_of_sampling(random_model: MRPForCausalLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "top_p": 0, "top_k": -1, "min_p": 4, "typical_p": 7, "top_h": 0}
    plain = text(random_model, PROMPTS[0], max_new_tokens=9)
    for given in (options, {"generation_config": options}, {"generation_config": GenerationConfig(**options)}):
        assert text(random_model, PROMPTS[0], max_new_tokens=9, **given) == plain


LEFT_OUT = {
    "PREFIX_TUNING": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "SHADOW": ShadowConfig(task_type="CAUSAL_LM"),
    r"aLoRA \(alora_invocation_tokens\)": LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[4, 5]),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_adapters_that_would_be_left_out_without_a_word_are_refused(kind: str) -> None:
    """Until they are switched off: vectors before the inputs, networks beside the layers, and what waits for an invocation."""
    plain = text(make_model(), PROMPTS[0], max_new_tokens=6)
    adapted: Any = get_peft_model(make_model().float(), LEFT_OUT[kind])
    refused = f"type {kind} has no effect on generate"
    rejected(lambda: adapted.generate(input_ids=PROMPT, max_new_tokens=6), refused, "such as LoRA")
    if kind == "PREFIX_TUNING":
        rejected(lambda: adapted(input_ids=PROMPT, labels=PROMPT), "prompt, prefix or P-tuning adapter", "such as LoRA")
    with adapted.disable_adapter():
        assert adapted.generate(input_ids=PROMPT, max_new_tokens=6)[0, 5:].tolist() == plain


@pytest.mark.parametrize("decoding", ["mrp_spec", "mrp_remask"])
def test_an_adapter_for_each_row(decoding: str) -> None:
    """Of two LoRAs, of backbone and head, whose texts end in different rounds: peft gives them out by place, so no row leaves
    its place."""
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=r".*layers\.\d+\.self_attn\.[qv]_proj", init_lora_weights=False)
    model: Any = get_peft_model(make_model(), lora, autocast_adapter_dtype=False)
    model.add_adapter("other", lora, autocast_adapter_dtype=False)
    model.to(torch.float64).eval()
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": list(range(0, 64, 7)), "pad_token_id": 63}
    options |= {"decoding": decoding}
    names, lengths = ["default", "other", "__base__"], set()
    together = model.generate(**left_padded(PROMPTS), adapter_names=names, return_dict_in_generate=True, **options)
    for row, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True)):
        alone = model.generate(input_ids=torch.tensor([prompt]), adapter_names=[name], **options)[0, len(prompt) :]
        assert together.sequences[row, max(map(len, PROMPTS)) :][: len(alone)].equal(alone)
        lengths.add(len(alone))
    assert len(lengths) == 3, "no row ends before another"
    call = {"input_ids": together.sequences[:, :12], "past_key_values": together.past_key_values, **options}
    rejected(lambda: model.generate(**call, adapter_names=names[::-1]), "older than the weights", "leave them unset")


def test_flex_attention_on_a_cpu_is_refused() -> None:
    """Compiled for a CPU, flex attention under a dense mask ended the process."""
    model = make_model()
    model.set_attn_implementation("flex_attention")
    for call in (model, partial(model, labels=PROMPT), partial(model.generate, max_new_tokens=4)):
        refused = r"attn_implementation is 'flex_attention'.*CPU", r"set_attn_implementation\('sdpa'\)"
        rejected(partial(call, PROMPT), *refused)
    model.set_attn_implementation("sdpa")
    assert model.generate(PROMPT, max_new_tokens=4).equal(make_model().generate(PROMPT, max_new_tokens=4))


PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "mrp_head", "model.layers.0", "model.layers.1")


# Where weights are kept: on disk; in a CPU's memory beside a device that computes, for which a CPU stands in: `torch.device` is
# not what accelerate calls it, so that it fetches what lies on "cpu" as it does for a GPU; or in such memory beside a GPU.
SPILLS = [
    pytest.param("disk", "cpu", PARTS, id="disk"),
    pytest.param("cpu", torch.device("cpu"), ("mrp_head", "model.layers.0"), id="some, in memory"),
    pytest.param(
        *("cpu", 0, PARTS),
        id="memory beside a GPU",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("kept", "computes", "offloaded"), SPILLS)
def test_offloaded_weights_decode(kept: str, computes: Any, offloaded: tuple[str, ...], tied: bool, tmp_path: Path) -> None:
    """What accelerate keeps elsewhere is fetched for each forward, and goes back: same text, same counts, also with a cache."""
    make_model(tie_word_embeddings=tied).save_pretrained(tmp_path / "full")
    model = MRPForCausalLM.from_pretrained(tmp_path / "full").to(computes)
    # A GPU computes where no part is placed on it: the part that holds no weights is.
    places = {part: kept if part in offloaded and part != "model.rotary_emb" else computes for part in PARTS}
    spilled = MRPForCausalLM.from_pretrained(tmp_path / "full", device_map=places, offload_folder=tmp_path / "spilled")
    assert any(weight.is_meta for weight in spilled.parameters())
    ids = random_ids(3, 2, 9).to(model.device)
    for mode in ("static", "mrp_spec", "mrp_remask"):
        options: dict[str, Any] = {"decoding": mode, "max_new_tokens": 9, "return_dict_in_generate": True}
        first = [one.generate(ids, **options) for one in (model, spilled)]
        pairs = zip((model, spilled), first, strict=True)
        again = [one.generate(out.sequences, past_key_values=out.past_key_values, **options) for one, out in pairs]
        for here, there in (first, again):
            assert there.sequences.equal(here.sequences)
            assert there.stats.forwards == here.stats.forwards
    assert spilled.lm_head.weight.is_meta == ("lm_head" in offloaded)


def test_gradient_checkpointing_is_refused_while_training(random_model: MRPForCausalLM) -> None:
    """Its layers would keep no keys and values: texts were wrong."""
    model = make_model()
    model.gradient_checkpointing_enable()
    model.train()
    rejected(lambda: model.generate(PROMPT, max_new_tokens=9), "gradient checkpointing is on", r"model.eval\(\)")
    options: dict[str, Any] = {"decoding": "mrp_spec", "max_new_tokens": 9}
    assert model.eval().generate(PROMPT, **options).equal(random_model.generate(PROMPT, **options))


def test_continuous_batching_is_refused(random_model: MRPForCausalLM) -> None:
    remedy = "all prompts to generate as one padded batch"
    rejected(lambda: random_model.generate_batch([[1, 2, 3]], max_new_tokens=4), "generate_batch and continuous", remedy)
    rejected(lambda: random_model.init_continuous_batching(), "continuous batching are not supported", remedy)


def test_an_output_goes_through_a_pickle() -> None:
    """All but the way back to the model: its cache is refused, where a deep copy goes on."""
    model = make_model()
    out = model.generate(**left_padded(PROMPTS), decoding="mrp_spec", max_new_tokens=9, return_dict_in_generate=True)
    again = pickle.loads(pickle.dumps(out))
    assert again.sequences.equal(out.sequences)
    assert again.stats.forwards == out.stats.forwards
    assert again.past_key_values.get_seq_length() == out.past_key_values.get_seq_length()
    more = {"input_ids": out.sequences, "max_new_tokens": 4}
    rejected(lambda: model.generate(**more, past_key_values=again.past_key_values), "went through a pickle", "leave them unset")
    copied = copy.deepcopy(out.past_key_values)
    assert model.generate(**more, past_key_values=copied).equal(model.generate(**more))


def test_an_adapter_of_the_lm_head_is_refused_until_it_is_merged() -> None:
    """Rows of its weight are what is read."""
    model: Any = get_peft_model(make_model(), LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False))
    ids = torch.tensor([[5, 6, 7]])
    for call in (lambda: model.generate(input_ids=ids, max_new_tokens=4), lambda: model.base_model.model.score(ids)):
        with pytest.raises(ValueError, match=r"lm_head has an adapter \(default\).*merge_and_unload"):
            call()
    merged = model.merge_and_unload()
    assert merged.generate(ids, max_new_tokens=4).shape == (1, 7)
