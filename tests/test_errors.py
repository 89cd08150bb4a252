"""Every bad input is refused before the backbone runs, by an error that names the value and the remedy."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.generation_mrp import DECODINGS, REMASK_RULES, MRPGenerationConfig

NAN, INF = float("nan"), float("inf")
PROMPT = torch.tensor([[1, 2, 3, 4, 5]])
PAIR = torch.tensor([[1, 2, 3], [4, 5, 6]])
EMBEDS = torch.zeros(1, 5, 32, dtype=torch.float64)


class ForwardRan(Exception):
    """The backbone ran: no error came before it. Not a ValueError, so that no test takes it for one."""


def guarded(model: MRPForCausalLM) -> MRPForCausalLM:
    def refuse(*_: Any) -> None:
        raise ForwardRan

    model.model.register_forward_pre_hook(refuse)
    return model


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    return guarded(make_model())


@pytest.fixture(scope="module")
def headless() -> MRPForCausalLM:
    return guarded(make_model(num_nextn_predict_layers=0))


@pytest.fixture(scope="module")
def short_model() -> MRPForCausalLM:
    return guarded(make_model(max_position_embeddings=16))


def rejected(call: Callable[[], Any], value: str, remedy: str) -> str:
    """Runs the call, which must raise a ValueError whose message matches both patterns; returns the message."""
    with pytest.raises(ValueError, match=value) as caught:
        call()
    message = str(caught.value)
    assert caught.type is ValueError
    assert re.search(remedy, message), message
    return message


# What generate takes: options


@pytest.mark.parametrize("mode", DECODINGS)
def test_the_guard_lets_no_forward_pass(model: MRPForCausalLM, mode: str) -> None:
    with pytest.raises(ForwardRan):
        model.generate(PROMPT, decoding=mode, max_new_tokens=4)


@pytest.mark.parametrize("copies", [0, -1, True])
def test_num_return_sequences(model: MRPForCausalLM, copies: Any) -> None:
    rejected(
        lambda: model.generate(PROMPT, num_return_sequences=copies, max_new_tokens=4),
        rf"num_return_sequences is {re.escape(repr(copies))}",
        r"an int of 1 or more",
    )


@pytest.mark.parametrize("decoding", ["x", "Static", "mrp", "", 3, ["static"]])
def test_unknown_decoding(model: MRPForCausalLM, decoding: Any) -> None:
    message = rejected(
        lambda: model.generate(PROMPT, decoding=decoding, max_new_tokens=4),
        rf"decoding is {re.escape(repr(decoding))}",
        r"choose one of",
    )
    assert all(name in message for name in DECODINGS)


@pytest.mark.parametrize("name", ["confidence_treshold", "block_length", "remasking", "gen_length"])
def test_unknown_option(model: MRPForCausalLM, name: str) -> None:
    rejected(lambda: model.generate(PROMPT, max_new_tokens=4, **{name: 0.5}), name, r"[Cc]heck the spelling")


@pytest.mark.parametrize("config_class", [MRPGenerationConfig, GenerationConfig])
def test_unknown_option_in_a_config_object(model: MRPForCausalLM, config_class: type[GenerationConfig]) -> None:
    config = config_class(max_new_tokens=4, confidence_treshold=0.5)
    rejected(lambda: model.generate(PROMPT, generation_config=config), r"confidence_treshold", r"check their spelling")


OUT_OF_RANGE: dict[str, tuple[list[Any], str]] = {
    "num_draft_states": ([0, -1, 2.5, True, "x"], r"an int of 1 or more"),
    "denoising_steps": ([0, -1, 5, 1.5, True, "x"], r"an int from 1 to block_size \(4\)"),
    "confidence_threshold": ([-0.1, 1.1, NAN, INF, "x", True], r"a probability from 0 to 1"),
    "entropy_threshold": ([-1, -1e-9, NAN, "x"], r"a number of nats, 0 or more"),
    "mrp_steps": ([0, -1, True], r"an int of 1 or more"),
    "residual_delta": ([0, -1.0, NAN, "x"], r"a positive number of logits"),
    "kernels": (["auto", 1, 0], r"None \(where they can be used\), True \(or an error\) or False \(PyTorch only\)"),
    "remask_rule": (["x", "Threshold"], "choose one of " + ", ".join(REMASK_RULES)),
    "temperature": ([0, 0.0, -1, NAN, INF, "x"], r"a positive number"),
    "seed": ([-1, "x", 1.5, True, 1 << 62, (0,), [-1], ["x"], [True]], r"None, an int from 0 to 2\*\*62, or a list"),
}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [(name, value, remedy) for name, (values, remedy) in OUT_OF_RANGE.items() for value in values],
)
def test_option_out_of_range(model: MRPForCausalLM, name: str, value: Any, remedy: str) -> None:
    rejected(
        lambda: model.generate(PROMPT, do_sample=True, max_new_tokens=4, **{name: value}),
        rf"^{name} is {re.escape(repr(value))}",
        remedy,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_states": 1},
        {"denoising_steps": 1},
        {"denoising_steps": 4},
        dict.fromkeys(OUT_OF_RANGE),
        {"decoding": None},
        {"confidence_threshold": 0},
        {"confidence_threshold": 1},
        {"entropy_threshold": 0},
        {"mrp_steps": 1},
        {"residual_delta": 1e-9},
        {"temperature": 1e-9},
        {"seed": 0},
        {"seed": (1 << 62) - 1},
        {"seed": [5]},
        {"max_new_tokens": 1},
        {"num_beams": 1},
        {"output_scores": False},
        {"use_cache": True},
        {"use_cache": False},  # a Trainer leaves it so in the config of what it saves; the loop keeps its own cache
    ],
    ids=str,
)
def test_the_edges_of_the_ranges_are_allowed(model: MRPForCausalLM, options: dict[str, Any]) -> None:
    with pytest.raises(ForwardRan):
        model.generate(PROMPT, **{"do_sample": True, "max_new_tokens": 4, **options})


@pytest.fixture(params=["kwarg", "MRPGenerationConfig", "GenerationConfig", "model.generation_config"])
def door(request: pytest.FixtureRequest, model: MRPForCausalLM) -> Iterator[Callable[..., Any]]:
    """`generate` with options given by each of the ways there are."""
    saved = model.generation_config

    def generate(**options: Any) -> Any:
        if request.param == "kwarg":
            return model.generate(PROMPT, **options)
        if request.param == "model.generation_config":
            model.generation_config = GenerationConfig(**options)
            return model.generate(PROMPT)
        kind = {"MRPGenerationConfig": MRPGenerationConfig, "GenerationConfig": GenerationConfig}[request.param]
        return model.generate(PROMPT, generation_config=kind(**options))

    yield generate
    model.generation_config = saved


@pytest.mark.parametrize(
    ("options", "value", "remedy"),
    [
        ({"num_draft_states": 0}, r"num_draft_states is 0", r"1 or more"),
        ({"decoding": "x"}, r"decoding is 'x'", r"choose one of"),
        ({"num_beams": 2}, r"num_beams=2", r"Leave num_beams unset"),
        ({"seed": [1, 2, 3]}, r"3 values for 1 rows", r"one per row"),
    ],
    ids=str,
)
def test_every_way_of_giving_options_is_checked(
    door: Callable[..., Any], options: dict[str, Any], value: str, remedy: str
) -> None:
    rejected(lambda: door(max_new_tokens=4, **options), value, remedy)


@pytest.mark.parametrize(
    ("inputs", "seeds", "returned"), [(PROMPT, [], 1), (PROMPT, [1, 2], 1), (PAIR, [1], 1), (PROMPT, [1], 3), (PAIR, [1, 2], 2)]
)
def test_seeds_that_do_not_match_the_rows(model: MRPForCausalLM, inputs: Tensor, seeds: list[int], returned: int) -> None:
    rejected(
        lambda: model.generate(inputs, do_sample=True, seed=seeds, num_return_sequences=returned, max_new_tokens=4),
        rf"{len(seeds)} values for {len(inputs) * returned} rows",
        r"give one per row",
    )


@pytest.mark.parametrize("mode", ["mrp_direct", "mrp_spec", "mrp_remask"])
def test_a_mode_that_needs_a_head(headless: MRPForCausalLM, mode: str) -> None:
    rejected(
        lambda: headless.generate(PROMPT, decoding=mode, max_new_tokens=4), rf"decoding='{mode}'", r"load one .*'self_spec'"
    )


@pytest.mark.parametrize("mode", [mode for mode in DECODINGS if not mode.startswith("mrp_")])
def test_the_other_modes_need_none(headless: MRPForCausalLM, mode: str) -> None:
    with pytest.raises(ForwardRan):
        headless.generate(PROMPT, decoding=mode, max_new_tokens=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("num_beam_groups", 2),
        ("penalty_alpha", 0.6),
        ("prompt_lookup_num_tokens", 3),
        ("constraints", ["c"]),
        ("force_words_ids", [[1]]),
        ("dola_layers", "low"),
        ("guidance_scale", 2.0),
        ("token_healing", True),
        ("output_scores", True),
        ("output_logits", True),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("cache_implementation", "static"),
    ],
)
def test_what_block_diffusion_does_not_do(model: MRPForCausalLM, name: str, value: Any) -> None:
    rejected(
        lambda: model.generate(PROMPT, max_new_tokens=4, return_dict_in_generate=True, **{name: value}),
        rf"{name}={re.escape(repr(value))} is not supported",
        rf"Leave {name} unset",
    )


def test_unknown_cache_implementation(model: MRPForCausalLM) -> None:
    rejected(
        lambda: model.generate(PROMPT, max_new_tokens=4, cache_implementation="x"), r"cache_implementation.*\(x\)", r"Choose"
    )


def test_an_assistant_model(model: MRPForCausalLM, headless: MRPForCausalLM) -> None:
    rejected(
        lambda: model.generate(PROMPT, max_new_tokens=4, assistant_model=headless), r"assistant_model", r"decoding='mrp_spec'"
    )


def test_negative_prompts(model: MRPForCausalLM) -> None:
    rejected(lambda: model.generate(PROMPT, max_new_tokens=4, negative_prompt_ids=PROMPT), r"negative_prompt_ids", r"unset")


def test_stop_strings_without_a_tokenizer(model: MRPForCausalLM) -> None:
    rejected(lambda: model.generate(PROMPT, max_new_tokens=4, stop_strings="x"), r"stop_strings='x'", r"pass tokenizer=")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.arange(7, 12)[None]),
        ("past_key_values", DynamicCache()),
        ("labels", PROMPT),
        ("noise_level", torch.ones(1)),
        ("noise_mask", torch.ones(1, 5, dtype=torch.bool)),
        ("inputs_embeds", EMBEDS),
        ("prefill_chunk_size", 2),
        ("forced_eos_token_id", 9),
        ("forced_bos_token_id", 9),
        ("begin_suppress_tokens", [9]),
        ("exponential_decay_length_penalty", (3, 1.5)),
        ("prefix_allowed_tokens_fn", lambda row, ids: [9]),
        ("negative_prompt_attention_mask", torch.ones(1, 5)),
    ],
)
def test_options_without_effect(model: MRPForCausalLM, name: str, value: Any) -> None:
    """Arguments of forward or of one-token decoding that would change nothing here are not taken in silence."""
    rejected(lambda: model.generate(PROMPT, max_new_tokens=4, **{name: value}), name, r"[Ll]eave .* unset")


@pytest.mark.parametrize("eos", [60, [9, 60]], ids=str)
def test_the_mask_id_as_eos(model: MRPForCausalLM, eos: Any) -> None:
    rejected(lambda: model.generate(PROMPT, max_new_tokens=4, eos_token_id=eos), r"eos_token_id.*60", r"mask")


# What generate takes: lengths


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        (0, r"must be greater than 0"),
        (-3, r"must be greater than 0"),
        (2.5, r"an int of 1 or more"),
        (True, r"an int of 1 or more"),
    ],
)
def test_max_new_tokens(model: MRPForCausalLM, limit: Any, remedy: str) -> None:
    rejected(lambda: model.generate(PROMPT, max_new_tokens=limit), rf"max_new_tokens.* is {limit}", remedy)


@pytest.mark.parametrize("prompt_length", [5, 15, 16, 17])
def test_prompt_and_new_tokens_exceed_the_positions(short_model: MRPForCausalLM, prompt_length: int) -> None:
    new = max(1, 17 - prompt_length)
    rejected(
        lambda: short_model.generate(torch.ones(1, prompt_length, dtype=torch.long), max_new_tokens=new),
        rf"prompt of {prompt_length} tokens and {new} new ones .*max_position_embeddings=16",
        r"shorten the prompt or lower max_new_tokens",
    )


@pytest.mark.parametrize("padding", [0, 30])
def test_the_last_position_can_be_used(short_model: MRPForCausalLM, padding: int) -> None:
    """5 + 11 = 16 tokens fit; padding takes no position."""
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), PROMPT], 1)
    with pytest.raises(ForwardRan):
        short_model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=11)


@pytest.mark.parametrize("where", ["kwarg", "model.generation_config"])
def test_max_length_exceeds_the_positions(short_model: MRPForCausalLM, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_length": 17}
    if where == "model.generation_config":
        monkeypatch.setattr(short_model, "generation_config", GenerationConfig(**options))
        options = {}
    rejected(lambda: short_model.generate(PROMPT, **options), r"17.*max_position_embeddings=16", r"shorten|lower max_length")


def test_max_length_not_above_the_prompt(model: MRPForCausalLM) -> None:
    rejected(lambda: model.generate(PROMPT, max_length=5), r"is 5, but `max_length` is set to 5", r"increasing `max_length`")


# What generate takes: prompts


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (3,), (1, 2, 3)], ids=str)
def test_prompts_without_a_token_or_a_row(model: MRPForCausalLM, shape: tuple[int, ...]) -> None:
    rejected(
        lambda: model.generate(torch.ones(shape, dtype=torch.long), max_new_tokens=4),
        rf"shape {re.escape(str(list(shape)))}",
        r"at least one row with at least one token",
    )


@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_is_all_padding(model: MRPForCausalLM, row: int) -> None:
    mask = torch.ones_like(PAIR)
    mask[row] = 0
    rejected(
        lambda: model.generate(PAIR, attention_mask=mask, max_new_tokens=4), rf"row {row} has no token", r"[Dd]rop the row"
    )


@pytest.mark.parametrize("mask_row", [[1, 0, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]], ids=str)
def test_a_mask_with_holes(model: MRPForCausalLM, mask_row: list[int]) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    rejected(
        lambda: model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1], mask_row]), max_new_tokens=4),
        r"attention_mask of row 1 has holes",
        r"must be contiguous",
    )


@pytest.mark.parametrize("mask_row", [[0, 1, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]], ids=str)
def test_padding_on_either_side_or_both_is_no_hole(model: MRPForCausalLM, mask_row: list[int]) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with pytest.raises(ForwardRan):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1, 1], mask_row]), max_new_tokens=4)


@pytest.mark.parametrize(
    ("ids", "value", "remedy"),
    [
        ([[5, 0, 7]], r"row 0 has holes", r"contiguous"),
        ([[0, 0, 0], [1, 2, 3]], r"row 0 has no token", r"[Dd]rop"),
    ],
)
def test_the_mask_that_transformers_infers(model: MRPForCausalLM, ids: list[list[int]], value: str, remedy: str) -> None:
    rejected(lambda: model.generate(torch.tensor(ids), pad_token_id=0, max_new_tokens=4), value, remedy)


@pytest.mark.parametrize("shape", [(2, 1, 3, 3), (1, 2, 3), (2, 4), (2, 2), (1, 3), (3,)], ids=str)
def test_a_mask_of_another_shape(model: MRPForCausalLM, shape: tuple[int, ...]) -> None:
    rejected(
        lambda: model.generate(PAIR, attention_mask=torch.ones(shape, dtype=torch.long), max_new_tokens=4),
        rf"{re.escape(str(list(shape)))} for input_ids of \[2, 3\]",
        r"2-D mask of the same shape",
    )


@pytest.mark.parametrize("column", [0, 2])
def test_the_mask_id_in_the_prompt(model: MRPForCausalLM, column: int) -> None:
    ids = PAIR.clone()
    ids[1, column] = 60
    rejected(lambda: model.generate(ids, max_new_tokens=4), r"mask id 60", r"infill_ids")


@pytest.mark.parametrize("padding", [60, 64, -1])
def test_what_padding_holds_does_not_matter(model: MRPForCausalLM, padding: int) -> None:
    ids = PAIR.clone()
    ids[1, 0] = padding
    with pytest.raises(ForwardRan):
        model.generate(ids, attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]), max_new_tokens=4)


@pytest.mark.parametrize("token", [64, 99, -1])
def test_an_id_outside_the_vocabulary(model: MRPForCausalLM, token: int) -> None:
    ids = PAIR.clone()
    ids[1, 1] = token
    value = rf"id {token}, outside the vocabulary of 64"
    rejected(lambda: model.generate(ids, max_new_tokens=4), value, r"use this model's tokenizer")


def test_no_ids(model: MRPForCausalLM) -> None:
    rejected(lambda: model.generate(max_new_tokens=4), r"needs input_ids", r"pass a \[rows, length\] tensor")


def test_embeddings_in_place_of_ids(model: MRPForCausalLM) -> None:
    rejected(lambda: model.generate(inputs_embeds=EMBEDS, max_new_tokens=4), r"inputs_embeds.* not supported", r"unset|pass a")


class SilentStreamer(BaseStreamer):
    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.parametrize(
    ("inputs", "options"),
    [(PAIR, {}), (PROMPT, {"do_sample": True, "num_return_sequences": 2})],
)
def test_a_streamer_with_two_rows(model: MRPForCausalLM, inputs: Tensor, options: dict[str, Any]) -> None:
    rejected(
        lambda: model.generate(inputs, max_new_tokens=4, streamer=SilentStreamer(), **options),
        r"the batch has 2",
        r"stream one prompt at a time",
    )


# Configurations


def config(**overrides: Any) -> MRPConfig:
    return MRPConfig(**{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "mask_token_id": 60, **overrides})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("block_size", 0, r"at least 1"),
        ("block_size", -4, r"at least 1"),
        ("block_size", 2.5, r"at least 1|an int"),
        ("block_size", "x", r"at least 1|an int"),
        ("mask_token_id", 64, r"set it to the id of the tokenizer's mask token"),
        ("mask_token_id", 1000, r"set it to the id of the tokenizer's mask token"),
        ("mask_token_id", -1, r"set it to the id of the tokenizer's mask token"),
        ("mask_token_id", None, r"set it to the id"),
        ("num_nextn_predict_layers", -1, r"0 for no head"),
        ("num_nextn_predict_layers", 1.5, r"0 for no head"),
        ("num_mrp_heads", 0, r"it must be 1"),
        ("num_mrp_heads", 2, r"it must be 1"),
        ("layer_types", ["sliding_attention", "full_attention"], r"needs 'full_attention' in every layer"),
    ],
)
def test_configuration(name: str, value: Any, remedy: str) -> None:
    rejected(lambda: config(**{name: value}), rf"{name} is {re.escape(repr(value))}", remedy)


def test_layers_that_qwen_would_make_sliding() -> None:
    """Without layer_types, Qwen3 derives them: here a window from layer 1 on."""
    rejected(
        lambda: config(use_sliding_window=True, sliding_window=4, max_window_layers=1),
        r"layer_types is \['full_attention', 'sliding_attention'\]",
        r"needs 'full_attention' in every layer",
    )


# Forwards


def test_forward_without_inputs(model: MRPForCausalLM) -> None:
    rejected(lambda: model(), r"neither input_ids nor inputs_embeds", r"pass one of them")


@pytest.mark.parametrize("shape", [(1, 4), (1, 7), (2, 5)])
def test_forward_with_a_mask_of_wrong_shape(model: MRPForCausalLM, shape: tuple[int, int]) -> None:
    rejected(
        lambda: model(PROMPT, attention_mask=torch.ones(shape)),
        rf"attention_mask has shape \[{shape[0]}, {shape[1]}\]",
        r"pass \[1, 5\]",
    )


@pytest.mark.parametrize("given", ["cache", "embeds", "4-D mask"])
def test_labels_with_what_does_not_go_with_them(model: MRPForCausalLM, given: str) -> None:
    inputs: dict[str, Any] = {
        "cache": {"input_ids": PROMPT, "past_key_values": model.block_cache(1, 8, 8, with_head=False)},
        "embeds": {"inputs_embeds": EMBEDS},
        "4-D mask": {"input_ids": PROMPT, "attention_mask": torch.ones(1, 1, 5, 5)},
    }[given]
    rejected(
        lambda: model(labels=PROMPT, **inputs), r"labels need", r"input_ids with a 2-D attention_mask and no past_key_values"
    )


@pytest.mark.parametrize("mask", [[0, 1, 1, 1, 1], [1, 1, 0, 1, 1]], ids=str)
def test_labels_without_right_padding(model: MRPForCausalLM, mask: list[int]) -> None:
    rejected(
        lambda: model(PROMPT, labels=PROMPT, attention_mask=torch.tensor([mask])), r"0 stands before a 1", r"need right padding"
    )


def test_labels_with_a_mask_of_wrong_length(model: MRPForCausalLM) -> None:
    rejected(lambda: model(PROMPT, labels=PROMPT, attention_mask=torch.ones(1, 4)), r"attention_mask", r"\[1, 5\]")


def test_residual_without_a_head(headless: MRPForCausalLM) -> None:
    positions, mask = torch.arange(5)[None], torch.ones(1, 1, 5, 5, dtype=torch.bool)
    rejected(
        lambda: headless.residual(PROMPT, EMBEDS, positions, mask),
        r"num_nextn_predict_layers is 0",
        r"load one .* or train a head",
    )


# Checkpoints


@pytest.mark.parametrize("options", [{}, {"num_nextn_predict_layers": 0}, {"tie_word_embeddings": True}], ids=str)
def test_an_intact_checkpoint_loads(options: dict[str, Any], tmp_path: Path) -> None:
    saved = make_model(**options)
    saved.save_pretrained(tmp_path)
    loaded = MRPForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == saved.state_dict().keys()
    assert all(torch.equal(loaded[name].double(), tensor) for name, tensor in saved.state_dict().items())


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def holding(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"),
        (without("mrp_head.norm.weight"), r"missing.*mrp_head\.norm\.weight"),
        (without("lm_head.weight"), r"missing.*lm_head\.weight"),
        (holding("model.layers.2.mlp.up_proj.weight", 3), r"unexpected.*model\.layers\.2\.mlp\.up_proj\.weight"),
        (holding("mrp_head.layers.2.input_layernorm.weight", 32), r"unexpected.*mrp_head\.layers\.2\.input_layernorm\.weight"),
        (holding("mrp_head.eh_proj.weight", 3, 5), r"shape.*mrp_head\.eh_proj\.weight.*\[3, 5\]"),
        (holding("model.embed_tokens.weight", 65, 32), r"shape.*model\.embed_tokens\.weight.*\[65, 32\]"),
    ],
    ids=["no backbone", "no head", "no lm_head", "more backbone", "more head", "other head shape", "other vocabulary"],
)
def test_a_checkpoint_that_does_not_fit(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], value: str, tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    message = rejected(
        lambda: MRPForCausalLM.from_pretrained(tmp_path), value, r"Check num_nextn_predict_layers .*config\.json"
    )
    assert len(re.findall(r"\.weight", message)) == 1, "names the tensors that are wrong and no others"


def test_a_cache_for_a_head_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no MRP head: pass with_head=False"):
        make_model(num_nextn_predict_layers=0).block_cache(1, 8, 8, with_head=True)
