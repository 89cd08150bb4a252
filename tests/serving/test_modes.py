"""Modes that change the text, and drafts that follow the clock, on the engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import BLOCK, CONCURRENCY, ENVIRONMENT, Asked, Generated, up_to_eos

from benchmarks.common import TINY
from benchmarks.server import Server
from modeling_mrp import MRPForCausalLM

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
COUNT = 32
MODES: tuple[dict[str, Any], ...] = (
    {"decoding": "mrp_direct", "mrp_steps": 1},
    {"decoding": "mrp_remask", "confidence_threshold": 0.5},
    {"decoding": "mrp_spec", "target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": "auto"},
)


@pytest.mark.parametrize("options", MODES, ids=[options["decoding"] for options in MODES])
def test_a_mode_gives_the_text_of_generate(
    options: dict[str, Any],
    generated: Callable[..., Generated],
    asked: Asked,
    tiny_model: MRPForCausalLM,
    tmp_path: Path,
    report: Callable[[str], None],
) -> None:
    """But where the engine goes on: it reveals behind an eos too, which what comes before in the block can see."""
    eos = tiny_model.generation_config.eos_token_id
    with Server(TINY, tmp_path, "MRP", options, environment=ENVIRONMENT) as server:
        served = server.measure(asked.prompts[:COUNT], asked.budgets[:COUNT], CONCURRENCY, BLOCK)
    expected = generated(**options).ids[:COUNT]
    same = sum(up_to_eos(ids, eos) == up_to_eos(other, eos) for ids, other in zip(served.ids, expected, strict=True))
    report(
        f"{options['decoding']}: {COUNT - same} of {COUNT} texts differ from those of generate; {served.tokens_per_forward:.3f}"
    )
    assert same >= COUNT - 2, "float32 may decide a near tie otherwise"
    assert served.tokens_per_forward > 1
