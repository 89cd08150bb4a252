"""The list operations: the words against the answer, the judge, and the length that is held out."""

import json
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.tasks import FAMILIES, SPLITS, Problem, judge, problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS

from benchmarks.common import read_lines
from benchmarks.frontier import by_kind, rule_settings, setting_name
from modeling_mrp.generate.option_table import TARGETS


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_does_what_the_words_say(split: Any) -> None:
    asked = problems("lists", split, 200)
    for problem in asked:
        words, names = ((part.split()) for part in problem.prompt.split(":"))
        made = problem.answer.split()
        expected = {"Copy": names, "Reverse": names[::-1], "Shuffle": made, "Replace": names}[words[0]]
        if words[0] == "Replace":
            expected = [words[3] if name == words[1] else name for name in names]
            assert words[1] in names
            assert words[3] not in names
        assert made == expected
        assert words[0].lower() == problem.kind
        assert (problem.kind == "replace") == (sorted(made) != sorted(names))
        assert len(set(names)) == len(names) < NEW_TOKENS["lists"]
        assert split != "heldout" or len(names) == 7
        assert split == "heldout" or len(names) != 7 or problem.kind != "shuffle"
    assert judge(asked, [problem.answer for problem in asked]) == [True] * len(asked)


@pytest.mark.parametrize(
    ("kind", "text", "right"),
    [
        ("copy", "Bo Ana Kai", True),
        ("copy", "Ana Bo Kai", False),
        ("shuffle", "Ana Bo Kai", True),
        ("shuffle", "Ana Bo Bo", False),
        ("shuffle", "Ana Bo Kai Kai", False),
        ("shuffle", "Ana Bo", False),
        ("replace", "", False),
    ],
)
def test_the_judge_by_hand(kind: str, text: str, right: bool) -> None:
    assert judge([Problem("lists", "", "Bo Ana Kai", kind=kind)], [text]) == [right]


def test_what_the_embedded_checkpoint_did_not_learn_is_measured_only_when_named() -> None:
    assert "lists" not in FAMILIES
    parts = by_kind(problems("lists", "heldout", 40))
    assert [{problem.kind for problem in part} for part in parts] == [{"copy"}, {"replace"}, {"reverse"}, {"shuffle"}]
    assert len(by_kind(problems("math", "heldout", 3))) == 1
    names = [setting_name(setting) for setting in rule_settings(family="lists")]
    assert len(set(names)) == len(names) == 2 * len(TARGETS)
    assert {"klass", "self_spec of klass K=4"} < set(names)


def test_lines_of_weights_that_are_not_kept_are_those_of_the_last(tmp_path: Path) -> None:
    headers = [{"benchmark": "frontier", "backbone": name, "head": None, "deciding": "then"} for name in ("old", "new")]
    lines = [{"accuracy": number, "head_per_token": 0.0} for number in (1, 2)]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for pair in zip(headers, lines, strict=True) for one in pair))
    assert read_lines(path, embedded=False) == lines[1:]
    with pytest.raises(ValueError, match="measured with the backbone old"):
        read_lines(path)
