"""Whatever `generate` cannot follow is refused before the backbone runs, by an error that names the value and the remedy."""

import re
import reprlib
from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model
from refusals import EMBEDS, PAIR, PROMPT, ForwardRan, guarded, headless, model, rejected
from torch import Tensor
from transformers import BatchEncoding, DynamicCache, GenerationConfig
from transformers.generation import WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.generate.option_table import CHECKED, DECODINGS, OF_SAMPLING, OPTIONS, REMASK_RULES, UNSUPPORTED, Option

__all__ = ["headless", "model"]  # fixtures

NAN, INF = float("nan"), float("inf")


def accepts(call: Callable[[], Any]) -> None:
    """The call comes to the backbone."""
    with pytest.raises(ForwardRan):
        call()


# Options


NUMBERS = [-1, -1e-9, 0, 1e-9, 0.5, 0.99, 1, 1.0, 1.1, 2.5, 4, 5, 256, 257, 65_535, 65_536, (1 << 62) - 1, 1 << 62, NAN]
OTHERS = [
    True,
    False,
    "",
    "x",
    "3",
    "auto",
    "Static",
    *DECODINGS,
    *REMASK_RULES,
    {},
    [],
    (0,),
    ["x"],
    [True],
    [-1],
    np.int64(4),
]
HUGE = [1 << 63, -(1 << 63), 10**5000]
DECLARED = (*OPTIONS, *CHECKED, *OF_SAMPLING)
IDS = ("eos_token_id", "pad_token_id", "suppress_tokens")


def said_to_be_allowed(value: Any, remedy: str) -> bool:
    """Whether the words of a declaration allow a value."""
    if isinstance(value, bool):
        return "True" in remedy
    if isinstance(value, str):
        return repr(value) in remedy or value in re.findall(r"\w+", remedy.partition("choose one of ")[2])
    if isinstance(value, list) and "or a list" in remedy:
        return all(type(one) is int and said_to_be_allowed(one, remedy) for one in value)
    ranges = {r"(\d+)(?: \(off\))? or more": ge, r"from (\d+) to": ge, "(?:positive|above) (?:number|0)": gt}
    ranges |= {r"\d to (?:\D*\()?(\d+)": le, r"(\d+) \(off\) at most": le, r"below (?:2\*\*)?(\d+)": lt}
    found = [(holds, match) for pattern, holds in ranges.items() if (match := re.search(pattern, remedy))]
    if not found or type(value) not in ((int,) if "an int" in remedy else (int, float)):
        return False
    bounds = [(holds, int(match[1]) if match.groups() else 0) for holds, match in found]
    return all(holds(value, 1 << 62 if bound == 62 else bound) for holds, bound in bounds)


@pytest.mark.parametrize("option", [one for one in DECLARED if one.name not in IDS], ids=lambda one: one.name)
def test_values_of_an_option(option: Option) -> None:
    """What passes is what the declaration says in words, and the error says that, the value, and its type if that is wrong."""
    remedy = option.remedy.replace("{block_size}", "block_size (4)")
    option.check(None if option.default is None else option.default, 4)
    allowed = [said_to_be_allowed(value, remedy) for value in [*NUMBERS, *OTHERS]]
    assert 0 < sum(allowed) < len(allowed)
    for value, fine in zip([*NUMBERS, *OTHERS], allowed, strict=True):
        if fine:
            option.check(value, 4)
        else:
            said = f"^{option.name} is {re.escape(repr(value))}(, of type {type(value).__name__})?: {re.escape(remedy)}$"
            rejected(lambda value=value: option.check(value, 4), said, "")
    for value in HUGE:
        rejected(lambda value=value: option.check(value, 4), rf"^{option.name} is -?2\*\*\d+ or more", re.escape(remedy))


def test_values_beside_those_of_the_words(model: MRPForCausalLM) -> None:
    """Ids, which have many forms; infinite numbers; and the type that is at fault."""
    good: dict[str, list[Any]] = {
        "eos_token_id": [2, [0, 63], (2, 3), np.int64(2), torch.tensor(2), torch.tensor([2, 3])],
        "pad_token_id": [63],
        "suppress_tokens": [[9]],
    }
    bad = {name: ["x", 1.5, True, {2: 3}, ["x"], [1.0]] for name in IDS}
    bad["pad_token_id"].append([3])
    bad |= {"temperature": [INF], "repetition_penalty": [INF]}
    for name in (*good, *bad):
        for value in good.get(name, []):
            accepts(lambda name=name, value=value: model.generate(PROMPT, max_new_tokens=4, **{name: value}))
        for value in bad[name]:
            options = {"do_sample": True, name: value}
            rejected(
                lambda options=options: model.generate(PROMPT, **options), f"^{name} is {re.escape(repr(value))}", "it must be"
            )
    rejected(lambda: model.generate(PROMPT, mrp_steps=2.0), "^mrp_steps is 2.0, of type float: it must be an int", "")


@pytest.mark.parametrize("way", ["argument", "dict", "MRPGenerationConfig", "GenerationConfig", "model.generation_config"])
def test_every_way_of_giving_options_is_checked(model: MRPForCausalLM, way: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def generate(**options: Any) -> Any:
        options = {"max_new_tokens": 4, **options}
        if way == "argument":
            return model.generate(PROMPT, **options)
        config: Any = MRPGenerationConfig() if way == "MRPGenerationConfig" else GenerationConfig()
        for name, value in options.items():
            setattr(config, name, value)
        config = options if way == "dict" else config
        if way == "model.generation_config":
            monkeypatch.setattr(model, "generation_config", config)
            return model.generate(PROMPT)
        return model.generate(PROMPT, generation_config=config)

    for option in DECLARED:
        rejected(lambda option=option: generate(**{"do_sample": True, option.name: {}}), f"^{option.name} is {{}}", "")
    rejected(lambda: generate(num_beams=2), "num_beams=2 is not supported", "Leave num_beams unset")
    rejected(lambda: generate(seed=[1, 2, 3]), "3 values for 1 rows", "one per row")
    rejected(lambda: generate(denoising_steps=5), "denoising_steps is 5", r"an int from 1 to block_size \(4\)")
    accepts(lambda: generate(**{option.name: None for option in DECLARED if option.name != "max_new_tokens"}))
    if way != "model.generation_config":
        rejected(lambda: generate(decodng="static"), r"decodng \(did you mean decoding\?\)", "[Cc]heck the")


def test_options_in_a_dict_go_behind_arguments(model: MRPForCausalLM) -> None:
    given = {"max_new_tokens": 600, "decoding": "mrp_spec"}
    rejected(lambda: model.generate(PROMPT, generation_config=given), "600 new ones", "lower")
    accepts(lambda: model.generate(PROMPT, generation_config=given, max_new_tokens=4))
    for other in ("greedy", [("top_k", 3)]):
        rejected(lambda other=other: model.generate(PROMPT, generation_config=other), "generation_config is", "pass a Gener")
    rejected(lambda: model.generate(PROMPT, generation_config={3: 4}), "unknown fields: 3", "Check their spelling")


def test_fields_of_the_models_own_config_without_effect(
    model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may come from a file that somebody else wrote: a warning, once, and none for what transformers leaves there."""

    def warned() -> str:
        caplog.clear()
        accepts(lambda: model.generate(PROMPT, max_new_tokens=4))
        return " ".join(record.getMessage() for record in caplog.records if "have no effect" in record.getMessage())

    monkeypatch.setattr(model, "generation_config", GenerationConfig.from_model_config(model.config))
    assert warned() == ""
    model.generation_config.decodng, model.generation_config.made_by = "static", "hand"
    assert "no effect: decodng (did you mean decoding?), made_by" in warned()
    assert warned() == ""


def test_options_that_have_no_meaning_here(model: MRPForCausalLM) -> None:
    """Each with the reason of its own; what switches them off is allowed."""
    values = {"cache_implementation": "static", "watermarking_config": WatermarkingConfig()}
    for name, (off, why) in UNSUPPORTED.items():
        value = values.get(name, 3)
        said = f"^{name}={re.escape(reprlib.repr(value))} is not supported: {re.escape(why)}"
        rejected(lambda: model.generate(PROMPT, max_new_tokens=4, **{name: value}), said, f"Leave {name} unset")  # noqa: B023
        accepts(lambda: model.generate(PROMPT, max_new_tokens=4, **{name: off}))  # noqa: B023
    for use_cache in (True, False):  # a Trainer leaves it so in the config of what it saves; the loop keeps its own cache
        accepts(lambda use_cache=use_cache: model.generate(PROMPT, max_new_tokens=4, use_cache=use_cache))


@pytest.mark.parametrize("mode", DECODINGS)
def test_modes_that_need_a_head(headless: MRPForCausalLM, mode: str) -> None:
    def call() -> Any:
        return headless.generate(PROMPT, decoding=mode, max_new_tokens=4)

    if mode.startswith("mrp_"):
        rejected(call, f"decoding='{mode}'", "load one .*'self_spec'")
    else:
        accepts(call)


@pytest.mark.parametrize(("inputs", "seeds", "returned"), [(PAIR, [1], 1), (PAIR, [1, 2], 2)])
def test_seeds_that_do_not_match_the_rows(model: MRPForCausalLM, inputs: Tensor, seeds: list[int], returned: int) -> None:
    rejected(
        lambda: model.generate(inputs, do_sample=True, seed=seeds, num_return_sequences=returned, max_new_tokens=4),
        f"{len(seeds)} values for {len(inputs) * returned} rows",
        "give one per row",
    )


# Arguments: by name a value and what is said of it.
BAD_ARGUMENTS: dict[str, list[tuple[Any, str]]] = {
    "confidence_treshold": [
        (0.5, r"confidence_treshold \(did you mean confidence_threshold\?\): not used.*Check the spelling")
    ],
    "inputs_embeds": [(EMBEDS, "inputs_embeds=.* is not supported: pass .* as input_ids")],
    "past_key_values": [(DynamicCache(), "are a DynamicCache.*leave them unset")],
    "attention_mask": [
        ([[1] * 5], "attention_mask is list.*tensor of 0 and 1"),
        *((torch.tensor([[1, 1, 1, 1, odd]]), f"holds {odd}.*1 at tokens and 0") for odd in (0.5, -1, 2, NAN)),
        *((torch.ones(shape), "for input_ids of .*same shape") for shape in ((1, 1, 5, 5), (1, 6), (2, 5), (5,))),
        (torch.zeros(1, 5), "row 0 has no token.*drop the row"),
        *((torch.tensor([row]), "row 0 has holes.*contiguous") for row in ([1, 0, 1, 1, 1], [0, 1, 0, 0, 1])),
    ],
    "infill_ids": [
        (PROMPT.float(), r"infill_ids are torch.float32.*\[rows, n\] tensor of ids, torch\.long"),
        ([[7]], r"infill_ids are a list.*\[rows, n\] tensor"),
        *((given, r"for 1 prompts: pass \[1, n\], with a token") for given in (PAIR, PROMPT[0], PAIR[:, :1], PROMPT[:, :0])),
        *((torch.tensor([[7, odd]]), f"infill_ids hold the id {odd}, outside the vocabulary of 64") for odd in (64, -100)),
        (torch.tensor([[9] * 5]), "infill_ids hold 5 tokens a row.*leaves room for 4: raise it"),
    ],
    "streamer": [
        *((given, "must have put and end") for given in ("stdout", print, [BaseStreamer(), None])),
        ([BaseStreamer(), BaseStreamer()], "the batch has 1, and streamer holds 2.*a list of 1"),
        ([], "streamer holds 0.*a list of 1"),
    ],
    "eos_token_id": [
        (64, "eos_token_id holds 64, outside the vocabulary of 64.*inside"),
        ([3, -1], "eos_token_id holds -1, outside"),
        (60, "eos_token_id holds the mask id 60"),
        ([9, 60], "eos_token_id holds the mask id 60"),
    ],
    "pad_token_id": [(64, "pad_token_id holds 64, outside"), (-1, "pad_token_id holds -1, outside")],
    "bad_words_ids": [([[3], [4, 64]], "bad_words_ids or sequence_bias hold the id 64, outside.*tokenizer")],
    "sequence_bias": [({(3, 99): 1.0}, "bad_words_ids or sequence_bias hold the id 99, outside")],
    "kernels": [(True, "kernels is True, but .* no kernels for torch.float64.*load the model in bfloat16")],
    "stop_strings": [
        ("x", "stop_strings='x' need the tokenizer: pass tokenizer="),
        *((given, "stop_strings is .*none of them empty") for given in (5, [], ["a", ""])),
    ],
    "logits_processor": [(given, "logits_processor is .*pass a list") for given in (lambda ids, scores: scores, ["top"])],
    "stopping_criteria": [(lambda ids, scores: True, "stopping_criteria is <function.*pass a list")],
    "max_length": [(5, "is 5, but `max_length` is set to 5.*increasing `max_length`")],
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_cannot_be_used(model: MRPForCausalLM, name: str) -> None:
    for value, said in BAD_ARGUMENTS[name]:
        options = {"max_new_tokens": None if name == "max_length" else 4, name: value}
        rejected(lambda options=options: model.generate(PROMPT, **options), f"(?s){said}", "")


def test_arguments_that_go_with_others(model: MRPForCausalLM) -> None:
    one = [BaseStreamer()] * 2
    rejected(lambda: model.generate(PAIR, streamer=one), "the batch has 2, and streamer holds 1", "a list of 2 different")
    copies = {"num_return_sequences": 2, "do_sample": True, "streamer": one[0]}
    rejected(lambda: model.generate(PROMPT, **copies), "the batch has 2", "stream one prompt at a time")
    masks = torch.full((1, 6), 60)
    rejected(lambda: model.generate(PROMPT, infill_ids=masks, max_length=10), "hold 6 tokens a row.*room for 5", "raise it")
    rejected(lambda: model.generate(PROMPT, infill_ids=masks.repeat(1, 100)), "make 605, which exceeds", "shorten")
    rejected(lambda: model.generate(PROMPT, stop_strings="a", tokenizer="gpt2"), "and tokenizer is 'gpt2'", "pass tokenizer=")


LEFT_TO_RIGHT: list[dict[str, Any]] = [{"decoding": "sequential"}, {"decoding": "mrp_spec", "target": "sequential"}]
OTHER_ORDERS: list[dict[str, Any]] = [
    {"decoding": "sequential", "denoising_steps": 2},
    {"decoding": "self_spec", "target": "dynamic"},
    *({"decoding": mode} for mode in DECODINGS if mode != "sequential"),
]


def test_a_bias_on_several_tokens_needs_all_before_its_last(model: MRPForCausalLM) -> None:
    bias = {"sequence_bias": [[[3], 2.0], [[3, 9], 1.0]], "max_new_tokens": 4}
    for order in LEFT_TO_RIGHT:
        accepts(lambda order=order: model.generate(PROMPT, **bias, **order))
    for order in OTHER_ORDERS:
        rejected(lambda order=order: model.generate(PROMPT, **bias, **order), r"\[3, 9\], of several tokens", "'sequential'")
        accepts(lambda order=order: model.generate(PROMPT, bad_words_ids=[[3, 9]], max_new_tokens=4, **order))


# Prompts


PROMPTS: list[tuple[Any, str]] = [
    (None, r"input_ids are a NoneType: pass a \[rows, n\] tensor"),
    *((torch.ones(s, dtype=torch.long), "with a token or more in each") for s in ((0, 3), (2, 0), (1, 2, 3))),
    (PROMPT[0], r"shape \[5\].* For one row pass input_ids\[None\]"),
    (PROMPT.float(), r"input_ids are torch.float32: pass a \[rows, n\] tensor of ids, torch\.long$"),
    (PROMPT.tolist(), "input_ids are a list"),
    (PROMPT.numpy(), "input_ids are a ndarray"),
    (BatchEncoding({"input_ids": PROMPT}), r"input_ids are a BatchEncoding.*pass \*\*inputs"),
    *((torch.tensor([[1, token, 3]]), f"id {token}, outside the vocabulary of 64.*tokenizer") for token in (64, 99, -1)),
    *((torch.tensor([[1, 2, 3], row]), "mask id 60.*infill_ids") for row in ([60, 1, 2], [1, 2, 60])),
    (torch.tensor([[5, 0, 7]]), "row 0 has holes.*contiguous"),  # the mask that transformers infers of padding
    (torch.tensor([[0, 0, 0], [1, 2, 3]]), "row 0 has no token.*drop"),
]


@pytest.mark.parametrize(("ids", "said"), PROMPTS)
def test_prompts(model: MRPForCausalLM, ids: Any, said: str) -> None:
    for call in ({"inputs": ids}, {"input_ids": ids}):
        rejected(lambda call=call: model.generate(**call, pad_token_id=0, max_new_tokens=4), f"(?s){said}", "")


def test_prompts_that_are_as_good(model: MRPForCausalLM) -> None:
    """Ids of 32 bits, padding on either side or both, masks of any type, and padding that holds anything."""
    accepts(lambda: model.generate(PROMPT.int(), max_new_tokens=4))
    for mask in ([0, 1, 1, 1, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]):
        for kind in (torch.float, torch.bool):
            given = torch.tensor([mask, [1] * 5]).to(kind)
            accepts(lambda given=given: model.generate(PROMPT.repeat(2, 1), attention_mask=given, max_new_tokens=4))
    for padding in (60, 64, -1):
        ids = torch.tensor([[padding, 2, 3], [4, 5, 6]])
        mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
        accepts(lambda ids=ids, mask=mask: model.generate(ids, attention_mask=mask, max_new_tokens=4))


@pytest.mark.parametrize("length", [5, 15, 16, 17])
def test_room_for_the_text(length: int) -> None:
    """16 positions; padding takes none."""
    short, new = guarded(make_model(max_position_embeddings=16)), max(1, 17 - length)
    ids = torch.cat([torch.zeros(1, 30, dtype=torch.long), torch.ones(1, length, dtype=torch.long)], 1)
    mask = (ids != 0).long()
    rejected(
        lambda: short.generate(ids, attention_mask=mask, max_new_tokens=new),
        f"prompt of {length} tokens and {new} new ones .*max_position_embeddings=16",
        "shorten the prompt or lower max_new_tokens",
    )
    if length < 16:
        accepts(lambda: short.generate(ids, attention_mask=mask, max_new_tokens=new - 1))
        short.generation_config.max_length = 17
        rejected(lambda: short.generate(ids[:, 30:]), "max_position_embeddings=16", "lower .*max_length")


# What a user's function returns, and how it is called in the error.
BAD_ANSWERS: list[tuple[str, Any, str]] = [
    ("logits_processor", None, "processor Wrong returned a NoneType"),
    ("logits_processor", torch.zeros(3), r"processor Wrong returned torch.float32 of \[3\]"),
    ("logits_processor", torch.zeros(4, 64, dtype=torch.long), r"processor Wrong returned torch.int64 of \[4, 64\]"),
    ("stopping_criteria", None, "criterion Wrong returned None"),
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
