"""First loads of a repository while another process is still copying its code: transformers copies
without a lock."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.dynamic_module_utils import get_relative_import_files

from modeling_mrp import entry
from modeling_mrp.model.code import AUTO_MAP, MODELING, PACKAGE, code_files
from tests.support.fresh import Fresh
from tests.support.helpers import SHA, in_hub_cache
from tests.support.places import TINY

WHOLE = "first = 1\nsecond = [\n    2,\n]\n# The end\n"
PARTS = {
    "missing": None,
    "empty": "",
    "cut between two lines": WHOLE[:10],
    "cut in an expression": WHOLE[:20],
    "without its end": WHOLE.removesuffix("# The end\n"),
    "with a hole": WHOLE.replace("2", "\0"),
}


@pytest.fixture
def name() -> Any:
    yield "module_of_this_test"
    sys.modules.pop("module_of_this_test", None)


@pytest.mark.parametrize("part", PARTS)
def test_a_file_is_imported_once_it_is_whole(
    part: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process goes on writing it while this one sleeps for the third time."""
    path, naps = tmp_path / "sibling.py", []
    if (text := PARTS[part]) is not None:
        path.write_text(text)

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        assert name in sys.modules
        assert not hasattr(sys.modules[name], "first"), "nothing of it has run"
        if len(naps) == 3:
            path.write_text(WHOLE)

    monkeypatch.setattr(entry.time, "sleep", sleep)
    module = entry.import_whole(name, path, "# The end")
    assert (module.first, module.second, len(naps)) == (1, [2], 3)
    assert entry.import_whole(name, path, "# The end") is module


@pytest.mark.parametrize("part", PARTS)
def test_a_file_that_stays_incomplete_is_an_error(part: str, name: str, tmp_path: Path) -> None:
    """Which says what to do; it can be imported once that was done."""
    path = tmp_path / "sibling.py"
    if (text := PARTS[part]) is not None:
        path.write_text(text)
    with pytest.raises(
        ImportError,
        match=rf"sibling\.py is not whole: for 0 s .*delete the folder {tmp_path}, and load again",
    ):
        entry.import_whole(name, path, "# The end", 0)
    assert name not in sys.modules
    path.write_text(WHOLE)
    assert entry.import_whole(name, path, "# The end", 0).first == 1


def test_line_ends_of_another_system_do_not_matter(name: str, tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_bytes(WHOLE.replace("\n", "\r\n").encode())
    assert entry.import_whole(name, tmp_path / "sibling.py", "# The end", 0).first == 1


def test_the_entry_is_written_at_once() -> None:
    """It fits a page of memory, so that no process sees a part of it, and it names the file that
    transformers copies beside it. Neither file has a character of several bytes, which a reader
    could meet half of."""
    code = code_files()
    assert len(code[MODELING]) < 4096
    assert code[MODELING].isascii()
    assert code[PACKAGE].isascii()
    assert get_relative_import_files(TINY / MODELING) == [str(TINY / PACKAGE)]


LOAD = """
import json, pathlib, threading, time
from transformers import AutoConfig, AutoModel, dynamic_module_utils
cache = pathlib.Path(dynamic_module_utils.HF_MODULES_CACHE)
folder = cache / "transformers_modules" / "org" / "{name}" / "{sha}"
folder.mkdir(parents=True)
text = pathlib.Path({package!r}).read_text()
# As another process leaves it that is not done.
(folder / "package_mrp.py").write_text(text[:{cut}])
"""
GOES_ON = """
waits, sleep = [], time.sleep
def go_on(seconds):
    waits.append(seconds)
    (folder / "package_mrp.py").write_text(text)
    sleep(seconds)
time.sleep = go_on
config = AutoConfig.from_pretrained("org/{name}", trust_remote_code=True)
model = AutoModel.from_pretrained("org/{name}", trust_remote_code=True)
assert type(model.config) is type(config)
model.save_pretrained("saved by {name}")
saved = pathlib.Path("saved by {name}")
print(len(waits) > 0, json.loads((saved / "config.json").read_text())["auto_map"] == {auto_map})
again = AutoModel.from_pretrained(saved, trust_remote_code=True)
print((saved / "package_mrp.py").read_text() == text, again.config.has_head)
"""
STAYS = """
try:
    AutoConfig.from_pretrained("org/{name}", trust_remote_code=True)
except ImportError as error:
    print(str(error).count("is not whole"), str(error).count(str(folder)))
"""


@pytest.mark.parametrize("cut", [0, 200_000], ids=["empty", "half"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_transformers_loads_what_another_process_copies(
    goes_on: bool, cut: int, fresh: Fresh, tmp_path: Path
) -> None:
    """From the Hub's cache; code that is saved by the loaded model is that of the repository, and
    is named as there."""
    folder, name = tmp_path / "repository", f"copied_{goes_on}_{cut}"
    folder.mkdir()
    for path in TINY.glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    if not goes_on:
        text = (folder / MODELING).read_text()
        assert text.count("float = 60.0") == 1
        (folder / MODELING).write_text(text.replace("float = 60.0", "float = 0.1"))
    in_hub_cache(folder, fresh.hub_cache, f"org/{name}")
    values = {
        "name": name,
        "sha": SHA,
        "package": str(TINY / PACKAGE),
        "cut": cut,
        "auto_map": json.dumps(AUTO_MAP),
    }
    printed = fresh((LOAD + (GOES_ON if goes_on else STAYS)).format(**values))
    assert printed == ("True True\nTrue True\n" if goes_on else "1 2\n")
