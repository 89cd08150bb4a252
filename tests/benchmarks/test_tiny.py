"""The recipe of the embedded checkpoint: where it starts, what is accepted, and that its files and
those of `make tiny` are the same."""

import re
from pathlib import Path

import pytest
import yaml
from mrp_trainer.evaluate.provenance import digests

from benchmarks import tiny
from benchmarks.common import load
from benchmarks.targets import TARGETS
from tests.support.places import ROOT, TINY

RECIPES = ROOT / "trainer/mrp_trainer/train/recipes"


def test_a_new_backbone_has_the_embedded_shape(tmp_path: Path) -> None:
    """Without a head, with the same weights each time, which are not the embedded ones."""
    tiny.main(["new", str(tmp_path / "a")])
    tiny.main(["new", str(tmp_path / "b")])
    (made, tokenizer), (again, _), (embedded, of_embedded) = map(
        load, (tmp_path / "a", tmp_path / "b", TINY)
    )
    assert tokenizer.get_vocab() == of_embedded.get_vocab()
    shapes = {name: tensor.shape for name, tensor in made.state_dict().items()}
    assert not made.config.has_head
    assert shapes == {
        name: tensor.shape
        for name, tensor in embedded.state_dict().items()
        if not name.startswith("mrp_head.")
    }
    assert digests(made) == digests(again)
    assert digests(made)["backbone"] != digests(embedded)["backbone"]


def test_what_is_as_good_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    tiny.main(["accept", str(TINY), "--count", "2"])
    assert capsys.readouterr().out.endswith("is as good as the embedded checkpoint\n")


@pytest.mark.parametrize(
    ("solved", "speed", "refused"),
    [(95.0, 2.0, False), (94.0, 2.0, True), (100.0, 1.91, False), (100.0, 1.89, True)],
)
def test_what_is_worse_is_refused(
    solved: float, speed: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By five points of problems solved, or by 5 % of the speed, of one target in one family."""

    def numbers(folder: Path, family: str, count: int) -> dict[str, tuple[float, float]]:
        of_all = dict.fromkeys(TARGETS, (100.0, 2.0))
        if folder != TINY and family == "code":
            of_all["dynamic"] = solved, speed
        return of_all

    monkeypatch.setattr(tiny, "numbers_of", numbers)
    if refused:
        with pytest.raises(SystemExit, match="not as good as the embedded one: dynamic in code"):
            tiny.main(["accept", "made"])
    else:
        tiny.main(["accept", "made"])


def test_the_steps_of_make_tiny_fit_together() -> None:
    """What a recipe reads, an earlier line makes."""
    (target,) = re.findall(r"\ntiny:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text())
    commands = target.replace("$(TINY)", "runs/tiny")
    (loop,) = re.finditer(r"for target in (.*); do .*\n((?:.*\n)+?)\tdone", commands)
    assert loop[1].split() == [*TARGETS]
    for decoding in TARGETS:
        commands += loop[2].replace("$$target", decoding)
    backbone, head = (
        yaml.safe_load((RECIPES / f"tiny-{part}.yaml").read_text()) for part in ("backbone", "head")
    )
    for recipe in (backbone, head):
        for source in recipe["data"]:
            assert f"--output {source.partition('*')[0]}" in commands
    assert f"benchmarks.tiny new {backbone['model']}\n" in commands
    assert head["model"] == backbone["output_dir"]
    assert commands.count(f"benchmarks.tiny accept {head['output_dir']}\n") == 1
    assert [
        sum(float(source.partition("*")[2]) for source in recipe["data"])
        for recipe in (backbone, head)
    ] == pytest.approx([1.0, 1.0])
