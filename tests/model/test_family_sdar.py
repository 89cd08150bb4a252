"""Dense SDAR and the models that are published as SDAR: each loads by its config, at every block size."""

from pathlib import Path
from typing import Any

import published
import pytest
import torch
from families import assert_decodes, assert_drafts_are_lossless, loaded
from published import backbone_config, backbone_shapes, hidden_states

from modeling_mrp import MRPConfig

# Of the published models the name, the shape (hidden, intermediate, layers, heads), and block sizes; all declare `sdar`.
SMALL, MIDDLE, LARGE = (2048, 6144, 28, 16), (2560, 9728, 36, 32), (4096, 12288, 36, 32)
FAMILY: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "JetLM/SDAR-1.7B-Chat": (SMALL, (4, 16)),
    "JetLM/SDAR-4B-Chat": (MIDDLE, (4, 8, 16, 32, 64)),
    "JetLM/SDAR-8B-Chat": (LARGE, (4, 16)),
    "Gen-Verse/TraDo-4B-Instruct": (MIDDLE, (4,)),
    "Gen-Verse/TraDo-8B-Thinking": (LARGE, (4,)),
    "DiRL-8B-Instruct": (LARGE, (4,)),
    "TDAR-8B": (LARGE, (4, 8, 16)),
    "RCD on SDAR-8B": (LARGE, (32, 64)),
}


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_published_as_sdar_is_read_by_its_config(name: str) -> None:
    (hidden, intermediate, layers, heads), blocks = FAMILY[name]
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    for block in blocks:
        config = MRPConfig.from_dict(backbone_config(**sizes, mask_token_id=151669, block_size=block))
        assert (config.family, config.block_size, config.mask_token_id) == ("sdar", block, 151669)
        assert {name: getattr(config, name) for name in sizes} == sizes
        assert "family" not in config.to_diff_dict()


@pytest.mark.parametrize("block", [8, 32])
def test_blocks_of_other_sizes(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 are in `test_layouts.py`."""
    monkeypatch.setattr(published, "BLOCK", block)
    model, tensors = loaded(tmp_path / "twin", backbone_config(block_size=block), backbone_shapes(), head_layers=1)

    def logits(ids: list[int]) -> Any:
        return hidden_states(tensors, ids) @ tensors["lm_head.weight"].T

    with torch.no_grad():
        assert_decodes(model, logits, block + 2)
    assert_drafts_are_lossless(model)
