"""Rows that have ended leave a batch by halves; the others' texts, costs and caches are as if they had stayed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import generate, random_ids
from tape import TapeRecorder, tapes
from test_graphs import SAMPLED, same
from test_scores import says
from torch import Tensor
from transformers.generation import StoppingCriteria

from modeling_mrp import MRPForCausalLM

__all__ = ["tapes"]  # a fixture


class EndsAt(StoppingCriteria):
    """Ends row i behind its i-th limit of new tokens, as it counts columns of the batch as it was given."""

    def __init__(self, prompt: int, limits: list[int]) -> None:
        self.prompt, self.limits, self.shapes = prompt, limits, set[int]()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shapes.add(len(input_ids))
        return torch.tensor([input_ids.shape[1] - self.prompt >= limit for limit in self.limits])


def batches(model: MRPForCausalLM, run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What `run` gives, and the rows of each of the backbone's forwards meanwhile."""
    seen: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(rows_of(args, kwargs)), with_kwargs=True
    )
    try:
        return run(), seen
    finally:
        hook.remove()


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    given = next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value))
    return len(given)


@pytest.mark.parametrize("mode", ["static", "mrp_spec", "mrp_remask"])
def test_rows_that_have_ended_are_not_computed(mode: str) -> None:
    """Of 5 rows that end behind 4, 40, 8, 12 and 24 tokens forwards hold 5, then 3, 2 and 1."""
    model, prompts, ends = make_model(3), random_ids(1, 5, 6), EndsAt(6, [4, 40, 8, 12, 24])
    given = {"decoding": mode, "max_new_tokens": 40, "return_dict_in_generate": True, "eos_token_id": None}
    out, sizes = batches(model, lambda: model.generate(prompts, stopping_criteria=[ends], **given))
    assert ends.shapes == {5}, "criteria see the batch as it was given"
    assert sizes == sorted(sizes, reverse=True)
    assert {5, 1} <= set(sizes) <= {5, 3, 2, 1}
    assert mode == "mrp_spec" or len(set(sizes)) == 4
    assert out.stats.slot_forwards == sum(sizes)
    assert [(steps >= 0).sum().item() for steps in out.reveal_step] == ends.limits


def test_a_compiled_model_keeps_its_batch() -> None:
    """Which is compiled for one size."""
    model = make_model(3)
    model.model.compile(dynamic=False, backend="eager")
    given = {"decoding": "static", "max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True}
    ends = EndsAt(6, [1, 12, 1, 1])
    out, sizes = batches(model, lambda: model.generate(random_ids(1, 4, 6), stopping_criteria=[ends], **given))
    assert set(sizes) == {4}
    assert out.stats.slot_forwards == 4 * len(sizes)


def test_an_interrupted_call_leaves_its_cache_in_order() -> None:
    """What was stored before it is gone on from, for every row, though rows had changed their places."""
    model, prompts = make_model(3), random_ids(2, 4, 9)
    given = {"decoding": "mrp_spec", "max_new_tokens": 30, "eos_token_id": None, "return_dict_in_generate": True}
    cache = model.generate(prompts, **given | {"max_new_tokens": 1}).past_key_values
    assert min(cache.held) == 8

    class Interrupts(EndsAt):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if input_ids.shape[1] > 9 + 20:
                raise KeyboardInterrupt
            return super().__call__(input_ids, scores)

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts, past_key_values=cache, stopping_criteria=[Interrupts(9, [3, 30, 30, 3])], **given)
    assert min(cache.held) == 8
    again = model.generate(prompts, past_key_values=cache, **given)
    assert again.sequences.equal(model.generate(prompts, **given).sequences)


def test_a_call_that_fails_when_rows_have_left_leaves_nothing_in_its_cache() -> None:
    """What is not finite there is not gone on from."""
    model, prompts = make_model(3), random_ids(2, 4, 9)
    given = {"decoding": "static", "max_new_tokens": 30, "eos_token_id": None, "return_dict_in_generate": True}
    cache = model.generate(prompts, **given).past_key_values
    assert min(cache.held) > 0
    fails = given | says(float("nan"), 9 + 20)
    with pytest.raises(ValueError, match="row 1 has no token with a finite score"):
        model.generate(prompts, past_key_values=cache, stopping_criteria=[EndsAt(9, [3, 30, 3, 3])], **fails)
    assert (cache.rows, cache.held) == (4, [0] * 4)


def test_recorded_rounds_shrink_too(tapes: type[TapeRecorder]) -> None:
    """Texts, steps and counts are those without recordings; a batch of 9 goes to 5 and no further, and both are found again."""
    model = make_model(3)
    prompts = random_ids(4, 9, 5).tolist()
    options: dict[str, Any] = {**SAMPLED, "decoding": "mrp_spec", "seed": 7, "max_new_tokens": 30}
    plain = generate(model, prompts, graphs=False, **options)
    forwards = sum(plain.stats.forwards[role] for role in ("prefill", "denoise", "verify"))
    for _ in range(3):
        recorded = generate(model, prompts, graphs=True, **options)
        same(recorded, plain)
        assert plain.stats.slot_forwards <= recorded.stats.slot_forwards < 9 * forwards
        made, replayed = len(tapes.tapes), tapes.replays
    same(generate(model, prompts, graphs=True, **options), plain)
    assert len(tapes.tapes) == made
    assert tapes.replays > replayed
