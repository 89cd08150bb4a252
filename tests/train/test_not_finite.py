"""Training that meets a number that is not finite ends there, says why, and leaves good checkpoints alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from mrp_trainer.cli import app
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.trainer import MRPTrainer
from safetensors.torch import load_file, save_file
from training_runs import OPTIONS, Rows, small_model
from transformers import TrainerCallback
from typer.testing import CliRunner

BROKEN = "model.layers.1.mlp.up_proj.weight"


class Break(TrainerCallback):
    """Sets one number of a weight before a step."""

    def __init__(self, step: int, value: float, name: str) -> None:
        self.step, self.value, self.name = step, value, name

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            model.get_parameter(self.name).data[0] = self.value


def trainer_of(folder: Path, objective: str, **options: Any) -> MRPTrainer:
    chosen = {**OPTIONS, "objective": objective, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, **options}
    return MRPTrainer(small_model(), MRPTrainingArguments(str(folder), **chosen), Rows(12), Rows(4))


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("objective", "more"),
    [("block_diffusion", {"gradient_accumulation_steps": 2}), ("mrp", {"max_grad_norm": 0.0})],
)
def test_a_broken_weight_ends_training_before_anything_is_saved(objective: str, more: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, objective, **more)
    trainer.model.get_parameter(BROKEN).data[3, 5] = float("nan")
    with pytest.raises(
        FloatingPointError, match=r"^the gradient norm of step 1 is nan, and nothing is saved: lower learning_rate"
    ):
        trainer.train()
    assert checkpoints(tmp_path) == []
    with pytest.raises(FloatingPointError, match=r"^the held-out loss is nan"):
        trainer.evaluate()


@pytest.mark.parametrize("objective", ["mrp"])
def test_good_checkpoints_stay(objective: str, tmp_path: Path) -> None:
    name = BROKEN if objective == "block_diffusion" else "mrp_head.norm.weight"
    trainer = trainer_of(tmp_path, objective)
    trainer.add_callback(Break(3, float("inf"), name))
    with pytest.raises(FloatingPointError, match=r"of step 3 is nan.*learning_rate, which is 0.01"):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    again = trainer_of(tmp_path, objective)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


@pytest.mark.parametrize("objective", ["block_diffusion"])
def test_a_gradient_norm(objective: str, tmp_path: Path) -> None:
    """Of a loss that is finite, in the second step."""
    name = BROKEN if objective == "block_diffusion" else "mrp_head.norm.weight"
    trainer = trainer_of(tmp_path, objective)
    trainer.model.get_parameter(name).register_hook(lambda grad: grad / (trainer.state.global_step == 0))
    message = r"^the gradient norm of step 2 is (inf|nan), and nothing is saved: lower learning_rate, which is 0\.01"
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("objective", ["mrp"])
def test_a_rate_that_blows_weights_up(objective: str, tmp_path: Path) -> None:
    """In the last step, too, behind which there is no loss."""
    with pytest.raises(FloatingPointError, match=r"nothing is saved.*learning_rate, which is 1e\+30"):
        trainer_of(tmp_path / "a", objective, learning_rate=1e30, warmup_steps=0, save_steps=3).train()
    with pytest.raises(FloatingPointError, match=r"^a weight behind step 1 is nan.*learning_rate, which is 1e\+39"):
        trainer_of(tmp_path / "b", objective, learning_rate=1e39, warmup_steps=0, max_steps=1).train()
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b") == []


def test_the_command_ends_with_an_error(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(TINY, model)
    tensors = load_file(model / "model.safetensors")
    tensors[BROKEN][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    data.write_text("\n".join(training_lines("math", "train", 4)))
    flags = ["--model", str(model), "--data", str(data), "--output-dir", str(tmp_path / "run"), "--steps", "1"]
    done = CliRunner().invoke(app, ["train", "head", *flags, "--set", "use_cpu=true"])
    assert done.exit_code == 1
    assert "the gradient norm of step 1 is nan, and nothing is saved" in done.stderr
    assert not list(tmp_path.rglob("run/*.safetensors"))
    assert checkpoints(tmp_path / "run") == []
