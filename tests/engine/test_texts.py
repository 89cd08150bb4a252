"""Texts: what MRP serves is what stock `LowConfidence` serves, in fewer forwards."""

import pytest
from asking import STATES, Asked, Measure, Report, explained

from modeling_mrp import MRPForCausalLM

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")


@pytest.mark.parametrize("threshold", [1.0, 0.9, 0.7])
def test_texts_are_those_of_stock_in_fewer_forwards(
    threshold: float,
    measured: Measure,
    asked: Asked,
    tiny_model_float64: MRPForCausalLM,
    report: Report,
) -> None:
    stock, drafted = measured("LowConfidence", threshold), measured("MRP", threshold)
    eos = tiny_model_float64.generation_config.eos_token_id
    report(
        f"threshold {threshold}: "
        f"{explained(tiny_model_float64, asked, threshold, drafted.ids, stock.ids, eos)}"
    )
    report(
        f"tokens per forward, K = {STATES}: {drafted.tokens_per_forward:.3f}, stock "
        f"{stock.tokens_per_forward:.3f}, ratio "
        f"{drafted.tokens_per_forward / stock.tokens_per_forward:.3f}"
    )
    if threshold == 0.9:
        assert drafted.tokens_per_forward >= 1.8 * stock.tokens_per_forward
