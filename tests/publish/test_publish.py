"""Publishing: which folders are fit for it, what arrives, and that it loads where this package is
not installed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import ModelCard, snapshot_download
from mrp_trainer.publish import push
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.code import AUTO_MAP, code_files
from tests.support.commands import mrp
from tests.support.fresh import Fresh
from tests.support.helpers import hashes
from tests.support.hub_server import HubServer
from tests.support.random_cases import make_model

PACKAGE = {name: text.encode() for name, text in code_files().items()}
WRITTEN = (
    "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# Mine\n"
)
USED = ("config.json", "generation_config.json", "model.safetensors")
REPO = "org/name"


def tokenizer(tokens: int) -> PreTrainedTokenizerFast:
    words = WordLevel({f"w{i}": i for i in range(tokens)}, unk_token="w63")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A full model, the same in shards and with a tokenizer, its head, and an adapter of the
    head."""
    model, at = make_model().float(), tmp_path_factory.mktemp("folders")
    model.save_pretrained(at / "full")
    model.save_pretrained(at / "shards", max_shard_size="40KB")
    tokenizer(64).save_pretrained(at / "shards")
    model.backbone_source = ("org/backbone", "a" * 40)
    model.save_pretrained(at / "head", head_only=True)
    (at / "adapter").mkdir()
    named = {"base_model_name_or_path": "org/head", "peft_type": "LORA"}
    (at / "adapter" / "adapter_config.json").write_text(json.dumps(named))
    factors = {"base_model.model.mrp_head.eh_proj.lora_A.weight": torch.ones(2, 4)}
    save_file(factors, at / "adapter" / "adapter_model.safetensors")
    card = "---\nlibrary_name: peft\n---\n# Model Card for Model ID\n[More Information Needed]\n"
    (at / "adapter" / "README.md").write_text(card)
    return {kind: at / kind for kind in ("full", "shards", "head", "adapter")}


def titles(hub: HubServer) -> list[str]:
    return [commit.title for commit in hub.repository(REPO).history("main")]


def code_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.endswith(".py")}


# What arrives


def test_a_full_model_arrives_whole_in_one_commit_and_private(
    hub: HubServer, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that the Hub refuses leaves what was there."""
    before = hashes(folders["full"])
    pushed = push(folders["full"], REPO)
    assert str(pushed).startswith(f"a full model to {REPO}\n")
    assert str(pushed).endswith(hub.repository(REPO).history("main")[0].oid)
    assert hub.repository(REPO).private is True
    assert titles(hub) == ["Upload a full model"]
    files = hub.files(REPO)
    assert json.loads(files["config.json"]) == json.loads(
        (folders["full"] / "config.json").read_text()
    )
    assert {name: files[name] for name in USED[1:]} == {
        name: (folders["full"] / name).read_bytes() for name in USED[1:]
    }
    assert (
        f'AutoModel.from_pretrained("{REPO}", trust_remote_code=True)'
        in files["README.md"].decode()
    )
    monkeypatch.setattr(hub, "create_commit", Mock(side_effect=OSError("403 Forbidden")))
    assert mrp("push", str(folders["shards"]), REPO, fails=True) == "Error: 403 Forbidden\n"
    assert hub.files(REPO) == files
    assert hashes(folders["full"]) == before


def test_code_is_the_packages_and_what_is_not_declared_is_left_out(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whatever lies in the folder, and whatever its config names."""
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "modeling_mrp.py").write_text("from .rows_mrp import rows")
    others = [
        "training_args.bin",
        "optimizer.pt",
        ".env",
        "rows_mrp.py",
        "model-00001-of-00002.safetensors",
        "checkpoint-5/x",
    ]
    (folder / "checkpoint-5").mkdir()
    for name in others:
        (folder / name).write_bytes(b"secret")
    fields(auto_map={"AutoModel": "org/evil--modeling_mrp.MRPForCausalLM"})(folder)
    assert f"left out: {', '.join(sorted(others))}" in str(push(folder, REPO))
    assert hub.files(REPO).keys() == {*USED, *PACKAGE, "README.md"}
    assert code_of(hub.files(REPO)) == PACKAGE
    assert json.loads(hub.files(REPO)["config.json"])["auto_map"] == AUTO_MAP


def test_files_of_an_earlier_push_go_in_the_same_commit(
    hub: HubServer, folders: dict[str, Path]
) -> None:
    """Shards and code that are no longer there; what a person added stays."""
    config = (folders["full"] / "config.json").read_bytes()
    hub.commit(REPO, {"config.json": config, "old_mrp.py": b"pass", "notes.txt": b"mine"})
    push(folders["shards"], REPO)
    shards = {name for name in hub.files(REPO) if name.startswith("model")}
    assert len(shards) > 2
    push(folders["full"], REPO)
    assert (
        not ((shards | {"old_mrp.py"}) - {"model.safetensors", "modeling_mrp.py"})
        & hub.files(REPO).keys()
    )
    assert hub.files(REPO)["notes.txt"] == b"mine"
    assert titles(hub) == ["Upload a full model"] * 2 + ["by the test"]


def test_a_persons_card_is_kept(hub: HubServer, folders: dict[str, Path], tmp_path: Path) -> None:
    """In the folder and in the repository; replaced when asked."""
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "README.md").write_text(WRITTEN)
    for pushed in (folder, folders["full"]):
        push(pushed, REPO)
        assert hub.files(REPO)["README.md"].decode() == WRITTEN
    with pytest.raises(
        ValueError,
        match=r"README\.md was written by a person: leave out results and about, or pass new_card",
    ):
        push(folder, REPO, about=folder / "README.md")
    push(folder, REPO, new_card=True)
    assert f'"{REPO}"' in hub.files(REPO)["README.md"].decode()
    assert (folder / "README.md").read_text() == WRITTEN
    push(folders["full"], REPO, tags=["new"])
    assert "\n- new\n" in hub.files(REPO)["README.md"].decode(), (
        "one that was rendered is rendered again"
    )


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_the_command_names_another_base(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Of what was trained on a local folder, which none finds there."""
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    (folder / "run.yaml").write_text("objective: mrp\nmodel: /home/me/backbone\nunroll: 2\n")
    config = folder / {"head": "config.json", "adapter": "adapter_config.json"}[kind]
    named = json.loads(config.read_text()) | {"base_model_name_or_path": "/home/me/backbone"}
    config.write_text(json.dumps(named))
    before = hashes(folder)
    assert "base_model is '/home/me/backbone': it must be the id of a model on" in mrp(
        "push", str(folder), REPO, fails=True
    )
    assert hub.repositories == {}
    mrp("push", str(folder), REPO, "--base-model", "org/b", "--base-revision", "v1")
    assert hashes(folder) == before
    files = hub.files(REPO)
    revision = {"head": "base_model_revision", "adapter": "revision"}[kind]
    assert json.loads(files[config.name]) == named | {
        "base_model_name_or_path": "org/b",
        revision: "v1",
    }
    weights = {"head": "model.safetensors", "adapter": "adapter_model.safetensors"}[kind]
    assert files[weights] == (folder / weights).read_bytes()
    assert "base_model: org/b\n" in files["README.md"].decode()
    assert "model: org/b\nunroll: 2\n```" in files["README.md"].decode(), (
        "the recipe of the run, which itself stays here"
    )
    assert "run.yaml" not in files


def test_a_card_has_the_metadata_that_are_asked_for(
    hub: HubServer, folders: dict[str, Path]
) -> None:
    """The licence of the base where none is given, as the Hub's own check reads it; a base without
    a card has none."""

    def metadata() -> dict[str, Any]:
        return ModelCard(hub.files(REPO)["README.md"].decode()).data.to_dict()

    command = ["push", str(folders["head"]), REPO]
    mrp(*command, "--base-model", "org/none")
    assert metadata()["license"] == "unknown"
    card = b"---\nlicense: other\nlicense_name: sdar\nlicense_link: LICENSE\n---\n"
    hub.commit("org/licensed", {"README.md": card})
    given = ["--base-model", "org/licensed", "--tag", "math", "--tag", "chat"]
    given += ["--language", "en", "--language", "de", "--dataset", "org/chats"]
    mrp(*command, *given)
    found = metadata()
    assert (found["license"], found["license_name"]) == ("other", "sdar")
    assert (found["language"], found["datasets"]) == (["en", "de"], ["org/chats"])
    assert found["tags"][-2:] == ["math", "chat"]
    mrp(*command, *given, "--license", "mit")
    assert metadata()["license"] == "mit"
    told = mrp(*command, "--dataset", "./chats.jsonl", fails=True)
    assert "dataset is './chats.jsonl': it must be the id of a dataset on the Hub" in told
    printed = mrp("card", str(folders["head"]), "--license", "mit", "--tag", "math")
    assert ModelCard(printed).data.license == "mit"


def test_where_the_command_pushes(hub: HubServer, folders: dict[str, Path]) -> None:
    """A name without an owner is one of the user's, which a dry run, that makes no connection,
    cannot know."""
    full = str(folders["full"])
    dry = mrp("push", full, "mine", "--dry-run")
    assert (
        f"{(folders['full'] / 'model.safetensors').stat().st_size:>15,}  model.safetensors\n" in dry
    )
    assert dry.endswith("Dry run: nothing was sent.\n")
    assert hub.repositories == {}
    assert mrp("push", str(folders["head"]), "my-head").startswith("an MRP head to alice/my-head\n")
    assert '"alice/my-head"' in hub.files("alice/my-head")["README.md"].decode()
    mrp("push", full, REPO, "--public", "--message", "From the shell")
    assert titles(hub) == ["From the shell"]
    assert hub.repository(REPO).private is False
    mrp("push", snapshot_download(REPO), "alice/copy", "--branch", "b")
    card = (
        hub.files(REPO)["README.md"]
        .decode()
        .replace(REPO, "alice/copy")
        .replace("# name", "# copy")
    )
    assert hub.files("alice/copy", "b")["README.md"].decode() == card
    mrp("push", full, "alice/other", "--pull-request")
    assert hub.files("alice/other") == {}
    assert "model.safetensors" in hub.files("alice/other", "refs/pr/1")


def test_what_was_pushed_loads_without_this_package(
    hub: HubServer, fresh: Fresh, id_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A model and its tokenizer by transformers' call, the head by ours. What the repository's code
    saves is the same again."""
    model: Any = make_model().float()
    prompts, modes = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 3]], ("static", "mrp_spec", "mrp_direct")
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "seed": 3}
    model.push_to_hub("pushed/whole", private=True)
    id_tokenizer.push_to_hub("pushed/whole")
    MRPForCausalLM.from_pretrained("pushed/whole").save_pretrained(
        tmp_path / "head", head_only=True
    )
    push(tmp_path / "head", "pushed/head")
    files = hub.files("pushed/whole")
    assert files.keys() == {*USED, *PACKAGE, "README.md", "tokenizer.json", "tokenizer_config.json"}
    assert code_of(files) == code_of(hub.files("pushed/head")) == PACKAGE
    assert {"mrp", "speculative-decoding"} <= set(ModelCard(files["README.md"].decode()).data.tags)
    shutil.copytree(hub.cache, fresh.hub_cache, dirs_exist_ok=True)
    printed = fresh(
        f"""
        from transformers import AutoModel, AutoTokenizer
        for name in ("pushed/whole", "pushed/head"):
            model = AutoModel.from_pretrained(name, trust_remote_code=True)
            ids = torch.tensor({prompts})
            print([model.generate(ids, decoding=mode, **{options}).tolist() for mode in {modes}])
        model.save_pretrained({str(tmp_path / "again")!r})
        tokenizer = AutoTokenizer.from_pretrained("pushed/whole", trust_remote_code=False)
        print(tokenizer("w03 w01 w00")["input_ids"])
        """
    )
    texts = [
        model.generate(torch.tensor(prompts), decoding=mode, **options).tolist() for mode in modes
    ]
    assert printed == f"{texts}\n" * 2 + f"{id_tokenizer('w03 w01 w00')['input_ids']}\n"
    again = {
        path.relative_to(tmp_path / "again").as_posix(): path.read_bytes()
        for path in (tmp_path / "again").rglob("*.*")
    }
    assert code_of(again) == PACKAGE
    assert again["model.safetensors"] == files["model.safetensors"]


# What is tried


def edited(file: str, change: Callable[[torch.Tensor], Any], name: str) -> Callable[[Path], Any]:
    """Return a function that changes a tensor in a folder's file."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors[name])
        save_file(tensors, folder / file, {"format": "pt"})

    return edit


@pytest.mark.real_trial
def test_what_is_sent_is_tried_before(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path
) -> None:
    """As users have it, in a fresh process: a head whose backbone is a folder here. What cannot be
    tried here is told; what does not decode is not sent."""
    done = "\nLoaded in a fresh process, and decoded a block with and without drafts.\n"
    head = shutil.copytree(folders["head"], tmp_path / "head")
    not_tried = str(push(head, REPO, dry_run=True))
    assert "\nNot tried: " in not_tried
    assert "org/backbone" in not_tried
    fields(base_model_name_or_path=str(folders["full"]))(head)
    assert done in str(push(head, REPO, "org/backbone", dry_run=True))
    outside = shutil.copytree(folders["full"], tmp_path / "outside")
    fields("generation_config.json", eos_token_id=64)(outside)
    with pytest.raises(
        ValueError,
        match=r"does not load and decode in a fresh process: .*eos_token_id holds 64, outside",
    ):
        push(outside, REPO)
    assert hub.repositories == {}


@pytest.mark.real_trial
def test_an_adapter_is_tried_on_the_revision_it_names(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base is there on a branch alone."""
    with monkeypatch.context() as untried:
        untried.setattr("mrp_trainer.publish.command.try_out", lambda *_: "")
        push(folders["full"], "org/base", revision="v1")
    adapted: Any = get_peft_model(make_model().float(), LoraConfig(target_modules=["eh_proj"]))
    adapted.save_pretrained(tmp_path)
    tried = push(tmp_path, REPO, "org/base", "v1", dry_run=True).trial
    assert tried == "Loaded in a fresh process, and decoded a block with and without drafts."


@pytest.mark.parametrize("kind", ["full", "shards", "head", "adapter"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.real_trial
def test_weights_that_are_not_finite(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path, kind: str, value: float
) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    file, name = next(
        (path.name, name)
        for path in folder.glob("*.safetensors")
        for name in load_file(path)
        if "mrp_head" in name
    )
    edited(file, lambda tensor: tensor.view(-1)[-1:].fill_(value), name)(folder)
    for dry_run in (True, False):
        with pytest.raises(
            ValueError, match=rf"{name} in .* holds NaN or infinity: train it again"
        ):
            push(folder, REPO, dry_run=dry_run)
    assert hub.repositories == {}


IDS = (
    "../x",
    " ",
    "",
    "http://evil/x",
    "org/<b>",
    "a/b/c",
    "org/",
    "/x",
    "org/na me",
    "-x",
    "x" * 97,
    "org/a--b",
    "o\n",
)


@pytest.mark.parametrize("repo_id", IDS)
def test_ids_that_no_repository_has(hub: HubServer, folders: dict[str, Path], repo_id: str) -> None:
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=r"[Rr]epo id must|in repo_id"):
            push(folders["full"], repo_id, dry_run=dry_run)
    with pytest.raises(
        ValueError, match=r"base_model is .*: it must be the id of a model on the Hub"
    ):
        push(folders["head"], REPO, repo_id or " ")
    assert hub.repositories == {}


# What is refused


def text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


def fields(file: str = "config.json", **changed: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(
        json.dumps(json.loads((folder / file).read_text()) | changed)
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (text("model.safetensors", "cut"), "model.safetensors is not a whole safetensors file"),
        (text("config.json", "{}"), "holds no checkpoint: give a folder"),
        (
            text("config.json", '{"model_type": "llama"}'),
            "holds a model of type 'llama': give a folder that save_pretrained",
        ),
        (
            fields(head_dim=16),
            r"wrong shape: model.layers.0.self_attn.k_norm.weight is \[8\], needs \[16\]",
        ),
        (
            fields(num_nextn_predict_layers=3),
            "num_nextn_predict_layers is 3, and it holds 2 layers mrp_head",
        ),
        (
            fields(base_model_name_or_path="org/backbone"),
            "(?s)does not fit its config.*unexpected: lm_head.weight",
        ),
        (text("tokenizer.json", "{}"), "the tokenizer of '.*' cannot be loaded"),
        (
            text("tokenizer_config.json", '{"auto_map": "org/evil--t.T"}'),
            "takes code from .*org/evil--t.T",
        ),
        (
            fields("generation_config.json", decoding="evil"),
            "decoding is 'evil': choose one of static",
        ),
        (
            fields("generation_config.json", max_new_tokens="8"),
            "max_new_tokens is '8', of type str",
        ),
        (text("generation_config.json", "[]"), r"generation_config\.json holds no JSON object"),
        (
            lambda folder: tokenizer(65).save_pretrained(folder),
            "has 65 tokens, and the model 64: publish the model's own",
        ),
    ],
)
def test_a_folder_that_is_not_fit_is_refused_before_anything_is_sent(
    hub: HubServer,
    folders: dict[str, Path],
    tmp_path: Path,
    spoil: Callable[[Path], Any],
    message: str,
) -> None:
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    spoil(folder)
    before = hashes(folder)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=message):
            push(folder, REPO, dry_run=dry_run)
    with pytest.raises(
        ValueError, match=r"is not a folder: save the model there first, .* hf download"
    ):
        push("org/elsewhere", REPO)
    with pytest.raises(ValueError, match=r"base_model is org/b, but .* holds a full model"):
        push(folders["full"], REPO, "org/b")
    assert hashes(folder) == before
    assert hub.repositories == {}
