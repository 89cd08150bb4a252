"""Loading takes no second copy of the weights: a small version of `python -m benchmarks.load_memory`.

Each measurement has a process of its own: in one that has run tests before, freed memory that is used again does not show.
"""

import sys
from pathlib import Path

import pytest

from benchmarks.load_memory import load_and_read, measure, write_checkpoint
from modeling_mrp import MRPConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CONFIG = {
    "vocab_size": 20000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "mask_token_id": 19999,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}
BYTES = 2 * (
    2 * 20000 * 1024  # embedding and lm_head
    + 3 * (2 * 1024 * 1024 + 2 * 1024 * 512 + 2 * 128 + 3 * 1024 * 3072 + 2 * 1024)  # layers; the head's is one of them
    + 1024  # last norm
    + 2 * 1024 * 1024 + 3 * 1024  # eh_proj, enorm, hnorm, norm
)  # fmt: skip


def test_peak_memory_in_a_fresh_process(tmp_path: Path) -> None:
    """160 MB in two shards; what the interpreter and its imports take is not counted. Two copies would be 2.0."""
    source = write_checkpoint(tmp_path, MRPConfig(**CONFIG), "heavyball", shard_bytes=100 << 20)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    found = measure(source)
    assert found["loaded_bytes"] == BYTES
    assert 0.95 < found["peak_ratio"] <= 1.15  # everything was read
    assert found["anonymous_ratio"] <= 1.15


def test_peak_memory_of_a_head_and_its_backbone(tmp_path: Path) -> None:
    found = measure(write_checkpoint(tmp_path, MRPConfig(**CONFIG), "head"))
    assert found["loaded_bytes"] == BYTES
    assert 0.95 < found["peak_ratio"] <= 1.15
    assert found["anonymous_ratio"] <= 1.15


def test_the_meter_sees_a_second_copy(tmp_path: Path) -> None:
    """Loading in another type leaves the files' pages mapped beside the new numbers."""
    found = measure(write_checkpoint(tmp_path, MRPConfig(**CONFIG), "mrp"), "float32")
    assert found["loaded_bytes"] == 2 * BYTES
    assert found["peak_ratio"] > 1.3
    assert 0.95 < found["anonymous_ratio"] <= 1.15  # and no third one


def test_a_load_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_and_read(str(tmp_path), "auto")
