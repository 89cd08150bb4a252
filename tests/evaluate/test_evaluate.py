"""The commands that measure: one line or one row for everything asked, and numbers that agree with the texts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import main
from conftest import TINY
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.cost import charged
from mrp_trainer.evaluate.options import EvaluateOptions
from mrp_trainer.evaluate.provenance import digests
from mrp_trainer.evaluate.results import with_headers
from mrp_trainer.loading import load_model
from mrp_trainer.picture.modes import show_model
from mrp_trainer.picture.options import ShowOptions

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """What the command prints; arguments may hold several words."""
    main(["evaluate", "--model", str(TINY), "--json", *" ".join(arguments).split()])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_every_setting_whose_intervals_hold_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    modes = "--decoding static mrp_spec mrp_remask --target static --states 2 4 --branches 1 3 --tau 0.3 0.9"
    lines = lines_of(capsys, "--family math --count 4", modes)
    names = ("decoding", "num_draft_states", "draft_branches", "confidence_threshold")
    assert [tuple(map(line.get, names)) for line in lines] == [
        ("static", None, None, None),
        *(("mrp_spec", k, b, None) for k in (2, 4) for b in (1, 3)),
        *(("mrp_remask", None, None, tau) for tau in (0.3, 0.9)),
    ]
    assert all(line["identical_to_first"] == 100 and line["accuracy"] == lines[0]["accuracy"] for line in lines[:5])
    assert lines[0]["tokens_per_forward"] < lines[1]["tokens_per_forward"] < lines[3]["tokens_per_forward"]
    assert lines[0]["head_per_token"] == 0 < lines[1]["head_per_token"]
    spec, remask = lines[4:6]
    for name in ("accuracy", "tokens_per_forward", "mean_accepted_length", "identical_to_first"):
        low, high = spec[f"{name}_95"]
        assert low <= spec[name] <= high
    for rate, (low, high) in zip(spec["acceptance_by_depth"], spec["acceptance_by_depth_95"], strict=True):
        assert low <= rate <= high
    accepted = sum(n * rate / 100 for n, rate in zip(spec["offered_by_depth"], spec["acceptance_by_depth"], strict=True))
    assert accepted == pytest.approx(spec["accepted"], abs=0.1)
    assert spec["offered_by_depth"] == sorted(spec["offered_by_depth"], reverse=True)
    assert not {"mean_accepted_length", "acceptance_by_depth"} & set(remask)
    assert remask["revoked"] > 0


def test_what_is_drafted_by_default_is_the_checkpoints_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its target, and 4 states where its number is `auto`, 8 in a picture; whatever is asked for goes before."""
    auto = {"target": "dynamic", "num_draft_states": "auto"}
    for own, asked, target, width in (
        ({**auto, "num_draft_states": 6}, {}, "dynamic", 6),
        (auto, {}, "dynamic", 4),
        (auto, {"target": ["static"], "states": ["3"]}, "static", 3),
    ):
        (setting,) = EvaluateOptions(decoding=["mrp_spec"], **asked).of_checkpoint(own).settings()
        assert (setting["target"], setting["num_draft_states"]) == (target, width)
    shutil.copytree(TINY, tmp_path / "own")
    path = tmp_path / "own" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **auto}))
    main(f"evaluate --model {path.parent} --json --family math --count 1 --max-new-tokens 16 --decoding mrp_spec".split())
    line = json.loads(capsys.readouterr().out)
    assert (line["target"], line["num_draft_states"]) == ("dynamic", 4)
    show = ShowOptions(model=str(path.parent), output=str(tmp_path / "a.svg"), max_new_tokens=16)
    assert re.fullmatch(r"dynamic.*; mrp_spec of dynamic K=8 .*", show_model(show).title)


def test_a_file_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The problems of a family, from a file: the same texts at the same cost. The second has another answer there, the third
    none, and the fourth lies behind the limit."""
    asked = problems("math", "heldout", 4)
    answers = [{"answer": asked[0].number}, {"answer": "1234"}, {}, {"answer": "x = 3"}]
    path = tmp_path / "asked.jsonl"
    records = ({"prompt": problem.prompt, **answer} for problem, answer in zip(asked, answers, strict=True))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    common = ["--count", "3", "--max-new-tokens", "64", "--target", "static", "--decoding", "mrp_spec", "--model"]
    main(["evaluate", *common, str(TINY), "--json", "--family", "math"])
    known = json.loads(capsys.readouterr().out)
    of_file = ["--prompts", str(path), "--chat", "--judge", "last_number", "--show", "1"]
    main(["evaluate", *common, str(TINY), "--json", *of_file])
    line, *shown = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (shown[0], shown[-1]) == (f"--- {asked[0].prompt}", "[right]")
    assert (found["file"], found["accuracy"]) == (str(path), 50)
    assert {name: found[name] for name in found if name.startswith("accept")} == {
        name: known[name] for name in known if name.startswith("accept")
    }


def measured(path: Path) -> list[dict[str, Any]]:
    return [line for _, line in with_headers(map(json.loads, path.read_text().splitlines()))]


def test_a_command_goes_on_where_it_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is on a whole line is not measured again; another question is."""
    path = tmp_path / "out.jsonl"
    arguments = f"--family math --count 1 --max-new-tokens 16 --decoding static mrp_spec --target static --output {path}"
    lines = lines_of(capsys, arguments)
    header = json.loads(path.read_text().splitlines()[0])
    assert header.items() >= digests(load_model(str(TINY))).items()
    assert measured(path) == lines
    path.write_bytes(path.read_bytes()[:-40])
    (again,) = lines_of(capsys, arguments)
    assert {**again, "seconds": 0} == {**lines[1], "seconds": 0}
    assert measured(path) == [lines[0], again]
    assert lines_of(capsys, arguments) == []
    assert len(lines_of(capsys, arguments.replace("--count 1", "--count 2"))) == 2
    assert len(measured(path)) == 4


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells are the fields of the lines that the file gets; measured again, it is read from there."""
    path = tmp_path / "out.jsonl"
    arguments = (
        f"--model {TINY} --family math --count 2 --max-new-tokens 16 --show 1 --target static --states auto 2 --output {path}"
    )
    asked = [*arguments.split(), "--decoding", "static", "mrp_spec"]
    main(["evaluate", *asked])
    shown = capsys.readouterr().out
    lines = measured(path)
    assert [line.get("num_draft_states") for line in lines] == [None, "auto", 2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["static", "mrp_spec of static K=auto", "mrp_spec of static K=2"]
    last = charged(lines[2])
    assert last["charged_as"] == "4B"
    assert rows[2][3] == "{:.2f} ({:.2f}-{:.2f})".format(last["tokens_per_unit"], *last["tokens_per_unit_95"])
    assert (rows[0][0], rows[0][5], rows[0][6]) == ("math", "-", "0.00")
    assert shown.count("--- ") == 3, "an answer of each"
    main(["evaluate", *asked])
    assert capsys.readouterr().out.count("mrp_spec of static") == 2
    assert measured(path) == lines


def test_other_options_of_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They reach `generate` in every mode, and are part of what a line measures."""
    path = tmp_path / "out.jsonl"
    common = f"--family source --count 2 --max-new-tokens 16 --target static --output {path}"
    (plain,) = lines_of(capsys, common, "--decoding mrp_spec")
    sampled = lines_of(capsys, common, "--decoding mrp_spec static --set do_sample=true seed=3 temperature=8e-1 top_k=0")
    assert "set" not in plain
    assert sampled[0]["set"] == {"do_sample": True, "seed": 3, "temperature": 0.8, "top_k": 0}
    assert sampled[1]["identical_to_first"] == 100, "lossless for the same noise"
    assert plain["tokens_per_forward"] != sampled[0]["tokens_per_forward"]
    assert plain["accuracy"] is None, "real source text has none"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "no file named model.safetensors"),
        ("--prompts GOOD --max-new-tokens 9000", "line 1: a prompt of 3 tokens and 9000 new ones exceed the model's"),
        ("--output BAD", "bad.jsonl, line 1: no result of this command"),
        ("--decoding dynamic --tau 2", "confidence_threshold is 2.0: it must be a probability"),
        ("--decoding mrp_spec --states two", "num_draft_states is 'two': it must be 'auto' or an int from 1 to 256"),
        ("--set draft_pases=2", "--set draft_pases: generate has no such option (did you mean draft_passes?)"),
        ("--set num_return_sequences=2", "--set num_return_sequences=2: this command decides on num_return_sequences"),
    ],
)
def test_what_the_command_refuses(
    arguments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it reads the weights, of which there are none."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, "without", ignore=shutil.ignore_patterns("*.safetensors"))
    held = '{"prompt": "x"}\n{"prompt": 7}\n'
    Path("bad.jsonl").write_text(held)
    Path("good.jsonl").write_text('{"prompt": "2 + 3"}\n')
    words = arguments.replace("BAD", "bad.jsonl").replace("GOOD", "good.jsonl").split()
    with pytest.raises(SystemExit) as exited:
        main(["evaluate", *([] if "--model" in words else ["--model", "without"]), *words])
    assert exited.value.code in (1, 2)
    assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert Path("bad.jsonl").read_text() == held
