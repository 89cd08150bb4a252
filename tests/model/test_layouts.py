"""Checkpoints in the published layouts load as they lie, and what does not fit is refused before anything is read."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import close
from published import (
    BLOCK,
    HEAD,
    MASK,
    heavyball_tensors,
    hidden_states,
    published_config,
    residual,
    write,
)
from safetensors.torch import load_file

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.headers import check_tensors, stored_tensors
from modeling_mrp.model.layouts import our_name

PROMPT = [5, 17, 80, 3, 44, 9]


@pytest.fixture(scope="module")
def heavyball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hub") / "heavyball", published_config(), heavyball_tensors(), shards=2)


@torch.no_grad()
def test_heavyball_logits_and_residuals(heavyball: Path) -> None:
    """fp32 against a reference in float64. Two shards."""
    model = MRPForCausalLM.from_pretrained(heavyball)
    assert model.dtype == torch.float32
    exact = {name: tensor.double() for name, tensor in heavyball_tensors().items()}
    ids = [*PROMPT, MASK, MASK, 60, MASK]
    after = [*PROMPT, 12, MASK, 60, 71]
    hidden = hidden_states(exact, ids)
    close(model(torch.tensor([ids])).logits[0].double(), hidden @ exact["lm_head.weight"].T, atol=1e-5)
    positions = torch.arange(len(ids))[None]
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    got = model.residual(torch.tensor([after]), hidden[None].float(), positions, mask)[0]
    close(got.double(), residual(exact, after, hidden), atol=1e-5)
    assert got.abs().max() > 0.1  # the head says something


def test_old_fields_are_dropped_and_our_layout_is_saved(heavyball: Path, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        model = MRPForCausalLM.from_pretrained(heavyball)
    assert "of type" not in caplog.text  # no doubt about the model type
    model.save_pretrained(tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    for name in ("fuse_cross_entropy", "debug", "rope_theta", "rope_scaling", "torch_dtype", "base_model_name_or_path"):
        assert name not in saved
    assert saved["model_type"] == "sdar_mrp"
    assert saved["architectures"] == ["MRPForCausalLM"]
    assert saved["auto_map"]["AutoModel"] == "modeling_mrp.MRPForCausalLM"
    assert saved["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert (saved["block_size"], saved["mask_token_id"], saved["num_nextn_predict_layers"]) == (4, 97, 2)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert stored.keys() == {name.replace(HEAD, "mrp_head") for name in heavyball_tensors()}
    again = MRPForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(torch.tensor([PROMPT])).logits, model(torch.tensor([PROMPT])).logits)


def test_saving_over_the_files_that_the_weights_are_mapped_from(heavyball: Path, tmp_path: Path) -> None:
    """The weights lie in the mapped files until they are touched: replacing these must not change a loaded model."""
    folder = Path(shutil.copytree(heavyball, tmp_path / "mine"))
    model = MRPForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder)
    assert sorted(path.name for path in folder.glob("*.safetensors*")) == ["model.safetensors"]  # and the two shards are gone
    again = MRPForCausalLM.from_pretrained(folder)
    for name, tensor in heavyball_tensors().items():
        assert torch.equal(model.state_dict()[our_name(name)], tensor)
        assert torch.equal(again.state_dict()[our_name(name)], tensor)


def test_misfits_are_listed(tmp_path: Path) -> None:
    """What is loaded, and what is only looked at before a push."""
    tensors = heavyball_tensors()
    del tensors[f"{HEAD}.norm.weight"]
    tensors["model.extra.weight"] = torch.zeros(3)
    tensors[f"{HEAD}.eh_proj.weight"] = torch.zeros(32, 63)
    write(tmp_path, published_config(), tensors, shards=2)
    told = r"missing_keys.*head\.norm.*unexpected_keys.*model\.extra.*mismatched_keys.*head\.eh_proj"
    with pytest.raises(ValueError, match="does not fit its config: .*" + told):
        MRPForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not fit its config \(3 tensors\)") as caught:
        check_tensors(MRPConfig.from_pretrained(tmp_path), stored_tensors(tmp_path.glob("*.safetensors")))
    for line in (
        "missing: mrp_head.norm.weight",
        "unexpected: model.extra.weight",
        f"wrong shape: {HEAD}.eh_proj.weight is [32, 63], needs [32, 64]",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize("source", ["./folder", "", "org/misspelt", "{empty}"])
def test_a_name_of_nothing(source: str, tmp_path: Path) -> None:
    """The tests are offline."""
    source = source.format(empty=tmp_path)
    for load in (MRPForCausalLM.from_pretrained, MRPForCausalLM.from_backbone, make_model().attach_head):
        with pytest.raises(OSError, match=rf"^'{source}' is no folder here, .*could not be read|^{source} has no config\.json"):
            load(source)
