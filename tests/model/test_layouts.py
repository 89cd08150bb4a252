"""Checkpoints in the published layouts load as they lie, and compute what is written from method.md
alone."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.layouts import our_name
from tests.support.helpers import close
from tests.support.published import (
    BLOCK,
    HEAD,
    MASK,
    backbone_config,
    backbone_shapes,
    heavyball_tensors,
    hidden_states,
    published_config,
    random_tensors,
    residual,
    write,
)
from tests.support.random_cases import make_model

PROMPT = [5, 17, 80, 3, 44, 9]


@pytest.fixture(scope="module")
def heavyball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(
        tmp_path_factory.mktemp("hub") / "heavyball",
        published_config(),
        heavyball_tensors(),
        shards=2,
    )


@torch.no_grad()
def test_heavyball_logits_and_residuals(heavyball: Path) -> None:
    """fp32 against a reference in float64. Two shards."""
    model = MRPForCausalLM.from_pretrained(heavyball)
    assert model.dtype == torch.float32
    exact = {name: tensor.double() for name, tensor in heavyball_tensors().items()}
    ids = [*PROMPT, MASK, MASK, 60, MASK]
    after = [*PROMPT, 12, MASK, 60, 71]
    hidden = hidden_states(exact, ids)
    close(
        model(torch.tensor([ids])).logits[0].double(), hidden @ exact["lm_head.weight"].T, atol=1e-5
    )
    positions = torch.arange(len(ids))[None]
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    got = model.residual(torch.tensor([after]), hidden[None].float(), positions, mask)[0]
    close(got.double(), residual(exact, after, hidden), atol=1e-5)
    assert got.abs().max() > 0.1  # the head says something


def test_a_published_head_on_a_published_backbone(tmp_path: Path) -> None:
    """The two come from different authors: JetLM's folder with the weights of one, heavyball's with
    both."""
    theirs, backbone = (
        heavyball_tensors(),
        random_tensors(backbone_shapes(), seed=3, dtype=torch.bfloat16),
    )
    write(tmp_path / "heavyball", published_config(), theirs, shards=2)
    write(tmp_path / "sdar", backbone_config(torch_dtype="bfloat16"), backbone, shards=2)
    state = MRPForCausalLM.from_backbone(
        tmp_path / "sdar", head=tmp_path / "heavyball"
    ).state_dict()
    heads = {
        name.replace(HEAD, "mrp_head"): one for name, one in theirs.items() if name not in backbone
    }
    assert state.keys() == backbone.keys() | heads.keys()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert all(
        torch.equal(state[name], tensor.bfloat16()) for name, tensor in (backbone | heads).items()
    )


def test_old_fields_are_dropped_and_our_layout_is_saved(
    heavyball: Path, tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        model = MRPForCausalLM.from_pretrained(heavyball)
    assert "of type" not in caplog.text  # no doubt about the model type
    model.save_pretrained(tmp_path / "ours")
    saved, theirs = json.loads((tmp_path / "ours" / "config.json").read_text()), published_config()
    old = {
        "fuse_cross_entropy",
        "debug",
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
        "num_mrp_heads",
    }
    assert not saved.keys() & old
    kept = theirs.keys() - old - {"architectures", "auto_map", "model_type", "transformers_version"}
    assert {name: getattr(model.config, name) for name in kept} == {
        name: theirs[name] for name in kept
    }
    assert (saved["model_type"], saved["architectures"]) == ("sdar_mrp", ["MRPForCausalLM"])
    assert saved["auto_map"]["AutoModel"] == "modeling_mrp.MRPForCausalLM"
    assert saved["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert stored.keys() == {name.replace(HEAD, "mrp_head") for name in heavyball_tensors()}
    again = MRPForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.config.to_dict() == {
        **model.config.to_dict(),
        "_name_or_path": again.config.name_or_path,
    }
    assert torch.equal(again(torch.tensor([PROMPT])).logits, model(torch.tensor([PROMPT])).logits)


def test_saving_over_the_files_that_the_weights_are_mapped_from(
    heavyball: Path, tmp_path: Path
) -> None:
    """The weights lie in the mapped files until they are touched: replacing these must not change a
    loaded model."""
    folder = Path(shutil.copytree(heavyball, tmp_path / "mine"))
    model = MRPForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder)
    # and the two shards are gone
    assert sorted(path.name for path in folder.glob("*.safetensors*")) == ["model.safetensors"]
    again = MRPForCausalLM.from_pretrained(folder)
    for name, tensor in heavyball_tensors().items():
        assert torch.equal(model.state_dict()[our_name(name)], tensor)
        assert torch.equal(again.state_dict()[our_name(name)], tensor)


@pytest.mark.parametrize("source", ["org/misspelt", "{empty}"])
def test_a_name_of_nothing(source: str, tmp_path: Path) -> None:
    """The tests are offline."""
    source = source.format(empty=tmp_path)
    for load in (
        MRPForCausalLM.from_pretrained,
        MRPForCausalLM.from_backbone,
        make_model().attach_head,
    ):
        with pytest.raises(
            OSError,
            match=rf"^'{source}' is no folder here, .*could not be read|^{source} has no "
            r"config\.json",
        ):
            load(source)
