"""Whatever `generate`, a forward, `score` or a config cannot follow is refused before the backbone runs, by an error that names
the value and the remedy. What transformers checks itself is left to it."""

import re
import reprlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model
from refusals import EMBEDS, PAIR, PROMPT, ForwardRan, guarded, headless, model, rejected
from transformers import BatchEncoding, GenerationConfig
from transformers.generation import WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.generate.option_table import DECODINGS, OFF, OPTIONS, REMASK_RULES, TARGETS, UNSUPPORTED

__all__ = ["headless", "model"]  # fixtures

NAN = float("nan")


def accepts(call: Any) -> None:
    """The call comes to the backbone."""
    with pytest.raises(ForwardRan):
        call()


COUNTS = ([1, 10**6], [0, -1, 2.5])
PROBABILITIES = ([0, 0.5, 1.0], [-1e-9, 1.01, NAN])
POSITIVE = ([1e-9, 1, 300.0], [0, -1, NAN])
SWITCHES = ([True, False], [1, 0])
# Of each option values at the edges of its range: those that pass, and those that do not. The model's blocks are of 4.
EDGES: dict[str, tuple[Any, list[Any]]] = {
    "decoding": (DECODINGS, ["Static", ""]),
    "target": (TARGETS, ["mrp_spec", "self_spec"]),
    **dict.fromkeys(("denoising_steps", "mrp_steps"), ([1, 4], [0, 5, 2.5])),
    **dict.fromkeys(("confidence_threshold", "low_threshold"), PROBABILITIES),
    "entropy_threshold": ([0, 12.5], [-1e-9, NAN]),
    **dict.fromkeys(("factor", "residual_delta"), POSITIVE),
    "num_draft_states": (["auto", 1, 256], [0, 257, "3", 2.5]),
    **dict.fromkeys(("draft_branches", "draft_passes"), COUNTS),
    "draft_shortlist": ([0, 1024], [-1, 1025]),
    "remask_rule": (REMASK_RULES, ["static"]),
    "seed": ([0, (1 << 62) - 1, [0, 3]], [-1, 1 << 62, 2.5, (0,), [-1], [True], ["x"]]),
    **dict.fromkeys(("kernels", "graphs"), SWITCHES),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda one: one.name)
def test_values_of_an_option(option: Any) -> None:
    """The error says the value, its type if that is wrong, and the remedy."""
    allowed, refused = EDGES[option.name]
    remedy = re.escape(option.remedy.replace("{block_size}", "block_size (4)"))
    for value in (*allowed, *([None] if option.default is None else [option.default])):
        option.check(value, 4)
    for value in (*refused, {}, "x", np.int64(4), *([] if option.kind is bool else [True])):
        said = f"^{option.name} is {re.escape(repr(value))}(, of type {type(value).__name__})?: {remedy}$"
        rejected(lambda value=value: option.check(value, 4), said, "")


def test_every_way_of_giving_options_is_checked(model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As arguments, in a dict, in a config of either class, in the model's own."""
    kinds: list[Any] = [None, dict, MRPGenerationConfig, GenerationConfig, "own"]

    def generate(kind: Any, **options: Any) -> Any:
        options = {"max_new_tokens": 4, **options}
        if kind is None or kind is dict:
            return model.generate(PROMPT, **({"generation_config": options} if kind else options))
        config: Any = (GenerationConfig if kind == "own" else kind)()
        for name, value in options.items():
            setattr(config, name, value)
        with monkeypatch.context() as patch:
            if kind == "own":
                patch.setattr(model, "generation_config", config)
            return model.generate(PROMPT, generation_config=None if kind == "own" else config)

    for kind in kinds:
        for option in OPTIONS:
            rejected(partial(generate, kind, **{option.name: {}}), f"^{option.name} is {{}}", "")
        rejected(partial(generate, kind, num_beams=2), "num_beams=2 is not supported", "Leave num_beams unset")
        rejected(partial(generate, kind, denoising_steps=5), "denoising_steps is 5", r"an int from 1 to block_size \(4\)")
        accepts(partial(generate, kind, **{option.name: None for option in OPTIONS}))
        if kind != "own":
            rejected(partial(generate, kind, decodng="static"), r"decodng \(did you mean decoding\?\)", "[Cc]heck the")


def test_options_that_have_no_meaning_here(model: MRPForCausalLM) -> None:
    """Each with a reason; what switches them off is allowed."""
    values = {"cache_implementation": "static", "watermarking_config": WatermarkingConfig()}
    for name, why in UNSUPPORTED.items():
        for value in [values.get(name, 3), *([] if name in values else [0, 1])]:
            call = partial(model.generate, PROMPT, max_new_tokens=4, **{name: value})
            if value == OFF.get(name):
                accepts(call)
            else:
                said = f"^{name}={re.escape(reprlib.repr(value))} is not supported: {re.escape(why)}"
                rejected(call, said, f"Leave {name} unset")
        for off in (None, GenerationConfig._get_default_generation_params().get(name)):
            accepts(partial(model.generate, PROMPT, max_new_tokens=4, **{name: off}))


@pytest.mark.parametrize("mode", DECODINGS)
def test_modes_that_need_a_head(headless: MRPForCausalLM, mode: str) -> None:
    def call() -> Any:
        return headless.generate(PROMPT, decoding=mode, max_new_tokens=4)

    if mode.startswith("mrp_"):
        rejected(call, f"decoding='{mode}'", "load one .*'self_spec'")
    else:
        accepts(call)


ALONE = "no effect with labels, whose pass packs .* of input_ids with a mask and positions of its own"
NAMED: dict[str, Any] = {"position_ids": torch.arange(5)[None], "inputs_embeds": EMBEDS, "logits_to_keep": torch.tensor([0])}
NAMED |= {"use_cache": True, "output_hidden_states": True, "output_attentions": True, "cache_position": torch.arange(5)}
MASKS = torch.full((1, 6), 60)
STREAMERS = [BaseStreamer(), BaseStreamer()]
# Of what is called, by argument: values, with what is said of them; a dict gives several arguments.
REFUSED: dict[tuple[str, str], list[tuple[Any, str]]] = {
    ("generate", "spelling"): [({"generation_config": {3: 4}}, "^3: not used.*Check the spelling")],
    ("generate", "inputs_embeds"): [(EMBEDS, "inputs_embeds=.* is not supported: pass .* as input_ids")],
    ("generate", "attention_mask"): [
        ([[1] * 5], "attention_mask is list.*pass 0 and 1 of the same"),
        (torch.ones(2, 5), "for input_ids of .*same shape"),
        (torch.zeros(1, 5), "row 0 has no token.*drop the row"),
        *((torch.tensor([row]), "row 0 has holes.*contiguous") for row in ([1, 0, 1, 1, 1], [0, 1, 0, 0, 1])),
    ],
    ("generate", "infill_ids"): [
        ([[7]], r"infill_ids are a list.*\[rows, n\] tensor"),
        *((given, r"pass \[1, n\], with a token") for given in (PAIR, PROMPT[0], PROMPT[:, :0])),
        (torch.tensor([[7, 64]]), "infill_ids hold the id 64, outside the vocabulary of 64"),
        (torch.tensor([[9] * 5]), "infill_ids hold 5 tokens a row.*leaves room for 4: raise it"),
        ({"infill_ids": MASKS.repeat(1, 100), "max_new_tokens": None}, "make 605, which exceeds.*shorten"),
    ],
    ("generate", "streamer"): [
        (STREAMERS, "the batch has 1, and streamer holds 2.*a list of 1"),
        ({"input_ids": PAIR, "streamer": STREAMERS[:1] * 2}, "batch has 2, and streamer holds 1: pass a list of 2 different"),
        ({"num_return_sequences": 2, "do_sample": True, "streamer": STREAMERS[0]}, "the batch has 2.*one prompt at a time"),
    ],
    ("generate", "seed"): [
        ({"input_ids": PAIR, "do_sample": True, "seed": [1, 2], "num_return_sequences": 2}, "2 values for 4 rows.*one per row")
    ],
    ("generate", "eos_token_id"): [
        (64, "eos_token_id holds 64, outside the vocabulary of 64.*inside"),
        ([9, 60], "eos_token_id holds the mask id 60"),
    ],
    ("generate", "pad_token_id"): [(64, "pad_token_id holds 64, outside")],
    ("generate", "sequence_bias"): [({"sequence_bias": {(3, 99): 1.0}}, "bad_words_ids or sequence_bias hold the id 99")],
    ("generate", "kernels"): [(True, "kernels is True, but .* no kernels for torch.float64.*load the model in bfloat16")],
    ("generate", "graphs"): [(True, "graphs is True, but the model is on cpu: move it to a CUDA device, or leave graphs")],
    ("generate", "stop_strings"): [("x", "stop_strings='x' need the tokenizer: pass tokenizer=")],
    ("generate", "max_length"): [
        ({"max_new_tokens": None, "max_length": 5}, "is 5, but `max_length` is set to 5.*increasing `max_length`"),
    ],
    ("generate", "input_ids"): [
        (None, r"input_ids are a NoneType: pass a \[rows, n\] tensor"),
        (torch.ones(2, 0, dtype=torch.long), "with a token or more in each"),
        (PROMPT[0], r"shape \[5\].* For one row pass input_ids\[None\]"),
        (PROMPT.float(), r"input_ids are torch.float32: pass a \[rows, n\] tensor of ids, torch\.long$"),
        (BatchEncoding({"input_ids": PROMPT}), r"input_ids are a BatchEncoding.*pass \*\*inputs"),
        *((torch.tensor([[1, token, 3]]), f"id {token}, outside the vocabulary of 64.*tokenizer") for token in (64, -1)),
        (torch.tensor([[1, 2, 3], [1, 2, 60]]), "mask id 60.*infill_ids"),
        (torch.tensor([[5, 0, 7]]), "row 0 has holes.*contiguous"),  # the mask that is inferred of padding
    ],
    ("forward", "input_ids"): [(None, "neither input_ids nor inputs_embeds: pass one of them")],
    ("forward", "noise"): [
        ({"noise_level": torch.ones(1)}, "^noise_level: no effect without labels.*Pass them too"),
        ({"attention_masks": 5}, "no argument attention_masks: check the spelling"),
    ],
    ("loss", "labels"): [
        ({"input_ids": None, "inputs_embeds": EMBEDS}, ALONE),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, ALONE),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "has holes.*contiguous, .*one side"),
        *(({name: value}, f"^{name}: no effect with labels.*Leave out either") for name, value in NAMED.items()),
        *(({"noise_level": torch.tensor([v])}, r"noise_level is \[.*\]: levels are above 0") for v in (0.0, 1.01, NAN)),
        ({"noise_level": torch.ones(2)}, r"noise_level has shape \[2\]: .* must be \[1\]"),
        ({"noise_mask": torch.ones(1, 4).bool()}, r"noise_mask has shape \[1, 4\]: .* must be \[1, 5\]"),
    ],
    ("score", "input_ids"): [
        (torch.tensor([[1, 60]]), "mask id 60.*call the model"),
        (torch.ones(1, 40_000, dtype=torch.long), "40000.*max_position_embeddings.*shorten"),
    ],
    ("score", "labels"): [
        (PROMPT.roll(-1, 1), r"labels differ from input_ids at row and column \[0, 0\]: .*without a shift"),
    ],
    ("score", "temperature"): [(0.0, "temperature is 0.0.*above 0")],
    ("score", "tokens_per_forward"): [(0, "tokens_per_forward 0: both must be above 0")],
}
ALWAYS: dict[str, dict[str, Any]] = {"generate": {"max_new_tokens": 4, "pad_token_id": 0}, "loss": {"labels": PROMPT}}


@pytest.mark.parametrize(("called", "name"), REFUSED)
def test_arguments_that_cannot_be_used(model: MRPForCausalLM, called: str, name: str) -> None:
    method: Any = {"generate": model.generate, "score": model.score}.get(called, model)
    for value, said in REFUSED[called, name]:
        given = {"input_ids": PROMPT, **ALWAYS.get(called, {}), **(value if type(value) is dict else {name: value})}
        rejected(partial(method, **given), f"(?s){said}", "")


ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "generate": [
        {"input_ids": PROMPT.int()},
        *({"eos_token_id": ids} for ids in ((2, 3), np.int64(2), torch.tensor(2), torch.tensor([2, 3]))),
        {"generation_config": {"max_new_tokens": 600, "decoding": "mrp_spec"}},  # arguments go before it
        {"input_ids": torch.tensor([[5, 0, 7], [0, 5, 7]]), "eos_token_id": 0},  # an eos is no padding
        {"use_cache": False},  # a Trainer leaves it so in the config of what it saves
        *(  # padding that holds anything
            {"input_ids": torch.tensor([[padding, 2, 3], [4, 5, 6]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1.0]])}
            for padding in (60, 64, -1)
        ),
    ],
    "forward": [{"use_cache": False, "output_attentions": None, "output_hidden_states": False, "return_dict": None}],  # as peft
    "loss": [
        {"num_items_in_batch": 3, "use_cache": None, "position_ids": None, "logits_to_keep": 0, "junk": None},
        {"noise_level": torch.ones(1), "noise_mask": PROMPT > 0},
    ],
}


@pytest.mark.parametrize("called", ACCEPTED)
def test_arguments_that_are_as_good(model: MRPForCausalLM, called: str) -> None:
    method: Any = model.generate if called == "generate" else model
    for given in ACCEPTED[called]:
        accepts(lambda given=given: method(**{"input_ids": PROMPT, **ALWAYS.get(called, {}), **given}))


def test_a_bias_on_several_tokens_needs_all_before_its_last(model: MRPForCausalLM) -> None:
    bias = {"sequence_bias": [[[3], 2.0], [[3, 9], 1.0]], "max_new_tokens": 4}
    for order in ({"decoding": "sequential"}, {"decoding": "mrp_spec", "target": "sequential"}):
        accepts(lambda order=order: model.generate(PROMPT, **bias, **order))
    others: list[dict[str, Any]] = [{"decoding": mode} for mode in DECODINGS if mode != "sequential"]
    for order in [{"decoding": "sequential", "denoising_steps": 2}, *others]:
        rejected(lambda order=order: model.generate(PROMPT, **bias, **order), r"\[3, 9\], of several tokens", "'sequential'")
        accepts(lambda order=order: model.generate(PROMPT, bad_words_ids=[[3, 9]], max_new_tokens=4, **order))


def test_room_for_the_text() -> None:
    """16 positions; padding takes none."""
    short = guarded(make_model(max_position_embeddings=16))
    for length, new in ((5, 12), (15, 2), (16, 1), (17, 1)):
        ids = torch.cat([torch.zeros(1, 30, dtype=torch.long), torch.ones(1, length, dtype=torch.long)], 1)
        call = partial(short.generate, ids, attention_mask=(ids != 0).long())
        said = f"prompt of {length} tokens and {new} new ones .*max_position_embeddings=16"
        rejected(partial(call, max_new_tokens=new), said, "shorten the prompt or lower")
        if length < 16:
            accepts(partial(call, max_new_tokens=new - 1))


# What a user's processor returns, and how it is called in the error.
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "processor Wrong returned a NoneType.*it must return"),
        (torch.zeros(3), r"processor Wrong returned torch.float32 of \[3\].*it must return"),
        (torch.zeros(4, 64, dtype=torch.long), r"processor Wrong returned torch.int64 of \[4, 64\].*it must return"),
        (torch.full((2, 64), torch.inf), r"processor Wrong returned \+inf.*let it return -inf for all others"),
    ],
)
def test_processors_that_return_the_wrong_thing(random_model: MRPForCausalLM, answer: Any, said: str) -> None:
    """The error names the user's own; it comes when that is first asked."""
    wrong = type("Wrong", (), {"__call__": lambda *_, **__: answer})()
    rejected(lambda: random_model.generate(PAIR, max_new_tokens=4, logits_processor=[wrong]), said, "")


@pytest.mark.parametrize(("decoding", "warned"), [("sequential", False), ("static", True)])
def test_a_processor_that_does_not_see_all_on_its_left_is_told(
    random_model: MRPForCausalLM, decoding: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr("modeling_mrp.generate.generation.logger", SimpleNamespace(warning_once=heard.append))
    random_model.generate(PROMPT, decoding=decoding, max_new_tokens=4, logits_processor=[lambda ids, scores: scores], top_k=3)
    assert [said for said in heard if "logits processor function sees what is known" in said] == heard
    assert len(heard) == warned


def test_caches_and_heads(model: MRPForCausalLM, headless: MRPForCausalLM) -> None:
    cache = model.block_cache(1, 8, 8, with_head=False)
    rejected(lambda: model(PROMPT, past_key_values=cache), "are a BlockCache, which only generate", "DynamicCache")
    rejected(lambda: model(PROMPT, labels=PROMPT, past_key_values=cache), ALONE, "")
    rejected(lambda: model.block_cache(1, 10, 8, with_head=True), "capacity is 10", "a multiple of the block size, 4")
    rejected(lambda: headless.block_cache(1, 8, 8, with_head=True), "no MRP head", "pass with_head=False")
    call = (PROMPT, EMBEDS, torch.arange(5)[None], torch.ones(1, 1, 5, 5, dtype=torch.bool))
    rejected(lambda: headless.residual(*call), "num_nextn_predict_layers is 0", "load one .* or train a head")
    rejected(lambda: guarded(make_model().train()).score(PAIR), "training mode", r"model.eval\(\)")
