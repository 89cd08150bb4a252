"""Habits of Hugging Face users: greedy options of clients, an adapter for each row, offloading,
pickles."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.options import logger
from tests.support.helpers import PROMPTS, left_padded, random_ids, text
from tests.support.random_cases import make_model


def test_greedy_ignores_the_options_of_sampling(random_model: MRPForCausalLM) -> None:
    options: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0,
        "top_k": -1,
        "min_p": 4,
        "typical_p": 7,
        "top_h": 0,
    }
    plain = text(random_model, PROMPTS[0], max_new_tokens=9)
    for given in (
        options,
        {"generation_config": options},
        {"generation_config": GenerationConfig(**options)},
    ):
        assert text(random_model, PROMPTS[0], max_new_tokens=9, **given) == plain


def test_an_option_without_effect_is_told(
    random_model: MRPForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    type(logger).warning_once.cache_clear()
    for options in (
        {"target": "dynamic", "confidence_threshold": 0.5, "seed": 1},
        {"target": "static", "factor": 2.0},
    ):
        assert "no effect" not in caplog.text
        random_model.generate(
            torch.tensor([[1, 2]]), max_new_tokens=1, decoding="self_spec", **options
        )
    assert "factor: no effect with decoding='self_spec' here" in caplog.text


@pytest.mark.parametrize("decoding", ["mrp_spec", "mrp_remask"])
def test_an_adapter_for_each_row(decoding: str) -> None:
    """Of two LoRAs, of backbone and head, whose texts end in different rounds: peft gives them out
    by place, so no row leaves its place."""
    torch.manual_seed(0)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=r".*layers\.\d+\.self_attn\.[qv]_proj",
        init_lora_weights=False,
    )
    model: Any = get_peft_model(make_model(), lora, autocast_adapter_dtype=False)
    model.add_adapter("other", lora, autocast_adapter_dtype=False)
    model.to(torch.float64).eval()
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "eos_token_id": list(range(0, 64, 7)),
        "pad_token_id": 63,
    }
    options |= {"decoding": decoding}
    names, lengths = ["default", "other", "__base__"], set()
    together = model.generate(
        **left_padded(PROMPTS), adapter_names=names, return_dict_in_generate=True, **options
    )
    for row, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True)):
        alone = model.generate(input_ids=torch.tensor([prompt]), adapter_names=[name], **options)[
            0, len(prompt) :
        ]
        assert together.sequences[row, max(map(len, PROMPTS)) :][: len(alone)].equal(alone)
        lengths.add(len(alone))
    assert len(lengths) == 3, "no row ends before another"
    twice: dict[str, Any] = {
        **left_padded(PROMPTS),
        **options,
        "do_sample": True,
        "num_return_sequences": 2,
    }
    with pytest.raises(
        ValueError, match=r"adapter_names holds 3 names for 6 rows.*after num_return_sequences"
    ):
        model.generate(**twice, adapter_names=names)
    assert (
        len(model.generate(**twice, adapter_names=[name for name in names for _ in range(2)])) == 6
    )
    call = {
        "input_ids": together.sequences[:, :12],
        "past_key_values": together.past_key_values,
        **options,
    }
    with pytest.raises(ValueError, match="older than the weights"):
        model.generate(**call, adapter_names=names[::-1])


PARTS = (
    "model.rotary_emb",
    "model.embed_tokens",
    "model.norm",
    "lm_head",
    "mrp_head",
    "model.layers.0",
    "model.layers.1",
)


# Where weights are kept: on disk; in a CPU's memory beside a device that computes, for which a CPU
# stands in: `torch.device` is not what accelerate calls it, so that it fetches what lies on "cpu"
# as it does for a GPU.
@pytest.mark.parametrize(
    ("kept", "computes", "offloaded"),
    [
        ("disk", "cpu", PARTS[1:]),  # accelerate before 1.15 takes no model that is all on disk
        ("cpu", torch.device("cpu"), ("mrp_head", "model.layers.0")),
    ],
)
def test_offloaded_weights_decode(
    kept: str, computes: Any, offloaded: tuple[str, ...], tmp_path: Path
) -> None:
    """What accelerate keeps elsewhere is fetched for each forward, and goes back: same text, same
    counts, also with a cache."""
    make_model(tie_word_embeddings=kept == "disk").save_pretrained(tmp_path / "full")
    model = MRPForCausalLM.from_pretrained(tmp_path / "full")
    places = {part: kept if part in offloaded else computes for part in PARTS}
    spilled = MRPForCausalLM.from_pretrained(
        tmp_path / "full", device_map=places, offload_folder=tmp_path / "spilled"
    )
    assert any(weight.is_meta for weight in spilled.parameters())
    ids = random_ids(3, 2, 9)
    for mode in ("static", "mrp_spec", "mrp_remask"):
        options: dict[str, Any] = {
            "decoding": mode,
            "max_new_tokens": 9,
            "return_dict_in_generate": True,
        }
        first = [one.generate(ids, **options) for one in (model, spilled)]
        pairs = zip((model, spilled), first, strict=True)
        again = [
            one.generate(out.sequences, past_key_values=out.past_key_values, **options)
            for one, out in pairs
        ]
        for here, there in (first, again):
            assert there.sequences.equal(here.sequences)
            assert there.stats.forwards == here.stats.forwards
    assert spilled.lm_head.weight.is_meta == ("lm_head" in offloaded)


def test_an_output_goes_through_a_pickle() -> None:
    """All but the way back to the model: its cache is refused, where a deep copy goes on."""
    model = make_model()
    out = model.generate(
        **left_padded(PROMPTS), decoding="mrp_spec", max_new_tokens=9, return_dict_in_generate=True
    )
    again = pickle.loads(pickle.dumps(out))
    assert again.sequences.equal(out.sequences)
    assert again.stats.forwards == out.stats.forwards
    more = {"input_ids": out.sequences, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="went through a pickle"):
        model.generate(**more, past_key_values=again.past_key_values)
    copied = copy.deepcopy(out.past_key_values)
    assert model.generate(**more, past_key_values=copied).equal(model.generate(**more))
