"""Faults of a push to a loopback Hub: what is survived, and what the others leave."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import hashes
from hub_client import Done, HubClient
from hub_server import HubServer
from publishing import client, folders, hub, push, repo, server, titles

__all__ = ["client", "folders", "hub", "push", "repo", "server"]  # fixtures


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
    done = push(folders["full"], repo, retries={"times": 99, "timeout": 0.2, "longest_silence": 0.5})
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
    done = client.run(copy)
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
