"""Heads on their own: saved, found with their backbones, put on others, swapped, taken off."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.heads import new_head, with_new_head
from safetensors.torch import load_file, save, save_file
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from modeling_mrp import MRPForCausalLM, MRPHead
from modeling_mrp.model.layouts import backbone_location
from tests.support.helpers import SHA, in_hub_cache, same_tensors, speculate
from tests.support.hub_server import HubServer
from tests.support.random_cases import make_model

PROMPT = torch.tensor([[5, 17, 40, 3, 44, 9]])
BASE = ("base_model_name_or_path", "base_model_revision")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A full checkpoint, its backbone, its head alone, and another full one for the same
    backbone."""
    root = tmp_path_factory.mktemp("heads")
    full = make_model().float()
    full.save_pretrained(root / "full")
    backbone = MRPForCausalLM.from_pretrained(root / "full")
    backbone.detach_head()
    backbone.save_pretrained(root / "backbone")
    model = MRPForCausalLM.from_backbone(root / "backbone", head=root / "full")
    model.generation_config.num_draft_states = 3
    model.save_pretrained(root / "head", head_only=True)
    other = with_new_head(MRPForCausalLM.from_pretrained(root / "backbone"), 1, "published")
    other.save_pretrained(root / "other")
    return {path.name: path for path in root.iterdir()}


def test_a_head_repository(folders: dict[str, Path], tmp_path: Path) -> None:
    """It holds the head's tensors alone, and loads its backbone; saved whole, the model names
    none."""
    files = {path.name for path in folders["full"].rglob("*") if path.is_file()}
    assert {path.name for path in folders["head"].rglob("*") if path.is_file()} == files
    stored, head = (
        load_file(folders["full"] / "model.safetensors"),
        load_file(folders["head"] / "model.safetensors"),
    )
    assert head.keys() == {name for name in stored if name.startswith("mrp_head.")}
    # of a folder there is no revision
    named = {"base_model_name_or_path": str(folders["backbone"])}
    assert config_of(folders["head"]) == config_of(folders["full"]) | named
    model, full = (MRPForCausalLM.from_pretrained(folders[kind]) for kind in ("head", "full"))
    assert same_tensors(model, full)
    assert speculate(model, PROMPT) == speculate(full, PROMPT)
    assert model.generation_config.num_draft_states == 3
    assert model.backbone_source == (str(folders["backbone"]), None)
    assert not model.training
    assert not model.mrp_head.training
    model.save_pretrained(tmp_path / "whole")
    assert [config_of(tmp_path / "whole")[name] for name in BASE] == [None, None]
    assert same_tensors(MRPForCausalLM.from_pretrained(tmp_path / "whole"), full)
    model.save_pretrained(tmp_path / "head", head_only=True)
    assert config_of(tmp_path / "head") == config_of(folders["head"])


@torch.no_grad()
def test_a_head_on_a_backbone_that_is_spread_over_devices(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Half of it on the disk: accelerate's hooks move what passes between its parts."""
    parts = {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.0", "norm", "rotary_emb")}
    parts |= {"lm_head": "cpu", "model.layers.1": "disk"}
    spread = MRPForCausalLM.from_pretrained(
        folders["head"], device_map=parts, offload_folder=tmp_path / "offloaded"
    )
    assert spread.model.layers[1].mlp.up_proj.weight.is_meta
    full = MRPForCausalLM.from_pretrained(folders["full"])
    arguments = (
        PROMPT,
        torch.ones(1, 6, 32),
        torch.arange(6)[None],
        torch.ones(1, 1, 6, 6, dtype=torch.bool),
    )
    assert torch.equal(spread.residual(*arguments), full.residual(*arguments))
    assert spread.mrp_head._hf_hook.execution_device == torch.device("cpu")
    spread.save_pretrained(tmp_path / "head", head_only=True)
    assert same_tensors(MRPForCausalLM.from_pretrained(tmp_path / "head"), full)


def test_head_repository_from_the_hubs_cache(folders: dict[str, Path], tmp_path: Path) -> None:
    """The commit of a backbone as downloaded is remembered. That a pinned one is loaded is in
    `test_trust.py`."""
    in_hub_cache(folders["backbone"], tmp_path, "org/backbone")
    model = MRPForCausalLM.from_backbone("org/backbone", head=folders["full"], cache_dir=tmp_path)
    assert model.backbone_source == ("org/backbone", SHA)
    model.save_pretrained(tmp_path / "head", head_only=True)
    assert [config_of(tmp_path / "head")[name] for name in BASE] == ["org/backbone", SHA]


def test_names_of_backbones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config from the Hub names a repository and nothing else; that of a folder may name one on
    this machine."""
    for folder in ("head/inner", "backbone", "org/name"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    local, hub, absolute = str(tmp_path / "head"), "someone/head", str(tmp_path / "backbone")
    for source in (local, hub):
        assert backbone_location("JetLM/SDAR-4B-Chat-b16", source) == "JetLM/SDAR-4B-Chat-b16"
        for name in ("../backbone", "inner", "a/b/c", "~", "gpt2", "", "org\\name"):
            with pytest.raises(ValueError, match=r"is not followed.*from_backbone"):
                backbone_location(name, source)
        with pytest.raises(ValueError, match=r"is not followed.*no path that exists here"):
            backbone_location("org/name", source)
    assert backbone_location(absolute, local) == absolute
    with pytest.raises(
        ValueError,
        match=r"the folder /no/such is gone, which the head in .*/head names as its backbone",
    ):
        backbone_location("/no/such", local)
    with pytest.raises(ValueError, match=r"is not followed.*from_backbone"):
        backbone_location("/no/such", hub)
    with pytest.raises(ValueError, match=r"is not followed.*from_backbone"):
        backbone_location(absolute, hub)


def test_a_head_of_a_repository_is_attached_at_its_revision(
    hub: HubServer, folders: dict[str, Path]
) -> None:
    """By default at its newest commit."""
    files = {path.name: path.read_bytes() for path in folders["head"].glob("*.*")}
    first = hub.commit("org/head", files)
    weights = load_file(folders["head"] / "model.safetensors")
    weights["mrp_head.norm.weight"] += 1
    hub.commit("org/head", {**files, "model.safetensors": save(weights, {"format": "pt"})})
    model = MRPForCausalLM.from_pretrained(folders["backbone"])
    model.attach_head("org/head", revision=first)
    assert same_tensors(model, MRPForCausalLM.from_pretrained(folders["full"]))
    model.attach_head("org/head")
    assert torch.equal(model.mrp_head.norm.weight, weights["mrp_head.norm.weight"])


def test_attach_and_detach(folders: dict[str, Path]) -> None:
    model = MRPForCausalLM.from_pretrained(folders["other"])
    model.generation_config.decoding = "mrp_spec"
    first = speculate(model, PROMPT)
    assert len(model.mrp_head.layers) == 1
    model.attach_head(folders["head"])
    full = MRPForCausalLM.from_pretrained(folders["full"])
    assert same_tensors(model, full)
    assert model.config.num_nextn_predict_layers == 2
    assert [layer.self_attn.layer_idx for layer in model.mrp_head.layers] == [2, 3]
    assert speculate(model, PROMPT) == speculate(full, PROMPT) != first
    head = model.detach_head()
    assert isinstance(head, MRPHead)
    assert (model.mrp_head, model.config.has_head, model.generation_config.decoding) == (
        None,
        False,
        None,
    )
    assert same_tensors(model, MRPForCausalLM.from_pretrained(folders["backbone"]))
    assert model.detach_head() is None
    with pytest.raises(ValueError, match=r"num_nextn_predict_layers is 0.*attach_head"):
        model.residual(
            PROMPT,
            torch.zeros(1, 6, 32),
            torch.arange(6)[None],
            torch.ones(1, 1, 6, 6, dtype=torch.bool),
        )
    model.double().attach_head(head)
    assert model.mrp_head is head
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float64}
    assert speculate(model, PROMPT)[0] == speculate(full, PROMPT)[0]


def test_heads_that_do_not_fit(folders: dict[str, Path], tmp_path: Path) -> None:
    model = MRPForCausalLM.from_pretrained(folders["full"])
    before = model.mrp_head
    make_model(rope_parameters={"rope_type": "default", "rope_theta": 5.0}).float().save_pretrained(
        tmp_path / "other"
    )
    for name in ("short", "cut"):
        shutil.copytree(folders["head"], tmp_path / name)
    stored, data = (
        load_file(folders["head"] / "model.safetensors"),
        (folders["head"] / "model.safetensors").read_bytes(),
    )
    del stored["mrp_head.norm.weight"]
    save_file(stored, tmp_path / "short" / "model.safetensors")
    (tmp_path / "cut" / "model.safetensors").write_bytes(data[:-5])
    heads: list[tuple[Any, str]] = [
        (
            make_model(block_size=8).detach_head(),
            "head of another model does not belong .*: its block_size is 8, .* 4",
        ),
        (tmp_path / "other", r"does not belong to this backbone.*rope_parameters is .*5\.0.*10000"),
        (folders["backbone"], "has no MRP head"),
        (tmp_path / "short", r"(?s)the head of .*does not fit its config: .*norm\.weight"),
        (tmp_path / "cut", "the head of .* is not whole"),
    ]
    for head, message in heads:
        with pytest.raises(ValueError, match=message):
            model.attach_head(head)
    with pytest.raises(ValueError, match=r"revison: attach_head takes .*revision.*spelling"):
        model.attach_head(folders["full"], revison="main")
    assert model.mrp_head is before
    of_itself = json.dumps({**config_of(folders["head"]), BASE[0]: str(tmp_path / "short")})
    (tmp_path / "short" / "config.json").write_text(of_itself)
    for load, folder in (
        (MRPForCausalLM.from_backbone, folders["head"]),
        (MRPForCausalLM.from_pretrained, tmp_path / "short"),
    ):
        with pytest.raises(ValueError, match=r"is a head repository and has no backbone"):
            load(folder)


def test_new_heads() -> None:
    """They add nothing to begin with. One starts from copies of the backbone's last layers, which
    read h_A as it is; one from matrices as in the published recipe."""
    arguments = (
        PROMPT,
        torch.randn(1, 6, 32).double(),
        torch.arange(6)[None],
        torch.ones(1, 1, 6, 6, dtype=torch.bool),
    )
    model = make_model(num_hidden_layers=3, num_nextn_predict_layers=0, initializer_range=0.02)
    torch.manual_seed(1)
    head = new_head(model, 3, "published")
    matrices = torch.cat([p.flatten() for p in head.parameters() if p.dim() == 2])
    assert matrices.std().item() == pytest.approx(0.2, rel=0.02)  # 30,000 numbers
    assert all(p.eq(1).all() for p in head.parameters() if p.dim() == 1)
    for how in ("identity", "backbone"):
        with_new_head(model, 2, how)
        assert model.residual(*arguments).eq(0).all()
        assert model.config.num_nextn_predict_layers == 2
    assert MRPForCausalLM(model.config).mrp_head.norm.weight.eq(0).all()
    for layer, source in zip(model.mrp_head.layers, model.model.layers[1:], strict=True):
        assert same_tensors(layer, source)
        assert layer.mlp.up_proj.weight.data_ptr() != source.mlp.up_proj.weight.data_ptr()
    # from hidden states of the backbone, whose size is that of its last norm's weight
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(3, 9, 32))
    copied = model.mrp_head
    h_a = model.backbone(PROMPT, *arguments[2:])
    with_new_head(model, 2, "cancel")
    left = h_a + model.residual(PROMPT, h_a, *arguments[2:])
    assert left.norm() < 0.3 * h_a.norm()
    model.mrp_head = copied
    assert torch.equal(
        model.mrp_head.eh_proj.weight, torch.cat([torch.zeros(32, 32), torch.eye(32)], 1).double()
    )
    refused = (
        ((0,), "is 0: a head has 1 layer"),
        ((4, "backbone"), "use fewer"),
        ((2, "zero"), "is 'zero': choose one of"),
    )
    for given, message in refused:
        with pytest.raises(ValueError, match=message):
            new_head(model, *given)


def test_an_autoregressive_checkpoint_as_a_backbone(tmp_path: Path, caplog: Any) -> None:
    """Under a causal mask it is still the model that it was. Tied weights may lie there twice, as
    in Qwen/Qwen3-0.6B."""
    options = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    options |= {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    source = Qwen3ForCausalLM(Qwen3Config(**options)).eval()
    source.save_pretrained(tmp_path / "qwen")
    stored = load_file(tmp_path / "qwen/model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "qwen/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"mask_token_id is 151669: it must be an int from 0 to 63 \(the"
    ):
        MRPForCausalLM.from_backbone(tmp_path / "qwen")
    with caplog.at_level(logging.WARNING):
        model = MRPForCausalLM.from_backbone(tmp_path / "qwen", block_size=8, mask_token_id=63)
    assert "autoregressive" in caplog.text
    assert (model.config.block_size, model.config.mask_token_id, model.config.model_type) == (
        8,
        63,
        "sdar_mrp",
    )
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = source(PROMPT).logits
        torch.testing.assert_close(
            model(PROMPT, attention_mask=causal).logits, expected, rtol=0, atol=1e-6
        )
        assert (
            model(PROMPT).logits - expected
        ).abs().max() > 1e-3  # a block sees itself from both sides
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("kind", "head_dim"), [(Qwen2ForCausalLM, 8), (Qwen3ForCausalLM, 12), (LlamaForCausalLM, 8)]
)
def test_an_autoregressive_checkpoint_writes_its_own_text_in_blocks_of_one(
    kind: Any, head_dim: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hidden states predict the next token, and do so as a shifted family: in blocks of one
    token `sequential` is greedy decoding, drafted too; saved and loaded it is the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = kind.config_class(
        vocab_size=64,
        **sizes,
        **heads,
        **({"head_dim": head_dim} if kind is Qwen3ForCausalLM else {}),
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    source = kind(config).eval()
    source.save_pretrained(tmp_path / "source")
    shifted = {"shifted": True} if kind is Qwen3ForCausalLM else {}
    with caplog.at_level(logging.WARNING):
        model = MRPForCausalLM.from_backbone(
            tmp_path / "source", block_size=1, mask_token_id=63, dtype="float64", **shifted
        )
    assert "only the target sequential writes text" in caplog.text
    source.double()
    options = {"max_new_tokens": 20, "eos_token_id": None, "suppress_tokens": [63]}
    expected = source.generate(PROMPT, do_sample=False, pad_token_id=0, **options)
    for drafted in ({"decoding": "sequential"}, {"decoding": "self_spec", "target": "sequential"}):
        assert model.generate(PROMPT, **drafted, **options).equal(expected)
    model.save_pretrained(tmp_path / "saved")
    again = MRPForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.generate(PROMPT, decoding="sequential", **options).equal(expected)
    with pytest.raises(ValueError, match="its config says how it predicts"):
        MRPForCausalLM.from_backbone(tmp_path / "saved", shifted=True)
    if kind is not Qwen3ForCausalLM:
        with pytest.raises(ValueError, match="only opened with hidden states that predict the"):
            MRPForCausalLM.from_backbone(tmp_path / "source", shifted=False)


def test_a_head_that_cannot_be_saved_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    backbone, x = MRPForCausalLM.from_pretrained(folders["backbone"]), tmp_path / "x"
    refused: list[tuple[MRPForCausalLM, dict[str, Any], str]] = [
        (
            backbone,
            {"head_only": True},
            r"the model has no MRP head\. Give it one with attach_head",
        ),
        (
            backbone,
            {"head_only": True, "push_to_hub": True},
            "save the head to a folder, and push that with `mrp push`",
        ),
        (make_model(), {"head_only": True}, r"Set model\.backbone_source = \(name"),
    ]
    for model, given, message in refused:
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(x, **given)
    assert not x.exists()
