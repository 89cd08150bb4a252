"""Faults of a push to a loopback Hub: what is survived, and what the others leave."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import hashes
from hub_client import Done
from hub_server import HubServer
from publishing import client, folders, hub, push, repo, server, titles

__all__ = ["client", "folders", "hub", "push", "repo", "server"]  # fixtures


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({"status": 503}, "was given up (HfHubHTTPError: Server error '503"),
        ({"change": lambda body: b"<html>"}, "or only the answer was lost: push again"),
        ({"status": 403}, "was given up (HfHubHTTPError"),
    ],
    ids=["503", "unreadable", "403"],
)
@pytest.mark.parametrize("revision", [None, "new-branch"])
def test_a_commit_that_fails_changes_nothing(
    hub: HubServer,
    push: Callable[..., Done],
    folders: dict[str, Path],
    repo: str,
    fault: dict[str, Any],
    seen: str,
    revision: str | None,
) -> None:
    """But one of which only the answer was lost: the next push finds nothing to do."""
    commit = hub.commit(repo, {"notes.txt": b"", "config.json": (folders["full"] / "config.json").read_bytes()})
    refs, before = hub.repository(repo).state["refs"], hashes(folders["full"])
    hub.fail("POST .*/commit/", **fault)
    done = push(folders["full"], repo, revision=revision)
    assert seen in str(done.error)
    assert hashes(folders["full"]) == before
    if "status" in fault:
        assert hub.repository(repo).read("main").oid == commit
        assert hub.repository(repo).state["refs"] == refs, "no empty branch is left"
    assert push(folders["full"], repo, revision=revision).error is None
    assert titles(hub, repo, revision or "main").count("Upload a full model") == 1


def test_after_a_broken_upload_only_the_rest_is_sent(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str
) -> None:
    hub.fail("PUT /", status=400, skip=1, times=99)
    done = push(folders["shards"], repo)
    assert "what was uploaded is not sent again" in str(done.error)
    assert titles(hub, repo) == ["initial commit"]
    assert set(hub.files(repo)) == {".gitattributes"}
    shards = sorted(path.name for path in folders["shards"].glob("*.safetensors"))
    arrived = [logged for logged in hub.asked("PUT /") if logged.status == 200]
    assert len(arrived) == 1
    hub.faults.clear()
    assert push(folders["shards"], repo).error is None
    assert len([logged for logged in hub.asked("PUT /") if logged.status == 200]) == len(shards)
    assert {name: hub.files(repo)[name] for name in shards} == {n: (folders["shards"] / n).read_bytes() for n in shards}


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
    [("hf_wrong", "org"), ("hf_reader", "org"), ("hf_alice", "others")],
    ids=["wrong", "read-only", "others"],
)
def test_a_token_that_may_not_write_is_named(
    hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], token: str, owner: str
) -> None:
    done = push(folders["full"], f"{owner}/not-mine", token=token)
    assert "was given up" in str(done.error)
    assert "comes from `hf auth login`" in str(done.error)
    assert hub.store.find(f"{owner}/not-mine") is None
