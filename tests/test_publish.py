"""Publishing through a loopback Hub: what arrives, what is refused, and what failures leave."""

import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, make_model
from helpers import hashes
from hub_client import Done, HubClient
from hub_server import HubServer
from huggingface_hub import ModelCard
from mrp_trainer.publish import main
from mrp_trainer.publishing import publish
from mrp_trainer.publishing.card import check_card, is_own_card
from mrp_trainer.publishing.folder import read_folder
from safetensors.torch import save_file

from modeling_mrp import MRPForCausalLM
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
            import pathlib
            from mrp_trainer.publishing import Retries, publish
            quick = Retries(**{{"times": 2, "first_wait": 0.01, "longest_wait": 5, **{options.pop("retries", {})!r}}})
            print(publish({str(folder)!r}, {repo_id!r}, retries=quick, **{options!r}))
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
    assert hub.repository(repo).state["private"] is True
    assert titles(hub, repo) == ["Upload a full model", "initial commit"]
    files = hub.files(repo)
    assert {name: files[name] for name in USED} == {name: (folders["full"] / name).read_bytes() for name in USED}
    assert {name: content for name, content in files.items() if name.endswith(".py")} == PACKAGE
    assert set(files) == {*USED, *PACKAGE, "README.md", ".gitattributes"}
    assert f'AutoModel.from_pretrained("{repo}", trust_remote_code=True)' in files["README.md"].decode()
    assert hashes(folders["full"]) == before
    assert {logged.server for logged in hub.requests} == {"hub", "storage"}


def test_what_was_pushed_loads_and_serves_stock_models(
    hub: HubServer, client: HubClient, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    """From the Hub's own bytes, by remote code; a stock model by `custom_generate`, its weights of the commit of its code."""
    assert push(folders["shards"], repo).error is None
    done = client.run(
        f"""
        import sys, torch
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained({repo!r}, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules.org.")
        ids = torch.arange(1, 8)[None]
        print(model.generate(ids, decoding="mrp_spec", max_new_tokens=12).tolist())
        from stock import stock_of
        stock = stock_of(model)
        options = dict(custom_generate={repo!r}, trust_remote_code=True, decoding="mrp_spec", max_new_tokens=12)
        print(stock.generate(ids, **options).tolist())
        """
    )
    assert done.error is None
    model = MRPForCausalLM.from_pretrained(folders["full"])
    expected = model.generate(torch.arange(1, 8)[None], decoding="mrp_spec", max_new_tokens=12).tolist()
    assert done.printed == f"{expected}\n" * 2


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_a_head_and_an_adapter_arrive(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str, kind: str
) -> None:
    assert push(folders[kind], repo, private=False).error is None
    files = hub.files(repo)
    weights = {"head": "model.safetensors", "adapter": "adapter_model.safetensors"}[kind]
    own = {"head": {*USED, *PACKAGE}, "adapter": {weights, "adapter_config.json"}}[kind]
    assert set(files) == {*own, "README.md", ".gitattributes"}
    assert files[weights] == (folders[kind] / weights).read_bytes()
    assert hub.repository(repo).state["private"] is False
    base = {"head": "org/backbone", "adapter": "org/head"}[kind]
    assert f"base_model: {base}\n" in files["README.md"].decode()
    assert "base_model_relation: adapter\n" in files["README.md"].decode()
    assert ("\n- speculators\n- draft-model\n" in files["README.md"].decode()) == (kind == "head")


def test_of_a_model_with_a_peft_adapter_the_adapter_is_published(
    hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str
) -> None:
    """Under the name of the model it was made for; a local path is none."""
    prepared = f"""
        import warnings
        from peft import LoraConfig
        from modeling_mrp import MRPForCausalLM
        warnings.simplefilter("ignore")
        model = MRPForCausalLM.from_pretrained({str(folders["full"])!r})
        model.add_adapter(LoraConfig(r=2, target_modules=["eh_proj"]))
    """
    done = client.run(f"{prepared}    model.push_to_hub({repo!r})")
    assert f"base_model is '{folders['full']}': it must be the id of a model on the Hub" in str(done.error)
    assert hub.requests == []
    done = client.run(
        f"""{prepared}
        model.peft_config["default"].base_model_name_or_path = "org/head"
        print(model.push_to_hub({repo!r}).commit_message)
        """
    )
    assert (done.printed, done.error) == ("Upload an adapter\n", None)
    assert set(hub.files(repo)) == {"adapter_config.json", "adapter_model.safetensors", "README.md", ".gitattributes"}


def test_a_loaded_model_pushes_itself(hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str) -> None:
    """In one commit, with a card of a few lines that a push of the command replaces."""
    done = client.run(
        f"""
        from modeling_mrp import MRPForCausalLM
        model = MRPForCausalLM.from_pretrained({str(folders["full"])!r})
        done = model.push_to_hub({repo!r}, commit_message="My first", max_shard_size="40KB")
        print(done.oid)
        model.save_pretrained("again", push_to_hub=True, repo_id={repo!r}, revision="second")
        print(model.push_to_hub({repo!r}, create_pr=True).pr_url)
        """
    )
    assert done.error is None
    first, pull_request = done.printed.split()
    assert pull_request.endswith(f"/{repo}/discussions/1")
    assert titles(hub, repo) == ["My first", "initial commit"]
    assert hub.repository(repo).read("main").oid == first
    assert hub.repository(repo).state["private"] is True
    shards = {name for name in hub.files(repo) if name.startswith("model-0000")}
    assert len(shards) > 1
    assert titles(hub, repo, "second")[0] == "Upload a full model"
    for revision in ("second", "refs/pr/1"):
        assert not shards & set(hub.files(repo, revision)), "what the earlier push left is removed in the same commit"
        assert hub.files(repo, revision)["model.safetensors"] == (folders["full"] / "model.safetensors").read_bytes()
    card = hub.files(repo)["README.md"].decode()
    check_card(card)
    assert "Here is a full model. Nothing is told of it yet" in card
    assert not is_own_card(card)


@pytest.mark.parametrize("there", ["full", "adapter", "other"])
def test_a_loaded_model_overwrites_nothing_of_another_kind(
    hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str, there: str
) -> None:
    """And a commit that fails, or that somebody else was faster than, leaves the repository as it was."""
    files = {"notes.bin": b"1"} if there == "other" else {p.name: p.read_bytes() for p in folders[there].glob("*.json")}
    commit = hub.commit(repo, files)
    head = f"""
        from modeling_mrp import MRPForCausalLM
        model = MRPForCausalLM.from_pretrained({str(folders["full"])!r})
        model.push_to_hub({{!r}}, head_only=True, base_model_name_or_path="org/b")
    """
    done = client.run(head.format(repo))
    assert "and what is pushed is an MRP head: push it to a repository of its own" in str(done.error)
    assert {logged.method for logged in hub.requests} <= {"GET", "HEAD"}
    assert hub.repository(repo).read("main").oid == commit


@pytest.mark.parametrize("failure", ["refused", "late"])
def test_a_loaded_models_commit_is_made_whole_or_not_at_all(
    hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str, failure: str
) -> None:
    hub.commit(repo, {"README.md": b"mine"})

    def meanwhile(body: bytes) -> bytes:
        hub.commit(repo, {"README.md": b"theirs"})
        return body

    if failure == "refused":
        hub.fail("POST .*/commit/", status=400)
    else:
        hub.fail("POST .*/preupload/", change=meanwhile)
    push = f"""
        from modeling_mrp import MRPForCausalLM
        MRPForCausalLM.from_pretrained({str(folders["full"])!r}).push_to_hub({repo!r})
    """
    assert {"refused": "BadRequestError: ", "late": "412 Precondition Failed"}[failure] in str(client.run(push).error)
    assert set(hub.files(repo)) == {".gitattributes", "README.md"}
    hub.faults.clear()
    assert client.run(push).error is None
    assert hub.files(repo)["README.md"] == {"refused": b"mine", "late": b"theirs"}[failure], "a card that is there is kept"


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


def test_a_branch_or_a_pull_request_leaves_main_alone(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    push(folders["full"], repo)
    main_files = hub.files(repo)
    assert push(folders["shards"], repo, revision="try/2").error is None
    done = push(folders["shards"], repo, create_pr=True)
    assert done.printed.strip().endswith(f"/{repo}/discussions/1")
    assert hub.files(repo) == main_files
    for revision in ("try/2", "refs/pr/1"):
        files = hub.files(repo, revision)
        assert "model.safetensors.index.json" in files
        assert "model.safetensors" not in files, "what the earlier push left is removed in the same commit"


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
    assert len(hub.asked("PUT /")) == 1


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


def test_a_given_card_is_published(hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str) -> None:
    done = client.run(
        f"""
        from huggingface_hub import ModelCard
        from mrp_trainer.publishing import publish
        publish({str(folders["full"])!r}, {repo!r}, card=ModelCard({WRITTEN!r}))
        """
    )
    assert done.error is None
    assert hub.files(repo)["README.md"].decode() == WRITTEN


def test_what_a_kept_card_would_not_say_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "README.md").write_text(WRITTEN)
    with pytest.raises(ValueError, match="was written by a person and is kept, so that results, about and tags would say"):
        publish(folder, "org/name", tags=["new"])
    assert publish(folder, "org/name", tags=["new"], new_card=True, dry_run=True).sizes["README.md"] > len(WRITTEN)


def test_a_card_that_the_hub_would_refuse_stays_here(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], tmp_path: Path, repo: str
) -> None:
    folder = shutil.copytree(folders["full"], tmp_path / "model")
    (folder / "README.md").write_text(WRITTEN.replace("mit", "mine"))
    assert "license is 'mine'" in str(push(folder, repo).error)
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
    assert client.run(f"from mrp_trainer.publish import main; main({arguments!r})").error is None
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
    assert client.run(f"from mrp_trainer.publish import main; main({arguments!r})").error is None
    assert hub.files(repo)["README.md"].decode() == WRITTEN


# What is refused


@pytest.mark.parametrize(
    ("there", "pushed", "held"),
    [
        ("head", "full", "an MRP head, and what is pushed is a full model"),
        ("full", "head", "a full model, and what is pushed is an MRP head"),
        ("adapter", "head", "an adapter, and what is pushed is an MRP head"),
        ("full", "adapter", "a full model, and what is pushed is an adapter"),
        ({"config.json": b'{"model_type": "llama"}'}, "full", "a model of type 'llama', and what is pushed is a full model"),
        ({"config.json": b"[]"}, "full", "a config.json that cannot be read, and"),
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
        ("org/name", {"about": "missing.md"}, "missing.md is not a file"),
        ("org/name", {"card": ModelCard(WRITTEN), "tags": ["a"]}, "is published as it is: leave out results, about, tags"),
        ("org/name", {"card": ModelCard(WRITTEN), "new_card": True}, "leave out results, about, tags and new_card"),
    ],
)
def test_a_wrong_argument_is_refused(folders: dict[str, Path], repo_id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        publish(folders["full"], repo_id, **options)


@pytest.mark.parametrize(
    ("repo_id", "options", "kind", "message"),
    [
        ("org/name", {"privat": True}, TypeError, "unexpected keyword argument 'privat'"),
        ("a/b/c", {}, ValueError, "Repo id must be in the form"),
        ("org/name", {"revision": "b", "create_pr": True}, ValueError, "push to a branch, or open a pull request"),
    ],
)
def test_a_loaded_model_is_not_written_for_a_wrong_argument(
    repo_id: str, options: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no folder for temporary files, which would be another error."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(FileNotFoundError):
        make_model().push_to_hub("org/name")
    with pytest.raises(kind, match=message):
        make_model().push_to_hub(repo_id, **options)


def test_a_name_without_an_owner_is_the_users(hub: HubServer, client: HubClient, folders: dict[str, Path]) -> None:
    """Of a model that pushes itself, that is saved and pushed, and of the command, whose dry run cannot know who it is."""
    done = client.run(
        f"""
        from mrp_trainer.publish import main
        from modeling_mrp import MRPForCausalLM
        model = MRPForCausalLM.from_pretrained({str(folders["full"])!r})
        print(model.push_to_hub("mine").commit_url.split("/commit/")[0])
        model.save_pretrained("saved", push_to_hub=True)
        main(["push", {str(folders["head"])!r}, "my-head"])
        """
    )
    assert done.error is None
    assert done.printed.startswith(f"{hub.url}/alice/mine\nan MRP head to alice/my-head (branch main; private if it is new)\n")
    for name, kind in (("mine", "a full model"), ("saved", "a full model"), ("my-head", "an MRP head")):
        assert titles(hub, f"alice/{name}") == [f"Upload {kind}", "initial commit"]
    assert '"alice/my-head"' in hub.files("alice/my-head")["README.md"].decode()
    dry = publish(folders["head"], "my-head", dry_run=True)
    assert str(dry).startswith("an MRP head to my-head of your own (branch main;")


def test_a_name_without_an_owner_needs_a_user(folders: dict[str, Path]) -> None:
    for push in (make_model().push_to_hub, lambda name, **how: publish(folders["full"], name, **how)):
        with pytest.raises(ValueError, match=r"Cannot use `token=False` with `whoami`"):
            push("mine", token=False)


def test_a_dry_run_makes_no_connection(hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str) -> None:
    done = push(folders["full"], repo, dry_run=True, revision="b", private=False)
    assert done.error is None
    size = (folders["full"] / "model.safetensors").stat().st_size
    assert f"{size:>15,}  model.safetensors\n" in done.printed
    assert f"a full model to {repo} (branch b; public if it is new)" in done.printed
    assert done.printed.endswith("Dry run: nothing was sent.\n")
    assert hub.requests == []


# What failures leave


@pytest.mark.parametrize(
    "fault",
    [
        {"pattern": "POST .*/commit/", "status": 503},
        {"pattern": "POST .*/commit/", "status": 429, "headers": {"Retry-After": "1"}},
        {"pattern": "POST .*/commit/", "cut_request_at": 100},
        {"pattern": "POST .*/commit/", "cut_response_at": 0},
        {"pattern": "POST .*/commit/", "change": b"<html>"},
        {"pattern": "POST .*/commit/", "change": b"[]"},
        *(
            {"pattern": pattern, "silent": True}
            for pattern in ("GET /api/models/", "POST .*/batch", "PUT /", "POST .*/commit/")
        ),
        {"pattern": "GET /api/models/", "status": 500},
        {"pattern": "GET /api/models/", "cut_response_at": 20},
        {"pattern": "POST /api/repos/create", "status": 502},
        {"pattern": "PUT /", "cut_request_at": 5000},
    ],
    ids=lambda fault: "-".join(map(str, fault.values())).replace("/", " "),
)
def test_a_passing_failure_is_survived(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str, fault: dict[str, Any]
) -> None:
    """One commit, whole, whatever failed once; also where the commit was made and only its answer was lost or is unreadable."""
    body = fault.get("change")
    hub.fail(**fault | ({} if body is None else {"change": lambda _: body}))
    done = push(folders["full"], repo, retries={"timeout": 2.0} if "silent" in fault else {})
    assert done.error is None
    assert not [left for left in hub.faults if left.times], "it did strike"
    assert titles(hub, repo) == ["Upload a full model", "initial commit"]
    assert done.printed.strip().endswith(hub.repository(repo).read("main").oid)
    assert hub.files(repo)["model.safetensors"] == (folders["full"] / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("fault", "seen", "attempts"),
    [
        ({"status": 503}, "was given up (HfHubHTTPError: Server error '503", 3),
        ({"cut_request_at": 100}, "was given up (", 3),
        ({"status": 429, "headers": {"Retry-After": "3600"}}, "wait 3600 s, then push again", 1),
        ({"status": 400}, "was given up (", 1),
        ({"status": 403}, "PermissionError: the token may not write to", 1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("revision", [None, "new-branch"])
def test_a_commit_that_fails_changes_nothing(
    hub: HubServer,
    push: Callable[..., Done],
    folders: dict[str, Path],
    repo: str,
    fault: dict[str, Any],
    seen: str,
    attempts: int,
    revision: str | None,
) -> None:
    commit = hub.commit(repo, {"notes.txt": b"", "config.json": (folders["full"] / "config.json").read_bytes()})
    refs, before = hub.repository(repo).state["refs"], hashes(folders["full"])
    hub.fail("POST .*/commit/", times=99, **fault)
    done = push(folders["full"], repo, revision=revision)
    assert done.error is not None
    assert seen in done.error
    assert "Error: " in done.error
    assert len(hub.asked("POST .*/commit/")) == attempts
    assert hub.repository(repo).read("main").oid == commit
    assert hub.repository(repo).state["refs"] == refs, "no empty branch is left"
    assert hashes(folders["full"]) == before


def test_a_silent_hub_is_given_up(hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str) -> None:
    """After as long as was said, not after all attempts."""
    hub.fail("GET /api/models/", silent=True, times=99)
    begun = time.monotonic()
    done = push(folders["full"], repo, retries={"times": 99, "timeout": 0.2, "longest_silence": 0.5})
    assert 0.5 < time.monotonic() - begun < 20
    assert re.search(
        r"was given up \(\w*Timeout.*: .*\) after \d+ s\. Its files and your folder are as they were", str(done.error)
    )
    assert len(hub.asked("GET /api/models/")) <= 4  # fewer where huggingface_hub has a bound of its own, of 10 s


@pytest.mark.parametrize("pattern", ["GET /api/models/", "GET /.*/resolve/"])
def test_a_repository_that_is_to_be_copied_is_not_waited_for(
    hub: HubServer, push: Callable[..., Done], client: HubClient, folders: dict[str, Path], repo: str, pattern: str
) -> None:
    """Whichever request of its download is not answered: nothing is pushed, and the next try does."""
    push(folders["full"], repo)
    target = f"alice/{repo.split('/')[1]}"
    hub.fail(pattern, silent=True, times=99)
    copy = f"""
        from huggingface_hub import get_session, constants, file_download
        from mrp_trainer import publish
        publish.PATIENCE = constants.HF_HUB_DOWNLOAD_TIMEOUT = file_download._ETAG_RETRY_TIMEOUT = 0.3
        constants.HF_HUB_ETAG_TIMEOUT = 0.3
        publish.main(["push", {repo!r}, {target!r}])
        """
    begun = time.monotonic()
    done = client.run(copy)
    assert time.monotonic() - begun < 60
    assert f"SystemExit: push: the download of {repo} was given up (" in str(done.error)
    assert hub.store.find(target) is None
    hub.faults.clear()
    assert client.run(copy).error is None
    assert hub.files(target)["model.safetensors"] == hub.files(repo)["model.safetensors"]


def test_a_loaded_model_asks_what_became_of_its_commit(
    hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str
) -> None:
    """Its answer is unreadable; and of a silent Hub it does not wait for more, here not longer than a user's own timeout."""
    push_itself = f"""
        from modeling_mrp import MRPForCausalLM
        from huggingface_hub import get_session
        get_session().timeout = {{}}
        try:
            print(MRPForCausalLM.from_pretrained({str(folders["full"])!r}).push_to_hub({repo!r}).oid)
        finally:
            assert get_session().timeout.read == {{}}
            get_session().timeout = None
        """
    hub.fail("POST .*/commit/", change=lambda _: b"<html>")
    done = client.run(push_itself.format(None, None))
    assert (done.error, done.printed.strip()) == (None, hub.repository(repo).read("main").oid)
    hub.fail("GET /api/models/", silent=True)
    assert "Timeout" in str(client.run(push_itself.format(0.5, 0.5)).error)
    assert titles(hub, repo) == ["Upload a full model", "initial commit"]


def test_after_a_broken_upload_only_the_rest_is_sent(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    hub.fail("PUT /", status=400, skip=1, times=99)
    done = push(folders["shards"], repo)
    assert "its files and your folder are as they were; push again" in str(done.error).lower()
    assert "what was uploaded already is not sent again" in str(done.error)
    assert titles(hub, repo) == ["initial commit"]
    assert set(hub.files(repo)) == {".gitattributes"}
    shards = sorted(path.name for path in folders["shards"].glob("*.safetensors"))
    arrived = [logged for logged in hub.asked("PUT /") if logged.status == 200]
    assert len(arrived) == 1
    hub.faults.clear()
    assert push(folders["shards"], repo).error is None
    assert len([logged for logged in hub.asked("PUT /") if logged.status == 200]) == len(shards)
    assert {name: hub.files(repo)[name] for name in shards} == {n: (folders["shards"] / n).read_bytes() for n in shards}


def test_a_lost_answer_does_not_open_a_second_pull_request(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    push(folders["full"], repo)
    hub.fail("POST .*/commit/", cut_response_at=0)
    done = push(folders["shards"], repo, create_pr=True)
    assert f"after a look at the pull requests of {repo}: the last one may be this push's" in str(done.error)
    assert len(hub.repository(repo).state["discussions"]) == 1
    hub.fail("POST .*/commit/", status=503)
    assert push(folders["shards"], repo, create_pr=True).error is None, "nothing was done by what answered 503"
    assert len(hub.repository(repo).state["discussions"]) == 2


def test_somebody_elses_commit_is_not_overwritten(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    push(folders["full"], repo)

    def meanwhile(body: bytes) -> bytes:
        hub.commit(repo, {"README.md": b"theirs"})
        return body

    hub.fail("POST .*/preupload/", change=meanwhile)
    done = push(folders["shards"], repo)
    assert f"ConnectionError: somebody else committed to {repo} (main) meanwhile, and that is kept" in str(done.error)
    assert hub.files(repo)["README.md"] == b"theirs"
    assert "model.safetensors.index.json" not in hub.files(repo)


@pytest.mark.parametrize(
    ("token", "owner"),
    [("hf_wrong", "org"), ("hf_reader", "org"), ("hf_alice", "others")],
    ids=["wrong", "read-only", "others"],
)
def test_a_token_that_may_not_write_is_named(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], token: str, owner: str
) -> None:
    done = push(folders["full"], f"{owner}/not-mine", token=token)
    assert str(done.error).startswith(f"PermissionError: the token may not write to {owner}/not-mine")
    assert "log in with `hf auth login`" in str(done.error)
    assert hub.store.find(f"{owner}/not-mine") is None


# The command


def test_the_command_pushes_and_copies(hub: HubServer, client: HubClient, folders: dict[str, Path], repo: str) -> None:
    done = client.run(
        f"""
        from mrp_trainer.publish import main
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
    assert hub.repository(repo).state["private"] is False
    assert hub.repository("alice/copy").state["private"] is True
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
        (["push", "org/elsewhere", "org/name"], "^push: org/elsewhere is no folder, .* not in the cache: .*HF_HUB_OFFLINE"),
        (["push", "./elsewhere", "org/name"], "^push: './elsewhere' is neither a folder nor the id of a repository"),
        (["push", full, "org/name"], "^push: Cannot reach .*offline mode is enabled.*HF_HUB_OFFLINE"),
        (["card", full, "--results", "missing.jsonl"], "missing.jsonl is not a file"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
    with pytest.raises(SystemExit):
        main(["push", full, "org/name", "--branch", "b", "--pull-request"])
    assert "not allowed with argument" in capsys.readouterr().err
    main(["push", full, "org/name", "--dry-run"])
    assert capsys.readouterr().out.endswith("Dry run: nothing was sent.\n")
