"""Publishing to a loopback Hub: what arrives, what is refused, and what a push that failed leaves."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import main, mrp
from conftest import make_model
from helpers import hashes
from hub_server import HubServer
from huggingface_hub import ModelCard, snapshot_download
from mrp_trainer.publish import publish
from mrp_trainer.publish.card import is_own_card
from mrp_trainer.publish.folder import read_folder
from safetensors.torch import save_file

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.code import code_files

PACKAGE = {name: text.encode() for name, text in code_files().items()}
WRITTEN = "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# Mine\n"
USED = ("config.json", "generation_config.json", "model.safetensors")
REPO = "org/name"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A full model, the same in shards, its head, and an adapter of the head."""
    model, at = make_model().float(), tmp_path_factory.mktemp("folders")
    model.save_pretrained(at / "full")
    model.save_pretrained(at / "shards", max_shard_size="40KB")
    model.save_pretrained(at / "head", head_only=True, base_model_name_or_path="org/backbone", base_model_revision="a" * 40)
    (at / "adapter").mkdir()
    named = {"base_model_name_or_path": "org/head", "peft_type": "LORA"}
    (at / "adapter" / "adapter_config.json").write_text(json.dumps(named))
    factors = {"base_model.model.mrp_head.eh_proj.lora_A.weight": torch.ones(2, 4)}
    save_file(factors, at / "adapter" / "adapter_model.safetensors")
    card = "---\nlibrary_name: peft\n---\n# Model Card for Model ID\n[More Information Needed]\n"
    (at / "adapter" / "README.md").write_text(card)
    return {kind: at / kind for kind in ("full", "shards", "head", "adapter")}


@pytest.fixture
def hub(as_alice: HubServer) -> HubServer:
    return as_alice


def titles(hub: HubServer, repo_id: str = REPO, revision: str = "main") -> list[str]:
    return [commit.title for commit in hub.repository(repo_id).history(revision)]


def code_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name.endswith(".py")}


# What arrives


def test_a_full_model_arrives_whole_in_one_commit_and_private(hub: HubServer, folders: dict[str, Path]) -> None:
    """A second push of the same makes no commit."""
    before = hashes(folders["full"])
    for _ in range(2):
        pushed = publish(folders["full"], REPO)
    assert f"a full model to {REPO} (branch main; private if it is new)" in str(pushed)
    assert str(pushed).endswith(hub.repository(REPO).read("main").oid)
    assert hub.repository(REPO).private is True
    assert titles(hub) == ["Upload a full model", "initial commit"]
    files = hub.files(REPO)
    assert {name: files[name] for name in USED} == {name: (folders["full"] / name).read_bytes() for name in USED}
    assert code_of(files) == PACKAGE
    assert set(files) == {*USED, *PACKAGE, "README.md", ".gitattributes"}
    assert f'AutoModel.from_pretrained("{REPO}", trust_remote_code=True)' in files["README.md"].decode()
    assert hashes(folders["full"]) == before


def test_a_loaded_model_pushes_itself_as_transformers_does(hub: HubServer, folders: dict[str, Path]) -> None:
    """With our tags and the user's, to a branch or a pull request; `mrp push` replaces its card, and pushes heads."""
    model: Any = MRPForCausalLM.from_pretrained(folders["full"])
    model.push_to_hub(REPO, commit_message="My first", tags="mine", private=True)
    assert model.push_to_hub(REPO, create_pr=True, max_shard_size="40KB").pr_url.endswith(f"/{REPO}/discussions/1")
    assert titles(hub) == ["My first", "initial commit"]
    assert titles(hub, revision="refs/pr/1")[0] == "Upload MRPForCausalLM"
    assert code_of(hub.files(REPO)) == PACKAGE
    assert hub.repository(REPO).private is True
    card = hub.files(REPO)["README.md"].decode()
    assert not is_own_card(card)
    assert {"mrp", "speculative-decoding", "mine"} <= set(ModelCard(card).data.tags)


def test_the_code_is_what_the_package_generates(
    hub: HubServer, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever lies in the folder; what is replaced is named."""
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "modeling_mrp.py").write_text("from .rows_mrp import rows")
    (folder / "rows_mrp.py").write_text("rows = 1")
    (folder / "configuration_mrp.py").unlink()
    assert publish(folder, REPO).left_out == ["rows_mrp.py"]
    assert f"{folder}/modeling_mrp.py is not what this package generates: that is published instead" in caplog.text
    assert code_of(hub.files(REPO)) == PACKAGE


def test_files_of_an_earlier_push_go_in_the_same_commit(hub: HubServer, folders: dict[str, Path]) -> None:
    """Shards and code that are no longer there; what a person added stays."""
    config = (folders["full"] / "config.json").read_bytes()
    hub.commit(REPO, {"config.json": config, "old_mrp.py": b"pass", "notes.txt": b"mine"})
    publish(folders["shards"], REPO)
    shards = {name for name in hub.files(REPO) if name.startswith("model-")}
    assert len(shards) > 1
    told = str(publish(folders["full"], REPO)).split("removed there: ")[1]
    assert all(name in told for name in shards)
    assert not (shards | {"old_mrp.py"}) & hub.files(REPO).keys()
    assert hub.files(REPO)["notes.txt"] == b"mine"
    assert titles(hub)[:2] == ["Upload a full model"] * 2


def test_a_persons_card_is_kept(hub: HubServer, folders: dict[str, Path], tmp_path: Path) -> None:
    """In the folder and in the repository; replaced when asked."""
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "README.md").write_text(WRITTEN)
    for pushed in (folder, folders["full"]):
        publish(pushed, REPO)
        assert hub.files(REPO)["README.md"].decode() == WRITTEN
    publish(folder, REPO, new_card=True)
    assert f'"{REPO}"' in hub.files(REPO)["README.md"].decode()
    assert (folder / "README.md").read_text() == WRITTEN
    publish(folders["full"], REPO, tags=["new"])
    assert "\n- new\n" in hub.files(REPO)["README.md"].decode(), "one that was rendered is rendered again"


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_the_command_names_another_base(hub: HubServer, folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Of what was trained on a local folder, which none finds there. A card that was rendered tells of the new base, a
    person's is kept."""
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    (folder / "run.yaml").write_text("objective: mrp\nmodel: /home/me/backbone\nunroll: 2\n")
    config = folder / {"head": "config.json", "adapter": "adapter_config.json"}[kind]
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": "/home/me/backbone"}
    config.write_text(json.dumps(fields))
    before = hashes(folder)
    assert "base_model is '/home/me/backbone': it must be the id of a model on" in mrp("push", str(folder), REPO, fails=True)
    assert hub.requests == []
    arguments = ["push", str(folder), REPO, "--base-model", "org/b", "--base-revision", "v1"]
    mrp(*arguments)
    assert hashes(folder) == before
    files = hub.files(REPO)
    revision = {"head": "base_model_revision", "adapter": "revision"}[kind]
    assert json.loads(files[config.name]) == fields | {"base_model_name_or_path": "org/b", revision: "v1"}
    weights = {"head": "model.safetensors", "adapter": "adapter_model.safetensors"}[kind]
    assert files[weights] == (folder / weights).read_bytes()
    assert "base_model: org/b\n" in files["README.md"].decode()
    assert "model: org/b\nunroll: 2\n```" in files["README.md"].decode(), "the recipe of the run, which itself stays here"
    assert "run.yaml" not in files
    (folder / "README.md").write_text(WRITTEN)
    mrp(*arguments)
    assert hub.files(REPO)["README.md"].decode() == WRITTEN


def test_a_name_without_an_owner_is_the_users(hub: HubServer, folders: dict[str, Path]) -> None:
    """Which a dry run, that makes no connection, cannot know."""
    dry = str(publish(folders["full"], "mine", dry_run=True, revision="b", private=False))
    assert dry.startswith("a full model to mine of your own (branch b; public if it is new)")
    assert f"{(folders['full'] / 'model.safetensors').stat().st_size:>15,}  model.safetensors\n" in dry
    assert dry.endswith("Dry run: nothing was sent.")
    assert hub.requests == []
    told = mrp("push", str(folders["head"]), "my-head")
    assert told.startswith("an MRP head to alice/my-head (branch main; private if it is new)\n")
    assert '"alice/my-head"' in hub.files("alice/my-head")["README.md"].decode()


def test_the_command_pushes_and_copies(hub: HubServer, folders: dict[str, Path]) -> None:
    mrp("push", str(folders["full"]), REPO, "--public", "--message", "From the shell")
    mrp("push", snapshot_download(REPO), "alice/copy", "--branch", "b")
    mrp("push", str(folders["head"]), "alice/other", "--base-model", "org/b", "--pull-request")
    head = hub.files("alice/other", "refs/pr/1")["model.safetensors"]
    assert head == (folders["head"] / "model.safetensors").read_bytes()
    assert set(hub.files("alice/other")) == {".gitattributes"}
    assert titles(hub) == ["From the shell", "initial commit"]
    assert (hub.repository(REPO).private, hub.repository("alice/copy").private) == (False, True)
    copy = hub.files("alice/copy", "b")
    assert copy["model.safetensors"] == hub.files(REPO)["model.safetensors"]
    assert '"alice/copy"' in copy["README.md"].decode()
    assert f'"{REPO}"' not in copy["README.md"].decode()


# What is refused, and what fails


@pytest.mark.parametrize(
    ("there", "pushed", "held"),
    [
        ("head", "full", "an MRP head, and what is pushed is a full model"),
        ("full", "adapter", "a full model, and what is pushed is an adapter"),
        ("data.csv", "full", "files of no model of this package, such as data.csv, and"),
    ],
)
def test_a_repository_of_another_kind_is_not_overwritten(
    hub: HubServer, folders: dict[str, Path], there: str, pushed: str, held: str
) -> None:
    files = {there: b"1"}
    if there in folders:
        files = {name: path.read_bytes() for name, path in read_folder(folders[there]).files.items() if name != "README.md"}
    commit = hub.commit(REPO, files)
    with pytest.raises(ValueError, match=f"^{REPO} holds {held}.*push it to a repository of its own"):
        publish(folders[pushed], REPO)
    assert hub.repository(REPO).read("main").oid == commit
    assert {request.split()[0] for request in hub.requests} <= {"GET", "HEAD"}


def test_the_command_says_what_is_wrong(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    full = str(folders["full"])
    for arguments, message in (
        (["push", full, "a/b/c"], "Repo id must be"),
        (["push", full, REPO, "--branch", "b", "--pull-request"], "push to a branch, or open a pull request"),
        (["push", full, REPO, "--base-model", "org/b"], "the backbone is to be org/b, but .* holds a full model"),
        (["push", "org/elsewhere", REPO], "Error: org/elsewhere is not a folder: save the model there first, .* hf download"),
        (["push", full, REPO], "Error: Cannot reach .*offline mode is enabled.*HF_HUB_OFFLINE"),
        (["card", full, "--results", "missing.jsonl"], "missing.jsonl is not a file"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert re.search(message, capsys.readouterr().err)


def test_a_commit_that_fails_changes_nothing(hub: HubServer, folders: dict[str, Path]) -> None:
    commit = hub.commit(REPO, {"notes.txt": b"", "config.json": (folders["full"] / "config.json").read_bytes()})
    refs, before = {**hub.repository(REPO).refs}, hashes(folders["full"])
    hub.fail("POST .*/commit/", status=503)
    told = r"was given up \(HfHubHTTPError: Server error '503.* what was uploaded is.* comes from `hf auth login`"
    with pytest.raises(ConnectionError, match=re.compile(told, re.DOTALL)):
        publish(folders["full"], REPO, revision="new")
    assert hashes(folders["full"]) == before
    assert hub.repository(REPO).read("main").oid == commit
    assert hub.repository(REPO).refs == refs, "no empty branch is left"
    publish(folders["full"], REPO, revision="new")
    assert titles(hub, revision="new").count("Upload a full model") == 1


def test_somebody_elses_commit_is_not_overwritten(hub: HubServer, folders: dict[str, Path]) -> None:
    publish(folders["full"], REPO)

    def meanwhile(body: bytes) -> bytes:
        hub.commit(REPO, {"README.md": b"theirs"})
        return body

    hub.fail("POST .*/preupload/", change=meanwhile)
    with pytest.raises(ConnectionError, match="the push was given up"):
        publish(folders["shards"], REPO)
    assert hub.files(REPO)["README.md"] == b"theirs"
    assert "model.safetensors.index.json" not in hub.files(REPO)
