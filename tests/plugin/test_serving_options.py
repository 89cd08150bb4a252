"""Options, requests and versions that a server is asked for: what is honoured, and what is refused
with the reason."""

import sys
import tomllib
from types import ModuleType, SimpleNamespace
from typing import Any

import mrp_serving
import numpy as np
import pytest
from mrp_serving.options import Settings, settings_of
from mrp_serving.picker import Sampling
from mrp_serving.requests import parse_options, refusal, refusal_of_body, seed_of, text_of_block
from packaging.requirements import Requirement

from modeling_mrp.generate.loop import Drafting, Mode
from modeling_mrp.generate.refine import Direct
from modeling_mrp.rules.reveal import Dynamic, Static, logit
from tests.support.fake_engine import SAMPLING_PARAMS, FakeRequest
from tests.support.places import ROOT


def test_options_have_the_names_of_generate_and_the_checkpoints_defaults() -> None:
    """Those of the file go before them, and what else its generation config holds has no effect."""
    settings = settings_of(
        {"target": "dynamic", "confidence_threshold": 0.7, "num_draft_states": 6}, {}, 16, True
    )
    assert settings.mode == Mode(Dynamic(logit(0.7)), drafting=Drafting(6, 3, 1))
    defaults = {"decoding": "mrp_direct", "mrp_steps": 3, "max_new_tokens": 7, "seed": 5}
    assert settings_of({}, defaults, 16, True).mode.refine == Direct(3)
    assert settings_of({"mrp_steps": 2}, defaults, 16, True).mode.refine == Direct(2)
    assert settings_of({"decoding": "static"}, defaults, 16, False).mode.rule == Static((1,) * 16)


@pytest.mark.parametrize(
    ("options", "has_head", "message"),
    [
        (
            {"num_draft_state": 4},
            True,
            r"num_draft_state is no option of MRP \(did you mean num_draft_states\?\)",
        ),
        (
            {"graphs": False, "seed": 1},
            True,
            r"graphs is not served.*; seed is not served, as requests have one each",
        ),
        (
            {"confidence_threshold": 1.5},
            True,
            r"confidence_threshold is 1.5: it must be a probability",
        ),
        (
            {"decoding": "mrp_spec"},
            False,
            "decoding='mrp_spec' needs an MRP head, and this model has none",
        ),
        ({"block_size": 4}, True, "block_size is 4: the checkpoint's is 16"),
        (
            {"decoding": "mrp_remask", "remask_rule": "residual"},
            True,
            "needs the whole vocabulary on one device",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_start(
    options: dict[str, Any], has_head: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(options, {}, 16, has_head, devices=2)


SERVER = settings_of(
    {"target": "dynamic", "confidence_threshold": 0.7, "num_draft_states": 4}, {}, 16, True
)


def request_with(settings: Settings = SERVER, **asked: Any) -> Any:
    req: Any = FakeRequest(
        [4, 5], asked={name: value for name, value in asked.items() if name in SAMPLING_PARAMS}
    )
    req.vocab_size = 64
    req.return_logprob, req.dllm_config = False, SimpleNamespace(mask_id=3, mrp_settings=settings)
    for name, value in asked.items():
        if name not in SAMPLING_PARAMS:
            setattr(req.logprob if name == "top_logprobs_num" else req, name, value)
    return req


def test_a_greedy_request_is_decoded_as_the_engines_own_algorithms_do() -> None:
    """Whatever its temperature, by a threshold in float32; rules that these do not have, and
    processors, as `generate` does."""
    asked = parse_options(request_with(temperature=0.5, top_p=0.5), SERVER)
    assert asked.mode == Mode(Dynamic(logit(float(np.float32(0.7)))), drafting=Drafting(4, 3, 1))
    assert (asked.sampling, asked.eos) == (Sampling(stock=True, drafts=True), frozenset())
    for other in (
        {"custom_params": {"target": "sequential"}},
        {"repetition_penalty": 1.5},
        {"min_new_tokens": 1},
    ):
        assert not parse_options(request_with(**other), SERVER).sampling.stock
    assert parse_options(request_with(min_new_tokens=1), SERVER).mode.rule == Dynamic(logit(0.7))
    # ints, for which transformers wants floats
    assert refusal(request_with(repetition_penalty=2, top_k=5, min_p=1)) is None
    assert parse_options(request_with(), SERVER).seed == seed_of("request") != seed_of("other")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"regex": "a+"}, "json_schema, regex, ebnf or structural_tag"),
        ({"return_logprob": True, "top_logprobs_num": 2}, "logprobs of other tokens"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"custom_logit_processor": "x"}, "a custom logits processor"),
        ({"input_embeds": [[0.0]]}, "input_embeds"),
        ({"origin_input_ids": [4, 3]}, "the mask token"),
        ({"origin_input_ids": [4, -3]}, "ids outside of the vocabulary"),
        ({"origin_input_ids": [4, 64]}, "ids outside of the vocabulary"),
        ({"logit_bias": {"5": float("nan")}}, "a logit_bias outside"),
        ({"temperature": 1e300}, "a temperature above"),
        ({"repetition_penalty": 1e-30}, "a repetition_penalty below"),
        ({"logit_bias": {"5": "1"}}, "a value of the wrong type"),
        ({"max_new_tokens": 5.5}, "a max_new_tokens that is no int"),
        ({"min_new_tokens": 1, "stop_token_ids": {*range(63)}}, "every token ends the text"),
        ({"custom_params": [1]}, "custom_params is [1]"),
        (
            {"custom_params": {"targets": "static"}},
            "targets is no option of a request (did you mean target?)",
        ),
        ({"custom_params": {"draft_passes": 2}}, "draft_passes is one of the server's options"),
        (
            {"custom_params": {"return_provisional": 1}},
            "return_provisional is 1, not true or false",
        ),
        ({"custom_params": {"denoising_steps": 17}}, "denoising_steps is 17"),
        (
            {"custom_params": {"num_draft_states": 5}},
            "num_draft_states is 5: this server has 4 at most",
        ),
        (
            {"server": "static", "custom_params": {"decoding": "mrp_spec"}},
            "this server has no use of its head",
        ),
        (
            {"server": "mrp_direct", "custom_params": {"decoding": "self_spec"}},
            "this server drafts nothing",
        ),
    ],
)
def test_requests_that_cannot_be_served_are_told_why(asked: dict[str, Any], reason: str) -> None:
    server = (
        settings_of({"decoding": asked.pop("server")}, {}, 16, True)
        if "server" in asked
        else SERVER
    )
    assert reason in str(refusal(request_with(server, **asked)))


@pytest.mark.parametrize(
    ("first", "logprobs", "stop_regex", "reason"),
    [
        (
            1,
            True,
            None,
            "logprob_start_len is 1, and MRP has no log-probabilities of the prompt, which has 2 "
            "tokens",
        ),
        (2, True, ["a+", "b"], "None"),
        (0, False, "a+", "None"),
        (-1, True, ["a", "("], "stop_regex has '(', which is no regular expression"),
        (-1, False, [5], "stop_regex has 5, which is no regular expression"),
    ],
)
def test_what_the_engine_would_answer_wrongly_is_refused(
    first: int, logprobs: bool, stop_regex: Any, reason: str
) -> None:
    body = SimpleNamespace(
        return_logprob=logprobs, logprob_start_len=first, sampling_params={"stop_regex": stop_regex}
    )
    assert str(refusal_of_body(body, [4, 5])).startswith(reason)


M, SAMPLED, STRINGS = 3, {"top_k": 5}, {"stop_strs": ["."]}


@pytest.mark.parametrize(
    ("asked", "ids", "start", "final"),
    [
        ({}, [7, 9, M, M], 8, [7, 9, M, M]),  # an eos, and what comes before it
        ({}, [M, 9, 7, 7], 8, None),
        # the text fills the block, whose keys and values may be shared
        ({}, [7, 7, 7, 9], 8, None),
        ({}, [9, M, M, M], 4, None),  # the prompt's
        ({}, [7, 7, M, M], 12, [7, 7, M, M]),  # position 13 is the last that was asked for
        ({}, [7, M, 7, 7], 12, None),
        # the engine's own algorithm reads on, and the string may stand there
        (STRINGS, [7, 9, M, 8], 8, None),
        ({**STRINGS, **SAMPLED}, [7, 9, M, 8], 8, [7, 9, M, M]),
        ({**SAMPLED, "ignore_eos": True}, [7, 9, M, 8], 8, None),
    ],
)
def test_what_the_client_is_not_shown_is_not_decoded(
    asked: dict[str, Any], ids: list[int], start: int, final: Any
) -> None:
    req = FakeRequest([1] * 6, max_new_tokens=8, stop=(9,), asked=asked)
    assert text_of_block(req, parse_options(req, SERVER), ids, start, M) == final


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("0.5.21", ""),
        ("0.5.24", ""),
        ("0.5.23.post1", ", which lacks what is extended (import of fastapi halted"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(
    version: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that raises would only be passed over: so whatever is asked of the algorithm
    raises."""
    register: Any = ModuleType("sglang.srt.dllm.algorithm")
    register.algo_name_to_cls = algorithms = dict[str, Any]()
    monkeypatch.setitem(sys.modules, register.__name__, register)
    monkeypatch.setattr(mrp_serving, "version", lambda name: version)
    assert (mrp_serving.version_obstacle() is None) is bool(lacks)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "mrp_serving.plugin", raising=False)
    mrp_serving.register()
    message = (
        "MRP is not served: this version of modeling-mrp serves with sglang<0.5.24,>=0.5.22, and "
        f"{version} is installed"
    )
    for use in (
        lambda refused: refused.supported_attention_backends,
        lambda refused: refused(None),
    ):
        with pytest.raises(RuntimeError) as raised:
            use(algorithms["MRP"])
        assert str(raised.value).startswith(message + lacks)


def test_the_extra_asks_for_the_version_that_is_checked() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert [Requirement(each).specifier for each in extras["sglang"]] == [
        mrp_serving.SUPPORTED_SGLANG
    ]
