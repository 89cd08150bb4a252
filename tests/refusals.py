"""How tests see that a bad input is refused before the backbone runs."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_model

from modeling_mrp import MRPForCausalLM

PROMPT = torch.tensor([[1, 2, 3, 4, 5]])
PAIR = torch.tensor([[1, 2, 3], [4, 5, 6]])
EMBEDS = torch.zeros(1, 5, 32, dtype=torch.float64)


class ForwardRan(Exception):
    """The backbone ran: no error came before it. Not a ValueError, so that no test takes it for one."""


def guarded(model: MRPForCausalLM) -> MRPForCausalLM:
    """The model, whose backbone raises `ForwardRan`."""

    def refuse(*_: Any) -> None:
        raise ForwardRan

    model.model.register_forward_pre_hook(refuse)
    return model


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    """With a head."""
    return guarded(make_model())


@pytest.fixture(scope="module")
def headless() -> MRPForCausalLM:
    return guarded(make_model(num_nextn_predict_layers=0))


def rejected(call: Callable[[], Any], value: str, remedy: str) -> str:
    """Runs the call, which must raise a ValueError whose message matches both patterns; returns the message."""
    with pytest.raises(ValueError, match=value) as caught:
        call()
    message = str(caught.value)
    assert caught.type is ValueError
    assert re.search(remedy, message), message
    return message
