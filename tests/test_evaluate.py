"""The commands that measure: one line or one row for everything asked, and numbers that agree with the texts."""

import json

import pytest
from conftest import TINY

from modeling_mrp import MRPForCausalLM
from trainer import demo, evaluate
from trainer.evaluate import Decoded, decode_problems
from trainer.tasks import judge, problems

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def test_evaluate_prints_a_line_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"--model {TINY} --count 3 --family math --decoding static mrp_spec dynamic"
    evaluate.main([*asked.split(), *["--states", "2", "4", "--branches", "1", "3", "--tau", "0.5", "0.9"]])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    settings = [
        (line["decoding"], line.get("num_draft_states"), line.get("draft_branches"), line.get("confidence_threshold"))
        for line in lines
    ]
    assert settings == [
        ("static", None, None, None),
        *(("mrp_spec", k, b, None) for k in (2, 4) for b in (1, 3)),
        *(("dynamic", None, None, tau) for tau in (0.5, 0.9)),
    ]
    assert all(line["identical_to_first"] == 100 and line["accuracy"] == lines[0]["accuracy"] for line in lines[:5])
    assert lines[0]["tokens_per_forward"] < lines[1]["tokens_per_forward"] < lines[3]["tokens_per_forward"]
    assert lines[0]["head_per_token"] == 0 < lines[1]["head_per_token"]


def test_what_is_counted(tiny_model: MRPForCausalLM, tiny_tokenizer: object) -> None:
    """Texts, their judgements and their lengths over forwards, whatever the batches."""
    asked = problems("code", "tune", 5)
    done: list[int] = []
    parts = [
        decode_problems(tiny_model, tiny_tokenizer, asked, size, done.append, decoding="static")  # type: ignore[arg-type]
        for size in (2, 5)
    ]
    assert done == [2, 2, 1, 5]
    for decoded in parts:
        assert decoded.ids == parts[0].ids
        assert decoded.right == [judge(problem, text) for problem, text in zip(asked, decoded.texts, strict=True)]
        assert decoded.accuracy == 20 * sum(decoded.right)
        assert decoded.tokens_per_forward == parts[0].tokens_per_forward <= 1
        assert decoded.identical(parts[0]) == 100
    other = Decoded(**{**vars(parts[0]), "ids": [*parts[0].ids[:4], []]})
    assert parts[0].identical(other) == 80


def test_the_demo_ends_with_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(["--count", "2", "--batch-size", "2"])
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in out.splitlines() if line.startswith("│")}
    table = {name: [cell.strip() for cell in cells] for name, cells in rows.items() if len(cells) == 8}
    assert list(table) == [name for name, _ in demo.MODES]
    for name, (math, code, _, head, speed, same, _, source) in table.items():
        assert float(math) in (0, 50, 100) and float(code) in (0, 50, 100)  # noqa: PT018
        assert (float(head) > 0) == name.startswith("mrp")
        assert "x (" in speed
        if name == "static":
            assert (same, source) == ("100.0", "100.0")
    assert out.rstrip().splitlines()[-1].startswith("2 problems a family, batches of 2, greedy")
