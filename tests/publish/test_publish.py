"""Publishing through a loopback Hub: what arrives, what is refused, and what a push that failed leaves."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import main
from conftest import ROOT, make_model
from helpers import hashes
from hub_client import Done, HubClient
from hub_server import HubServer
from huggingface_hub import ModelCard
from mrp_trainer.publish import publish
from mrp_trainer.publish.card import is_own_card
from mrp_trainer.publish.folder import read_folder
from safetensors.torch import save_file

from modeling_mrp.model.saving import code_files

PACKAGE = {name: text.encode() for name, text in code_files().items()}
WRITTEN = "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# Mine\n"
USED = ("config.json", "generation_config.json", "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A full model, the same in shards, its head, and an adapter of the head."""
    model, at = make_model().float(), tmp_path_factory.mktemp("folders")
    model.save_pretrained(at / "full")
    model.save_pretrained(at / "shards", max_shard_size="40KB")
    model.save_pretrained(at / "head", head_only=True, base_model_name_or_path="org/backbone", base_model_revision="a" * 40)
    (at / "adapter").mkdir()
    (at / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "org/head", "peft_type": "LORA"})
    )
    save_file(
        {"base_model.model.mrp_head.eh_proj.lora_A.weight": torch.ones(2, 4)}, at / "adapter" / "adapter_model.safetensors"
    )
    (at / "adapter" / "README.md").write_text(
        "---\nlibrary_name: peft\n---\n# Model Card for Model ID\n[More Information Needed]\n"
    )
    return {kind: at / kind for kind in ("full", "shards", "head", "adapter")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as hub:
        hub.add_user("alice", token="hf_alice", organizations=["org"])
        hub.add_user("reader", token="hf_reader", organizations=["org"], can_write=False)
        yield hub


@pytest.fixture(scope="module")
def client(server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClient]:
    home = tmp_path_factory.mktemp("client")
    with HubClient(home, server.environment(home, "hf_alice"), ROOT, ROOT / "trainer") as process:
        yield process


@pytest.fixture
def hub(server: HubServer) -> Iterator[HubServer]:
    """The server, with an empty log and, afterwards, without failures."""
    server.requests.clear()
    yield server
    server.faults.clear()


@pytest.fixture
def repo(request: pytest.FixtureRequest) -> str:
    """A repository's id of the test's own."""
    return "org/" + hashlib.sha1(request.node.nodeid.encode()).hexdigest()[:12]


@pytest.fixture
def push(client: HubClient) -> Callable[..., Done]:
    def run(folder: Path, repo_id: str, **options: Any) -> Done:
        return client.run(
            f"""
            from mrp_trainer.publish import publish
            print(publish({str(folder)!r}, {repo_id!r}, **{options!r}))
            """
        )

    return run


def titles(hub: HubServer, repo_id: str, revision: str = "main") -> list[str]:
    return [commit.title for commit in hub.repository(repo_id).history(revision)]


# What arrives


def test_a_full_model_arrives_whole_in_one_commit_and_private(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    before = hashes(folders["full"])
    done = push(folders["full"], repo)
    assert done.error is None
    assert f"a full model to {repo} (branch main; private if it is new)" in done.printed
    assert done.printed.strip().endswith(hub.repository(repo).read("main").oid)
    assert hub.repository(repo).private is True
    assert titles(hub, repo) == ["Upload a full model", "initial commit"]
    files = hub.files(repo)
    assert {name: files[name] for name in USED} == {name: (folders["full"] / name).read_bytes() for name in USED}
    assert {name: content for name, content in files.items() if name.endswith(".py")} == PACKAGE
    assert set(files) == {*USED, *PACKAGE, "README.md", ".gitattributes"}
    assert f'AutoModel.from_pretrained("{repo}", trust_remote_code=True)' in files["README.md"].decode()
    assert hashes(folders["full"]) == before


def test_a_loaded_model_pushes_itself_as_transformers_does(
    hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str
) -> None:
    """Whole or its head, private, with our tags and the user's, a branch or a pull request; `mrp push` replaces its card."""
    done = client.run(
        f"""
        from peft import LoraConfig
        from modeling_mrp import MRPForCausalLM
        model = MRPForCausalLM.from_pretrained({str(folders["full"])!r})
        print(model.push_to_hub({repo!r}, commit_message="My first", max_shard_size="40KB", tags="mine").oid)
        model.save_pretrained("again", push_to_hub=True, repo_id={repo!r}, revision="second", tags=["more"])
        print(model.push_to_hub({repo!r}, create_pr=True).pr_url)
        model.push_to_hub("mine", head_only=True, base_model_name_or_path="org/b", private=False)
        model.add_adapter(LoraConfig(r=2, target_modules=["eh_proj"]))
        model.push_to_hub("{repo}-adapter")
        """
    )
    assert done.error is None
    first, pull_request = done.printed.split()
    assert pull_request.endswith(f"/{repo}/discussions/1")
    assert titles(hub, repo) == ["My first", "initial commit"]
    assert hub.repository(repo).read("main").oid == first
    assert len([name for name in hub.files(repo) if name.startswith("model-0000")]) > 1
    assert {name: content for name, content in hub.files(repo).items() if name.endswith(".py")} == PACKAGE
    for revision in ("second", "refs/pr/1"):
        assert titles(hub, repo, revision)[0] == "Upload model"
        assert hub.files(repo, revision)["model.safetensors"] == (folders["full"] / "model.safetensors").read_bytes()
    card = hub.files(repo)["README.md"].decode()
    assert not is_own_card(card)
    assert {"mrp", "speculative-decoding", "mine"} <= set(ModelCard(card).data.tags)
    assert "more" in ModelCard(hub.files(repo, "second")["README.md"].decode()).data.tags
    assert json.loads(hub.files("alice/mine")["config.json"])["base_model_name_or_path"] == "org/b"
    assert hub.files("alice/mine")["model.safetensors"] == (folders["head"] / "model.safetensors").read_bytes()
    assert [hub.repository(name).private for name in (repo, "alice/mine")] == [True, False]
    assert {"adapter_config.json", "adapter_model.safetensors"} < set(hub.files(f"{repo}-adapter"))
    assert "model.safetensors" not in hub.files(f"{repo}-adapter")


def test_a_head_that_names_a_folder_does_not_push_itself(
    hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str
) -> None:
    done = client.run(
        f"""
        from modeling_mrp import MRPForCausalLM
        MRPForCausalLM.from_pretrained({str(folders["full"])!r}).push_to_hub({repo!r}, head_only=True)
        """
    )
    assert f"base_model_name_or_path is '{folders['full']}', and a head on the Hub needs a backbone" in str(done.error)
    assert hub.requests == []


def test_the_code_is_what_the_package_generates(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], tmp_path: Path, repo: str, caplog: Any
) -> None:
    """Whatever lies in the folder; what is replaced is named."""
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "modeling_mrp.py").write_text("from .rows_mrp import rows")
    (folder / "rows_mrp.py").write_text("rows = 1")
    (folder / "configuration_mrp.py").unlink()
    assert publish(folder, repo, dry_run=True).left_out == ["rows_mrp.py"]
    assert f"{folder}/modeling_mrp.py is not what this package generates: that is published instead" in caplog.text
    assert push(folder, repo).error is None
    assert {name: content for name, content in hub.files(repo).items() if name.endswith(".py")} == PACKAGE


def test_files_of_an_earlier_push_go_in_the_same_commit(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    """Shards and code that are no longer there; what a person added stays."""
    hub.commit(repo, {"config.json": (folders["full"] / "config.json").read_bytes(), "old_mrp.py": b"pass"})
    hub.commit(repo, {"notes.txt": b"mine", "tokenizer.json": b"{}"})
    assert push(folders["shards"], repo).error is None
    shards = {name for name in hub.files(repo) if name.startswith("model-")}
    done = push(folders["full"], repo)
    files = hub.files(repo)
    assert len(shards) > 1
    assert not shards & set(files)
    assert all(name in done.printed.split("removed there: ")[1] for name in shards)
    assert "old_mrp.py" not in files
    assert (files["notes.txt"], files["tokenizer.json"]) == (b"mine", b"{}")
    assert titles(hub, repo)[:2] == ["Upload a full model"] * 2


def test_a_second_push_of_the_same_makes_no_commit(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    push(folders["full"], repo)
    assert push(folders["full"], repo).error is None
    assert len(titles(hub, repo)) == 2
    assert len(hub.asked("POST .*/commit/")) == 1


# Cards


def test_a_persons_card_is_kept(hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], tmp_path: Path) -> None:
    """In the folder and in the repository; replaced when asked."""
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "README.md").write_text(WRITTEN)
    assert push(folder, "org/cards").error is None
    assert hub.files("org/cards")["README.md"].decode() == WRITTEN
    assert push(folders["full"], "org/cards").error is None
    assert hub.files("org/cards")["README.md"].decode() == WRITTEN
    assert push(folder, "org/cards", new_card=True).error is None
    assert '"org/cards"' in hub.files("org/cards")["README.md"].decode()
    assert (folder / "README.md").read_text() == WRITTEN
    assert push(folders["full"], "org/cards", tags=["new"]).error is None
    assert "\n- new\n" in hub.files("org/cards")["README.md"].decode(), "one that was rendered is rendered again"


def test_a_card_that_the_hub_would_refuse_stays_here(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], tmp_path: Path, repo: str
) -> None:
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "README.md").write_text(WRITTEN.replace("mit", "mine"))
    assert "must be one of" in str(push(folder, repo).error)
    assert {logged.method for logged in hub.requests} == {"GET", "POST"}
    assert not [logged for logged in hub.requests if logged.method == "POST" and logged.path != "/api/validate-yaml"]
    hub.requests.clear()
    config = json.loads((folders["head"] / "config.json").read_text()) | {"base_model_name_or_path": "/home/me/backbone"}
    head = shutil.copytree(folders["head"], tmp_path / "head")
    (head / "config.json").write_text(json.dumps(config))
    assert "base_model is '/home/me/backbone': it must be the id of a model on the Hub" in str(push(head, repo).error)
    (head / "README.md").write_text(WRITTEN)
    assert "base_model is '/home/me/backbone'" in str(push(head, repo).error), "also under a card that does not say so"
    assert hub.requests == []


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_the_command_names_another_base(
    hub: HubServer, client: HubClient, folders: dict[str, Path], tmp_path: Path, repo: str, kind: str
) -> None:
    """Of what was trained on a local folder. A card that was rendered tells of the new base, a person's is kept."""
    folder = shutil.copytree(folders[kind], tmp_path / kind)
    (folder / "run.yaml").write_text("objective: mrp\nmodel: /home/me/backbone\nunroll: 2\n")
    config = folder / {"head": "config.json", "adapter": "adapter_config.json"}[kind]
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": "/home/me/backbone"}
    config.write_text(json.dumps(fields))
    before = hashes(folder)
    arguments = ["push", str(folder), repo, "--base-model", "org/b", "--base-revision", "v1"]
    assert client.run(f"from mrp_trainer.cli import main; main({arguments!r})").error is None
    assert hashes(folder) == before
    files = hub.files(repo)
    revision = {"head": "base_model_revision", "adapter": "revision"}[kind]
    if kind == "head":
        fields["speculators_config"]["verifier"]["name_or_path"] = "org/b"
    assert json.loads(files[config.name]) == fields | {"base_model_name_or_path": "org/b", revision: "v1"}
    weights = {"head": "model.safetensors", "adapter": "adapter_model.safetensors"}[kind]
    assert files[weights] == (folder / weights).read_bytes()
    assert "base_model: org/b\n" in files["README.md"].decode()
    assert "model: org/b\nunroll: 2\n```" in files["README.md"].decode(), "the recipe of the run, which itself stays here"
    assert "run.yaml" not in files
    (folder / "README.md").write_text(WRITTEN)
    assert client.run(f"from mrp_trainer.cli import main; main({arguments!r})").error is None
    assert hub.files(repo)["README.md"].decode() == WRITTEN


# What is refused


@pytest.mark.parametrize(
    ("there", "pushed", "held"),
    [
        ("head", "full", "an MRP head, and what is pushed is a full model"),
        ("full", "adapter", "a full model, and what is pushed is an adapter"),
        ({"config.json": b'{"model_type": "llama"}'}, "full", "a model of type 'llama', and what is pushed is a full model"),
        ({"data.csv": b"1"}, "full", "files of no model of this package, such as data.csv, and"),
    ],
)
def test_a_repository_of_another_kind_is_not_overwritten(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str, there: Any, pushed: str, held: str
) -> None:
    files = (
        there if isinstance(there, dict) else {name: p.read_bytes() for name, p in read_folder(folders[there]).files.items()}
    )
    commit = hub.commit(repo, {name: content for name, content in files.items() if name != "README.md"})
    done = push(folders[pushed], repo)
    assert done.error is not None
    assert done.error.startswith(f"ValueError: {repo} holds {held}")
    assert "push it to a repository of its own" in done.error
    assert hub.repository(repo).read("main").oid == commit
    assert {logged.method for logged in hub.requests} <= {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("repo_id", "options", "message"),
    [
        ("a/b/c", {}, "Repo id must be"),
        ("org/name", {"revision": "b", "create_pr": True}, "push to a branch, or open a pull request"),
        ("org/name", {"results": ["missing.jsonl"]}, "missing.jsonl is not a file"),
        ("org/name", {"card": ModelCard(WRITTEN), "tags": ["a"]}, "is published as it is: leave out results, about, tags"),
    ],
)
def test_a_wrong_argument_is_refused(folders: dict[str, Path], repo_id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        publish(folders["full"], repo_id, **options)


def test_a_name_without_an_owner_is_the_users(hub: HubServer, client: HubClient, folders: dict[str, Path]) -> None:
    """Which a dry run cannot know."""
    done = client.run(f"from mrp_trainer.cli import main; main(['push', {str(folders['head'])!r}, 'my-head'])")
    assert done.error is None
    assert done.printed.startswith("an MRP head to alice/my-head (branch main; private if it is new)\n")
    assert titles(hub, "alice/my-head") == ["Upload an MRP head", "initial commit"]
    assert '"alice/my-head"' in hub.files("alice/my-head")["README.md"].decode()
    dry = publish(folders["head"], "my-head", dry_run=True)
    assert str(dry).startswith("an MRP head to my-head of your own (branch main;")
    with pytest.raises(ValueError, match=r"Cannot use `token=False` with `whoami`"):
        publish(folders["full"], "mine", token=False)


def test_a_dry_run_makes_no_connection(hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str) -> None:
    done = push(folders["full"], repo, dry_run=True, revision="b", private=False)
    assert done.error is None
    size = (folders["full"] / "model.safetensors").stat().st_size
    assert f"{size:>15,}  model.safetensors\n" in done.printed
    assert f"a full model to {repo} (branch b; public if it is new)" in done.printed
    assert done.printed.endswith("Dry run: nothing was sent.\n")
    assert hub.requests == []


# The command


def test_the_command_pushes_and_copies(hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str) -> None:
    done = client.run(
        f"""
        from mrp_trainer.cli import main
        main(["push", {str(folders["full"])!r}, {repo!r}, "--public", "--message", "From the shell"])
        main(["push", {repo!r}, "alice/copy", "--branch", "b"])
        main(["push", {repo!r}, "alice/head", "--head-only"])
        main(["push", {str(folders["full"])!r}, "alice/other", "--head-only", "--base-model", "org/b", "--pull-request"])
        """
    )
    assert done.error is None
    config = json.loads(hub.files("alice/head")["config.json"])
    assert config["base_model_name_or_path"] == repo
    assert config["base_model_revision"] == hub.repository(repo).read("main").oid
    assert hub.files("alice/head")["model.safetensors"] == (folders["head"] / "model.safetensors").read_bytes()
    assert json.loads(hub.files("alice/other", "refs/pr/1")["config.json"])["base_model_name_or_path"] == "org/b"
    assert set(hub.files("alice/other")) == {".gitattributes"}
    assert titles(hub, repo) == ["From the shell", "initial commit"]
    assert hub.repository(repo).private is False
    assert hub.repository("alice/copy").private is True
    copy = hub.files("alice/copy", "b")
    assert copy["model.safetensors"] == hub.files(repo)["model.safetensors"]
    assert '"alice/copy"' in copy["README.md"].decode()
    assert f'"{repo}"' not in copy["README.md"].decode()


def test_the_command_says_what_is_wrong(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    full = str(folders["full"])
    for arguments, message in (
        (["push", full, "org/name", "--adapter"], "holds a full model, not an adapter: leave out the option"),
        (["push", str(folders["adapter"]), "org/name", "--head-only"], "holds an adapter, not an MRP head"),
        (["push", full, "org/name", "--head-only"], "does not say where its backbone is on the Hub: give --base-model"),
        (["push", full, "org/name", "--base-model", "org/b"], "the backbone is to be org/b, but .* holds a full model"),
        (["push", "org/elsewhere", "org/name", "--dry-run"], "is not in the cache: a dry run downloads nothing"),
        (["push", "org/elsewhere", "org/name"], "Error: org/elsewhere is no folder, .* not in the cache: .*HF_HUB_OFFLINE"),
        (["push", "./elsewhere", "org/name"], "Error: './elsewhere' is neither a folder nor the id of a repository"),
        (["push", full, "org/name"], "Error: Cannot reach .*offline mode is enabled.*HF_HUB_OFFLINE"),
        (["card", full, "--results", "missing.jsonl"], "missing.jsonl is not a file"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert re.search(message, capsys.readouterr().err)
    main(["push", full, "org/name", "--dry-run"])
    assert capsys.readouterr().out.endswith("Dry run: nothing was sent.\n")


# What fails


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({"status": 503}, "was given up (HfHubHTTPError: Server error '503"),
        ({"change": lambda body: b"<html>"}, "or only the answer was lost: push again, what was uploaded is not sent again"),
    ],
    ids=["503", "unreadable"],
)
def test_a_commit_that_fails_changes_nothing(
    hub: HubServer,
    push: Callable[..., Done],
    folders: dict[str, Path],
    repo: str,
    fault: dict[str, Any],
    seen: str,
) -> None:
    """But one of which only the answer was lost: the next push finds nothing to do."""
    revision = "new-branch"
    commit = hub.commit(repo, {"notes.txt": b"", "config.json": (folders["full"] / "config.json").read_bytes()})
    refs, before = {**hub.repository(repo).refs}, hashes(folders["full"])
    hub.fail("POST .*/commit/", **fault)
    done = push(folders["full"], repo, revision=revision)
    assert seen in str(done.error)
    assert hashes(folders["full"]) == before
    if "status" in fault:
        assert hub.repository(repo).read("main").oid == commit
        assert hub.repository(repo).refs == refs, "no empty branch is left"
    assert push(folders["full"], repo, revision=revision).error is None
    assert titles(hub, repo, revision).count("Upload a full model") == 1


def test_somebody_elses_commit_is_not_overwritten(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    push(folders["full"], repo)

    def meanwhile(body: bytes) -> bytes:
        hub.commit(repo, {"README.md": b"theirs"})
        return body

    hub.fail("POST .*/preupload/", change=meanwhile)
    done = push(folders["shards"], repo)
    assert "ConnectionError: the push was given up" in str(done.error)
    assert hub.files(repo)["README.md"] == b"theirs"
    assert "model.safetensors.index.json" not in hub.files(repo)


@pytest.mark.parametrize(
    ("token", "owner"),
    [("hf_wrong", "org"), ("hf_reader", "org")],
    ids=["wrong", "read-only"],
)
def test_a_token_that_may_not_write_is_named(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], token: str, owner: str
) -> None:
    done = push(folders["full"], f"{owner}/not-mine", token=token)
    assert "was given up" in str(done.error)
    assert "comes from `hf auth login`" in str(done.error)
    assert f"{owner}/not-mine" not in hub.repositories
