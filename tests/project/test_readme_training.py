"""README's commands of training, as they stand there: they end with a head that wins."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import mrp
from tests.support.places import ROOT


def test_readmes_training_ends_with_a_head_that_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About two minutes of one core. How far it wins depends on how a CPU rounds."""
    section = (ROOT / "README.md").read_text().split("\n## Train\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "hub_configs").symlink_to(ROOT / "hub_configs")
    monkeypatch.chdir(tmp_path)
    told = {}
    for line in block.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "mrp"
        told[words[0]] = mrp(*words)
    assert list(told) == ["tasks", "decode", "train", "show"]
    assert re.search(r"^verdict: worth publishing, 1\.\d\d times", told["train"], re.MULTILINE)
    numbers = r"^  (?:static|dynamic)" + 4 * r" +(\S+)" + "$"
    static, dynamic = re.findall(numbers, told["train"], re.MULTILINE)
    for stale, drafted, stale_per_unit, per_unit in (static, dynamic):
        assert float(drafted) > float(stale) > float(stale_per_unit)
        assert float(drafted) > float(per_unit)
    assert float(dynamic[3]) > float(dynamic[2])
    assert (tmp_path / "run.svg").is_file()
