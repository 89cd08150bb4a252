"""Rounds on an engine's batches: each request has the text of `generate`, or of the engine's own
algorithm, whoever comes, goes or shares its rounds, in as few forwards, with nothing left
behind."""

import random
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from mrp_serving.options import Settings
from mrp_serving.requests import parse_options, seed_of
from mrp_serving.usage import report_of
from mrp_trainer.data.tasks import make_problem

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels.dispatch import Dispatch, Kernel, triton
from modeling_mrp.rules.reveal import Static
from tests.support.engine_reference import low_confidence
from tests.support.fake_engine import (
    FakeEngine,
    FakeRequest,
    FakeScheduler,
    SharedLogits,
    rounds_of,
)
from tests.support.places import TINY
from tests.support.request_kinds import KINDS, as_engine, as_options

EOS, NEW, AT_ONCE = (2, 0), 20, 4
DYNAMIC: dict[str, Any] = {"target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4}
SERVERS: dict[str, dict[str, Any]] = {
    "drafts": DYNAMIC,
    "two passes": {
        "target": "dynamic",
        "confidence_threshold": 0.7,
        "num_draft_states": 8,
        "draft_passes": 2,
    },
    "shortlist": {"target": "static", "num_draft_states": 4, "draft_shortlist": 16},
    "by the clock": {**DYNAMIC, "num_draft_states": "auto"},
    "self_spec": {"decoding": "self_spec", "target": "static", "num_draft_states": 3},
    "self_spec, eoser": {"decoding": "self_spec", "target": "eoser", "num_draft_states": 3},
    "credit": {"target": "credit", "num_draft_states": 4},
    **{name: {"decoding": name} for name in ("dynamic", "cad", "slow_fast")},
    "mrp_direct": {"decoding": "mrp_direct", "mrp_steps": 2},
    **{
        rule: {"decoding": "mrp_remask", "remask_rule": rule}
        for rule in ("reread", "threshold", "residual")
    },
}
# Rows and pages of an engine, and whether its attention sees what the same forward writes: all, no
# row for drafts, few pages.
ROOM = ((64, 128, True), (AT_ONCE, 128, True), (64, 30, True), (64, 128, False))
# as the engine's own algorithms decode it, where they have the server's rule
PLAIN = {"temperature": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return MRPForCausalLM.from_pretrained(TINY, dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: Any) -> list[list[int]]:
    chats = [make_problem(family, "heldout", 0).messages() for family in ("math", "code")]
    encoded = [
        tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        for chat in chats
    ]
    return [list(one["input_ids"]) for one in encoded]


def kinds_of(settings: Settings) -> list[dict[str, Any]]:
    """The kinds of requests that a server takes."""
    found = []
    for kind in KINDS:
        with suppress(ValueError):
            parse_options(FakeRequest([5], asked=as_engine(kind)), settings)
            found.append(kind)
    return found


def assert_its_text(model: Any, req: Any, kind: dict[str, Any], server: dict[str, Any]) -> None:
    """Compare a text, its log-probabilities and steps with those of `generate`, or with the text of
    `LowConfidence`."""
    ids, asked = req.origin_input_ids, req.mrp.options
    if asked.sampling.stock:
        threshold = (
            1.0 if isinstance(asked.mode.rule, Static) else server.get("confidence_threshold", 0.9)
        )
        assert (
            req.output_ids_through_stop
            == low_confidence(model, ids, threshold, NEW, EOS, exact=True).tokens
        )
        return
    seed = seed_of(req.rid) if kind.get("sampling_seed") is None else kind["sampling_seed"]
    options = {
        "decoding": "mrp_spec",
        "eos_token_id": list(EOS),
        "do_sample": False,
        "max_new_tokens": NEW,
        **server,
    }
    options |= as_options({**kind, "sampling_seed": seed}, len(ids))
    out = model.generate(torch.tensor([ids]), return_dict_in_generate=True, **options)
    text, shown = out.sequences[0, len(ids) :].tolist(), report_of(req)
    assert req.output_ids_through_stop == text, kind
    assert shown is not None
    assert shown["reveal_step"] == out.reveal_step[0].tolist(), kind
    logprobs = torch.tensor(req.logprob.output_token_logprobs_val[: len(text)])
    torch.testing.assert_close(logprobs, out.token_logprobs[0].float(), rtol=1e-5, atol=1e-8)
    assert req.logprob.output_token_logprobs_idx[: len(text)] == text


@pytest.mark.parametrize("name", SERVERS)
@torch.inference_mode()
def test_requests_of_all_kinds_come_and_go(name: str, model: Any, prompts: list[list[int]]) -> None:
    """At any time one is aborted, or loses its rows and goes on; one that has no finite score is
    aborted alone."""
    server, draw = SERVERS[name], random.Random(name)
    rows, pages, sees_new = ROOM[list(SERVERS).index(name) % len(ROOM)]
    engine, rounds = FakeEngine(model, rows, pages), rounds_of(model, server)
    engine.graph_shared_output = SharedLogits(50)  # of the engine, for logits that fit
    scheduler = FakeScheduler(engine, rounds, sees_new)
    theirs = kinds_of(rounds.settings)
    kinds = [PLAIN, PLAIN, *draw.sample(theirs, 4)]
    barred = {
        "temperature": 1.0,
        "logit_bias": {str(token): -torch.inf for token in range(model.config.vocab_size)},
    }
    kinds = [
        {**kind, "sampling_seed": draw.choice((None, place, 2**61 + 5))}
        for place, kind in enumerate([*kinds, barred])
    ]
    requests = []
    for place, kind in enumerate(kinds):
        custom = {**kind.get("custom_params", {}), "return_reveal_step": True}
        prompt = draw.choice(prompts)
        # whole blocks, and scored with the next one
        begin = draw.randrange(18) if place < len(kinds) - 1 else len(prompt) % 16
        asked = as_engine({**kind, "custom_params": custom})
        requests.append(FakeRequest(prompt[begin:], NEW, EOS, str(place), asked=asked))
    *sound, broken = requests
    waiting, gone, lost = requests[::-1], set[FakeRequest](), set[tuple[str, int]]()

    def on_step() -> None:
        while waiting and len(scheduler.running) < AT_ONCE:
            scheduler.add(waiting.pop())
        if scheduler.running and draw.random() < 0.3:
            req = draw.choice(scheduler.running)
            if draw.random() < 0.1:
                scheduler.release(req)
                gone.add(req)
            elif (at := (req.rid, len(req.output_ids))) not in lost:
                scheduler.take_back(req)
                lost.add(at)

    on_step()
    scheduler.run(on_step)
    assert len(lost) > 1
    assert len(rounds.rows) <= AT_ONCE
    for req, kind in zip(sound, kinds, strict=False):
        assert req.ended is not (req in gone)
        if req.ended:
            assert_its_text(model, req, kind, server)
    if broken not in gone:
        assert str(broken.to_finish).startswith("no token has a finite score at position ")
        assert set(broken.output_ids) == {model.config.mask_token_id}


def test_what_requests_cost(model: Any, prompts: list[list[int]]) -> None:
    """As many forwards as `generate` makes, but for prompts, of which the engine takes a block a
    forward; each is told its own, and metrics count all. One costs the same beside others and where
    graphs overwrite what the last one made."""
    engine, rounds, metrics = (
        FakeEngine(model, 64, 128),
        rounds_of(model, DYNAMIC),
        dict[str, Mock](),
    )
    rounds.report.count_in(
        lambda name, text: metrics.setdefault(name.removeprefix("sglang:mrp_"), Mock())
    )
    scheduler, theirs, ours = FakeScheduler(engine, rounds), 0, 0
    alone, beside = ([FakeRequest(prompt, stop=EOS) for prompt in prompts] for _ in range(2))
    for req in alone:
        before = len(engine.widths)
        scheduler.add(req)
        scheduler.run()
        shown = report_of(req)
        assert shown is not None
        assert shown["forwards"] == len(engine.widths) - before
        assert shown["tokens_per_forward"] == len(req.output_ids_through_stop) / shown["forwards"]
        assert 0 < shown["spec_verify_ct"] <= shown["forwards"]
        tokens = len(req.output_ids_through_stop)
        assert shown["spec_accept_length"] == tokens / shown["spec_verify_ct"]
        assert 0 < shown["acceptance"] == shown["accepted"] / shown["drafted"] <= 1
        assert shown["spec_accept_rate"] == shown["acceptance"]
        assert shown["spec_accept_token_num"] == shown["accepted"]
        assert shown["spec_draft_token_num"] == shown["drafted"]
        assert (
            sum(shown["accepted_at_depth"]) == shown["accepted"] <= sum(shown["offered_at_depth"])
        )
        ids = torch.tensor([req.origin_input_ids])
        out = model.generate(
            ids, max_new_tokens=40, return_dict_in_generate=True, decoding="mrp_spec", **DYNAMIC
        )
        theirs += int(out.stats.row_forwards[0]) - 1
        ours += shown["forwards"] - ids.shape[1] // 16
    assert ours <= 1.02 * theirs
    totals = {
        name: sum(call.args[0] for call in counter.inc.call_args_list)
        for name, counter in metrics.items()
    }
    assert totals["forwards"] == len(engine.widths)
    assert totals["tokens"] == sum(len(req.output_ids) for req in alone)
    rounds = sum(report["spec_verify_ct"] for req in alone if (report := report_of(req)))
    assert totals["rounds"] == rounds
    assert 0 < totals["accepted"] <= totals["drafted"]
    scheduler = FakeScheduler(FakeEngine(model, 64, 128, graphs=True), rounds_of(model, DYNAMIC))
    scheduler.add(*beside)
    scheduler.run()
    assert [report_of(req) for req in beside] == [report_of(req) for req in alone]


# numpy's, of infinities, where a kernel is interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.skipif(
    triton is None or torch.cuda.is_available(), reason="needs triton's interpreter"
)
@torch.inference_mode()
def test_requests_end_with_kernels_as_without(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, interpreted: the same text at the same cost, and the kernel took part in every
    pick."""
    model, run = MRPForCausalLM.from_pretrained(TINY, dtype=torch.float32), Dispatch.run
    names, told = list[tuple[str, bool | None]](), list[Any]()

    def noted(dispatch: Dispatch, kernel: Kernel, *given: Any) -> Any:
        names.append((kernel.name, dispatch.forced))
        return run(dispatch, kernel, *given)

    monkeypatch.setattr(Dispatch, "run", noted)
    for kernels in (False, True):
        options = {
            "decoding": "mrp_remask",
            "remask_rule": "threshold",
            "confidence_threshold": 0.7,
            "kernels": kernels,
        }
        scheduler, req = (
            FakeScheduler(FakeEngine(model, 64, 128), rounds_of(model, options)),
            FakeRequest(prompts[0], stop=EOS),
        )
        scheduler.add(req)
        scheduler.run()
        told.append((req.output_ids_through_stop, report_of(req)))
    assert told[0] == told[1]
    assert len(told[0][0]) > 1
    picks = len(names) // 2
    assert names == [("pick", False)] * picks + [("pick", True)] * picks != []
