"""The Space: its page in headless Chromium, asking for nothing from elsewhere, and the folder that is uploaded."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from browser import Browser, free_port, missing_programs, wait_until
from conftest import ROOT, TINY

pytest.importorskip("gradio", reason="the Space needs gradio: pip install -e '.[space]'")

SPACE = ROOT / "space"
PROMPT = "Sum the numbers of a list that are even, each plus 5."
# Runs a script, and writes down where it connects to, if that is not this machine.
GUARD = """
import runpy, socket, sys
connect, path = socket.socket.connect, sys.argv[2]
def watched(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        open(path, "a").write(f"{address}\\n")
        raise OSError(f"{address} is elsewhere")
    return connect(self, address)
socket.socket.connect = watched
look_up = socket.getaddrinfo
def named(host, *args, **kwargs):
    if host not in ("127.0.0.1", "::1", "localhost", None, ""):
        open(path, "a").write(f"{host}\\n")
        raise OSError(f"{host} is elsewhere")
    return look_up(host, *args, **kwargs)
socket.getaddrinfo = named
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclass(frozen=True)
class Served:
    """A page that is served.

    Attributes:
        url: Its address.
        elsewhere: What the server connected to beside this machine, line by line; no file, if nothing.
    """

    url: str
    elsewhere: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The Space as it is uploaded, in a folder that knows nothing of this checkout."""
    folder = tmp_path_factory.mktemp("space")
    subprocess.run([sys.executable, SPACE / "folder.py", folder / "app"], check=True, capture_output=True)
    (folder / "guard.py").write_text(textwrap.dedent(GUARD))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MRP_", "GRADIO_", "PYTHON"))}
    port = free_port()
    environment |= {"GRADIO_SERVER_PORT": str(port), "PYTHONPATH": str(folder / "app"), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-P", folder / "guard.py", folder / "app" / "app.py", folder / "elsewhere"]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}/"

        def is_up() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return urllib.request.urlopen(url, timeout=5).status == 200
            except OSError:
                return False

        try:
            wait_until(is_up, 120, "page")
            yield Served(url, folder / "elsewhere")
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if missing := missing_programs():
        pytest.skip(f"no {' and no '.join(missing)} on this machine: install the distribution's packages")
    with Browser(tmp_path, height=1370) as opened:
        yield opened


def test_a_prompt_is_answered_and_the_picture_appears(served: Served, browser: Browser, tmp_path: Path) -> None:
    """A block is seen at work, then the whole text, what it cost, and both decodes. MRP_SCREENSHOT names a file to keep."""
    browser.open(served.url)
    wait_until(lambda: browser.count("#prompt textarea"), 30, "prompt")
    browser.requested()  # of the browser's own first page
    browser.open(served.url)
    wait_until(lambda: browser.count("#prompt textarea"), 30, "prompt")
    browser.type("#prompt textarea", PROMPT)
    browser.click("#send")
    wait_until(lambda: browser.count(".mrp-block") and browser.count(".mrp-mask"), 30, "block at work")
    wait_until(lambda: browser.count("#mrp-picture svg"), 60, "picture")
    assert "It solves two kinds of small problems" in browser.text("#able")
    said = browser.text("#chat").replace("\u00a0", " ")
    assert PROMPT in said
    assert "def number(number):\n    return sum(5 + n for n in number if n % 2 == 0)" in said
    assert browser.count(".mrp-mask") == 0
    told = browser.text("#mrp-cost")
    pattern = r"3\.57 tokens per forward · 25 tokens · 7 forwards · [\d.]+ s · 18 of 22 drafts accepted · the same text as its"
    assert re.match(pattern, told), told
    label = browser.run("return document.querySelector('#mrp-picture svg').getAttribute('aria-label')")
    assert label == "sequential: 25 forwards; mrp_spec of sequential K=8: 7 forwards"
    hidden = "return getComputedStyle(document.querySelectorAll('#mrp-picture .token')[40]).animationDuration"
    assert browser.run(hidden).endswith("s"), "the style sheet arrived"
    asked = browser.requested()
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith((served.url, "data:", "blob:"))] == []
    assert not served.elsewhere.exists(), served.elsewhere.read_text()
    assert [line for line in browser.errors() if "favicon" not in line] == []
    if kept := os.environ.get("MRP_SCREENSHOT"):
        wait_until(lambda: float(browser.run(PROGRESS)) > 0.99, 30, "whole picture")
        browser.screenshot(Path(kept))


# How much of the picture's last token is to be seen.
PROGRESS = "return getComputedStyle([...document.querySelectorAll('#mrp-picture .f25')].at(-1)).opacity"


def test_what_is_typed_is_text_and_what_does_not_fit_is_told(served: Served, browser: Browser) -> None:
    browser.open(served.url)
    wait_until(lambda: browser.count("#prompt textarea"), 30, "prompt")
    browser.click("#send")
    wait_until(lambda: "There is no prompt" in browser.text("body"), 30, "error")
    typed = "<img src=x onerror=alert(1)> **a_b_c** $x$ `y` &amp;"
    browser.type("#prompt textarea", typed)
    browser.click("#send")
    wait_until(lambda: browser.count("#mrp-cost"), 60, "answer")
    assert typed in browser.text("#chat").replace("\u00a0", " ")
    assert browser.count("#chat img[src='x']") == 0


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


def test_half_a_surrogate_pair_is_told() -> None:
    """A client of the page's API may send one; a tokenizer cannot read it."""
    space = runpy.run_path(str(SPACE / "app.py"))
    with pytest.raises(Exception, match=r"The prompt has half a surrogate pair, .* at character 3") as refused:
        next(space["answer"]("hi \ud83d", [], "static", "static", 0.9, 8, 16, 0, False, False))
    assert type(refused.value).__name__ == "Error"  # gradio's, which the page shows


def test_a_space_installs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["space"]]
    assert (SPACE / "requirements.txt").read_text().split() == needed
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert f"sdk_version: {pinned['gradio']}\n" in (SPACE / "README.md").read_text()
