"""The plan of a training at 4B: its numbers follow from the dry run, and stand in the document."""

from pathlib import Path

import pytest
import torch
from mrp_trainer.evaluate.roofline import Device

from benchmarks.training_plan import DATA_SETS, GPUS, NEW_TOKENS, decoding_hours, plan

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="a chunk of logits is as memory allows")
def test_the_document_has_what_the_command_prints() -> None:
    printed = plan()
    assert printed in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_hours_grow_with_records_and_fall_with_rates() -> None:
    """A device of twice the rates takes half the time; twice the records twice."""
    data, gpu = DATA_SETS[0], GPUS[0]
    hours = decoding_hours(data, gpu)
    twice = Device("twice", 2 * gpu.bandwidth, 2 * gpu.peak)
    assert abs(decoding_hours(data, twice) / hours - 0.5) < 1e-9
    assert abs(decoding_hours(DATA_SETS[1], gpu) / hours - 10) < 1e-9
    # 32 rows take a token each from a forward that reads 4 B weights once
    least = 8e9 / gpu.bandwidth
    assert hours * 3600 > data.records * NEW_TOKENS / 32 * least
