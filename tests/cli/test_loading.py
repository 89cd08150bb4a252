"""Models and tokenizers as the commands load them: every layout, adapters, and no code of a repository."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_model
from helpers import in_hub_cache, same_tensors
from mrp_trainer.loading import load_config, load_model, load_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from published import as_published

from modeling_mrp import MRPForCausalLM

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model as everything that the commands take."""
    root = tmp_path_factory.mktemp("loading")
    model = make_model().float()
    model.save_pretrained(root / "mrp")
    model.save_pretrained(root / "head", head_only=True, base_model_name_or_path=str(root / "mrp"))
    as_published(root / "mrp", root / "heavyball")
    adapted: Any = get_peft_model(MRPForCausalLM.from_pretrained(root / "mrp"), LoraConfig(r=2, target_modules=["o_proj"]))
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.o_proj.lora_B["default"].weight)
    adapted.save_pretrained(root / "adapter")
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("layout", ["mrp", "head", "heavyball", "adapter"])
def test_every_layout_is_the_same_model(layout: str, saved: dict[str, Path]) -> None:
    """And an adapter comes with its base."""
    expected: Any = make_model().float()
    if layout == "adapter":
        expected = PeftModel.from_pretrained(expected, saved["adapter"]).base_model.model
    loaded = load_model(str(saved[layout]))
    assert not loaded.training
    assert torch.equal(loaded(IDS).logits, expected(IDS).logits)
    assert torch.equal(loaded(IDS).logits, make_model().float()(IDS).logits) == (layout != "adapter")
    if layout != "adapter":
        assert same_tensors(loaded.mrp_head, expected.mrp_head)
    config = load_config(str(saved[layout]))
    assert (config.block_size, config.mask_token_id, config.has_head, config.max_position_embeddings) == (4, 60, True, 512)
    assert load_model(str(saved[layout]), "float64").dtype == torch.float64


def test_adapters_that_name_no_model(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One from the Hub may name no path; one in a folder has to name something."""
    folder = tmp_path / "adapter"
    shutil.copytree(saved["adapter"], folder)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "../other"}))
    in_hub_cache(folder, tmp_path / "hub", "org/adapter")
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path / "hub"))
    with pytest.raises(ValueError, match=r"adapter org/adapter on the Hub names the model '\.\./other', which is not followed"):
        load_model("org/adapter")
    config.write_text("{}")
    with pytest.raises(ValueError, match="names no base_model_name_or_path: write the model's into"):
        load_model(str(folder))


@pytest.mark.parametrize(("name", "text"), [("tokenizer.json", '{"a":' * 5000), ("tokenizer_config.json", '{"auto_map": 5}')])
def test_a_tokenizer_that_cannot_be_loaded(name: str, text: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """Damaged, missing in its folder, or nowhere."""
    for path in TINY.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / name).write_text(text)
    for folder in (tmp_path, saved["mrp"]):
        with pytest.raises(ValueError, match=r"the tokenizer of '.*' cannot be loaded: check the name, save one") as told:
            load_tokenizer(str(folder))
        assert len(str(told.value)) < 600
    with pytest.raises(ValueError, match=r"the tokenizer of 'org/none' cannot be loaded: check the name"):
        load_tokenizer("org/none", local_files_only=True)


def test_a_published_checkpoints_code_does_not_run(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Of the embedded checkpoint in the published layout; code beside it leaves a mark if it runs."""
    folder, mark = tmp_path / "published", tmp_path / "it ran"
    as_published(TINY, folder)
    tokenizer = [None, "tokenization_sdar.SDARTokenizer"]
    own = {"AutoConfig": "configuration_sdar.SDARConfig", "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"}
    for name, named in (("config", {**own, "AutoTokenizer": tokenizer}), ("tokenizer_config", {"AutoTokenizer": tokenizer})):
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": named}))
    for module in ("configuration_sdar", "modeling_sdar", "tokenization_sdar", "custom_generate/generate"):
        (folder / f"{module}.py").parent.mkdir(exist_ok=True)
        (folder / f"{module}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit('this ran')\n")
    ours = MRPForCausalLM.from_pretrained(TINY).state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in load_model(str(folder)).state_dict().items())
    assert load_tokenizer(str(folder)).get_vocab() == tiny_tokenizer.get_vocab()
    assert not mark.exists()
