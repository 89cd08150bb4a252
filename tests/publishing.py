"""What tests of publishing share: saved checkpoints, a Hub on loopback, and a process that pushes to it."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, make_model
from hub_client import Done, HubClient
from hub_server import HubServer
from safetensors.torch import save_file

__all__ = ["client", "folders", "hub", "push", "repo", "server", "titles"]


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
