"""peft adapters on the head: saved and loaded with peft's own calls, `load_adapter` and the
commands, and from a cache."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.loading import load_config, load_model
from peft import LoraConfig, PeftModel, get_peft_model

from modeling_mrp import MRPForCausalLM
from tests.support.fresh import Fresh
from tests.support.helpers import SHA, SPEC, close, in_hub_cache, speculate
from tests.support.random_cases import make_model

PROMPT = torch.tensor([[5, 17, 40, 3, 44, 9]])
TARGETS = r"mrp_head\.(eh_proj|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))"


def adapted(model: MRPForCausalLM) -> Any:
    """With LoRA on every matrix of the head, as if trained: peft starts its second factor at
    zero."""
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@torch.no_grad()
def residual(model: MRPForCausalLM) -> torch.Tensor:
    hidden = torch.randn(
        1, 6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).to(model.dtype)
    return model.residual(
        PROMPT, hidden, torch.arange(6)[None], torch.ones(1, 1, 6, 6, dtype=torch.bool)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and an adapter for its head."""
    root = tmp_path_factory.mktemp("adapters")
    make_model().save_pretrained(root / "full")
    adapted(MRPForCausalLM.from_pretrained(root / "full")).save_pretrained(root / "adapter")
    return root / "full", root / "adapter"


def test_round_trips_and_merging(saved: tuple[Path, Path], tmp_path: Path) -> None:
    """The merged head is saved alone and found again."""
    expected, plain, loaded = (
        adapted(MRPForCausalLM.from_pretrained(saved[0])),
        *map(MRPForCausalLM.from_pretrained, 2 * saved[:1]),
    )
    unmerged, drafts = residual(expected), speculate(expected, PROMPT)
    assert (residual(plain) - unmerged).abs().max() > 1e-2
    assert speculate(plain, PROMPT) != drafts
    loaded.load_adapter(str(saved[1]))
    for model in (loaded, PeftModel.from_pretrained(plain, saved[1]).eval()):
        assert torch.equal(residual(model), unmerged)
        assert speculate(model, PROMPT) == drafts
    with pytest.raises(ValueError, match=r"Merge adapters first \(merge_and_unload\)"):
        expected.base_model.model.save_pretrained(tmp_path / "head", head_only=True)
    merged = expected.merge_and_unload()
    merged.save_pretrained(tmp_path / "head", head_only=True)
    for again in (merged, MRPForCausalLM.from_pretrained(tmp_path / "head")):
        close(residual(again), unmerged)
        assert speculate(again, PROMPT) == drafts


@pytest.mark.parametrize("kind", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
@torch.no_grad()
def test_an_adapter_of_a_tied_weight_changes_one_of_both(
    kind: str, name: str, tmp_path: Path
) -> None:
    """Unmerged, merged, saved and loaded, and put on by peft's call or by that of transformers."""
    make_model(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    plain = MRPForCausalLM.from_pretrained(tmp_path / "tied")
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    other = {"lm_head": "model.embed_tokens.weight", "embed_tokens": "lm_head.weight"}[name]
    before = plain.lm_head.weight.clone()
    config = LoraConfig(
        **{"target_modules": ["q_proj"], "r": 2, "init_lora_weights": False, kind: [name]}
    )
    model: Any = get_peft_model(
        MRPForCausalLM.from_pretrained(tmp_path / "tied"), config, autocast_adapter_dtype=False
    )
    if kind == "modules_to_save":
        getattr(
            model.base_model.model.get_submodule({"lm_head": "", "embed_tokens": "model"}[name]),
            name,
        ).weight.mul_(1.5)
    logits = model(PROMPT).logits
    model.save_pretrained(tmp_path / "adapter")
    again: Any = PeftModel.from_pretrained(
        MRPForCausalLM.from_pretrained(tmp_path / "tied"), tmp_path / "adapter"
    )
    close(again.eval()(PROMPT).logits, logits)
    merged = model.merge_and_unload()
    close(merged(PROMPT).logits, logits)
    assert torch.equal(merged.state_dict()[other], before)
    assert not torch.equal(
        merged.get_parameter({"lm_head": "lm_head.weight"}.get(name, "model.embed_tokens.weight")),
        before,
    )
    merged.save_pretrained(tmp_path / "merged")
    close(MRPForCausalLM.from_pretrained(tmp_path / "merged")(PROMPT).logits, logits)


def test_an_adapter_of_a_weight_that_is_not_tied_copies_nothing() -> None:
    plain = make_model()
    weight = plain.lm_head.weight
    config = LoraConfig(target_modules=["lm_head"], r=2)
    model: Any = get_peft_model(plain, config, autocast_adapter_dtype=False)
    assert model.base_model.model.lm_head.base_layer.weight is weight


def test_the_commands_load_an_adapter_with_its_base(
    saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from the Hub may name no path; one in a folder has to name something."""
    model = load_model(str(saved[1]), "float64")
    assert (model.dtype, model.training) == (torch.float64, False)
    assert torch.equal(residual(model), residual(adapted(MRPForCausalLM.from_pretrained(saved[0]))))
    assert load_config(str(saved[1])).block_size == 4
    folder = shutil.copytree(saved[1], tmp_path / "adapter")
    config = folder / "adapter_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "../other"})
    )
    in_hub_cache(folder, tmp_path / "hub", "org/adapter")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(
        ValueError,
        match=r"adapter org/adapter on the Hub names the model '\.\./other', which is not followed",
    ):
        load_model("org/adapter")
    config.write_text("{}")
    with pytest.raises(
        ValueError, match="names no base_model_name_or_path: write the model's into"
    ):
        load_model(str(folder))


def test_offline_in_a_fresh_process(saved: tuple[Path, Path], fresh: Fresh, tmp_path: Path) -> None:
    """`AutoModel` on a head repository and on an adapter for it, from the cache."""
    full, adapter = saved
    in_hub_cache(full, fresh.hub_cache, "org/backbone")
    model = MRPForCausalLM.from_pretrained(full)
    model.backbone_source = ("org/backbone", SHA)
    model.save_pretrained(tmp_path / "head", head_only=True)
    in_hub_cache(tmp_path / "head", fresh.hub_cache, "org/head")
    config = json.loads((adapter / "adapter_config.json").read_text())
    shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "org/head"})
    )
    in_hub_cache(tmp_path / "adapter", fresh.hub_cache, "org/adapter")
    printed = fresh(
        f"""
        from transformers import AutoModel, AutoModelForCausalLM
        for auto, name in ((AutoModel, "org/head"), (AutoModelForCausalLM, "org/adapter")):
            model = auto.from_pretrained(name, trust_remote_code=True)
            out = model.generate(torch.tensor({PROMPT.tolist()}), **{SPEC!r})
            stats = out.stats
            print(out.sequences[0].tolist(), stats.drafted.tolist(), stats.accepted.tolist())
            package = type(model).__module__.split(".")[0]
            print(model.backbone_source[0], model.name_or_path, package)
        """
    )
    plain, tuned = (
        " ".join(map(str, speculate(m, PROMPT)))
        for m in (model, adapted(MRPForCausalLM.from_pretrained(full)))
    )
    where = "org/backbone org/head transformers_modules"
    assert printed.splitlines() == [plain, where, tuned, where]
