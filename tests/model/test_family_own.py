"""The family of docs/own_backbone.md, a Llama made block-causal: asked what the families of this package are asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from families import assert_decodes, assert_drafts_are_lossless, block_causal, loaded
from published import write
from test_family_stable_diffcoder import TWIN, shapes_of
from torch import Tensor
from transformers import LlamaForCausalLM

from modeling_mrp.model.families import registry

LLAMA = {**TWIN, "architectures": ["LlamaForCausalLM"], "head_dim": 8}


@pytest.fixture
def page_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's class, registered for as long as a test takes."""
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry.families()))
    blocks = (ROOT / "docs/own_backbone.md").read_text().split("```python\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "@family" in block)
    exec(code[: code.index("\nmodel =")], {"tok": SimpleNamespace(mask_token_id=5)})


@pytest.mark.usefixtures("page_family")
def test_the_pages_family_decodes_and_drafts_as_the_others_do(tmp_path: Path) -> None:
    """Undrafted as transformers' own Llama over the whole text under a block-causal mask; drafted as undrafted."""
    model, tensors = loaded(tmp_path / "llama", LLAMA, shapes_of(TWIN), head_layers=2)
    assert (model.config.family, model.config.block_size) == ("my_llama", 8)
    write(tmp_path / "stock", LLAMA, tensors)
    stock: Any = LlamaForCausalLM.from_pretrained(tmp_path / "stock", dtype=torch.float64, attn_implementation="sdpa")

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        scores: Tensor = stock(torch.tensor([ids]), attention_mask=block_causal(len(ids), 8)).logits[0]
        return scores

    assert_decodes(model, logits)
    assert_drafts_are_lossless(model)
