"""Rounds on an engine's batches: the text of the engine's own algorithm, in fewer forwards, with nothing left behind."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from conftest import TINY
from engine_reference import low_confidence
from fake_engine import FakeEngine, FakeRequest, FakeScheduler, rounds_of, serve
from mrp_serving.usage import shown_of
from mrp_trainer.data.tasks import make_problem
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels.dispatch import Dispatch, Kernel, triton

EOS = (2, 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return MRPForCausalLM.from_pretrained(TINY, dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    asked = [make_problem(family, "heldout", index) for index in range(1) for family in ("math", "code")]
    chats = [problem.messages() for problem in asked]
    return [
        list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]) for chat in chats
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(TINY)


@pytest.fixture(scope="module")
def stock(model: Any, prompts: list[list[int]]) -> Callable[[float], list[list[int]]]:
    """Texts of the engine's own algorithm at a threshold."""
    return cache(lambda threshold: [low_confidence(model, prompt, threshold, 40, EOS, exact=True).tokens for prompt in prompts])


def served(model: Any, prompts: list[list[int]], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Serve prompts side by side; returns the requests and the engine."""
    requests = [FakeRequest(prompt, stop=EOS, rid=str(number)) for number, prompt in enumerate(prompts)]
    return requests, serve(model, requests, options, *args, **kwargs)


def forwards(requests: list[FakeRequest]) -> int:
    return sum(req.mrp.counts.forwards for req in requests)


@pytest.mark.parametrize(
    ("options", "threshold"),
    [
        ({"target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4}, 0.9),
        ({"target": "dynamic", "confidence_threshold": 0.7, "num_draft_states": 8, "draft_passes": 2}, 0.7),
        ({"target": "static", "num_draft_states": 4, "draft_shortlist": 16}, 1.0),
        ({"decoding": "self_spec", "target": "static", "num_draft_states": 3}, 1.0),
        ({"decoding": "dynamic", "confidence_threshold": 0.9}, 0.9),
        ({"target": "dynamic", "num_draft_states": "auto"}, 0.9),
    ],
)
def test_the_text_is_that_of_the_engines_own_algorithm(
    model: Any, prompts: list[list[int]], stock: Any, options: dict[str, Any], threshold: float
) -> None:
    requests, _ = served(model, prompts, options)
    assert [req.text() for req in requests] == stock(threshold)
    accepted = sum(req.mrp.counts.accepted for req in requests)
    if options.get("num_draft_states") != "auto":
        assert (accepted > 9) == (options.get("decoding") != "dynamic")


@pytest.mark.parametrize(
    ("rows", "pages", "sees_new"),
    [(4, 128, True), (64, 20, True), (64, 128, False)],
    ids=["no row is left", "few pages", "attention does not see what is new"],
)
def test_what_room_there_is_does_not_change_the_text(
    model: Any, prompts: list[list[int]], stock: Any, rows: int, pages: int, sees_new: bool
) -> None:
    options = {"target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4}
    requests, engine = served(model, prompts, options, rows, pages, sees_new=sees_new)
    assert [req.text() for req in requests] == stock(0.9)
    assert max(engine.widths) <= rows


def test_what_drafts_start_from_outlives_the_graph_that_made_it(model: Any, prompts: list[list[int]], stock: Any) -> None:
    engine = FakeEngine(model, 64, 128, graphs=True)
    options = {"target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4}
    rounds = rounds_of(model, options)
    scheduler, requests = FakeScheduler(engine, rounds), [FakeRequest(prompt, stop=EOS) for prompt in prompts]
    replayed, places = engine.replayed.untyped_storage().data_ptr(), set[int]()  # type: ignore[union-attr]

    def on_step() -> None:
        sources = [row.source for _, row in rounds.rows.values() if row.source is not None and row.source.hidden is not None]
        places.update(source.hidden[0].untyped_storage().data_ptr() for source in sources if source.hidden)

    scheduler.add(*requests)
    scheduler.run(on_step)
    assert [req.text() for req in requests] == stock(0.9)
    assert places
    assert replayed not in places


@pytest.mark.parametrize(
    "options",
    [
        {"decoding": "mrp_direct", "mrp_steps": 2},
        *({"decoding": "cad"}, {"decoding": "self_spec", "target": "eoser", "num_draft_states": 3}),
        *({"decoding": "mrp_remask", "remask_rule": rule} for rule in ("reread", "threshold", "residual")),
        *({"decoding": "slow_fast"}, {"decoding": "mrp_spec", "target": "credit", "num_draft_states": 4}),
    ],
)
def test_other_modes_give_the_text_of_generate(model: Any, prompts: list[list[int]], options: dict[str, Any]) -> None:
    requests, _ = served(model, prompts, options)
    for req in requests:
        ids = torch.tensor([req.origin_input_ids])
        text = model.generate(ids, max_new_tokens=40, eos_token_id=list(EOS), do_sample=False, **options)[0, ids.shape[1] :]
        assert text.tolist() == req.text()


def test_the_head_sees_the_prefix(model: Any, prompts: list[list[int]]) -> None:
    """As many tokens a forward as `generate` makes, but for prompts, of which the engine takes a block a forward."""
    options = {"target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4}
    requests, _ = served(model, prompts, options)
    ours, theirs = 0, 0
    for req in requests:
        prompt = torch.tensor([req.origin_input_ids])
        out = model.generate(prompt, max_new_tokens=40, return_dict_in_generate=True, decoding="mrp_spec", **options)
        theirs += int(out.stats.row_forwards[0]) - 1
        ours += forwards([req]) - prompt.shape[1] // 16
    assert ours <= 1.02 * theirs


def test_requests_come_and_go(model: Any, prompts: list[list[int]], stock: Any) -> None:
    """Aborted, taken back and joined by others at any time, requests get their text, and leave nothing."""
    draw = random.Random(3)
    engine = FakeEngine(model, 24, 64)
    options = {"target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4}
    rounds = rounds_of(model, options)
    scheduler = FakeScheduler(engine, rounds)
    wanted = {tuple(prompt): text for prompt, text in zip(prompts, stock(0.9), strict=True)}
    requests = [FakeRequest(draw.choice(prompts), stop=EOS) for _ in range(12)]
    waiting, aborted = list(requests), set()

    def on_step() -> None:
        while waiting and len(scheduler.running) < 4:
            scheduler.add(waiting.pop())
        if scheduler.running and draw.random() < 0.3:
            req = draw.choice(scheduler.running)
            scheduler.release(req)
            scheduler.fresh[req] = False
            if draw.random() < 0.5:
                aborted.add(req)
            else:
                scheduler.add(req)  # it goes on from the blocks that are done

    on_step()
    scheduler.run(on_step)
    assert 0 < len(aborted) < 12
    assert all(req.ended or req in aborted for req in requests)
    assert all(req.text() == wanted[tuple(req.origin_input_ids)] for req in requests if req.ended)
    assert len(engine.req_to_token_pool.free_slots) == 24
    assert len(engine.token_to_kv_pool_allocator.free_pages) == 64
    assert len(rounds.rows) <= 4


def test_requests_are_told_what_they_cost_and_metrics_count_all(model: Any, prompts: list[list[int]]) -> None:
    class Counter:
        def __init__(self, name: str, documentation: str) -> None:
            counters[name], self.total = self, 0

        def inc(self, number: int) -> None:
            self.total += number

    counters: dict[str, Counter] = {}
    engine = FakeEngine(model, 64, 128)
    rounds = rounds_of(model, {"target": "dynamic", "num_draft_states": 4})
    rounds.report.count_in(Counter)
    scheduler = FakeScheduler(engine, rounds)
    asked = [FakeRequest(prompt, stop=EOS, rid=str(number)) for number, prompt in enumerate(prompts[:2])]
    for req in asked:
        before = len(engine.widths)
        scheduler.add(req)
        scheduler.run()
        shown = shown_of(req)
        assert shown is not None
        assert shown["forwards"] == len(engine.widths) - before
        assert shown["tokens_per_forward"] == len(req.text()) / shown["forwards"]
        assert 0 < shown["acceptance"] == shown["accepted"] / shown["drafted"] <= 1
        assert sum(shown["accepted_at_depth"]) == shown["accepted"]
        assert all(came <= asked for came, asked in zip(shown["accepted_at_depth"], shown["offered_at_depth"], strict=True))
    assert counters["sglang:mrp_forwards"].total == len(engine.widths) == forwards(asked)
    assert counters["sglang:mrp_tokens"].total == sum(len(req.output_ids) for req in asked)
    assert 0 < counters["sglang:mrp_accepted"].total <= counters["sglang:mrp_drafted"].total


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of infinities, where a kernel is interpreted
@pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs triton's interpreter")
@torch.inference_mode()
def test_requests_end_with_kernels_as_without(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, interpreted: the same texts at the same cost, and the kernel took part in every pick; those that are made as
    the engine's own algorithms make them need none."""
    model, names, run = MRPForCausalLM.from_pretrained(TINY, dtype=torch.float32), [], Dispatch.run

    def noted(dispatch: Dispatch, kernel: Kernel, *given: Any) -> Any:
        names.append((kernel.name, dispatch.forced))
        return run(dispatch, kernel, *given)

    monkeypatch.setattr(Dispatch, "run", noted)
    asked = {"decoding": "mrp_remask", "remask_rule": "threshold", "confidence_threshold": 0.7}
    off, _ = served(model, prompts[:1], {**asked, "kernels": False})
    picks = len(names)
    on, _ = served(model, prompts[:1], {**asked, "kernels": True})
    assert [req.text() for req in on] == [req.text() for req in off]
    assert all(req.ended and len(req.text()) > 1 for req in on)
    assert forwards(on) == forwards(off)
    assert names == [("pick", False)] * picks + [("pick", True)] * picks
    assert picks
