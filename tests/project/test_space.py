"""The Space: the folder that is uploaded, served, asked as its page asks it, and asking for nothing from elsewhere."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY

gradio_client = pytest.importorskip("gradio_client", reason="the Space needs gradio: pip install -e '.[space]'")

SPACE = ROOT / "space"
PROMPT = "Sum the numbers of a list that are even, each plus 5."
# Runs a script that may speak to this machine alone.
GUARD = """
import runpy, sys
def listen(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = arguments[1][0] if event == "socket.connect" and isinstance(arguments[1], tuple) else arguments[0]
        if isinstance(host, str) and host not in ("127.0.0.1", "::1", "localhost", "0.0.0.0"):
            open("elsewhere", "a").write(f"{host}\\n")
            raise OSError(f"{host} is elsewhere")
sys.addaudithook(listen)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A client of the Space as it is uploaded, in a folder that knows nothing of this checkout; and the folder."""
    folder = tmp_path_factory.mktemp("space")
    subprocess.run([sys.executable, SPACE / "folder.py", folder / "app"], check=True, capture_output=True)
    (folder / "guard.py").write_text(GUARD)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MRP_", "GRADIO_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(folder / "app"), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "guard.py", "app/app.py"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+", line)))
            yield gradio_client.Client(address, verbose=False), folder
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_prompt_is_answered_and_the_picture_appears(served: tuple[Any, Path]) -> None:
    """A block is seen at work, then the whole text, what it cost, and both decodes."""
    client, folder = served
    options = ("mrp_spec", "sequential", 0.9, 8, 64, 0, True, False)
    moments = [str(one) for one in client.submit(PROMPT, *options, api_name="/answer")]
    assert any("mrp-block" in one and "mrp-mask" in one for one in moments)
    assert "mrp-mask" not in moments[-1]
    assert re.search(r"<b>3.57</b> tokens per forward · <b>25</b> tokens · <b>7</b> forwards", moments[-1])
    assert "<b>18</b> of 22 drafts accepted · the same text as its target" in moments[-1]
    assert 'aria-label="sequential: 25 forwards; mrp_spec of sequential K=8: 7 forwards"' in moments[-1]
    assert not (folder / "elsewhere").exists(), (folder / "elsewhere").read_text()


@pytest.mark.parametrize(
    ("decoding", "target", "tau", "states", "label"),
    [
        ("dynamic", "static", 0.7, 8, "dynamic tau=0.7: "),
        ("mrp_spec", "dynamic", 0.7, 4, "dynamic tau=0.7: .*; mrp_spec of dynamic K=4 tau=0.7: "),
        ("self_spec", "sequential", 0.9, 2, "sequential: .*; self_spec of sequential K=2: "),
    ],
)
def test_what_is_chosen_is_decoded(
    decoding: str, target: str, tau: float, states: int, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a model that the variable names."""
    shutil.copytree(TINY, tmp_path / "mine")
    monkeypatch.setenv("MRP_MODEL", str(tmp_path / "mine"))
    space = runpy.run_path(str(SPACE / "app.py"))
    assert space["MODEL"] == str(tmp_path / "mine")
    *_, (_, shown, chat, cost, picture) = space["answer"](PROMPT, [], decoding, target, tau, states, 64, 0, True, False)
    assert re.search(f'aria-label="{label}', picture)
    assert ("the same text as its target" in cost) is (decoding in ("mrp_spec", "self_spec"))
    assert [message["role"] for message in chat] == [message["role"] for message in shown] == ["user", "assistant"]
    assert "return sum(" in chat[1]["content"]


def test_what_is_typed_is_text_and_what_does_not_fit_is_told() -> None:
    """A client of the page's API may send half a surrogate pair; a tokenizer cannot read it."""
    space = runpy.run_path(str(SPACE / "app.py"))
    _, shown, *_ = next(space["answer"]("<img src=x> **a** $x$", [], "static", "static", 0.9, 8, 16, 0, False, False))
    assert not set("<>*$&") & set(re.sub(r"^<span class=\"mrp-text\">|</span>$|&#\d+;", "", shown[0]["content"]))
    for prompt, message in (
        ("hi \ud83d", r"The prompt has half a surrogate pair, .* at character 3"),
        (" ", "There is no prompt"),
    ):
        with pytest.raises(Exception, match=message) as refused:
            next(space["answer"](prompt, [], "static", "static", 0.9, 8, 16, 0, False, False))
        assert type(refused.value).__name__ == "Error"  # gradio's, which the page shows


def test_a_space_installs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["space"]]
    assert (SPACE / "requirements.txt").read_text().split() == needed
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert f"sdk_version: {pinned['gradio']}\n" in (SPACE / "README.md").read_text()
