"""The notebooks, run from the first cell to the last; the second trains for a few steps and pushes to a Hub on loopback."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import ROOT
from hub_server import HubServer

nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel: pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="notebooks need ipykernel: pip install -e '.[notebooks]'")
import nbformat  # noqa: E402  # comes with nbclient

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that writes nowhere but to this test's folder, and imports from this checkout."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR", "TMPDIR"):
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'trainer'}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(name: str) -> Any:
    """The notebook with its outputs, run in a folder far from this checkout."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    where = {"metadata": {"path": os.environ["TMPDIR"]}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, record_timing=False).execute()
    return notebook


def kept(notebook: Any) -> Any:
    """The notebook as it is committed: without warnings, progress bars and what tells of a machine."""
    for cell in notebook.cells:
        outputs = [out for out in cell.get("outputs", ()) if out.get("name") != "stderr" and WIDGET not in out.get("data", ())]
        if cell.cell_type == "code":
            cell.outputs, cell.metadata = outputs, {}
    notebook.metadata = {**notebook.metadata, "language_info": {"name": "python"}}
    return notebook


def pictures(notebook: Any) -> list[str]:
    found = [out["data"].get("text/html", "") for cell in notebook.cells for out in cell.get("outputs", ()) if "data" in out]
    return [re.findall(r'aria-label="([^"]*)"', html)[0] for html in found if html.startswith("<svg")]


def printed(notebook: Any) -> str:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    return "".join(out["text"] for out in outputs if out.get("name") == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_was_run_from_first_to_last_and_tells_of_no_machine(path: Path) -> None:
    """``python tests/project/test_notebooks.py`` runs them, and writes their outputs into them."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run it again"
    assert len(code) <= 10
    assert len(pictures(notebook)) == {"decode": 7, "train": 1}[path.stem]
    assert not re.search(r"/(tmp|root|home|Users|work)/|Traceback", path.read_text())
    assert kept(notebook) == nbformat.read(path, as_version=4)


@pytest.mark.usefixtures("quiet")
def test_decode_and_see() -> None:
    """Its own assertions hold drafted texts to their targets; the pictures are those of the embedded checkpoint, and what is
    committed says the same."""
    notebook = run("decode.ipynb")
    committed = nbformat.read(ROOT / "notebooks" / "decode.ipynb", as_version=4)
    assert (printed(notebook), pictures(notebook)) == (printed(committed), pictures(committed))


@pytest.mark.usefixtures("quiet")
def test_train_evaluate_and_push(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name, value in hub.environment(tmp_path).items():
        if name.startswith(("HF_", "HUGGING")):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("MRP_NOTEBOOK_STEPS", "3")
    monkeypatch.setenv("MRP_NOTEBOOK_REPO", "alice/tiny-head")
    notebook = run("train.ipynb")
    told = printed(notebook)
    for mode in ("static", "self_spec", "mrp_spec"):
        assert re.search(rf"^{mode} +\d\.\d\d tokens per forward, \d+ % right$", told, re.MULTILINE), mode
    assert len(pictures(notebook)) == 1
    files = hub.files("alice/tiny-head")
    assert {"README.md", "config.json", "decode.svg", "model.safetensors", "modeling_mrp.py", "tokenizer.json"} <= files.keys()
    assert b"](decode.svg)" in files["README.md"]


if __name__ == "__main__":
    for path in NOTEBOOKS:
        with TemporaryDirectory() as folder:
            os.environ |= {"TMPDIR": folder, "PYTHONPATH": f"{ROOT}:{ROOT / 'trainer'}"}
            nbformat.write(kept(run(path.name)), path)
