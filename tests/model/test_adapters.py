"""peft adapters on the head: saved and loaded with peft's own calls and with `load_adapter`, here and from the Hub's cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from fresh import Fresh
from helpers import SHA, SPEC, close, in_hub_cache, speculate
from peft import LoraConfig, PeftModel, get_peft_model

from modeling_mrp import MRPForCausalLM

PROMPT = torch.tensor([[5, 17, 40, 3, 44, 9]])
TARGETS = r"mrp_head\.(eh_proj|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))"
DIRECT = {**SPEC, "decoding": "mrp_direct", "mrp_steps": 2}


def adapted(model: MRPForCausalLM) -> Any:
    """With LoRA on every matrix of the head, as if trained: peft starts its second factor at zero."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@torch.no_grad()
def residual(model: MRPForCausalLM) -> torch.Tensor:
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(model.dtype)
    return model.residual(PROMPT, hidden, torch.arange(6)[None], torch.ones(1, 1, 6, 6, dtype=torch.bool))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and an adapter for its head."""
    root = tmp_path_factory.mktemp("adapters")
    make_model().save_pretrained(root / "full")
    adapted(MRPForCausalLM.from_pretrained(root / "full")).save_pretrained(root / "adapter")
    return root / "full", root / "adapter"


@pytest.mark.parametrize("way", ["PeftModel", "load_adapter", "AutoClass"])
def test_round_trips(way: str, saved: tuple[Path, Path]) -> None:
    full, adapter = saved
    expected, model = adapted(MRPForCausalLM.from_pretrained(full)), MRPForCausalLM.from_pretrained(full)
    before, direct = residual(model), model.generate(PROMPT, **DIRECT).sequences
    if way == "PeftModel":
        model = PeftModel.from_pretrained(model, adapter).eval()
    elif way == "load_adapter":
        model.load_adapter(str(adapter))
    else:
        model = MRPForCausalLM.from_pretrained(full, adapter_kwargs={"_adapter_model_path": str(adapter)})  # as AutoModel does
    assert torch.equal(residual(model), residual(expected))
    assert (residual(model) - before).abs().max() > 1e-2
    assert speculate(model, PROMPT) == speculate(expected, PROMPT)
    found = model.generate(PROMPT, **DIRECT).sequences
    assert found.equal(expected.generate(PROMPT, **DIRECT).sequences)
    assert not found.equal(direct)


def test_merging_changes_nothing(saved: tuple[Path, Path], tmp_path: Path) -> None:
    """The merged head is saved alone and found again."""
    model = adapted(MRPForCausalLM.from_pretrained(saved[0]))
    unmerged, drafts = residual(model), speculate(model, PROMPT)
    with pytest.raises(ValueError, match=r"Merge adapters first \(merge_and_unload\)"):
        model.base_model.model.save_pretrained(tmp_path / "head", head_only=True)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "head", head_only=True)
    for again in (merged, MRPForCausalLM.from_pretrained(tmp_path / "head")):
        close(residual(again), unmerged)
        assert speculate(again, PROMPT) == drafts


def test_offline_in_a_fresh_process(saved: tuple[Path, Path], fresh: Fresh, tmp_path: Path) -> None:
    """`AutoModel` on a head repository, on it with another backbone, and on an adapter for it: all from the cache."""
    full, adapter = saved
    hub = fresh.hub_cache
    in_hub_cache(full, hub, "org/backbone")
    model = MRPForCausalLM.from_pretrained(full)
    model.save_pretrained(tmp_path / "head", head_only=True, base_model_name_or_path="org/backbone", base_model_revision=SHA)
    in_hub_cache(tmp_path / "head", hub, "org/head")
    in_hub_cache(adapter, hub, "org/adapter")
    path = hub / "models--org--adapter" / "snapshots" / SHA / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "org/head"}))
    printed = fresh(
        f"""
        from transformers import AutoModel, AutoModelForCausalLM
        for auto, name in ((AutoModel, "org/head"), (AutoModelForCausalLM, "org/adapter")):
            model = auto.from_pretrained(name, trust_remote_code=True)
            out = model.generate(torch.tensor({PROMPT.tolist()}), **{SPEC!r})
            print(out.sequences[0].tolist(), out.stats.drafted.tolist(), out.stats.accepted.tolist())
            print(model.backbone_source.name, model.name_or_path, type(model).__module__.split(".")[0])
        """
    )
    plain, tuned = (" ".join(map(str, speculate(m, PROMPT))) for m in (model, adapted(MRPForCausalLM.from_pretrained(full))))
    assert plain != tuned
    where = "org/backbone org/head transformers_modules"
    assert printed.splitlines() == [plain, where, tuned, where]
