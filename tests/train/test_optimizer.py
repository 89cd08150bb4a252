"""MuonAdamW: which parameters go to which optimizer, the size of a step, and resuming."""

from copy import deepcopy
from pathlib import Path

import torch
from conftest import make_model
from mrp_trainer.train.optimizer import MuonAdamW
from torch import nn


def test_the_optimizer_splits_parameters_as_documented() -> None:
    model = make_model()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = MuonAdamW(model, lr=0.01, muon_lr=0.02, weight_decay=0.1)
    groups = {type(part): [names[id(p)] for g in part.param_groups for p in g["params"]] for part in optimizer.parts}
    projections = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    matrices = {f"{m}.layers.{i}.{x}.weight" for m in ("model", "mrp_head") for i in (0, 1) for x in projections}
    frozen = {"model.layers.0.mlp.up_proj.weight"}
    assert set(groups[torch.optim.Muon]) == matrices - frozen
    assert set(groups[torch.optim.AdamW]) == set(names.values()) - matrices
    assert sorted(sum(groups.values(), [])) == sorted(set(names.values()) - frozen)  # noqa: RUF017 - none twice
    settings = {type(p): [(g["lr"], g["weight_decay"]) for g in p.param_groups] for p in optimizer.parts}
    assert settings == {torch.optim.Muon: [(0.02, 0.1)], torch.optim.AdamW: [(0.01, 0.0)]}
    assert len(MuonAdamW(nn.Linear(2, 2), 0.01, 0.02).parts) == 1  # a module without layers is AdamW's alone


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def test_the_optimizer_resumes_identically(tmp_path: Path) -> None:
    straight = make_model()
    optimizer = MuonAdamW(straight, lr=0.01, muon_lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        give_gradients(straight, step)
        optimizer.step()
        schedule.step()
    resumed = deepcopy(straight)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    restored = MuonAdamW(resumed, lr=9.0, muon_lr=9.0)  # the saved rates replace these
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert [g["lr"] for g in restored.param_groups] == [g["lr"] for g in optimizer.param_groups] == [0.02 / 4, 0.01 / 4]
    fresh, unrestored = deepcopy(straight), None
    unrestored = MuonAdamW(fresh, lr=0.01 / 4, muon_lr=0.02 / 4)
    for step in range(3, 6):
        for model, stepper in ((straight, optimizer), (resumed, restored), (fresh, unrestored)):
            give_gradients(model, step)
            for group in stepper.param_groups:
                group["lr"] *= 0.9
            stepper.step()
    for a, b, c in zip(straight.parameters(), resumed.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)  # the moments matter
