"""Texts: what MRP serves is what stock `LowConfidence` serves, and what `generate` gives, in fewer forwards."""

from collections.abc import Callable

import pytest
from asking import BLOCK, CONCURRENCY, STATES, Asked, Generate, Measure, Report, explained, target_of, up_to_eos

from benchmarks.server import Measured, Server
from modeling_mrp import MRPForCausalLM

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")


@pytest.mark.parametrize("threshold", [1.0, 0.9, 0.7])
def test_texts_are_those_of_stock_and_of_generate(
    threshold: float, measured: Measure, generated: Generate, asked: Asked, tiny_model_float64: MRPForCausalLM, report: Report
) -> None:
    options, eos = target_of(threshold), tiny_model_float64.generation_config.eos_token_id
    decoding, served = options.pop("target"), measured("MRP", threshold).ids
    report(f"threshold {threshold}:")
    of_stock = measured("LowConfidence", threshold).ids
    report(explained(tiny_model_float64, asked, threshold, served, of_stock, eos))
    ours = generated(decoding=decoding, **options).ids
    report(explained(tiny_model_float64, asked, threshold, [up_to_eos(ids, eos) for ids in served], ours, eos))


def test_tokens_per_forward(measured: Measure, generated: Generate, report: Report) -> None:
    stock, drafted = measured("LowConfidence", 0.9), measured("MRP", 0.9)
    report(
        f"tokens per forward at 0.9, K = {STATES}: {drafted.tokens_per_forward:.3f}, stock {stock.tokens_per_forward:.3f}, "
        f"ratio {drafted.tokens_per_forward / stock.tokens_per_forward:.3f}; "
        f"seconds {drafted.seconds:.1f} against {stock.seconds:.1f}"
    )
    ours = generated(decoding="mrp_spec", num_draft_states=STATES, **target_of(0.9))
    in_process = sum(map(len, ours.ids)) / ours.forwards
    report(f"generate: {in_process:.3f}")
    assert drafted.tokens_per_forward >= 1.8 * stock.tokens_per_forward
    assert drafted.tokens_per_forward == pytest.approx(in_process, rel=0.02)


def test_requests_that_wait_take_no_rows_from_drafts(
    serve: Callable[..., Server], measured: Measure, asked: Asked, report: Report
) -> None:
    """`--max-running-requests` counts requests, each of which has rows for its drafts, however many others wait."""
    count, running = 64, 4
    with serve("MRP", 0.9, max_running_requests=running) as server:
        few = server.measure(asked.prompts[:count], asked.budgets[:count], CONCURRENCY, BLOCK)
    assert few.ids == measured("LowConfidence", 0.9).ids[:count]
    roomy = Measured(measured("MRP", 0.9).replies[:count], 0, 1)
    drafted = [sum(reply["meta_info"]["mrp"]["drafted"] for reply in part.replies) for part in (few, roomy)]
    report(f"{running} of {CONCURRENCY} requests at once: {drafted[0]} drafts, as with all of them {drafted[1]}")
    assert drafted[0] == pytest.approx(drafted[1], rel=0.02)
