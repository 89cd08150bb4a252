"""The Space: the folder that is uploaded, served, asked as its page asks it, and asking for nothing
from elsewhere."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh import ALONE
from tests.support.places import ROOT

gradio_client = pytest.importorskip(
    "gradio_client", reason="the Space needs gradio: pip install -e '.[space]'"
)

SPACE = ROOT / "space"
PROMPT = "Sum the numbers of a list that are even, each plus 5."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """A client of the Space as it is uploaded, in a folder that knows nothing of this checkout; and
    the folder."""
    folder = tmp_path_factory.mktemp("space")
    subprocess.run(
        [sys.executable, SPACE / "folder.py", folder / "app"], check=True, capture_output=True
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MRP_", "GRADIO_", "PYTHON"))
    }
    environment |= {
        "PYTHONPATH": str(folder / "app"),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-P",
        "-c",
        f"{ALONE}import runpy\nrunpy.run_path('app/app.py', run_name='__main__')",
    ]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = next(
                found[0] for line in process.stdout if (found := re.search(r"http://[\d.:]+", line))
            )
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
    assert re.search(
        r"<b>3.57</b> tokens per forward · <b>25</b> tokens · <b>7</b> forwards", moments[-1]
    )
    assert "<b>18</b> of 22 drafts accepted · the same text as its target" in moments[-1]
    assert (
        'aria-label="sequential: 25 forwards; mrp_spec of sequential K=8: 7 forwards"'
        in moments[-1]
    )
    assert not (folder / "elsewhere").exists(), (folder / "elsewhere").read_text()


@pytest.mark.parametrize(
    ("options", "label"),
    [
        (("dynamic", "static", 0.7, 8, 64, 0, True, False), "dynamic tau=0.7: "),
        (
            ("mrp_spec", "dynamic", 0.7, 4, 64, 0, True, False),
            "dynamic tau=0.7: .*; mrp_spec of dynamic K=4 tau=0.7: ",
        ),
    ],
)
def test_what_is_chosen_is_decoded(
    served: tuple[Any, Path], options: tuple[Any, ...], label: str
) -> None:
    _, shown, cost, picture = served[0].predict(PROMPT, *options, api_name="/answer")
    assert re.search(f'aria-label="{label}', picture)
    assert ("the same text as its target" in cost) is (options[0] == "mrp_spec")
    assert [message["role"] for message in shown[-2:]] == ["user", "assistant"]


def test_what_is_typed_is_text_and_what_does_not_fit_is_told(served: tuple[Any, Path]) -> None:
    options = ("static", "static", 0.9, 8, 16, 0, False, False)
    _, shown, *_ = served[0].predict("<img src=x> **a** $x$", *options, api_name="/answer")
    assert "img src" in str(shown[-2])
    assert not [typed for typed in ("<img", "**a", "$x") if typed in str(shown)]
    with pytest.raises(gradio_client.exceptions.AppError, match="There is no prompt"):
        served[0].predict(" ", *options, api_name="/answer")


def test_a_space_installs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["space"]]
    assert (SPACE / "requirements.txt").read_text().split() == needed
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert f"sdk_version: {pinned['gradio']}\n" in (SPACE / "README.md").read_text()
