"""Prompts of real text: kinds, splits that share nothing, the same for the same seed."""

from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.tasks import Split, belongs

from benchmarks import prompts
from benchmarks.corpus import installed
from tests.benchmarks.test_corpus import install

SPLITS: tuple[Split, ...] = ("train", "heldout")
SOURCE = '''
def {name}_{number}(values, factor):
    """Multiply values by a factor, and add them up, as {name} does."""
    total = {number}
    for value in values:
        total = total + factor * value
    return total
'''
PROSE = (
    "This paragraph says what the package {name} is good for, in more than twelve words, so.\n\n"
)


def packages(tmp_path: Path) -> Any:
    """Install one package of each split."""
    names: dict[str, str] = {}
    number = 0
    while len(names) < 2:
        name = f"package-{number}"
        for split in SPLITS:
            if belongs(name, split):
                names.setdefault(split, name)
        number += 1
    for name in names.values():
        code = "".join(
            SOURCE.format(name=name.replace("-", "_"), number=index) for index in range(40)
        )
        install(tmp_path, name, **{"code.py": code, "read.md": 9 * PROSE.format(name=name)})
    return installed([str(tmp_path)])


def test_prompts_of_a_split_are_of_its_packages_and_subjects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = packages(tmp_path)
    monkeypatch.setattr(prompts, "installed", lambda: both)
    made = {split: prompts.prompts(split, 60) for split in SPLITS}
    assert prompts.prompts("train", 60) == made["train"]
    assert prompts.prompts("train", 60, seed=1) != made["train"]
    contents = {}
    for split, rows in made.items():
        contents[split] = [row["messages"][0]["content"] for row in rows]
        assert len({*contents[split]}) == 60
        for kind in prompts.KINDS:
            assert sum(row["kind"] == kind for row in rows) == 20
    own = {split: name.replace("-", "_") for name in both for split in made if belongs(name, split)}
    for split, other in zip(SPLITS, reversed(SPLITS), strict=True):
        assert any(own[split] in content for content in contents[split])
        assert not any(own[other] in content for content in contents[split])
        assert not {*prompts.subjects(split)} & {*prompts.subjects(other)}
    with pytest.raises(ValueError, match=r"prompts of code: heldout has 40 here"):
        prompts.prompts("heldout", 150)
    pieces = prompts.texts("train", 2)
    assert all(0 < len(piece["text"]) <= prompts.PIECE for piece in pieces)
    with pytest.raises(ValueError, match="9 texts: train has"):
        prompts.texts("train", 9)
