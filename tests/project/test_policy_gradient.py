"""The example of reinforcement learning on traces: its formulas by hand, and two of its steps."""

import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.data.tasks import problems

from tests.support.places import ROOT


@pytest.fixture(scope="module")
def example() -> Any:
    spec: Any = util.spec_from_file_location("example", ROOT / "notebooks" / "policy_gradient.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formulas(example: Any) -> None:
    """Advantages by group, none where all are equal; the loss as it is written, and its gradient
    at the texts just drawn: minus the advantage of each token, over their number."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    centred = torch.tensor([2 / 3, -1 / 3, -1 / 3])
    wanted = torch.cat([centred / (centred.square().sum() / 2).sqrt(), torch.zeros(3)])
    advantage = example.advantages(rewards, 3)
    torch.testing.assert_close(advantage, wanted, rtol=1e-3, atol=0)
    old = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
    revealed = torch.tensor([[True, True], [True, False]])
    logprobs = old.clone().requires_grad_()
    advantage = torch.tensor([1.5, -0.5])
    loss = example.clipped_loss(logprobs, old, advantage, revealed, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-(1.5 + 1.5 - 0.5) / 3)
    torch.testing.assert_close(logprobs.grad, -torch.tensor([[1.5, 1.5], [-0.5, 0.0]]) / 3)
    # a token that became twice as likely gains as at 1.2; one that should not, loses in full
    moved = old + torch.tensor(2.0).log()
    clipped = example.clipped_loss(moved, old, advantage, revealed, 0.2)
    assert clipped.item() == pytest.approx(-(2 * 1.2 * 1.5 - 2 * 0.5) / 3)


def test_rewards(example: Any) -> None:
    tasks = problems("math", "train", 2)
    texts = [tasks[0].answer, "no"]
    assert example.solved(prompts=["", ""], completions=texts, problem=tasks) == [1.0, 0.0]


def test_the_page_has_the_curve(example: Any) -> None:
    """As the command prints it, and it rises."""
    log = (ROOT / "notebooks" / "policy_gradient.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in log]
    assert example.curve_table(lines) in (ROOT / "docs" / "training.md").read_text()
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert sum(rewards[-20:]) > 2 * sum(rewards[:20])
    assert all(line["largest_gap"] < 1e-3 for line in lines if "reward" in line)


def test_two_steps(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Log-probabilities of the updated weights are those of the next draw, and the model that is
    saved has other weights."""
    log = tmp_path / "curve.jsonl"
    arguments = ["--steps", "2", "--problems", "8", "--group", "8", "--held-out", "4"]
    arguments += ["--output", str(log), "--save", str(tmp_path / "model"), "--warmup", "1"]
    monkeypatch.setattr(sys, "argv", ["policy_gradient.py", *arguments])
    example.main()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2]
    assert all(line["largest_gap"] < 1e-3 for line in lines[1:3])
    assert all(0 <= line["reward"] <= 1 for line in lines[1:3])
    assert (
        lines[0].keys()
        == lines[3].keys()
        == {"step", "held_out_reward", "held_out_tokens_per_step"}
    )
    assert capsys.readouterr().out == log.read_text()
    trained = example.MRPForCausalLM.from_pretrained(tmp_path / "model")
    before = example.MRPForCausalLM.from_pretrained(example.embedded_checkpoint())
    assert not torch.equal(trained.lm_head.weight, before.lm_head.weight)
    assert torch.equal(trained.mrp_head.norm.weight, before.mrp_head.norm.weight)
