"""`mrp doctor` on a CPU: its page, and a broken kernel, graph, acceptance or head, each named in
it."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer import cli
from mrp_trainer.doctor import checks, page, replays, rounds
from mrp_trainer.doctor.checks import Check, gaps, random_model
from mrp_trainer.doctor.options import DoctorOptions
from mrp_trainer.doctor.rounds import Timed, proposed
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from modeling_mrp import MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.generate import loop
from modeling_mrp.generate.option_table import TARGETS
from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.kernels.pick import gumbel_noise
from modeling_mrp.networks import graphs
from modeling_mrp.rules.reveal import Static
from tests.support.commands import mrp
from tests.support.faults import KERNELS, Stale, broken, flip_mlps
from tests.support.random_cases import make_model
from tests.support.tape import TapeRecorder, tapes

__all__ = ["tapes"]  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities
interpreted = pytest.mark.skipif(
    triton is None or torch.cuda.is_available(), reason="needs triton's interpreter"
)
LITTLE = ["--states", "1", "--states", "3", "--batch", "2", "--turns", "1"]
PREFIXES = ["--prefix", "8", "--prefix", "16"]
LOG_ODDS = [f"log-odds of {group}" for group in ("prompts", "rounds", "the head")]
DRAFTS = [
    f"drafts of {target} by {mode}" for target in TARGETS for mode in ("mrp_spec", "self_spec")
]


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "TOKENS", 14)
    monkeypatch.setattr(rounds, "TOKENS", 14)
    monkeypatch.setattr(rounds, "SHORT", 4)
    monkeypatch.setattr(replays, "CALLS", 1)
    monkeypatch.setattr(replays, "COPIED", {"cpu": 1024})
    monkeypatch.setattr(replays, "SIDE", {"cpu": 16})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, id_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A checkpoint in float32 of random weights, which words mean nothing to."""
    made = tmp_path_factory.mktemp("doctor") / "model"
    model = make_model(3, num_hidden_layers=1, num_nextn_predict_layers=1).float()
    model.generation_config.eos_token_id, model.generation_config.confidence_threshold = 3, 0.05
    model.save_pretrained(made)
    id_tokenizer.save_pretrained(made)
    return made


def examined(folder: Path) -> dict[str, Check]:
    """The checks by name, without times; the page names what failed."""
    report = page.examine(DoctorOptions(model=str(folder), states=[], batch=[]))
    assert max(len(line) for line in report.page().splitlines() if str(folder) not in line) <= 80
    assert not report.failed or f"**Failed: {'; '.join(report.failed)}.**" in " ".join(
        report.page().split()
    )
    assert all(f"| {name} | **failed** |" in report.page() for name in report.failed)
    return {check.name: check for check in report.checks}


def failed(folder: Path) -> list[str]:
    return [name for name, check in examined(folder).items() if check.ok is False]


@interpreted
def test_the_page(folder: Path) -> None:
    """Everything that a CPU can check, times of each width, and the widths that it proposes."""
    shown = mrp("doctor", "--model", str(folder), *LITTLE, *PREFIXES)
    for name in (
        "weights of the backbone",
        "weights of the head",
        "noise of sampling",
        *(f"kernel {name}" for name in KERNELS),
        *LOG_ODDS,
        *DRAFTS,
    ):
        assert f"| {name} | ok |" in shown
    assert "| graphs in generate | left out |  | see below |" in shown
    assert "graphs in generate: the model is on cpu: move it to a CUDA device" in shown.splitlines()
    lines = shown.splitlines()
    assert max(len(line) for line in lines if str(folder) not in line) <= 80
    *sections, costs = shown.split("\n## ")[2:]
    parts, steps, rounds_of_generate = (
        [line.split(" | ")[:4] for line in section.splitlines() if line.startswith("| 2 |")]
        for section in sections
    )
    table = json.loads(costs.split("```json\n")[1].split("```")[0])
    assert MRPGenerationConfig(round_costs=table).round_costs == table
    assert len(table["states"]) == len(table["backbone"]) == len(table["head"]) > 2
    assert [row[:3] for row in parts] == [
        ["| 2", "8", "1"],
        ["| 2", "8", "3"],
        ["| 2", "16", "1"],
        ["| 2", "16", "3"],
    ]
    assert [row[:3] for row in steps] == [
        ["| 2", "8", "transformers, DynamicCache"],
        ["| 2", "16", "transformers, DynamicCache"],
    ]
    assert [row[:2] for row in rounds_of_generate] == [["| 2", "1"], ["| 2", "3"]]
    assert any(line.startswith("| copies, products | ") for line in lines)
    assert "Most tokens a second on these prompts, batch 2: `num_draft_states=" in shown
    assert shown.strip().endswith(f"All {6 + len(KERNELS) + len(DRAFTS)} checks passed.")


def test_what_failed_is_the_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        page, "check_kernels", lambda *_: [Check("kernel pick", False, 0.5, "of 0.1")]
    )
    result = CliRunner().invoke(cli.app, ["doctor", "--model", str(folder), *LITTLE])
    assert result.exit_code == 1
    assert "**Failed: kernel pick.**" in result.stdout
    assert "| kernel pick | **failed** | 0.5 | of 0.1 |" in result.stdout


@pytest.mark.parametrize("broken_part", ["keys", "noise"])
def test_a_device_with_other_noise_is_named(
    broken_part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "check_kernels", lambda *_: [])
    monkeypatch.setattr(page, "check_drafts", lambda *_: [])
    if broken_part == "keys":  # on devices that multiply integers by way of floats
        right = checks.noise_key
        monkeypatch.setattr(
            checks, "noise_key", lambda *row: right(*row) ^ isinstance(row[0], torch.Tensor)
        )
    else:
        monkeypatch.setattr(checks, "gumbel_noise", lambda keys, *_: gumbel_noise(keys ^ 1, *_))
    assert failed(folder) == ["noise of sampling"]


@interpreted
@pytest.mark.parametrize("name", KERNELS)
def test_a_broken_kernel_is_named(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KERNELS[name].launch
    monkeypatch.setattr(KERNELS[name], "launch", lambda *given: broken(real(*given)))
    monkeypatch.setattr(page, "check_drafts", lambda *_: [])
    assert failed(folder) == [f"kernel {name}"]


@pytest.mark.parametrize("compared", [False, True], ids=["used", "found at first use"])
def test_a_broken_graph_is_named(
    compared: bool, tapes: type[TapeRecorder], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that repeats its first result, where nothing compares it at first use and where something
    does; whole ones pass."""
    monkeypatch.setattr(page, "check_kernels", lambda *_: [])
    monkeypatch.setattr(page, "check_drafts", lambda *_: [])
    assert examined(folder)["graphs in generate"].ok
    assert tapes.replays > 0
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Stale)
    monkeypatch.setattr(graphs, "CHECKED_ON", {"cpu"} if compared else set())
    with (
        pytest.warns(UserWarning, match="wrong when it is replayed") if compared else nullcontext()
    ):
        found = examined(folder)["graphs in generate"]
    assert found.ok is False
    assert ("not used: a recording" in found.note) is compared


def test_drafts_that_are_accepted_wrongly_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all drafts were of `static`: those of targets that reveal otherwise here make another
    text."""
    monkeypatch.setattr(page, "check_kernels", lambda *_: [])
    real, static = loop.accept, Static((1,))
    monkeypatch.setattr(
        loop, "accept", lambda row, rule, *given: real(row, static if given[-1] else rule, *given)
    )
    wrong = {
        name
        for name in failed(folder)
        if name.split()[2] in ("static", "dynamic", "sequential", "entropy_bound")
    }
    assert wrong == {
        name for name in DRAFTS if name.split()[2] in ("dynamic", "sequential", "entropy_bound")
    }


def test_a_head_that_is_not_finite_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backbone's texts and their stale drafts are right."""
    monkeypatch.setattr(page, "check_kernels", lambda *_: [])
    model: Any = MRPForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.mrp_head.norm.weight[3] = torch.nan
    monkeypatch.setattr(page, "load_model", lambda *_: model)
    found = examined(folder)
    assert found["weights of the head"].note == "not finite: mrp_head.norm.weight"
    assert next(name for name in found if found[name].ok is False) == "weights of the head"
    assert all(found[name].ok for name in DRAFTS if name.endswith("self_spec"))


def test_a_model_whose_texts_agree_may_be_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every MLP is subtracted, with drafts and without, texts are equal, and log-odds are
    not."""
    monkeypatch.setattr(page, "check_kernels", lambda *_: [])
    flip_mlps(monkeypatch)
    assert failed(folder) == LOG_ODDS


def test_random_weights_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is left as the memory was. What they make says nothing about drafts, so that no
    width is proposed; the times say from where one pays."""
    small = make_model(num_hidden_layers=1, initializer_range=0.02).config
    model, again = (random_model(small, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert (parameter == 1).all() if "norm" in name else 0.01 < parameter.float().std() < 0.03
    monkeypatch.setattr(page, "published_config", lambda size: small)
    monkeypatch.setattr(page, "check_kernels", lambda *_: [])
    report = page.examine(DoctorOptions(random="4b", states=[1, 2], batch=[1], prefix=[8], turns=1))
    assert report.failed == []
    first, second = report.rounds
    assert [replayed.states for replayed in report.replays] == [1, 2]
    assert f"| {second.seconds / first.seconds:.2f} | " in report.page()
    assert "num_draft_states" not in report.page()


def test_the_width_that_is_proposed() -> None:
    timed = [
        Timed(1, 1, 1.0, 1.0, 90.0),
        Timed(1, 4, 1.2, 2.5, 200.0),
        Timed(4, 1, 1.0, 1.0, 300.0),
    ]
    assert proposed([*timed, Timed(4, 4, 3.0, 2.5, 250.0)]) == {1: 4, 4: 1}
    assert "--random 5B: choose one of 1.7B, 4B, 8B" in mrp("doctor", "--random", "5B", fails=True)


def outputs(tokens: list[list[int]], logprobs: list[list[float]]) -> MRPGenerateOutput:
    """Of a prompt of two tokens; 0 is padding. A step reveals the first token, another one the
    rest."""
    ids = torch.tensor(tokens)
    whole = torch.cat([torch.full((len(ids), 2), 9), ids], 1)
    return MRPGenerateOutput(
        sequences=whole,
        reveal_step=torch.where(ids == 0, -1, torch.tensor([0, 1, 1])),
        token_logprobs=torch.tensor(logprobs),
    )


def test_gaps_by_hand() -> None:
    """A text of two tokens ends before one of three: means of what the step reveals are -0.75 and
    -1.7 / 2 = -0.85. In the last one token is another: -0.5 and -0.1."""
    ours = outputs(
        [[3, 4, 0], [5, 6, 0], [5, 6, 0]], [[-0.5] * 3, [-0.25, -0.75, 0.0], [-0.5, -0.5, 0.0]]
    )
    theirs = outputs(
        [[3, 4, 0], [5, 7, 8], [5, 7, 0]], [[-0.5] * 3, [-0.25, -0.7, -1.0], [-0.5, -0.1, 0.0]]
    )
    assert gaps(ours, theirs) == [None, pytest.approx(0.1), pytest.approx(0.4)]
