"""Rows that have ended leave a batch by halves; `test_fuzz.py` holds the others' texts, costs and caches."""

from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import random_ids, says_all
from torch import Tensor
from transformers.generation import StoppingCriteria

from modeling_mrp import MRPForCausalLM

GIVEN: dict[str, Any] = {"eos_token_id": None, "return_dict_in_generate": True}


class EndsAt(StoppingCriteria):
    """Ends row i behind its i-th limit of new tokens, as it counts columns of the batch as it was given; or interrupts it."""

    def __init__(self, prompt: int, limits: list[int], interrupts: int = 99) -> None:
        self.prompt, self.limits, self.interrupts, self.shapes = prompt, limits, interrupts, set[int]()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shapes.add(len(input_ids))
        new = input_ids.shape[1] - self.prompt
        if new > self.interrupts:
            raise KeyboardInterrupt
        return torch.tensor([new >= limit for limit in self.limits])


def decoded(model: MRPForCausalLM, prompts: Tensor, ends: EndsAt, **options: Any) -> tuple[Any, list[int]]:
    """The output, and the rows of each of the backbone's forwards."""
    seen: list[int] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(len(next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))))

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    return model.generate(prompts, stopping_criteria=[ends], **GIVEN, **options), seen


@pytest.mark.parametrize("mode", ["static", "mrp_spec", "mrp_remask"])
def test_rows_that_have_ended_are_not_computed(mode: str) -> None:
    """Of 5 rows that end behind 4, 40, 8, 12 and 24 tokens forwards hold 5, then 3, 2 and 1."""
    ends = EndsAt(6, [4, 40, 8, 12, 24])
    out, sizes = decoded(make_model(3), random_ids(1, 5, 6), ends, decoding=mode, max_new_tokens=40)
    assert ends.shapes == {5}, "criteria see the batch as it was given"
    assert sizes == sorted(sizes, reverse=True)
    assert {5, 1} <= set(sizes) <= {5, 3, 2, 1}
    assert mode == "mrp_spec" or len(set(sizes)) == 4
    assert out.stats.slot_forwards == sum(sizes)
    assert [(steps >= 0).sum().item() for steps in out.reveal_step] == ends.limits


def test_a_call_that_breaks_off_leaves_its_cache_in_order() -> None:
    """Though rows had changed their places: what was stored before an interruption is gone on from, for every row; behind an
    error nothing is, as what is not finite lies there."""
    model, prompts = make_model(3), random_ids(2, 4, 9)
    given = {"decoding": "mrp_spec", **GIVEN}
    cache = model.generate(prompts, max_new_tokens=1, **given).past_key_values
    assert min(cache.held) == 8
    given |= {"max_new_tokens": 30}
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts, past_key_values=cache, stopping_criteria=[EndsAt(9, [3, 30, 30, 3], 20)], **given)
    assert min(cache.held) == 8
    again = model.generate(prompts, past_key_values=cache, **given)
    assert again.sequences.equal(model.generate(prompts, **given).sequences)
    cache, fails = again.past_key_values, says_all(float("nan"), 9 + 20)
    with pytest.raises(ValueError, match="row 1 has no token with a finite score"):
        model.generate(prompts, past_key_values=cache, stopping_criteria=[EndsAt(9, [3, 30, 3, 3])], **given, **fails)
    assert (cache.rows, cache.held) == (4, [0] * 4)
