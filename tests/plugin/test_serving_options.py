"""Options, requests and versions that a server is asked for: what is honoured, and what is refused with the reason."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import mrp_serving
import numpy as np
import pytest
from fake_engine import FakeRequest
from mrp_serving.options import SERVED, settings_of
from mrp_serving.requests import block_is_text, committed_ids, end_of_text, refusal
from mrp_serving.usage import RAW, Report, Usage, shown_usage

from modeling_mrp.generate.loop import Drafting
from modeling_mrp.generate.refine import Direct
from modeling_mrp.rules.reveal import Dynamic, Static, logit


def test_options_have_the_names_and_defaults_of_generate() -> None:
    settings = settings_of({"target": "dynamic", "confidence_threshold": 0.7, "num_draft_states": 6}, {}, 16, True)
    assert settings.mode.rule == Dynamic(logit(float(np.float32(0.7))))  # as the engine compares
    assert settings.mode.drafting == Drafting(6, 3, 1)
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
        ({"seed": 1}, True, "seed is not served, as the engine decodes greedily: leave it out"),
        ({"graphs": False, "tau": 1}, True, "graphs is not served.*; tau is no option"),
        ({"confidence_threshold": 1.5}, True, r"confidence_threshold is 1.5: it must be a probability"),
        ({"decoding": "mrp_spec"}, False, "decoding='mrp_spec' needs an MRP head, and this model has none"),
        ({"block_size": 4}, True, "block_size is 4: the checkpoint's is 16"),
        ({"target": "cad"}, True, "the rule 'cad' is not served: it reads the eos, .* such as 'dynamic'"),
        ({"decoding": "eoser"}, True, "the rule 'eoser' is not served"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_start(options: dict[str, Any], has_head: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(options, {}, 16, has_head)


def request_with(**asked: Any) -> Any:
    parameters = {
        **{"temperature": 0.0, "top_k": -1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag")),
        "min_new_tokens": 0,
    }
    of_request = {"return_logprob": False, "origin_input_ids": [4, 5]}
    parameters |= {name: value for name, value in asked.items() if name in parameters}
    of_request |= {name: value for name, value in asked.items() if name not in parameters}
    return SimpleNamespace(sampling_params=SimpleNamespace(**parameters), dllm_config=SimpleNamespace(mask_id=3), **of_request)


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0, "top_k": 1}])
def test_greedy_requests_are_served(asked: dict[str, Any]) -> None:
    assert refusal(request_with(**asked)) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"temperature": 0.5}, "temperature above 0 (this server decodes greedily: send temperature=0, or top_k=1)"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"regex": "a+"}, "json_schema, regex, ebnf or structural_tag"),
        ({"return_logprob": True}, "logprobs"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"custom_logit_processor": "x"}, "a custom logits processor"),
        ({"input_embeds": [[0.0]]}, "input_embeds"),
        ({"origin_input_ids": [4, 3]}, "the mask token in its prompt"),
    ],
)
def test_requests_that_cannot_be_served_are_told_why(asked: dict[str, Any], reason: str) -> None:
    told = refusal(request_with(**asked))
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
    assert block_is_text(req, ids, start, M) == whole


def test_a_stop_string_may_lie_behind_an_eos() -> None:
    req = FakeRequest([1] * 6, max_new_tokens=8, stop=(9,))
    req.sampling_params.stop_strs = ["."]
    assert not block_is_text(req, [7, 9, M, M], 8, M)
    req.sampling_params.stop_strs, req.sampling_params.ignore_eos = [], True
    assert not block_is_text(req, [7, 9, M, M], 8, M)


def test_a_text_that_is_taken_up_again_has_its_tokens() -> None:
    assert committed_ids(FakeRequest([1, 2], output_ids=[3])) == [1, 2, 3]


def test_costs_are_told_by_block_also_of_a_request_that_lost_its_rows() -> None:
    report, req = Report(), FakeRequest([1] * 5)  # blocks of 4: the second one holds a token of the prompt
    report.begin(req)
    report.note(req, Usage(1, 1, 0, 0))
    report.count_tokens([req], [0], [4])
    report.note(req, Usage(2, 2, 3, 1))
    report.count_tokens([req], [4], [0])
    assert req.customized_info is None
    report.begin(req)  # taken up again
    report.note(req, Usage(1, 0, 0, 0))
    report.count_tokens([req], [4], [4])
    assert req.customized_info == {RAW: [(3, 2, 3, 1), None, None]}
    report.note(req, Usage(3, 1, 2, 2))
    report.count_tokens([req], [8], [4])
    shown = shown_usage(req.customized_info[RAW], 7)
    assert shown == {
        **{"forwards": 5, "head_forwards": 3, "drafted": 5, "accepted": 3},
        **{"tokens_per_forward": 7 / 5, "acceptance": 3 / 5},
    }


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


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24"])
def test_another_version_of_the_engine_is_refused(
    algorithms: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """A plugin that raises would only be passed over: so whatever is asked of the algorithm raises."""
    monkeypatch.setattr(mrp_serving, "version", lambda name: version)
    mrp_serving.register()
    assert f"MRP is not served: this version of modeling-mrp serves with sglang<0.5.24,>=0.5.22, and {version}" in caplog.text
    for use in (lambda refused: refused.supported_attention_backends, lambda refused: refused(None)):
        with pytest.raises(RuntimeError, match=rf"and {version} is installed: pip install 'sglang<0\.5\.24,>=0\.5\.22'"):
            use(algorithms["MRP"])


def test_an_engine_that_lacks_an_interface_is_refused(
    algorithms: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mrp_serving, "version", lambda name: "0.5.23")
    monkeypatch.delitem(sys.modules, "mrp_serving.plugin", raising=False)
    mrp_serving.register()
    assert "0.5.23 is installed, which lacks what is extended (No module named 'sglang." in caplog.text
    with pytest.raises(RuntimeError, match=r"sglang<0\.5\.24,>=0\.5\.22, and 0\.5\.23 is installed, which lacks"):
        algorithms["MRP"](None)


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
