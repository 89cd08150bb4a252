"""MuonAdamW: which parameters go to which optimizer."""

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
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.1), (0.01, 0.0)]
    assert len(MuonAdamW(nn.Linear(2, 2), 0.01, 0.02).parts) == 1  # a module without layers is AdamW's alone
