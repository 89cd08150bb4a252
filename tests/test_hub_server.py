"""huggingface_hub's own calls, in fresh processes, against the Hub on loopback that other tests use; and what it refuses."""

import hashlib
import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hub_server import HubServer, run_python

CARD = b"""---
license: apache-2.0
library_name: transformers
base_model: org/base
base_model_relation: adapter
tags: [mrp]
---
# Hi
"""
WEIGHTS = bytes(range(256)) * 200
CONFIG = b'{"model_type": "sdar_mrp"}'

# What every script below starts with.
CLIENT = """
import os
from huggingface_hub import CommitOperationAdd as Add, CommitOperationDelete as Delete, HfApi
from huggingface_hub.errors import *
api = HfApi()
def refused(kind, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        return error
    raise AssertionError(f"{call.__name__} was not refused")
"""


def client(hub: HubServer, tmp_path: Path, code: str, token: str | None = "hf_alice", **more: str) -> str:
    """What a script prints in a process of its own."""
    lines = [line.removeprefix("        ") for line in code.splitlines()]
    return run_python("\n".join([CLIENT, *lines]), tmp_path, hub.environment(tmp_path, token, **more))


def ask(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of a plain request."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def test_a_folder_goes_up_in_one_commit_and_comes_down_equal(hub: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    files = {"README.md": CARD, "config.json": CONFIG, "model.safetensors": WEIGHTS, "sub/notes.txt": b"", "sub/b.bin": b"\0\1"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    client(
        hub,
        tmp_path,
        """
        assert api.whoami()["name"] == "alice"
        assert api.create_repo("org/model", private=True).repo_id == "org/model"
        api.upload_folder(repo_id="org/model", folder_path="folder", commit_message="all of it")
        """,
    )
    stored = hub.files("org/model")
    assert {name: stored[name] for name in files} == files
    assert set(stored) == {*files, ".gitattributes"}
    history = hub.repository("org/model").history("main")
    assert [commit.title for commit in history] == ["all of it", "initial commit"]
    assert {path for path, entry in history[0].files.items() if entry.lfs} == {"model.safetensors", "sub/b.bin"}
    client(
        hub,
        tmp_path,
        f"""
        import hashlib
        from huggingface_hub import hf_hub_download, snapshot_download
        path = hf_hub_download("org/model", "sub/b.bin")
        assert open(path, "rb").read() == b"\\0\\1"
        snapshot = snapshot_download("org/model")
        assert snapshot.endswith({history[0].oid!r}) and path.startswith(snapshot)
        found = {{}}
        for root, _, names in os.walk(snapshot):
            for name in names:
                path = os.path.join(root, name)
                found[os.path.relpath(path, snapshot)] = hashlib.sha256(open(path, "rb").read()).hexdigest()
        assert found == { ({name: hashlib.sha256(content).hexdigest() for name, content in stored.items()})!r}
        """,
    )
    assert all("authorization" not in logged.headers for logged in hub.requests if logged.server == "storage")
    assert len(hub.asked("PUT /org/model/objects/")) == len(hub.asked("GET /org/model/objects/")) == 2


def test_what_the_hub_tells_of_a_repository(hub: HubServer, tmp_path: Path) -> None:
    first = hub.commit("org/model", {"README.md": CARD, "config.json": CONFIG, "a/b/c.txt": b"1"}, private=True)
    head = hub.commit("org/model", {"model.safetensors": WEIGHTS})
    client(
        hub,
        tmp_path,
        f"""
        info = api.model_info("org/model", files_metadata=True)
        assert (info.sha, info.private, info.library_name) == ({head!r}, True, "transformers")
        assert set(info.tags) >= {{"mrp", "license:apache-2.0", "base_model:adapter:org/base", "sdar_mrp"}}
        assert info.card_data.base_model == "org/base"
        sizes = {{sibling.rfilename: (sibling.size, sibling.lfs and sibling.lfs.sha256) for sibling in info.siblings}}
        assert sizes["model.safetensors"] == ({len(WEIGHTS)}, {hashlib.sha256(WEIGHTS).hexdigest()!r})
        assert sizes["config.json"] == ({len(CONFIG)}, None)
        assert api.model_info("org/model", revision={first[:8]!r}).sha == {first!r}
        names = [".gitattributes", "README.md", "a/b/c.txt", "config.json", "model.safetensors"]
        assert sorted(api.list_repo_files("org/model")) == names
        assert {{item.path for item in api.list_repo_tree("org/model", "a", recursive=True)}} == {{"a/b", "a/b/c.txt"}}
        assert {{item.path for item in api.list_repo_tree("org/model", "a")}} == {{"a/b"}}
        assert {{item.path for item in api.get_paths_info("org/model", ["a", "config.json", "none"])}} == {{"a", "config.json"}}
        assert [commit.commit_id for commit in api.list_repo_commits("org/model")][:2] == [{head!r}, {first!r}]
        assert api.file_exists("org/model", "a/b/c.txt") and not api.file_exists("org/model", "a/b")
        api.create_tag("org/model", tag="v1", revision={first!r})
        assert [tag.target_commit for tag in api.list_repo_refs("org/model").tags] == [{first!r}]
        api.auth_check("org/model")
        api.update_repo_settings("org/model", private=False)
        """,
    )
    assert hub.repository("org/model").state["private"] is False


def test_who_may_do_what(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("org/secret", {"config.json": CONFIG}, private=True)
    hub.commit("org/open", {"config.json": CONFIG})
    hub.add_user("reader", token="hf_reader", organizations=["org"], can_write=False)
    client(
        hub,
        tmp_path,
        """
        def status(call, *args, kind=HfHubHTTPError, **options):
            return refused(kind, call, *args, **options).response.status_code
        nobody, bob, reader = HfApi(token=False), HfApi(token="hf_bob"), HfApi(token="hf_reader")
        for asks, number in ((nobody, 401), (bob, 404)):
            assert status(asks.model_info, "org/secret", kind=RepositoryNotFoundError) == number
            assert status(asks.hf_hub_download, "org/secret", "config.json", kind=RepositoryNotFoundError) == number
            assert status(asks.model_info, "org/none", kind=RepositoryNotFoundError) == number
        assert reader.model_info("org/secret").private and nobody.model_info("org/open").sha
        assert status(HfApi(token="hf_wrong").whoami) == 401
        files = [Add("x.txt", b"x")]
        assert status(nobody.create_commit, "org/open", files, commit_message="m") == 401
        for asks in (bob, reader):
            assert status(asks.create_commit, "org/open", files, commit_message="m") == 403
            assert status(asks.create_repo, "org/new") == 403
        assert "409" in str(refused(HfHubHTTPError, api.create_repo, "org/open"))
        api.create_repo("org/open", exist_ok=True)
        assert status(api.model_info, "org/open", revision="none", kind=RevisionNotFoundError) == 404
        assert status(api.hf_hub_download, "org/open", "none", kind=RemoteEntryNotFoundError) == 404
        assert status(api.delete_branch, "org/open", branch="main") == 403
        """,
    )
    assert set(hub.files("org/open")) == {".gitattributes", "config.json"}
    assert set(hub.store.repositories) == {"org/secret", "org/open"}


def test_branches_and_pull_requests(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("org/model", {"config.json": CONFIG})
    client(
        hub,
        tmp_path,
        """
        api.create_branch("org/model", branch="trial/one")
        assert "409" in str(refused(HfHubHTTPError, api.create_branch, "org/model", branch="trial/one"))
        api.create_branch("org/model", branch="trial/one", exist_ok=True)
        api.create_commit("org/model", [Add("b.txt", b"on the branch")], commit_message="b", revision="trial/one")
        refused(RevisionNotFoundError, api.create_commit, "org/model", [Add("b.txt", b"")], commit_message="b", revision="none")
        bob = HfApi(token="hf_bob")
        opened = bob.create_commit("org/model", [Add("w.safetensors", b"of Bob")], commit_message="mine", create_pr=True)
        assert opened.pr_num == 1 and opened.pr_revision == "refs/pr/1"
        bob.create_commit("org/model", [Add("c.txt", b"more")], commit_message="more", revision="refs/pr/1")
        assert open(api.hf_hub_download("org/model", "w.safetensors", revision="refs/pr/1"), "rb").read() == b"of Bob"
        refs = api.list_repo_refs("org/model", include_pull_requests=True)
        assert [ref.name for ref in refs.branches] == ["main", "trial/one"]
        assert [ref.ref for ref in refs.pull_requests] == ["refs/pr/1"]
        """,
    )
    assert set(hub.files("org/model")) == {".gitattributes", "config.json"}
    assert hub.files("org/model", "trial/one")["b.txt"] == b"on the branch"
    client(
        hub,
        tmp_path,
        """
        discussion = next(api.get_repo_discussions("org/model"))
        assert (discussion.num, discussion.author, discussion.is_pull_request) == (1, "bob", True)
        assert api.create_pull_request("org/model", title="empty").num == 2
        api.merge_pull_request("org/model", 1)
        assert api.get_discussion_details("org/model", 1).status == "merged"
        api.delete_branch("org/model", branch="trial/one")
        """,
    )
    assert set(hub.files("org/model")) == {".gitattributes", "config.json", "w.safetensors", "c.txt"}
    assert set(hub.repository("org/model").state["refs"]) == {"refs/heads/main", "refs/pr/1", "refs/pr/2"}


def test_a_commit_is_whole_or_nothing(hub: HubServer, tmp_path: Path) -> None:
    base = hub.commit("org/model", {"config.json": CONFIG, "old/a.txt": b"a", "old/b.txt": b"b"})
    later = hub.commit("org/model", {"config.json": b"{}"})
    client(
        hub,
        tmp_path,
        f"""
        def commit(*operations, **options):
            return api.create_commit("org/model", operations, commit_message="m", **options)
        stale = refused(HfHubHTTPError, commit, Add("new.txt", b"n"), parent_commit={base!r})
        assert stale.response.status_code == 412
        assert "A file with this name doesn't exist" in str(
            refused(EntryNotFoundError, commit, Add("new.txt", b"n"), Delete("missing.txt")))
        bad = refused(ValueError, commit, Add("w.safetensors", b"w"), Add("README.md", b"---\\nlicense: mine\\n---\\n"))
        assert '"license" must be one of' in str(bad)
        """,
    )
    assert hub.repository("org/model").resolve("main") == later
    assert not hub.asked("PUT"), "a bad card is refused before any upload"
    client(
        hub,
        tmp_path,
        f"""
        operations = [Add("new.txt", b"n"), Delete("old/")]
        made = api.create_commit("org/model", operations, commit_message="m", parent_commit={later!r})
        again = api.create_commit("org/model", [Add("new.txt", b"n")], commit_message="nothing new")
        assert again.oid == made.oid
        """,
    )
    assert set(hub.files("org/model")) == {".gitattributes", "config.json", "new.txt"}


def test_an_interrupted_upload_is_resumed(hub: HubServer, tmp_path: Path) -> None:
    """A busy Hub, a storage that fails and one that cuts the connection are tried again; a lost commit changes nothing, and
    what was uploaded before it is not sent again."""
    hub.commit("org/model", {})
    hub.fail("POST .*/preupload/", status=429, headers={"Retry-After": "0"})
    hub.fail("PUT /org/model/objects/", cut_request_at=1000)
    hub.fail("POST .*/commit/", status=503)
    client(
        hub,
        tmp_path,
        f"""
        files = lambda: [Add("w.safetensors", {WEIGHTS!r}), Add("config.json", b"{{}}")]
        error = refused(HfHubHTTPError, api.create_commit, "org/model", files(), commit_message="m")
        assert error.response.status_code == 503
        assert api.list_repo_files("org/model") == [".gitattributes"]
        api.create_commit("org/model", files(), commit_message="m")
        """,
    )
    assert hub.files("org/model")["w.safetensors"] == WEIGHTS
    assert [logged.status for logged in hub.asked("POST .*/preupload/")] == [429, 200, 200]
    assert [logged.status for logged in hub.asked("PUT")] == [None, 200]


def test_a_cut_download_is_resumed_and_a_short_one_refused(hub: HubServer, tmp_path: Path) -> None:
    chunk = 10 * 2**20  # what huggingface_hub writes at a time, and resumes from
    big = bytes(chunk) + WEIGHTS
    hub.commit("org/model", {"w.safetensors": big, "x.safetensors": WEIGHTS, "config.json": CONFIG})
    hub.fail("HEAD .*config.json", status=500)
    hub.fail("GET /org/model/objects/", cut_response_at=chunk + 20000)
    hub.fail("GET /org/model/objects/", change=lambda body: body[:-1], skip=1)
    client(
        hub,
        tmp_path,
        f"""
        assert open(api.hf_hub_download("org/model", "config.json"), "rb").read() == {CONFIG!r}
        path = api.hf_hub_download("org/model", "w.safetensors")
        assert open(path, "rb").read() == bytes({chunk}) + {WEIGHTS!r}
        error = refused(OSError, api.hf_hub_download, "org/model", "x.safetensors")
        assert "should be of size {len(WEIGHTS)} but has size {len(WEIGHTS) - 1}" in str(error)
        blobs = os.path.join(os.path.dirname(path), "..", "..", "blobs")
        assert len(os.listdir(blobs)) == 2, "nothing of a broken download stays"
        """,
    )
    ranges = [logged.headers.get("range") for logged in hub.asked("GET /org/model/objects/")]
    assert ranges == [None, f"bytes={chunk}-", None]


def test_parts(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("org/model", {})
    hub.api.part_size = 20000
    client(
        hub,
        tmp_path,
        f"""
        api.create_commit("org/model", [Add("w.safetensors", {WEIGHTS!r})], commit_message="m")
        """,
    )
    assert hub.files("org/model")["w.safetensors"] == WEIGHTS
    assert [logged.path.rsplit("/", 1)[-1] for logged in hub.asked("PUT")] == ["1", "2", "3"]


def test_xet_is_refused(hub: HubServer, tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    hub.commit("org/model", {})
    client(
        hub,
        tmp_path,
        """
        error = refused(Exception, api.create_commit, "org/model", [Add("w.safetensors", b"w")], commit_message="m")
        assert "403" in str(error) and "xet" in str(error), error
        """,
        HF_HUB_DISABLE_XET="0",
    )
    assert set(hub.files("org/model")) == {".gitattributes"}


@pytest.mark.parametrize(
    ("asked", "status", "body", "said"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=7-", 206, b"789", "bytes 7-9/10"),
        ("bytes=7-99", 206, b"789", "bytes 7-9/10"),
        ("bytes=-2", 206, b"89", "bytes 8-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
    ],
)
def test_ranges(hub: HubServer, asked: str, status: int, body: bytes, said: str) -> None:
    head = hub.commit("org/model", {"digits.txt": b"0123456789"})
    found = ask(hub.url, "GET", "/org/model/resolve/main/digits.txt", Range=asked)
    assert (found[0], found[2], found[1]["Content-Range"]) == (status, body, said)
    assert (found[1]["X-Repo-Commit"], found[1]["ETag"]) == (head, f'"{git_hash(b"0123456789")}"')


def git_hash(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


HEADER = {"key": "header", "value": {"summary": "m"}}
GOOD = {"key": "file", "value": {"path": "a.txt", "content": "YQ==", "encoding": "base64"}}


@pytest.mark.parametrize(
    "bad",
    [
        {"key": "file", "value": {"path": "../a.txt", "content": "YQ=="}},
        {"key": "file", "value": {"path": "b/.git/hooks", "content": "YQ=="}},
        {"key": "file", "value": {"path": "b.txt", "content": "no base64"}},
        {"key": "lfsFile", "value": {"path": "w.safetensors", "algo": "sha256", "oid": "0" * 64, "size": 3}},
        {"key": "deletedFile", "value": {"path": "missing.txt"}},
        {"key": "unknown", "value": {"path": "b.txt"}},
        "cut in the mid",
    ],
)
def test_a_bad_line_undoes_the_whole_commit(hub: HubServer, bad: Any) -> None:
    head = hub.commit("org/model", {})
    body = "\n".join(json.dumps(line) for line in (HEADER, GOOD, bad))
    status, _, _ = ask(hub.url, "POST", "/api/models/org/model/commit/main", body.encode(), Authorization="Bearer hf_alice")
    assert status in (400, 404)
    assert hub.repository("org/model").resolve("main") == head
    good = "\n".join(json.dumps(line) for line in (HEADER, GOOD))
    assert ask(hub.url, "POST", "/api/models/org/model/commit/main", good.encode(), Authorization="Bearer hf_alice")[0] == 200
    assert hub.files("org/model")["a.txt"] == b"a"


def test_the_storage_takes_signed_links_only(hub: HubServer) -> None:
    hub.commit("org/secret", {"w.safetensors": WEIGHTS}, private=True)
    _, headers, _ = ask(hub.url, "GET", "/org/secret/resolve/main/w.safetensors", Authorization="Bearer hf_alice")
    link = headers["Location"].removeprefix(hub.storage_url)
    assert ask(hub.storage_url, "GET", link)[::2] == (200, WEIGHTS)
    assert ask(hub.storage_url, "GET", link.split("?")[0])[0] == 403
    assert ask(hub.storage_url, "PUT", link, b"changed")[0] == 403
    assert ask(hub.storage_url, "GET", link, Authorization="Bearer hf_alice")[0] == 400


def test_a_server_started_again_serves_what_was_stored(tmp_path: Path) -> None:
    with HubServer(tmp_path) as hub:
        head = hub.commit("org/model", {"a.txt": b"a"})
    with HubServer(tmp_path) as hub:
        assert hub.files("org/model")["a.txt"] == b"a"
        assert ask(hub.url, "HEAD", "/org/model/resolve/main/a.txt")[1]["X-Repo-Commit"] == head
