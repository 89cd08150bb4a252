"""Training that meets a number that is not finite ends there, says why, and leaves good checkpoints alone."""

from pathlib import Path

import pytest
from training_runs import rows_trainer

BROKEN = "model.layers.1.mlp.up_proj.weight"


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("objective", ["block_diffusion", "mrp"])
def test_a_broken_weight_ends_training_before_anything_is_saved(objective: str, tmp_path: Path) -> None:
    """With accumulated gradients, and without a limit for their norm."""
    trainer = rows_trainer(tmp_path, objective=objective, gradient_accumulation_steps=2, max_grad_norm=0.0)
    trainer.model.get_parameter(BROKEN).data[3, 5] = float("nan")
    with pytest.raises(FloatingPointError, match=r"^the gradient norm of step 1 is nan, and nothing is saved: lower"):
        trainer.train()
    assert checkpoints(tmp_path) == []
    with pytest.raises(FloatingPointError, match=r"^the held-out loss is nan"):
        trainer.evaluate()


def test_a_gradient_of_a_finite_loss(tmp_path: Path) -> None:
    """In the second step: the first one's checkpoint stays, and training goes on from it."""
    trainer = rows_trainer(tmp_path)
    trainer.model.get_parameter(BROKEN).register_hook(lambda grad: grad / (trainer.state.global_step == 0))
    with pytest.raises(FloatingPointError, match=r"^the gradient norm of step 2 is (inf|nan).* learning_rate, which is 0\.01"):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1"]
    again = rows_trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_a_rate_that_blows_weights_up_in_the_last_step(saves: str, tmp_path: Path) -> None:
    """Behind which there is no loss."""
    with pytest.raises(FloatingPointError, match=r"^a weight behind step 1 is nan.*learning_rate, which is 1e\+39"):
        rows_trainer(tmp_path, objective="mrp", learning_rate=1e39, warmup_steps=0, max_steps=1, save_strategy=saves).train()
    assert checkpoints(tmp_path) == []
