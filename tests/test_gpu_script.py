"""The script for a GPU as far as a CPU takes it: interpreted kernels at a toy's size, the floor, and what it says is wrong."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import ROOT, make_model
from tape import TapeRecorder, tapes

from benchmarks import gpu_rounds
from benchmarks.gpu_cases import attention_cases
from benchmarks.gpu_rounds import check_texts, fallbacks, gaps, published_config, random_model
from benchmarks.roofline import Shape
from modeling_mrp import MRPConfig
from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import triton

__all__ = ["tapes"]  # a fixture

CPU = torch.device("cpu")
LATER = float("inf")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of a run of all parts."""
    output = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    sizes = ["--states", "4", "--prefix", "8", "--rows", "5", "--repeats", "1", "--count", "1"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--shape", "toy", *sizes, "--output", str(output)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == output.read_text()
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_all_is_checked_before_anything_is_timed(ran: list[dict[str, Any]]) -> None:
    """Five kernels in three dtypes, a round and a text, and then times of the kernels' two ways and of a round's four."""
    checks = [line for line in ran if "check" in line]
    kernels = {"pick", "pick sampled", "round_attention", "sum_and_norm", "rotated"}
    assert {line["check"] for line in checks} == kernels | {"round", "texts"}
    assert all(line["ok"] for line in checks), checks
    assert ran[-1] == {"summary": "ok", "checks": 5 * 3 + 2, "wrong": [], "left_out": []}
    times = [line for line in ran if "us" in line]
    assert ran.index(checks[-1]) < ran.index(times[0])
    assert {(line["time"], line["way"]) for line in times} == {
        *((name, way) for name in kernels for way in ("kernel", "torch")),
        *(("round", way) for way in gpu_rounds.WAYS),
    }
    whole = [line for line in times if line["floor_us"] > 0.1]  # others are rounded away
    assert len(whole) > 5
    assert all(line["over_floor"] == pytest.approx(line["us"] / line["floor_us"], rel=0.1) for line in whole)
    assert [line["generate"] for line in ran if "generate" in line] == ["K=1", "K=4"]
    assert {"torch", "date", "options"} <= ran[0].keys()


def test_what_fell_back_is_counted(tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are recorded and replayed; a kernel that was given up shows, and fails the check of equal texts."""
    monkeypatch.setattr(dispatch, "_failed", set())
    model, inputs = make_model(), {"inputs": torch.tensor([[1, 2, 3, 4]])}
    line = check_texts(model, inputs, 8, {"decoding": "static"}, {})
    assert (line["ok"], line["equal"], line["fell_back"], line["failed_kernels"]) == (True, 1, False, [])
    assert line["recordings"] > 0
    assert line["replays"] == TapeRecorder.replays > line["recordings"]
    assert line["bytes"] > 0
    monkeypatch.setattr(dispatch, "_failed", {("pick", CPU)})
    line = check_texts(model, inputs, 8, {"decoding": "static"}, {})
    assert (line["ok"], line["fell_back"], line["failed_kernels"]) == (False, True, ["pick on cpu"])
    model.release_graphs()
    assert fallbacks(model)["recordings"] == fallbacks(model)["replays"] == 0


def outputs(tokens: list[list[int]], logprobs: list[list[float]], steps: list[list[int]] | None = None) -> MRPGenerateOutput:
    """Of a prompt of two tokens; 0 is padding. By default each row reveals all in its first step."""
    ids = torch.tensor(tokens)
    revealed = torch.where(ids == 0, -1, 0 if steps is None else torch.tensor(steps))
    whole = torch.cat([torch.full((len(ids), 2), 9), ids], 1)
    return MRPGenerateOutput(sequences=whole, reveal_step=revealed, token_logprobs=torch.tensor(logprobs))


def test_gaps_by_hand() -> None:
    """A text of two tokens ends after one in the other's, which has three. Means of what its one step reveals: -0.5 and
    -1.95 / 3 = -0.65."""
    ours = outputs([[3, 4, 0], [5, 6, 0]], [[-0.5] * 3, [-0.25, -0.75, 0.0]])
    theirs = outputs([[3, 4, 0], [5, 7, 8]], [[-0.5] * 3, [-0.25, -0.7, -1.0]])
    same, differs = gaps(ours, theirs)
    assert same is None
    assert differs == pytest.approx(0.15)


@pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs triton's interpreter")
def test_attention_and_its_floor() -> None:
    """Three states of 4 tokens behind 70 slots: both ways agree, and the floor counts what is seen."""
    shape = Shape("small", 32, 48, 1, 2, 1, 16, 64, 4, 1)
    (case,) = attention_cases(shape, 2, 3, 70, torch.float32, CPU)
    query, key, value = case.inputs(0)
    assert not torch.equal(case.inputs(1)[1], key)
    assert case.error((query, key, value)) < 1e-6
    torch.testing.assert_close(*(way(query, key, value) for way in case.ways.values()), rtol=0, atol=1e-5)
    assert case.floor.flops == 4 * 2 * 16 * 2 * (12 * 74 + 16)
    assert case.floor.bytes == 4 * (2 * query.numel() + 2 * key[:, :, : 12 + 70].numel())


def test_a_random_model_is_whole() -> None:
    """Built without an initialisation that walks the weights: no tensor is left as the memory was."""
    rope = published_config("1.7b").rope_parameters
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    ids = {"vocab_size": 200, "mask_token_id": 199, "pad_token_id": 0}
    config = MRPConfig(**small, **ids, num_hidden_layers=2, num_nextn_predict_layers=1, rope_parameters=rope)
    model, again = (random_model(config, torch.bfloat16, "cpu") for _ in range(2))
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, other)
        assert (parameter == 1).all() if "norm" in name else 0.01 < parameter.float().std() < 0.03
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, 1e6 ** -(torch.arange(0, 16, 2) / 16))
    out = model.generate(torch.tensor([[1, 2, 3]]), decoding="mrp_spec", max_new_tokens=20)
    assert out.shape == (1, 23)
