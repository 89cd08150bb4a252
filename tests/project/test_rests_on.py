"""docs/rests_on.md names all that the project takes of other Hugging Face packages, and the
installed ones have it."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from outside import KINDS, exists, listed, outside_names
from torch import nn
from transformers import Trainer
from transformers.modeling_utils import PreTrainedModel

from tests.support.places import ROOT
from tests.support.random_cases import make_model

PACKAGES = {
    "modeling_mrp": ROOT / "modeling_mrp",
    "mrp_trainer": ROOT / "trainer" / "mrp_trainer",
}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("kind", KINDS.values())
def test_the_page_lists_what_the_code_takes(package: str, kind: str) -> None:
    """A member that a new release renamed is overridden no more, and so no longer found."""
    if kind == "override":
        _need_extras_of(package)
    assert sorted(listed(package)[kind]) == sorted(outside_names(PACKAGES[package], package, kind))


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_exists(package: str) -> None:
    _need_extras_of(package)
    assert [name for name in sorted(listed(package)["import"]) if not exists(name)] == []


def _need_extras_of(package: str) -> None:
    """The server's modules, ours and transformers', are imported with its extra only."""
    if package == "mrp_trainer":
        pytest.importorskip("uvicorn", reason="needs the extra `serve`")


HOLDERS: dict[str, Callable[[], Any]] = {
    "_attn_implementation": lambda: make_model().config,
    "_experts_implementation": lambda: make_model().config,
    "_can_record_outputs": lambda: PreTrainedModel,
    "_no_split_modules": lambda: PreTrainedModel,
    "_from_model_config": lambda: make_model().generation_config,
    "_hf_hook": lambda: _with_hook(),
    "_call_impl": lambda: nn.Module(),
    "_compiled_call_impl": lambda: nn.Module(),
    "_modules": lambda: nn.Module(),
    "_parameters": lambda: nn.Module(),
    "_forward_hooks": lambda: nn.Module(),
    "_forward_pre_hooks": lambda: nn.Module(),
    "_version": lambda: torch.zeros(1),
    "_prepare_inputs": lambda: Trainer,
}
OF_PYTHON = {"_make", "_replace", "_exit"}


def _with_hook() -> nn.Module:
    hooks = importlib.import_module("accelerate.hooks")
    module = nn.Linear(1, 1)
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu"))
    return module


@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_reached_into_exists(name: str) -> None:
    assert hasattr(HOLDERS[name](), name)


def test_every_name_that_is_reached_into_is_looked_for() -> None:
    reached = set().union(*(listed(package)["reach into"] for package in PACKAGES))
    assert reached == HOLDERS.keys() | OF_PYTHON
