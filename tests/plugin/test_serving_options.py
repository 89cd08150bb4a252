"""Options, requests and versions that a server is asked for: what is honoured, and what is refused with the reason."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import mrp_serving
import numpy as np
import pytest
from fake_engine import SAMPLING_PARAMS, FakeRequest
from mrp_serving.options import SERVED, Settings, settings_of
from mrp_serving.picker import Sampling
from mrp_serving.requests import end_of_text, interpreted, refusal, refusal_of_body, seed_of, text_of_block

from modeling_mrp.generate.loop import Drafting, Mode
from modeling_mrp.generate.refine import Direct
from modeling_mrp.rules.reveal import Dynamic, Sequential, Static, logit


def test_options_have_the_names_and_defaults_of_generate() -> None:
    settings = settings_of({"target": "dynamic", "confidence_threshold": 0.7, "num_draft_states": 6}, {}, 16, True)
    assert settings.mode == Mode(Dynamic(logit(0.7)), drafting=Drafting(6, 3, 1))
    assert {"decoding", "target", "confidence_threshold", "num_draft_states"} <= set(SERVED)


def test_without_options_the_checkpoints_own_count() -> None:
    """Those of the file go before them, and what else its generation config holds has no effect."""
    defaults = {"decoding": "mrp_direct", "mrp_steps": 3, "max_new_tokens": 7, "seed": 5}
    assert settings_of({}, defaults, 16, True).mode.refine == Direct(3)
    assert settings_of({"mrp_steps": 2}, defaults, 16, True).mode.refine == Direct(2)
    assert settings_of({"decoding": "static"}, defaults, 16, False).mode.rule == Static((1,) * 16)
    assert settings_of({}, {}, 16, True).mode.uses_head


@pytest.mark.parametrize(
    ("options", "has_head", "message"),
    [
        ({"num_draft_state": 4}, True, r"num_draft_state is no option of MRP \(did you mean num_draft_states\?\)"),
        ({"seed": 1}, True, r"seed is not served, as requests have one each \(sampling_seed\): leave it out"),
        ({"graphs": False, "tau": 1}, True, "graphs is not served.*; tau is no option"),
        ({"confidence_threshold": 1.5}, True, r"confidence_threshold is 1.5: it must be a probability"),
        ({"decoding": "mrp_spec"}, False, "decoding='mrp_spec' needs an MRP head, and this model has none"),
        ({"block_size": 4}, True, "block_size is 4: the checkpoint's is 16"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_start(options: dict[str, Any], has_head: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(options, {}, 16, has_head)


def test_the_residual_rule_needs_the_vocabulary_on_one_device() -> None:
    given = {"decoding": "mrp_remask", "remask_rule": "residual"}
    with pytest.raises(ValueError, match="needs the whole vocabulary on one device: use another, or --tp-size 1"):
        settings_of(given, {}, 16, True, devices=2)
    assert "needs the whole vocabulary" in str(refusal(request_with(settings_of({}, {}, 16, True, 2), custom_params=given)))


SERVER = settings_of({"target": "dynamic", "confidence_threshold": 0.7, "num_draft_states": 4}, {}, 16, True)


def request_with(settings: Settings = SERVER, **asked: Any) -> Any:
    req: Any = FakeRequest([4, 5], asked={name: value for name, value in asked.items() if name in SAMPLING_PARAMS})
    req.vocab_size = 64
    req.return_logprob, req.dllm_config = False, SimpleNamespace(mask_id=3, mrp_settings=settings)
    for name, value in asked.items():
        if name not in SAMPLING_PARAMS:
            setattr(req.logprob if "logprob" in name and name != "return_logprob" else req, name, value)
    return req


def test_a_greedy_request_is_decoded_as_the_engines_own_algorithms_do() -> None:
    """Whatever its temperature, by a threshold in float32; rules that these do not have, and processors, as `generate` does."""
    asked = interpreted(request_with(temperature=0.5, top_p=0.5), SERVER)
    assert asked.mode == Mode(Dynamic(logit(float(np.float32(0.7)))), drafting=Drafting(4, 3, 1))
    assert (asked.sampling, asked.eos) == (Sampling(stock=True, drafts=True), frozenset())
    for other in ({"custom_params": {"target": "sequential"}}, {"repetition_penalty": 1.5}, {"min_new_tokens": 1}):
        assert not interpreted(request_with(**other), SERVER).sampling.stock
    assert interpreted(request_with(min_new_tokens=1), SERVER).mode.rule == Dynamic(logit(0.7))


def test_a_request_has_options_of_its_own() -> None:
    req = request_with(
        **{"top_k": 20, "temperature": 0.5, "sampling_seed": 9, "logit_bias": {"7": 2}, "presence_penalty": 0.5},
        custom_params={"target": "sequential", "denoising_steps": 8, "num_draft_states": 2, "return_provisional": True},
    )
    asked = interpreted(req, SERVER)
    assert asked.mode == Mode(Sequential((2,) * 8), drafting=Drafting(2, 3, 1))
    assert (asked.seed, asked.provisional, asked.reveal_step) == (9, True, False)
    biased = {"logit_bias": ((7, 2.0),), "presence_penalty": 0.5, "prompt": 2}
    assert asked.sampling == Sampling(sample=True, temperature=0.5, top_k=20, drafts=True, **biased)
    assert refusal(request_with(repetition_penalty=2, top_k=5, min_p=1)) is None  # ints, for which transformers wants floats
    assert interpreted(request_with(top_k=1 << 30), SERVER).seed == seed_of("request") != seed_of("other")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"regex": "a+"}, "json_schema, regex, ebnf or structural_tag"),
        ({"return_logprob": True, "top_logprobs_num": 2}, "logprobs of other tokens than the text's"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"custom_logit_processor": "x"}, "a custom logits processor"),
        ({"input_embeds": [[0.0]]}, "input_embeds"),
        ({"origin_input_ids": [4, 3]}, "the mask token in its prompt"),
        ({"origin_input_ids": [4, -3]}, "ids outside of the vocabulary in its prompt"),
        ({"origin_input_ids": [4, 100_000]}, "ids outside of the vocabulary in its prompt"),
        ({"logit_bias": {"5": float("nan")}}, "a logit_bias outside -100 to 100"),
        ({"temperature": 1e300}, "a temperature above 1000"),
        ({"repetition_penalty": 1e-30}, "a repetition_penalty below 0.01"),
        ({"logit_bias": {"5": "1"}}, "sampling_params hold a value of another type than they should: '<=' not supported"),
        ({"top_k": 5.5}, "a top_k that is no int"),
        ({"max_new_tokens": 5.5}, "a max_new_tokens that is no int"),
        ({"min_new_tokens": 1, "stop_token_ids": {*range(63)}}, "min_new_tokens where every token ends the text"),
        ({"custom_params": [1]}, "custom_params is [1]: it must be an object of options"),
        ({"custom_params": {"tau": 1}}, "custom_params: tau is no option of a request. They may hold decoding, target"),
        ({"custom_params": {"targets": "static"}}, "targets is no option of a request (did you mean target?)"),
        ({"custom_params": {"draft_passes": 2}}, "draft_passes is one of the server's options (--dllm-algorithm-config)"),
        ({"custom_params": {"return_provisional": 1}}, "return_provisional is 1, not true or false"),
        ({"custom_params": {"confidence_threshold": [0.5]}}, "confidence_threshold is [0.5], of type list"),
        ({"custom_params": {"denoising_steps": 17}}, "denoising_steps is 17: it must be an int from 1 to block_size (16)"),
        ({"custom_params": {"num_draft_states": 5}}, "num_draft_states is 5: this server has 4 at most. Ask for less"),
    ],
)
def test_requests_that_cannot_be_served_are_told_why(asked: dict[str, Any], reason: str) -> None:
    told = refusal(request_with(**asked))
    assert told is not None
    assert reason in told


@pytest.mark.parametrize(
    ("first", "logprobs", "stop_regex", "reason"),
    [
        (1, True, None, "logprob_start_len is 1, and MRP has no log-probabilities of the prompt, which has 2 tokens"),
        (2, True, ["a+", "b"], None),
        (-1, True, "a+", None),
        (0, False, None, None),
        (-1, False, ["a", "("], "stop_regex has '(', which is no regular expression: missing ), unterminated subpattern"),
        (-1, False, [5], "stop_regex has 5, which is no regular expression"),
    ],
)
def test_what_the_engine_would_answer_wrongly_is_refused(
    first: int, logprobs: bool, stop_regex: Any, reason: str | None
) -> None:
    body = SimpleNamespace(return_logprob=logprobs, logprob_start_len=first, sampling_params={"stop_regex": stop_regex})
    told = refusal_of_body(body, [4, 5])
    assert told is None if reason is None else str(told).startswith(reason)


@pytest.mark.parametrize(
    ("server", "has_head", "asked", "reason"),
    [
        ({"decoding": "static"}, True, "mrp_spec", "this server has no use of its head. Start it with 'decoding: mrp_spec'"),
        ({"decoding": "static"}, False, "mrp_spec", "this model has none"),
        ({"decoding": "mrp_direct"}, True, "self_spec", "this server drafts nothing. Start it with a mode that does"),
    ],
)
def test_a_request_gets_what_its_server_keeps(server: dict[str, Any], has_head: bool, asked: str, reason: str) -> None:
    told = refusal(request_with(settings_of(server, {}, 16, has_head), custom_params={"decoding": asked}))
    assert told is not None
    assert reason in told


@pytest.mark.parametrize(
    ("prompt", "new", "context", "end"), [(5, 3, 64, 8), (5, 4, 64, 12), (8, 4, 64, 12), (0, 100, 62, 60), (10, 4, 12, 12)]
)
def test_the_last_block_of_a_text(prompt: int, new: int, context: int, end: int) -> None:
    """In blocks of 4, of a text that neither the request nor the context lets go on."""
    assert end_of_text(FakeRequest([1] * prompt, max_new_tokens=new), 4, context) == end


M = 3


@pytest.mark.parametrize(
    ("ids", "start", "whole"),
    [
        ([7, 9, M, M], 8, True),  # an eos, and what comes before it
        ([M, 9, 7, 7], 8, False),
        ([7, 7, 7, 9], 8, False),  # the text fills the block, whose keys and values may be shared
        ([7, M, M, 7], 8, False),
        ([9, M, M, M], 4, False),  # the prompt's
        ([7, 7, M, M], 12, True),  # position 13 is the last that was asked for
        ([7, M, 7, 7], 12, False),
    ],
)
def test_what_the_client_is_not_shown_is_not_decoded(ids: list[int], start: int, whole: bool) -> None:
    req = FakeRequest([1] * 6, max_new_tokens=8, stop=(9,))
    assert text_of_block(req, interpreted(req, SERVER), ids, start, M) == (ids if whole else None)


def test_a_stop_string_may_lie_behind_an_eos() -> None:
    """Where the engine's own algorithm reads on; elsewhere that is no text."""
    req, ids = FakeRequest([1] * 6, max_new_tokens=8, stop=(9,), asked={"stop_strs": ["."]}), [7, 9, M, 8]
    assert text_of_block(req, interpreted(req, SERVER), ids, 8, M) is None
    req.sampling_params.top_k = 5
    assert text_of_block(req, interpreted(req, SERVER), ids, 8, M) == [7, 9, M, M]
    req.sampling_params.stop_strs, req.sampling_params.ignore_eos = [], True
    assert text_of_block(req, interpreted(req, SERVER), ids, 8, M) is None


@pytest.fixture
def algorithms(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The engine's register of algorithms, without an engine."""
    found: dict[str, Any] = {}
    for name in ("sglang", "sglang.srt", "sglang.srt.dllm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = ModuleType("sglang.srt.dllm.algorithm")
    module.algo_name_to_cls = found
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.mark.parametrize(
    ("version", "lacks"),
    [("0.5.21", ""), ("0.5.24", ""), ("0.5.23", ", which lacks what is extended (import of fastapi halted")],
)
def test_an_engine_that_does_not_fit_is_refused(
    algorithms: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, lacks: str
) -> None:
    """A plugin that raises would only be passed over: so whatever is asked of the algorithm raises."""
    monkeypatch.setattr(mrp_serving, "version", lambda name: version)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "mrp_serving.plugin", raising=False)
    mrp_serving.register()
    message = f"MRP is not served: this version of modeling-mrp serves with sglang<0.5.24,>=0.5.22, and {version} is installed"
    assert message + lacks in caplog.text
    for use in (lambda refused: refused.supported_attention_backends, lambda refused: refused(None)):
        with pytest.raises(RuntimeError, match=r"pip install 'sglang<0\.5\.24,>=0\.5\.22'") as raised:
            use(algorithms["MRP"])
        assert str(raised.value).startswith(message + lacks)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.5.23.post1"])
def test_versions_that_are_served(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(mrp_serving, "version", lambda name: version)
    assert mrp_serving.version_obstacle() is None


def test_the_extra_asks_for_the_version_that_is_checked() -> None:
    import tomllib

    from conftest import ROOT
    from packaging.requirements import Requirement

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [Requirement(each).specifier for each in extras["sglang"]] == [mrp_serving.SUPPORTED_SGLANG]
