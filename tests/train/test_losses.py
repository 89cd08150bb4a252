"""The losses against closed forms, and the walk over the vocabulary against logits that are all there at once."""

import math

import pytest
import torch
from helpers import close
from mrp_trainer.train import losses
from mrp_trainer.train.losses import BLANK, over_vocabulary, project, weighted_cross_entropy
from torch import Tensor


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_divergences_of_two_outcomes() -> None:
    """Logits (log odds, 0) of p = 3/4 and q = 1/2, and of q against itself."""
    p, q = torch.tensor([[math.log(3), 0.0]]), torch.tensor([[0.0, 0.0]])
    forward = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    assert losses.forward_kl(q, p).item() == pytest.approx(forward)
    assert losses.forward_kl(q, q).item() == 0
    assert losses.cross_entropy(p, torch.tensor([0])).item() == pytest.approx(-math.log(3 / 4))
    assert losses.cross_entropy(p, torch.tensor([BLANK])).item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 4)) / 2)


def everything(student: Tensor, teacher: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Three values with gradients and a note."""
    values = [losses.forward_kl(student, teacher), losses.cross_entropy(student, targets), student[:, 2].square()]
    return torch.stack(values, 1), (student.argmax(-1) == teacher.argmax(-1)).double()[:, None]


@pytest.mark.parametrize(("at_once", "trains"), [(1, "both"), (37 * 5, "hidden"), (37 * 5, "weight"), (1 << 20, "neither")])
def test_chunks_change_neither_values_nor_gradients(at_once: int, trains: str) -> None:
    """12 tokens, 37 words: from one token a chunk to all in one; a frozen vocabulary and one that trains."""
    targets = torch.randint(0, 37, (12,), generator=torch.Generator().manual_seed(5))
    upstream = normal(6, 12, 3)
    results = []
    for chunked in (True, False):
        hidden = normal(3, 12, 8).requires_grad_(trains in ("hidden", "both"))
        weight = normal(4, 37, 8).requires_grad_(trains in ("weight", "both"))
        teacher = normal(7, 12, 37)
        if chunked:
            values, notes = over_vocabulary(everything, hidden, weight, teacher, targets, at_once=at_once)
        else:
            values, notes = everything(project(hidden, weight), teacher, targets)
        assert not notes.requires_grad
        if trains != "neither":
            (values * upstream).sum().backward()
        results.append([values.detach(), notes, hidden.grad, weight.grad])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b, 1e-11)


@pytest.mark.parametrize("frozen", [True, False])
def test_no_tokens_leave_a_graph(frozen: bool) -> None:
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(37, 8).requires_grad_(not frozen)
    loss = weighted_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.long), torch.zeros(0))
    assert loss.item() == 0
    loss.backward()
    assert hidden.grad is not None
    assert frozen or not weight.grad.any()
