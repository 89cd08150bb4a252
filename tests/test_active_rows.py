"""Rows that have ended leave a batch by halves; the others' texts, costs and caches are as if they had stayed."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import BLOCK, generate, random_ids
from tape import TapeRecorder, tapes
from test_graphs import SAMPLED, same
from test_scores import says
from torch import Tensor
from transformers.generation import StoppingCriteria

from benchmarks.random_cases import dampened
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation
from modeling_mrp.generate.budget import Amount
from modeling_mrp.networks.cache import BlockCache

__all__ = ["tapes"]  # a fixture


class Scripted:
    """A budget that is told beforehand."""

    def __init__(self, script: Sequence[Amount]) -> None:
        self.script = iter(script)

    def choose(self, rows: Any) -> Amount:
        return next(self.script)

    def learn(self, *_: Any) -> None: ...


MODES = ("static", "mrp_spec", "mrp_direct", "mrp_remask")


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_that_have_ended_are_not_computed(mode: str, sampled: bool) -> None:
    """Of 5 rows that end behind 4, 40, 8, 12 and 24 tokens forwards hold 5, then 3, 2 and 1; all else is as without."""
    model, limits = make_model(3), [4, 40, 8, 12, 24]
    prompts = random_ids(1, 5, 6)
    options = {"decoding": mode, "do_sample": sampled, "seed": [3, 1, 4, 1, 5], "max_new_tokens": 40}
    given = {"return_dict_in_generate": True, "eos_token_id": None, **options}
    ends = EndsAt(6, limits)
    out, sizes = batches(model, lambda: model.generate(prompts, stopping_criteria=[ends], **given))
    assert ends.shapes == {5}, "criteria see the batch as it was given"
    assert sizes == sorted(sizes, reverse=True)
    assert {5, 1} <= set(sizes) <= {5, 3, 2, 1}
    assert out.stats.slot_forwards == sum(sizes)
    assert out.stats.slot_forwards < 5 * len(sizes)
    for row, limit in enumerate(limits):
        alone = model.generate(prompts[row : row + 1], **given | {"seed": [options["seed"][row]], "max_new_tokens": limit})
        assert out.sequences[row, 6 : 6 + limit].tolist() == alone.sequences[0, 6:].tolist()
        assert out.reveal_step[row, :limit].tolist() == alone.reveal_step[0].tolist()


def test_a_compiled_model_keeps_its_batch() -> None:
    """Which is compiled for one size."""
    model = make_model(3)
    model.model.compile(dynamic=False, backend="eager")
    given = {"decoding": "static", "max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True}
    ends = EndsAt(6, [1, 12, 1, 1])
    out, sizes = batches(model, lambda: model.generate(random_ids(1, 4, 6), stopping_criteria=[ends], **given))
    assert set(sizes) == {4}
    assert out.stats.slot_forwards == 4 * len(sizes)


@pytest.mark.parametrize("longest", [6, 90])
@pytest.mark.parametrize("mode", ["static", "mrp_spec"])
def test_a_cache_holds_every_row_where_it_was(mode: str, longest: int) -> None:
    """A call that goes on from it prefills nothing but what is new, and its texts are those without a cache.

    That of the first row, which leaves first, may be longer than any other comes to be.
    """
    model, limits = make_model(3), [1, 40, 8, 12, 24]
    prompts = random_ids(1, 5, longest)
    mask = torch.ones_like(prompts)
    mask[1:, :-6] = 0
    given = {"decoding": mode, "max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}
    given |= {"num_draft_states": 4} if mode == "mrp_spec" else {}
    out = model.generate(prompts, attention_mask=mask, stopping_criteria=[EndsAt(longest, limits)], **given)
    cache, head = out.past_key_values, range(2, 2 + model.config.num_nextn_predict_layers)
    assert cache.rows == 5
    text = [row[longest - 6 : longest + limit] for row, limit in zip(out.sequences.tolist(), limits, strict=True)]
    text[0] = prompts[0, :-6].tolist() + text[0]
    for row, ids in enumerate(text):
        alone = model.generate(torch.tensor([ids]), **given | {"max_new_tokens": 1}).past_key_values
        count = min(alone.held[0], cache.held[row])
        assert count >= len(ids) // BLOCK * BLOCK
        torch.testing.assert_close(kept(cache, row, count), kept(alone, 0, count))
        if mode == "mrp_spec":  # which the head reads when it is asked
            count = min(alone.head_held[0], cache.head_held[row])
            assert cache.hidden_held[row] >= len(ids) // BLOCK * BLOCK
            torch.testing.assert_close(kept(cache, row, count, head), kept(alone, 0, count, head))
    longer = [[*ids, 7, 8, 9] for ids in text]
    width = max(map(len, longer))
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in longer])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in longer])
    fresh = model.generate(ids, attention_mask=mask, **given)
    again, sizes = batches(model, lambda: model.generate(ids, attention_mask=mask, past_key_values=cache, **given))
    assert again.sequences.tolist() == fresh.sequences.tolist()
    assert sizes[0] == 5


@pytest.mark.parametrize("rests", [(3, 9), (9, 9), (99, 3)])
def test_a_head_that_rests_has_what_it_needs_of_rows_that_moved(
    monkeypatch: pytest.MonkeyPatch, rests: tuple[int, int]
) -> None:
    """It reads the text before rows leave, after that, or in the next call: drafts are as good as if all had stayed."""
    model, limits = dampened(make_model(3), 0.3), [4, 40, 8, 12, 24]
    given = {"decoding": "mrp_spec", "target": "static", "num_draft_states": "auto", "draft_passes": 2}
    given |= {"max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}

    def two_calls(least: int) -> Iterator[Any]:
        ids, cache = random_ids(1, 5, 6), None
        for rounds in rests:
            monkeypatch.setattr(generation, "fewest_rows", lambda *_: least)
            script = (*[Amount()] * rounds, *[Amount(4, 2)] * 99)
            monkeypatch.setattr(generation, "budget_of", lambda *_, script=script: Scripted(script))
            call = partial(model.generate, ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
            call = partial(call, stopping_criteria=[EndsAt(ids.shape[1], limits)])
            out, sizes = batches(model, lambda call=call: call(**given))
            assert min(sizes) == least
            yield out
            ids, cache = torch.cat([out.sequences, random_ids(2, 5, 3)], 1), out.past_key_values

    for one, other in zip(two_calls(1), two_calls(5), strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert torch.equal(one.stats.accepted_at_depth, other.stats.accepted_at_depth)
    assert one.stats.accepted.sum() > 10


def kept(cache: BlockCache, row: int, count: int, layers: range = range(2)) -> Tensor:
    """[layers, 2, heads, count, head_dim], the committed keys and values of a row: the backbone's, or those of other layers."""
    cache.target(0, count, prefill=True)
    cache.active = cache.rows
    return torch.stack([torch.stack([part[row].clone() for part in cache.read(layer)]) for layer in layers])


def test_an_interrupted_call_leaves_its_cache_in_order() -> None:
    """What was stored before it is right for every row, though rows had changed their places."""
    model = make_model(3)
    prompts = random_ids(2, 4, 9)
    given = {"decoding": "static", "max_new_tokens": 30, "eos_token_id": None, "return_dict_in_generate": True}
    cache = model.generate(prompts, **given | {"max_new_tokens": 1}).past_key_values
    held = list(cache.held)
    assert min(held) > 0
    before = [kept(cache, row, held[row]) for row in range(4)]

    class Interrupts(EndsAt):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            if input_ids.shape[1] > 9 + 20:
                raise KeyboardInterrupt
            return super().__call__(input_ids, scores)

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts, past_key_values=cache, stopping_criteria=[Interrupts(9, [3, 30, 30, 3])], **given)
    for row in range(4):
        assert torch.equal(kept(cache, row, held[row]), before[row])


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


@pytest.mark.parametrize("mode", ["static", "mrp_spec"])
def test_recorded_rounds_shrink_too(mode: str, tapes: type[TapeRecorder]) -> None:
    """Texts, steps and counts are those without recordings; a batch of 9 goes to 5 and no further, and both are found again."""
    model = make_model(3)
    prompts = random_ids(4, 9, 5).tolist()
    options: dict[str, Any] = {**SAMPLED, "decoding": mode, "seed": 7, "max_new_tokens": 30}
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
