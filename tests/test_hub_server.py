"""The Hub on loopback that other tests use: huggingface_hub's own calls against it, and what it refuses."""

import hashlib
import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hub_server import HubServer, run_python

CONFIG, WEIGHTS = b'{"model_type": "sdar_mrp"}', bytes(range(256)) * 200
# What every script below starts with.
CLIENT = """
from huggingface_hub import CommitOperationAdd as Add, CommitOperationDelete as Delete, HfApi
from huggingface_hub.errors import *
api = HfApi()
def status(call, *args, **options):
    try:
        call(*args, **options)
    except HfHubHTTPError as error:
        return error.response.status_code
"""


def ask(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """The status, the headers and the body of a plain request."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def test_a_folder_goes_up_in_one_commit_and_comes_down_equal(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    files = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "notes.txt": b"1"}
    for name, content in files.items():
        (tmp_path / "folder" / name).write_bytes(content)
    code = """
api.create_repo("org/model", private=True)
api.upload_folder(repo_id="org/model", folder_path="folder", commit_message="all of it")
from huggingface_hub import hf_hub_download
for name in ("config.json", "model.safetensors"):
    assert open(hf_hub_download("org/model", name), "rb").read() == open(f"folder/{name}", "rb").read()
"""
    run_python(CLIENT + code, tmp_path, hub.environment(tmp_path, "hf_alice"))
    assert {name: content for name, content in hub.files("org/model").items() if name != ".gitattributes"} == files
    head, first = hub.repository("org/model").history("main")
    assert (head.title, first.title) == ("all of it", "initial commit")
    assert {path for path, entry in head.files.items() if entry.lfs} == {"model.safetensors"}
    assert all("authorization" not in logged.headers for logged in hub.requests if logged.server == "storage")


def test_who_may_do_what_and_what_is_no_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.commit("org/secret", {"config.json": CONFIG}, private=True)
    base = hub.commit("org/open", {"config.json": CONFIG})
    later = hub.commit("org/open", {"config.json": b"{}"})
    code = f"""
bob = HfApi(token="hf_bob")
assert status(HfApi(token=False).model_info, "org/secret") == 401
assert status(bob.model_info, "org/secret") == status(bob.model_info, "org/none") == 404
files = [Add("x.txt", b"x")]
assert status(bob.create_commit, "org/open", files, commit_message="m") == 403
assert status(bob.create_repo, "org/new") == 403
assert status(api.create_repo, "org/open") == 409
assert status(api.create_commit, "org/open", files, commit_message="m", parent_commit={base!r}) == 412
assert status(api.create_commit, "org/open", [*files, Delete("none")], commit_message="m") == 404
opened = bob.create_commit("org/open", files, commit_message="mine", create_pr=True)
assert opened.pr_revision == "refs/pr/1"
"""
    run_python(CLIENT + code, tmp_path, hub.environment(tmp_path, "hf_alice"))
    assert hub.repository("org/open").read("main").oid == later
    assert hub.files("org/open", "refs/pr/1")["x.txt"] == b"x"
    assert set(hub.store.repositories) == {"org/secret", "org/open"}


@pytest.mark.parametrize(
    "bad",
    [
        {"key": "file", "value": {"path": "../a.txt", "content": "YQ=="}},
        {"key": "file", "value": {"path": "README.md", "content": "LS0tCmxpY2Vuc2U6IG1pbmUKLS0tCg=="}},  # license: mine
        {"key": "lfsFile", "value": {"path": "w.safetensors", "algo": "sha256", "oid": "0" * 64, "size": 3}},
    ],
)
def test_a_bad_line_undoes_the_whole_commit(hub: HubServer, bad: dict[str, Any]) -> None:
    head = hub.commit("org/model", {})
    lines = [{"key": "header", "value": {"summary": "m"}}, {"key": "file", "value": {"path": "a.txt", "content": "YQ=="}}]
    where = (hub.url, "POST", "/api/models/org/model/commit/main")
    for sent, status in (([*lines, bad], 400), (lines, 200)):
        assert hub.repository("org/model").read("main").oid == head
        body = "\n".join(map(json.dumps, sent)).encode()
        assert ask(*where, body, Authorization="Bearer hf_alice")[0] == status
    assert hub.files("org/model")["a.txt"] == b"a"


def test_the_storage_takes_signed_links_only(hub: HubServer) -> None:
    hub.commit("org/secret", {"w.safetensors": WEIGHTS}, private=True)
    _, headers, _ = ask(hub.url, "GET", "/org/secret/resolve/main/w.safetensors", Authorization="Bearer hf_alice")
    assert headers["X-Linked-Etag"] == f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'
    link = headers["Location"].removeprefix(hub.storage_url)
    assert ask(hub.storage_url, "GET", link)[::2] == (200, WEIGHTS)
    assert ask(hub.storage_url, "GET", link.split("?")[0])[0] == 403
    assert ask(hub.storage_url, "PUT", link, b"changed")[0] == 400
    assert ask(hub.storage_url, "GET", link, Authorization="Bearer hf_alice")[0] == 403
