"""The notebooks, run from the first cell to the last; the second trains for a few steps."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.support.places import ROOT

nbclient = pytest.importorskip(
    "nbclient", reason="notebooks need nbclient and ipykernel: pip install -e '.[notebooks]'"
)
pytest.importorskip("ipykernel", reason="notebooks need ipykernel: pip install -e '.[notebooks]'")
import nbformat  # noqa: E402  # comes with nbclient

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes nowhere but to this test's folder, and imports from this checkout."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'trainer'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(name: str) -> Any:
    """The notebook with its outputs, run in a folder far from this checkout."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    where = {"metadata": {"path": os.environ["TMPDIR"]}}
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=where, record_timing=False
    ).execute()
    return notebook


def kept(notebook: Any) -> Any:
    """The notebook as it is committed: without warnings, progress bars and what tells of a
    machine."""
    for cell in notebook.cells:
        outputs = [
            out
            for out in cell.get("outputs", ())
            if out.get("name") != "stderr" and WIDGET not in out.get("data", ())
        ]
        if cell.cell_type == "code":
            cell.outputs, cell.metadata = outputs, {}
    notebook.metadata = {**notebook.metadata, "language_info": {"name": "python"}}
    return notebook


def pictures(notebook: Any) -> list[str]:
    found = [
        out["data"].get("text/html", "")
        for cell in notebook.cells
        for out in cell.get("outputs", ())
        if "data" in out
    ]
    return [
        re.findall(r'aria-label="([^"]*)"', html)[0] for html in found if html.startswith("<svg")
    ]


def printed(notebook: Any) -> str:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return "".join(out["text"] for out in outputs if out.get("name") == "stdout")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_what_is_committed_was_run(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python tests/project/test_notebooks.py`` runs them, and writes their outputs into them. The
    pictures and numbers of the first are the embedded checkpoint's; the second trains, here for a
    few steps, and pushes where a repository is named."""
    monkeypatch.setenv("MRP_NOTEBOOK_STEPS", "3")
    committed = nbformat.read(path, as_version=4)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run it again"
    assert not re.search(r"/(tmp|root|home|Users|work)/|Traceback", path.read_text())
    assert kept(nbformat.read(path, as_version=4)) == committed
    notebook = run(path.name)
    told = printed(notebook)
    assert (
        len(pictures(notebook)) == len(pictures(committed)) == {"decode": 7, "train": 1}[path.stem]
    )
    if path.stem == "decode":
        assert (told, pictures(notebook)) == (printed(committed), pictures(committed))
    else:
        for mode in ("static", "self_spec", "mrp_spec"):
            assert re.search(
                rf"^{mode} +\d\.\d\d tokens per forward, \d+ % right$", told, re.MULTILINE
            ), mode
        assert "  decode.svg\n" in told
        assert told.endswith("Dry run: nothing was sent.\n")


if __name__ == "__main__":
    for path in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            os.environ |= {"TMPDIR": folder, "PYTHONPATH": f"{ROOT}:{ROOT / 'trainer'}"}
            nbformat.write(kept(run(path.name)), path)
