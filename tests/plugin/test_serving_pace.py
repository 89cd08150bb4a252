"""The amount of drafting on an engine that runs in several processes."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from mrp_serving.options import settings_of
from mrp_serving.pace import Led, pace_of

from modeling_mrp.generate.budget import Amount, Auto, Fixed


def test_all_processes_draft_as_the_first_one_chooses() -> None:
    """And each learns from what all have done."""
    said, chosen, other = list[int](), Amount(4, 3), Mock()
    other.choose.return_value = Amount(1, narrow=True)
    leads, follows = Led(Fixed(chosen), lambda numbers: said.extend(numbers) or said), Led(other, lambda numbers: said)
    assert [each.choose([]) for each in (leads, follows)] == [chosen, chosen]
    follows.learn(chosen, [], [], 0.1)
    other.learn.assert_called_once_with(chosen, [], [], 0.1)


@pytest.mark.parametrize(
    ("states", "share", "kind"), [("auto", None, Auto), ("auto", list, Led), (4, None, Fixed), (4, list, Fixed)]
)
def test_what_follows_the_clock_is_led(states: Any, share: Any, kind: type) -> None:
    mode = settings_of({"num_draft_states": states, "target": "dynamic"}, {}, 16, True).mode
    assert isinstance(pace_of(torch.nn.Linear(1, 1), mode, share), kind)
