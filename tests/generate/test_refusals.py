"""Whatever `generate`, a forward, `score` or a config cannot follow is refused before the backbone
runs, by an error that names the value and the remedy."""

import re
import reprlib
from collections.abc import Callable
from functools import partial
from itertools import product
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, ShadowConfig, get_peft_model
from transformers import BatchEncoding, GenerationConfig
from transformers.generation import WatermarkingConfig
from transformers.generation import logits_process as kinds
from transformers.generation.streamers import BaseStreamer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import (
    DECODINGS,
    OF_SAMPLING,
    OFF,
    OPTIONS,
    OPTIONS_OF_TRANSFORMERS,
    REMASK_RULES,
    TARGETS,
    UNSUPPORTED,
)
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.rules.options import COUNT, NATS, POSITIVE, PROBABILITY, STEPS, Values
from modeling_mrp.rules.reveal import Dynamic
from tests.support.random_cases import make_model

NAN = float("nan")
PROMPT = torch.tensor([[1, 2, 3, 4, 5]])
PAIR = torch.tensor([[1, 2, 3], [4, 5, 6]])
EMBEDS = torch.zeros(1, 5, 32, dtype=torch.float64)
QUEUE = SimpleQueue[int]()  # can `put`, and has no `end`
MATCH = re.match("a", "a")  # has an `end`, and cannot `put`


class ForwardRan(Exception):
    """The backbone ran: no error came before it. Not a ValueError, so that no test takes it for
    one."""


def guarded(model: MRPForCausalLM) -> MRPForCausalLM:
    """The model, whose backbone raises `ForwardRan`."""

    def refuse(*_: Any) -> None:
        raise ForwardRan

    model.model.register_forward_pre_hook(refuse)
    return model


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    """With a head."""
    return guarded(make_model())


def rejected(call: Callable[[], Any], said: str) -> None:
    """The call raises a ValueError, and nothing derived from it, whose message matches."""
    with pytest.raises(ValueError, match=f"(?s){said}") as caught:
        call()
    assert caught.type is ValueError


def accepts(call: Callable[[], Any]) -> None:
    """The call comes to the backbone."""
    with pytest.raises(ForwardRan):
        call()


# Of each kind of values, and of each option that has a kind of its own, values at the edges of its
# range: those that pass, and those that do not. The model's blocks are of 4.
EDGES_OF_KINDS: dict[Values, tuple[list[Any], list[Any]]] = {
    COUNT: ([1, 10**6], [0, -1, 2.5]),
    STEPS: ([1, 4], [0, 5, 2.5]),
    NATS: ([0, 12.5], [-1e-9, NAN]),
    POSITIVE: ([1e-9, 1, 300.0], [0, -1, NAN]),
    PROBABILITY: ([0, 0.5, 1.0], [-1e-9, 1.01, NAN]),
}
RULE = Dynamic(0.0)
EDGES: dict[str, tuple[Any, list[Any]]] = {
    "decoding": ((*DECODINGS, RULE), ["Static", "", Dynamic]),
    "target": ((*TARGETS, RULE), ["mrp_spec", "self_spec", Dynamic]),
    "num_draft_states": (["auto", 1, 256], [0, 257, "3", 2.5]),
    **dict.fromkeys(("draft_shortlist", "prompt_lookup_num_tokens"), ([0, 1024], [-1, 1025])),
    "remask_rule": (REMASK_RULES, ["static"]),
    "round_costs": ([{"states": [1, 8], "backbone": [1.0, 2.0]}], [{"states": [1]}, [1], 3]),
    "seed": ([0, (1 << 62) - 1, [0, 3]], [-1, 1 << 62, 2.5, (0,), [-1], [True], ["x"]]),
    **dict.fromkeys(("kernels", "graphs"), ([True, False], [1, 0])),
    **dict.fromkeys(("regex", "grammar"), (["a+", ["a", None]], ["", [], [""], [3], 3])),
    "draft_next_block": ([True, False], [1, 0]),
    "json_schema": (
        [{"type": "null"}, '{"type": "null"}', [{"type": "null"}, None]],
        ["", "[]", [], [3]],
    ),
    "choices": ([["a"], ["a", ""], [["a"], None]], [[], "a", [3], [[], ["a"]], [[3]]]),
}
ANY_TEXT = ("regex", "grammar")


@pytest.mark.parametrize("option", OPTIONS, ids=lambda one: one.name)
def test_values_of_an_option(option: Any) -> None:
    """The error says the value, its type if that is wrong, and the remedy."""
    allowed, refused = EDGES_OF_KINDS.get(option.values) or EDGES[option.name]
    remedy = re.escape(option.remedy.replace("{block_size}", "block_size (4)"))
    for value in (*allowed, *([None] if option.default is None else [option.default])):
        option.check(value, 4)
    refused = [*refused, {}, np.int64(4)]
    refused += [] if option.values.kind is bool else [True]
    refused += [] if option.name in ANY_TEXT else ["x"]
    for value in refused:
        said = (
            f"^{option.name} is {re.escape(repr(value))}(, of type {type(value).__name__})?: "
            f"{remedy}$"
        )
        rejected(lambda value=value: option.check(value, 4), said)


NUMBERS = ["8", [], {}, True, NAN]
FLAGS = ([True, False, 1, 0, np.True_], ["false", 2, 1.5, [], {}])
ID_LISTS = (
    [[], [3], (3, 5), torch.tensor([3, 5])],
    ["a", 5, [1.5], ["a"], [[1]], [True], {}, torch.tensor([1.5])],
)
# Of each option of transformers, as of ours: values that come to the backbone, and values that do
# not.
EDGES_OF_TRANSFORMERS: dict[str, tuple[list[Any], list[Any]]] = {
    "max_new_tokens": ([1, np.int64(8), 400], [0, -1, 1.5, *NUMBERS]),
    "max_length": ([6, np.int64(8)], [0, -1, 6.5, *NUMBERS]),
    "num_return_sequences": ([1, 3], [0, -1, 1.5, *NUMBERS]),
    "min_new_tokens": ([0, np.int64(3)], [-1, 1.5, *NUMBERS]),
    "min_length": ([0, 8], [-1, 1.5, *NUMBERS]),
    "no_repeat_ngram_size": ([0, 1, 9], [-1, 1.5, *NUMBERS]),
    "top_p": ([0, 0.5, 1, np.float64(0.5)], [-0.1, 1.01, 2.0, *NUMBERS]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.01, *NUMBERS]),
    "typical_p": ([0.5, 1], [-0.1, 1.01, *NUMBERS]),
    "top_h": ([0.5, 1.0], [-0.1, 1.01, *NUMBERS]),
    "epsilon_cutoff": ([0, 0.1], [-0.1, 1.01, *NUMBERS]),
    "eta_cutoff": ([0, 0.1], [-0.1, 1.01, *NUMBERS]),
    "top_k": ([0, 1, 1000], ["8", [], {}, True, 2.0]),
    "temperature": ([0.1, np.float64(2.0)], [-0.1, float("inf"), *NUMBERS]),
    "repetition_penalty": ([0.5, 1.5], [0, -0.1, float("inf"), *NUMBERS]),
    "max_time": ([0, 3.5], [-0.1, *NUMBERS]),
    "eos_token_id": ([3, np.int64(3), *ID_LISTS[0]], [1.5, "a", *ID_LISTS[1][2:]]),
    "bos_token_id": ([3, (1 << 31) - 1], [1.5, "a", 1 << 31, 10**20, *ID_LISTS[1][2:]]),
    "decoder_start_token_id": ([3], [1.5, "a", 10**20, *ID_LISTS[1][2:]]),
    "pad_token_id": ([63], [[0], 1.5, "a", *ID_LISTS[1][2:]]),
    "suppress_tokens": ID_LISTS,
    "bad_words_ids": ([[[3]], [[3, 5], [9]]], [5, "a", {}, [[]], [[3], []]]),
    "sequence_bias": ([{(3,): 1.0}, [[[3], 1.0]]], [5, "a", [1], [[3]], [[[3], 1.0, 2]]]),
    "stop_strings": (["w01", ["w01", "w02"]], [5, "", [], [5], ["w01", ""], b"w01", {}]),
    **dict.fromkeys(
        ("do_sample", "return_dict_in_generate", "output_scores", "output_logits", "use_cache"),
        FLAGS,
    ),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits"), FLAGS),
    "assistant_ensemble_weight": ([0.5], ["x", 1.5, [], {}]),
    "watermarking_config": ([], [5, "x", []]),
    "early_stopping": ([False, "never"], ["x", [], {}, 3]),
}


@pytest.mark.parametrize("option", OPTIONS_OF_TRANSFORMERS, ids=lambda option: option.name)
def test_values_of_an_option_of_transformers(
    model: MRPForCausalLM, id_tokenizer: Any, option: Any
) -> None:
    """As an argument, and in the file of a generation config; transformers sees only what it can
    compare."""
    allowed, refused = EDGES_OF_TRANSFORMERS[option.name]
    call = partial(model.generate, PROMPT, tokenizer=id_tokenizer, do_sample=True)
    for value in allowed:
        accepts(partial(call, **{option.name: value}))
    for value in refused:
        said = f"^{option.name} is {re.escape(repr(value))}.*: {re.escape(option.remedy)}$"
        rejected(partial(call, **{option.name: value}), said)
        rejected(
            lambda value=value: MRPGenerationConfig.from_dict(
                {"do_sample": True, option.name: value}
            ),
            said,
        )


def test_greedy_decoding_reads_no_range_of_sampling_but_types(model: MRPForCausalLM) -> None:
    for name in OF_SAMPLING:
        accepts(partial(model.generate, PROMPT, **{name: -1}))
        rejected(partial(model.generate, PROMPT, **{name: "x"}), f"^{name} is 'x', of type str: ")


def test_the_table_has_every_option_of_transformers_that_acts() -> None:
    """The others are not supported, or are about beams, assistants, caches and compilation, which
    are not here."""
    elsewhere = {
        "cache_config",
        "max_cache_len",
        "length_penalty",
        "diversity_penalty",
        "low_memory",
        "transformers_version",
    }
    elsewhere |= {
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "speculation_type",
    }
    elsewhere |= {
        "assistant_lookbehind",
        "target_lookbehind",
        "compile_config",
        "disable_compile",
    }
    elsewhere |= {"continuous_batching_config"}
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert (
        theirs
        <= {option.name for option in (*OPTIONS, *OPTIONS_OF_TRANSFORMERS)}
        | UNSUPPORTED.keys()
        | elsewhere
    )


def test_lengths_that_exclude_each_other(model: MRPForCausalLM) -> None:
    said = (
        r"min_new_tokens \(min_length\) asks for {} new tokens, and max_new_tokens \(max_length\) "
        r"leaves room for {}: lower"
    )
    for options, asked, room in (
        ({"min_new_tokens": 9, "max_new_tokens": 8}, 9, 8),
        ({"min_length": 14, "max_new_tokens": 8}, 9, 8),
        ({"min_new_tokens": 9, "max_length": 13}, 9, 8),
        ({"min_new_tokens": 4, "infill_ids": torch.tensor([[9, 60]])}, 4, 2),
    ):
        rejected(partial(model.generate, PROMPT, **options), said.format(asked, room))
    accepts(partial(model.generate, PROMPT, min_new_tokens=8, max_new_tokens=8))
    accepts(partial(model.generate, PROMPT, min_length=13, max_new_tokens=8))


def test_options_that_have_no_meaning_here(model: MRPForCausalLM) -> None:
    """Each with a reason; what switches them off is allowed."""
    values = {"cache_implementation": "static", "watermarking_config": WatermarkingConfig()}
    for name, why in UNSUPPORTED.items():
        call = partial(model.generate, PROMPT, max_new_tokens=4)
        value = values.get(name, 3)
        said = (
            f"^{name}={re.escape(reprlib.repr(value))} is not supported: {re.escape(why)}.*Leave "
            f"{name} unset"
        )
        rejected(partial(call, **{name: value}), said)
        if name not in (*OFF, *values):
            rejected(partial(call, **{name: False}), f"^{name}=False is not supported")
        for off in (
            None,
            OFF.get(name),
            GenerationConfig._get_default_generation_params().get(name),
        ):
            accepts(partial(call, **{name: off}))


ALONE = (
    "no effect with labels, whose pass packs .* of input_ids with a mask and positions of its own"
)
NAMED: dict[str, Any] = {
    "position_ids": torch.arange(5)[None],
    "inputs_embeds": EMBEDS,
    "logits_to_keep": torch.tensor([0]),
}
NAMED |= {
    "use_cache": True,
    "output_hidden_states": True,
    "output_attentions": True,
    "cache_position": torch.arange(5),
}
STREAMERS = [BaseStreamer(), BaseStreamer()]
# Of what is called: arguments, and what is said of them; nothing where they are as good as any.
ARGUMENTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "generate": [  # the fuzz gives good options in every way
        *(({option.name: {}}, f"^{option.name} is {{}}") for option in OPTIONS),
        ({"denoising_steps": 5}, r"denoising_steps is 5.*an int from 1 to block_size \(4\)"),
        ({"decodng": "static"}, r"decodng \(did you mean decoding\?\).*Check the"),
        (
            {"input_ids": PROMPT.float()},
            r"input_ids are torch.float32: pass a \[rows, n\] tensor of ids, torch\.long$",
        ),
        (
            {"input_ids": BatchEncoding({"input_ids": PROMPT})},
            r"input_ids are a BatchEncoding.*pass \*\*inputs",
        ),
        ({"input_ids": PROMPT[0]}, r"shape \[5\].* For one row pass input_ids\[None\]"),
        *(
            (
                {"input_ids": torch.tensor([[1, id, 3]])},
                f"id {id}, outside the vocabulary of 64.*tokenizer",
            )
            for id in (64, -1)
        ),
        ({"input_ids": torch.tensor([[1, 2, 3], [1, 2, 60]])}, "mask id 60.*infill_ids"),
        # the mask that is inferred of padding
        ({"input_ids": torch.tensor([[5, 0, 7]])}, "row 0 has holes.*contiguous"),
        ({"attention_mask": torch.ones(2, 5)}, "for input_ids of .*same shape"),
        ({"attention_mask": torch.zeros(1, 5)}, "row 0 has no token.*drop the row"),
        ({"attention_mask": torch.tensor([[0, 1, 0, 0, 1]])}, "row 0 has holes.*contiguous"),
        (
            {"input_ids": torch.ones(1, 509, dtype=torch.long)},
            "509 tokens and 4 new .*max_position_embeddings=512.*shorten",
        ),
        ({"infill_ids": PAIR}, r"pass \[1, n\], n of 1 or more"),
        (
            {"infill_ids": torch.tensor([[9] * 5])},
            "infill_ids hold 5 tokens a row.*leaves room for 4: raise it",
        ),
        ({"streamer": STREAMERS}, "streamer holds 2 for 1 rows: pass a list of 1"),
        (
            {"input_ids": PAIR, "streamer": STREAMERS[:1] * 2},
            "streamer holds 1 for 2 rows: pass a list of 2",
        ),
        (
            {"num_return_sequences": 2, "do_sample": True, "streamer": STREAMERS[0]},
            "for 2 rows.*one prompt at a time",
        ),
        (
            {"num_return_sequences": 2, "do_sample": True, "seed": [1]},
            "1 values for 2 rows.*one per row",
        ),
        ({"eos_token_id": "abc"}, "eos_token_id is 'abc': use an id, or a list of ids"),
        ({"eos_token_id": 64}, "eos_token_id holds 64, outside the vocabulary of 64.*inside"),
        ({"eos_token_id": [9, 60]}, "eos_token_id holds the mask id 60"),
        *(
            (
                {"suppress_tokens": [3, id]},
                f"suppress_tokens holds {id}, outside the vocabulary of 64",
            )
            for id in (64, -1)
        ),
        *(
            ({name: value}, f"^{name} is .*: pass a list of callables, none of them None$")
            for name in ("stopping_criteria", "logits_processor")
            for value in (5, "a", len, [None], [len, None], ["a"], {})
        ),
        *(
            (
                {"generation_config": value},
                f"^generation_config is {re.escape(repr(value))}.*pass a Gen",
            )
            for value in (5, "static", [1])
        ),
        *(
            ({"tokenizer": value, "stop_strings": "x"}, f"tokenizer=... to generate, not {value!r}")
            for value in (5, "a")
        ),
        *(
            ({"streamer": value}, f"^streamer is {value!r}, without put and end: pass")
            for value in (5, "a", len)
        ),
        *(
            (
                {"streamer": value},
                f"^streamer is {re.escape(repr(value))}, without put and end: pass",
            )
            for value in (QUEUE, MATCH)
        ),
        ({"sequence_bias": {(3, 99): 1.0}}, "bad_words_ids or sequence_bias hold the id 99"),
        (
            {"kernels": True},
            "kernels is True, but .* no kernels for torch.float64.*load the model in bfloat16",
        ),
        (
            {"graphs": True},
            "graphs is True, but the model is on cpu: move it to a CUDA device, or leave graphs",
        ),
        ({"stop_strings": "x"}, "stop_strings='x' need the tokenizer: pass tokenizer="),
        ({"input_ids": PROMPT.int()}, ""),
        ({"input_ids": (torch.arange(538) >= 30).long()[None]}, ""),  # padding takes no room
        *(({"eos_token_id": ids}, "") for ids in ((2, 3), np.int64(2), torch.tensor([2, 3]))),
        # arguments go before it
        ({"generation_config": {"max_new_tokens": 600, "decoding": "mrp_spec"}}, ""),
        # an eos is no padding
        ({"input_ids": torch.tensor([[5, 0, 7], [0, 5, 7]]), "eos_token_id": 0}, ""),
        ({"use_cache": False}, ""),  # a Trainer leaves it so in the config of what it saves
        (
            {
                "input_ids": torch.tensor([[60, 2], [-1, 5]]),
                "attention_mask": torch.tensor([[0, 1], [0, 1.0]]),
            },
            "",
        ),
    ],
    "forward": [
        ({"input_ids": None}, "neither input_ids nor inputs_embeds: pass one of them"),
        (
            {"text_noise": torch.zeros(1, 6)},
            "^text_noise, num_items_in_batch: no effect without labels.*Pass these too",
        ),
        ({"attention_masks": 5}, "no argument attention_masks: check the spelling"),
        # as peft
        (
            {
                "use_cache": False,
                "output_attentions": None,
                "output_hidden_states": False,
                "return_dict": None,
            },
            "",
        ),
    ],
    "loss": [
        ({"input_ids": None, "inputs_embeds": EMBEDS}, ALONE),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, ALONE),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "has holes.*contiguous, .*one side"),
        *(
            ({name: value}, f"^{name}: no effect with labels.*Leave out either")
            for name, value in NAMED.items()
        ),
        ({"labels": torch.ones(1, 4).long()}, r"labels has shape \[1, 4\]: .* must be \[1, 5\]"),
        (
            {
                "num_items_in_batch": 3,
                "use_cache": None,
                "position_ids": None,
                "logits_to_keep": 0,
                "junk": None,
            },
            "",
        ),
        ({"text_noise": torch.zeros(1, 6)}, ""),
    ],
    "score": [
        ({"input_ids": torch.tensor([[1, 60]])}, "mask id 60.*call the model"),
        (
            {"input_ids": torch.ones(1, 40_000, dtype=torch.long)},
            "40000.*max_position_embeddings.*shorten",
        ),
        (
            {"labels": PROMPT.roll(-1, 1)},
            r"labels differ from input_ids at row and column \[0, 0\]: .*without a shift",
        ),
        *(
            (
                {"labels": PROMPT[:, :width]},
                rf"^labels are \[1, {width}\] for input_ids of \[1, 5\]: pass",
            )
            for width in (1, 3)
        ),
        *(
            ({"labels": labels}, r"^labels are .* for input_ids of \[1, 5\]: pass")
            for labels in (PAIR, PROMPT[0], 5, "a", [[1]])
        ),
        *(
            (
                {"temperature": value},
                f"^temperature is {value!r}: it must be a finite number above 0",
            )
            for value in (0.0, -1, NAN, float("inf"), "a", None)
        ),
        *(
            (
                {"tokens_per_forward": value},
                f"^tokens_per_forward is {value!r}: it must be an int of 1 or more",
            )
            for value in (0, -1, 1.5, "a", None)
        ),
    ],
}
ALWAYS: dict[str, dict[str, Any]] = {
    "generate": {"max_new_tokens": 4, "pad_token_id": 0},
    "loss": {"labels": PROMPT},
}


@pytest.mark.parametrize("called", ARGUMENTS)
def test_arguments(model: MRPForCausalLM, called: str) -> None:
    method: Any = {"generate": model.generate, "score": model.score}.get(called, model)
    for given, said in ARGUMENTS[called]:
        call = partial(method, **{"input_ids": PROMPT, **ALWAYS.get(called, {}), **given})
        rejected(call, said) if said else accepts(call)


def test_a_bias_on_several_tokens_needs_all_before_its_last(model: MRPForCausalLM) -> None:
    bias = {"sequence_bias": [[[3], 2.0], [[3, 9], 1.0]], "max_new_tokens": 4}
    for order in ({"decoding": "sequential"}, {"decoding": "mrp_spec", "target": "sequential"}):
        accepts(partial(model.generate, PROMPT, **bias, **order))
    others: list[dict[str, Any]] = [
        {"decoding": mode} for mode in DECODINGS if mode != "sequential"
    ]
    for order in [{"decoding": "sequential", "denoising_steps": 2}, *others]:
        rejected(
            partial(model.generate, PROMPT, **bias, **order),
            r"\[3, 9\], of several tokens.*'sequential'",
        )
        accepts(partial(model.generate, PROMPT, bad_words_ids=[[3, 9]], max_new_tokens=4, **order))


def test_processors_that_return_the_wrong_thing(random_model: MRPForCausalLM) -> None:
    """The error names the user's own; it comes when that is first asked."""
    for answer, said in (
        (None, "returned a NoneType.*it must return"),
        (
            torch.zeros(4, 64, dtype=torch.long),
            r"returned torch.int64 of \[4, 64\].*it must return",
        ),
        (torch.full((2, 64), torch.inf), r"returned \+inf.*let it return -inf for all others"),
    ):
        wrong = type("Wrong", (), {"__call__": lambda *_, answer=answer, **__: answer})()
        call = partial(random_model.generate, PAIR, max_new_tokens=4, logits_processor=[wrong])
        rejected(call, f"processor Wrong {said}")


ANSWERS: list[tuple[Any, str]] = [
    (7, "a int"),
    (None, "a NoneType"),
    ([True, False], "a list"),
    (torch.tensor([1, 0]), r"torch\.int64 of \[2\]"),
    (torch.ones(2), r"torch\.float32 of \[2\]"),
    (torch.tensor([True]), r"torch\.bool of \[1\]"),
    (torch.ones(3, dtype=torch.bool), r"torch\.bool of \[3\]"),
    (torch.ones(2, 1, dtype=torch.bool), r"torch\.bool of \[2, 1\]"),
]


def test_criteria_that_return_the_wrong_thing(random_model: MRPForCausalLM) -> None:
    """For one row, and where another criterion is right. What a criterion may return is a bool, for
    all rows or each."""
    call = partial(random_model.generate, max_new_tokens=4)
    for answer, kind in ANSWERS:
        wrong = type("Wrong", (), {"__call__": lambda *_, answer=answer, **__: answer})()
        said = f"the stopping criterion Wrong returned {kind}: it must return a bool tensor of "
        rejected(
            partial(call, PAIR, stopping_criteria=[lambda *_: torch.tensor([True, True]), wrong]),
            said,
        )
    rejected(
        partial(call, PROMPT, stopping_criteria=[lambda *_: 7]),
        "criterion function returned a int: .*bool tensor of .1.",
    )
    for answer, lengths in (
        (True, [1, 1]),
        (torch.tensor(True), [1, 1]),
        (torch.tensor([False, True]), [4, 1]),
    ):
        out: Any = call(
            PAIR, stopping_criteria=[lambda *_, answer=answer: answer], return_dict_in_generate=True
        )
        assert (out.reveal_step >= 0).sum(1).tolist() == lengths


BEFORE = torch.tensor([[0, 1, 2], [3, 4, 5]])
COLUMNS: dict[str, Callable[[], Any]] = {
    "ForcedBOSTokenLogitsProcessor": lambda: kinds.ForcedBOSTokenLogitsProcessor(7),
    "ForcedEOSTokenLogitsProcessor": lambda: kinds.ForcedEOSTokenLogitsProcessor(6, 7),
    "ExponentialDecayLengthPenalty": lambda: kinds.ExponentialDecayLengthPenalty((2, 1.5), 7, 3),
    "SuppressTokensAtBeginLogitsProcessor": lambda: kinds.SuppressTokensAtBeginLogitsProcessor(
        [7], 3
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_processors_of_a_column_are_refused_beside_padding(
    model: MRPForCausalLM, name: str
) -> None:
    call = partial(model.generate, max_new_tokens=4, logits_processor=[COLUMNS[name]()])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    for padded in (mask, mask.flip(1)):
        rejected(
            partial(call, BEFORE, attention_mask=padded),
            f"processor {name} acts at a column.*prompts of one length",
        )
    accepts(partial(call, PAIR))


def test_minimum_lengths_given_as_processors(random_model: MRPForCausalLM) -> None:
    """They were left out: an eos that is the likeliest token everywhere came first."""
    likes = {"logits_processor": [lambda ids, scores: scores + 100 * (torch.arange(64) == 7)]}
    for eos, processor in product((7, [7, 9]), ("length", "new")):
        made: Any = kinds.MinLengthLogitsProcessor(6, eos, "cpu")
        made = (
            made
            if processor == "length"
            else kinds.MinNewTokensLengthLogitsProcessor(3, 3, eos, "cpu")
        )
        given = {
            "logits_processor": [*likes["logits_processor"], made],
            "eos_token_id": eos,
            "max_new_tokens": 8,
        }
        options = {**likes, "eos_token_id": eos, "max_new_tokens": 8}
        for mode in ({"decoding": "static"}, {"decoding": "mrp_spec", "target": "sequential"}):
            expected = random_model.generate(PAIR, **options, min_new_tokens=3, **mode)
            assert random_model.generate(PAIR, **given, **mode).equal(expected)
            assert not random_model.generate(PAIR, **options, **mode).equal(expected)
        rejected(
            partial(random_model.generate, PAIR, **{**given, "eos_token_id": 5}),
            r"has the eos .*generate \[5\]: pass min_new",
        )


def test_caches_heads_and_batches(model: MRPForCausalLM) -> None:
    headless = guarded(make_model(num_nextn_predict_layers=0))
    cache = model.block_cache(1, 8, 8, with_head=False)
    rejected(
        lambda: model(PROMPT, past_key_values=cache),
        "are a BlockCache, which only generate.*DynamicCache",
    )
    rejected(lambda: model(PROMPT, labels=PROMPT, past_key_values=cache), ALONE)
    rejected(
        lambda: model.block_cache(1, 10, 8, with_head=True),
        "capacity is 10.*a multiple of the block size, 4",
    )
    rejected(
        lambda: headless.block_cache(1, 8, 8, with_head=True), "no MRP head.*pass with_head=False"
    )
    for mode in ("mrp_direct", "mrp_spec", "mrp_remask"):
        rejected(
            partial(headless.generate, PROMPT, decoding=mode),
            f"decoding='{mode}'.*load one .*'self_spec'",
        )
    accepts(partial(headless.generate, PROMPT, decoding="self_spec"))
    rejected(lambda: guarded(make_model().train()).score(PAIR), r"training mode.*model.eval\(\)")


LEFT_OUT = {
    "PREFIX_TUNING": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "SHADOW": ShadowConfig(task_type="CAUSAL_LM"),
    r"aLoRA \(alora_invocation_tokens\)": LoraConfig(
        target_modules=["q_proj"], alora_invocation_tokens=[4, 5]
    ),
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_adapters_that_would_be_left_out_without_a_word_are_refused(
    random_model: MRPForCausalLM, kind: str
) -> None:
    """Until they are switched off: vectors before the inputs, networks beside the layers, and what
    waits for an invocation."""
    adapted: Any = get_peft_model(make_model().float(), LEFT_OUT[kind])
    call = partial(adapted.generate, input_ids=PROMPT, max_new_tokens=6)
    rejected(call, f"type {kind} has no effect on generate.*such as LoRA")
    if kind == "PREFIX_TUNING":
        rejected(
            lambda: adapted(input_ids=PROMPT, labels=PROMPT),
            "prompt, prefix or P-tuning adapter.*such as LoRA",
        )
    with adapted.disable_adapter():
        assert call().equal(random_model.generate(PROMPT, max_new_tokens=6))


def test_an_adapter_of_the_lm_head_is_refused_until_it_is_merged() -> None:
    """Rows of its weight are what is read."""
    model: Any = get_peft_model(
        make_model(), LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    )
    for call in (partial(model.generate, max_new_tokens=4), model.base_model.model.score):
        rejected(
            partial(call, input_ids=PROMPT), r"lm_head has an adapter \(default\).*merge_and_unload"
        )
    assert model.merge_and_unload().generate(PROMPT, max_new_tokens=4).shape == (1, 9)


def test_flex_attention_and_gradient_checkpointing_are_refused(
    random_model: MRPForCausalLM,
) -> None:
    """Compiled for a CPU, flex attention under a dense mask ended the process. Under gradient
    checkpointing layers in training keep no keys and values: texts were wrong."""
    model = make_model()
    model.set_attn_implementation("flex_attention")
    for call in (model, partial(model, labels=PROMPT), partial(model.generate, max_new_tokens=4)):
        rejected(
            partial(call, PROMPT),
            r"attn_implementation is 'flex_attention'.*CPU.*set_attn_implementation\('sdpa'\)",
        )
    model.set_attn_implementation("sdpa")
    model.train().gradient_checkpointing_enable()
    rejected(
        lambda: model.generate(PROMPT, max_new_tokens=9),
        r"gradient checkpointing is on.*model.eval\(\)",
    )
    options: dict[str, Any] = {"decoding": "mrp_spec", "max_new_tokens": 9}
    assert model.eval().generate(PROMPT, **options).equal(random_model.generate(PROMPT, **options))
