"""Every bad option of `generate` is refused before the backbone runs, by an error that names the value and the remedy."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from refusals import EMBEDS, PAIR, PROMPT, ForwardRan, headless, model, rejected
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS, REMASK_RULES
from modeling_mrp.generate.options import MRPGenerationConfig

__all__ = ["headless", "model"]  # fixtures

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("mode", DECODINGS)
def test_the_guard_lets_no_forward_pass(model: MRPForCausalLM, mode: str) -> None:
    with pytest.raises(ForwardRan):
        model.generate(PROMPT, decoding=mode, max_new_tokens=4)


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
    rejected(lambda: model.generate(PROMPT, max_new_tokens=4, **{name: 0.5}), f"^{name}.*: not used", r"[Cc]heck the spelling")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("decodng", "decoding"), ("confidence_treshold", "confidence_threshold"), ("max_new_token", "max_new_tokens")],
)
def test_the_option_that_was_meant(model: MRPForCausalLM, name: str, meant: str) -> None:
    value = rf"{name} \(did you mean {meant}"
    rejected(lambda: model.generate(PROMPT, **{name: 3}), value, "Check the spelling")
    rejected(lambda: model.generate(PROMPT, generation_config=GenerationConfig(**{name: 3})), value, "Check their spelling")


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("confidence_threshold", "0.5", "str"),
        ("num_draft_states", np.int64(4), "int64"),
        ("mrp_steps", 2.0, "float"),
        ("draft_branches", True, "bool"),
        ("temperature", "1", "str"),
    ],
)
def test_the_type_that_is_at_fault(model: MRPForCausalLM, name: str, value: Any, kind: str) -> None:
    given = rf"{name} is {re.escape(repr(value))}, of type {kind}: it must be"
    rejected(
        lambda: model.generate(PROMPT, do_sample=True, max_new_tokens=4, **{name: value}), given, r"an int|a float|a positive"
    )


@pytest.mark.parametrize("config_class", [MRPGenerationConfig, GenerationConfig])
def test_unknown_option_in_a_config_object(model: MRPForCausalLM, config_class: type[GenerationConfig]) -> None:
    config = config_class(max_new_tokens=4, confidence_treshold=0.5)
    rejected(lambda: model.generate(PROMPT, generation_config=config), r"confidence_treshold", r"Check their spelling")


OUT_OF_RANGE: dict[str, tuple[list[Any], str]] = {
    "num_draft_states": ([0, -1, 2.5, True, "x", 257], r"an int from 1 to 256"),
    "draft_branches": ([0, 2.0], r"an int of 1 or more"),
    "denoising_steps": ([0, -1, 5, 1.5, True, "x"], r"an int from 1 to block_size \(4\)"),
    "confidence_threshold": ([-0.1, 1.1, NAN, INF, "x", True], r"a probability, a float from 0 to 1"),
    "entropy_threshold": ([-1, -1e-9, NAN, "x"], r"a number of nats, a float of 0 or more"),
    "mrp_steps": ([0, -1, True, 5, 10_000], r"an int from 1 to block_size \(4\)"),
    "residual_delta": ([0, -1.0, NAN, "x"], r"a positive number of logits"),
    "kernels": (["auto", 1, 0], r"None \(where they can be used\), True \(or an error\) or False \(PyTorch only\)"),
    "remask_rule": (["x", "Threshold"], "choose one of " + ", ".join(REMASK_RULES)),
    "temperature": ([0, 0.0, -1, NAN, INF, "x"], r"a positive number"),
    "num_return_sequences": ([0, -1, True, "2", 65_536, 10**9], r"an int from 1 to 65535"),
    "max_new_tokens": ([0, -3, "3", 2.5, True], r"an int of 1 or more"),
    "max_length": ([0, "9", 9.0], r"an int of 1 or more"),
    "min_new_tokens": ([-1, "3", True], r"an int of 0 or more"),
    "min_length": ([-1, "3"], r"an int of 0 or more"),
    "top_k": ([-1, 2.5, True, "x"], r"an int of 0 or more"),
    "top_p": ([-0.1, 1.1, NAN, "x", True], r"a probability, a float from 0 to 1"),
    "min_p": ([-0.1, 1.1, NAN, "x"], r"a probability, a float from 0 to 1"),
    "typical_p": ([0, 1.1, NAN, "x"], r"above 0 and 1 \(off\) at most"),
    "top_h": ([0, 1.1, NAN, "x"], r"above 0 and 1 \(off\) at most"),
    "epsilon_cutoff": ([-1, 1.0, 2, NAN, "x"], r"0 \(off\) or more and below 1"),
    "eta_cutoff": ([-1, 1.0, 2, NAN, "x"], r"0 \(off\) or more and below 1"),
    "repetition_penalty": ([0, -1.0, NAN, INF, "x"], r"a positive number"),
    "no_repeat_ngram_size": ([-1, 2.0, "x"], r"an int of 0 or more"),
    "max_time": ([-1, NAN, "x", True], r"a number of seconds, 0 or more"),
    "do_sample": (["no", 1, 0], r"True or False"),
    "return_dict_in_generate": (["no", 1], r"True or False"),
    "pad_token_id": (["x", 1.5, True, [3]], r"it must be an id, an int,? or None"),
    "eos_token_id": (["2", ["2"], 2.0, True, {2: 3}], r"it must be an id, an int, or a list of them or None"),
    "seed": (
        [-1, "x", 1.5, True, 1 << 62, (0,), [-1], ["x"], [True]],
        r"None, an int of 0 or more and below 2\*\*62, or a list of one",
    ),
}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [(name, value, remedy) for name, (values, remedy) in OUT_OF_RANGE.items() for value in values],
)
def test_option_out_of_range(model: MRPForCausalLM, name: str, value: Any, remedy: str) -> None:
    rejected(
        lambda: model.generate(PROMPT, **{"do_sample": True, "max_new_tokens": 4, name: value}),
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
        {"mrp_steps": 4},
        {"num_draft_states": 256},
        {"top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "top_h": 1, "epsilon_cutoff": 0, "eta_cutoff": 0},
        {"min_new_tokens": 0, "min_length": 0, "no_repeat_ngram_size": 0, "max_time": 0, "repetition_penalty": 1},
        {"eos_token_id": [0, 63], "pad_token_id": 63},
        {"attention_mask": torch.ones(1, 5)},
        {"attention_mask": torch.ones(1, 5, dtype=torch.bool)},
        {"bad_words_ids": [[63]]},
        {"num_return_sequences": 1},
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
        ({"num_draft_states": 0}, r"num_draft_states is 0", r"1 to 256"),
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
    scores, states = ("output_scores", "output_logits"), ("output_attentions", "output_hidden_states")
    instead = "token_logprobs" if name in scores else "the forward of the model" if name in states else "one hypothesis per row"
    rejected(
        lambda: model.generate(PROMPT, max_new_tokens=4, return_dict_in_generate=True, **{name: value}),
        rf"{name}={re.escape(repr(value))} is not supported",
        rf"{instead}.*Leave {name} unset",
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


HUGE = 1 << 63
# What else a call may be given: a name, a value of it with what goes along, and the error.
BAD_ARGUMENTS: dict[str, list[tuple[Any, dict[str, Any], str, str]]] = {
    "generation_config": [
        ("greedy", {}, "generation_config is 'greedy'", "pass a GenerationConfig, or a dict"),
        ([("top_k", 3)], {}, "generation_config is", "pass a GenerationConfig, or a dict"),
        ({"decodng": "static"}, {}, r"decodng \(did you mean decoding\?\)", "Check their spelling"),
        ({3: 4}, {}, "unknown fields: 3", "Check their spelling"),
        ({"top_p": "x", "do_sample": True}, {}, "top_p is 'x', of type str", "a probability"),
        ({"num_draft_states": 0}, {}, "num_draft_states is 0", "1 to 256"),
    ],
    "attention_mask": [
        ([[1] * 5], {}, "attention_mask is a list", r"tensor of 0 and 1"),
        (np.ones((1, 5)), {}, "attention_mask is a ndarray", r"tensor of 0 and 1"),
        (torch.ones(1, 5).to_sparse(), {}, r"a tensor that is torch.sparse_coo", "dense"),
        (torch.ones(1, 5, device="meta"), {}, "on the meta device", "dense"),
        *((torch.tensor([[1, 1, 1, 1, odd]]), {}, f"holds {odd}", "1 at tokens and 0") for odd in (0.5, -1, 2, NAN)),
    ],
    "input_ids": [
        (PROMPT.to_sparse(), {}, "a tensor that is torch.sparse_coo", r"\[rows, length\] tensor"),
        (PROMPT.to("meta"), {}, "a tensor that is on the meta device", r"\[rows, length\] tensor"),
        (torch.nested.nested_tensor([PROMPT[0], PROMPT[0, :3]]), {}, "nested", r"\[rows, length\] tensor"),
    ],
    "infill_ids": [(PROMPT.to_sparse(), {}, "infill_ids are a tensor that is torch.sparse_coo", r"\[rows, n\] tensor")],
    "streamer": [
        ("stdout", {}, "streamer is 'stdout'", "put and end"),
        (print, {}, "streamer is <built-in", "put and end"),
        ([BaseStreamer(), None], {}, "streamer is None", "put and end"),
        (
            [BaseStreamer()] * 2,
            {"num_return_sequences": 2, "do_sample": True},
            "the batch has 2, and streamer holds 1",
            "a list of 2 different",
        ),
        ([BaseStreamer(), BaseStreamer()], {}, "the batch has 1, and streamer holds 2", "a list of 1"),
        ([], {}, "streamer holds 0", "a list of 1"),
    ],
    "eos_token_id": [
        (64, {}, "eos_token_id holds 64, outside the vocabulary of 64", "inside"),
        ([3, -1], {}, "eos_token_id holds -1, outside", "inside"),
        (HUGE, {}, "eos_token_id holds 9223372036854775808, outside", "inside"),
    ],
    "pad_token_id": [
        (64, {}, "pad_token_id holds 64, outside the vocabulary of 64", "inside"),
        (-1, {}, "pad_token_id holds -1, outside", "inside"),
    ],
    "bad_words_ids": [([[3], [4, 64]], {}, "bad_words_ids or sequence_bias hold the id 64, outside", "tokenizer")],
    "sequence_bias": [
        ({(3, 99): 1.0}, {}, "bad_words_ids or sequence_bias hold the id 99, outside", "tokenizer"),
        ([[[99], 1.0]], {}, "bad_words_ids or sequence_bias hold the id 99, outside", "tokenizer"),
    ],
    "kernels": [(True, {}, "kernels is True, but .* no kernels for torch.float64", "load the model in bfloat16")],
    "stop_strings": [
        ("a", {"tokenizer": "gpt2"}, "stop_strings='a' need the tokenizer, and tokenizer is 'gpt2'", "pass tokenizer="),
        (5, {}, "stop_strings is 5", "a text or a list of texts"),
        ([], {}, r"stop_strings is \[\]", "a text or a list of texts"),
        (["a", ""], {}, r"stop_strings is \['a', ''\]", "none of them empty"),
    ],
    "logits_processor": [
        (lambda ids, scores: scores, {}, "logits_processor is <function", "pass a list"),
        (["top"], {}, r"logits_processor is \['top'\]", "pass a list"),
    ],
    "stopping_criteria": [(lambda ids, scores: True, {}, "stopping_criteria is <function", "pass a list")],
    **{
        name: [
            (1 << 63, {"do_sample": True}, rf"{name} is 2\*\*63 or more", "64 bits"),
            (10**5000, {"do_sample": True}, rf"{name} is 2\*\*16609", "64 bits"),
        ]
        for name in ("max_new_tokens", "max_length", "min_new_tokens", "top_k", "num_return_sequences", "num_draft_states")
    },
    **{
        name: [(10**400, {"do_sample": True}, rf"{name} is 2\*\*1328 or more", "64 bits")]
        for name in ("temperature", "entropy_threshold", "residual_delta", "max_time", "draft_branches")
    },
}


@pytest.mark.parametrize(
    ("name", "value", "others", "said", "remedy"),
    [(name, *case) for name, cases in BAD_ARGUMENTS.items() for case in cases],
    ids=[f"{name}{place}" for name, cases in BAD_ARGUMENTS.items() for place, _ in enumerate(cases)],
)
def test_arguments_that_cannot_be_used(
    model: MRPForCausalLM, name: str, value: Any, others: dict[str, Any], said: str, remedy: str
) -> None:
    options = {"input_ids": PROMPT, "max_new_tokens": 4, **others, name: value}
    rejected(lambda: model.generate(**options), said, remedy)


def test_options_in_a_dict(model: MRPForCausalLM) -> None:
    """As in a config, arguments before them."""
    rejected(
        lambda: model.generate(PROMPT, generation_config={"max_new_tokens": 600, "decoding": "mrp_spec"}),
        "600 new ones",
        "lower",
    )
    with pytest.raises(ForwardRan):
        model.generate(PROMPT, generation_config={"max_new_tokens": 600, "decoding": "mrp_spec"}, max_new_tokens=4)


# What a user's function returns, and how it is called in the error.
BAD_ANSWERS: list[tuple[str, Any, str]] = [
    ("logits_processor", None, "processor Wrong returned a NoneType"),
    ("logits_processor", torch.zeros(3), r"processor Wrong returned torch.float32 of \[3\]"),
    ("logits_processor", torch.zeros(4, 64, dtype=torch.long), r"processor Wrong returned torch.int64 of \[4, 64\]"),
    ("stopping_criteria", None, "criterion Wrong returned None"),
    ("stopping_criteria", "stop", "criterion Wrong returned 'stop'"),
    ("stopping_criteria", 1.0, "criterion Wrong returned 1.0"),
    ("stopping_criteria", torch.ones(3, dtype=torch.bool), r"criterion Wrong returned tensor\(.*2 rows"),
    ("stopping_criteria", torch.tensor([NAN, NAN]), r"criterion Wrong returned tensor\(\[nan"),
]


@pytest.mark.parametrize(("name", "answer", "said"), BAD_ANSWERS)
def test_functions_that_return_the_wrong_thing(random_model: MRPForCausalLM, name: str, answer: Any, said: str) -> None:
    """The one error that names the user's own; it comes when that is first asked."""

    class Wrong:
        def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Any:
            return answer

    rejected(lambda: random_model.generate(PAIR, max_new_tokens=4, **{name: [Wrong()]}), said, "it must return")


@pytest.mark.parametrize("eos", [2, [2, 3], (2, 3), np.int64(2), torch.tensor(2), torch.tensor([2, 3])], ids=str)
def test_special_tokens_that_are_ids(model: MRPForCausalLM, eos: Any) -> None:
    with pytest.raises(ForwardRan):
        model.generate(PROMPT, max_new_tokens=4, eos_token_id=eos)


def test_fields_of_the_models_own_config_without_effect(
    model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may come from a file that somebody else wrote: a warning, once, and none for what transformers leaves there."""

    def warned() -> str:
        caplog.clear()
        with pytest.raises(ForwardRan):
            model.generate(PROMPT, max_new_tokens=4)
        return " ".join(record.getMessage() for record in caplog.records if "have no effect" in record.getMessage())

    monkeypatch.setattr(model, "generation_config", GenerationConfig.from_model_config(model.config))
    assert warned() == ""
    model.generation_config.decodng, model.generation_config.made_by = "static", "hand"
    assert "no effect: decodng (did you mean decoding?), made_by" in warned()
    assert warned() == ""
