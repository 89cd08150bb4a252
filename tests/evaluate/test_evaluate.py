"""The commands that measure: problems with answers, a line for everything asked, and numbers that
agree with texts."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.cost import charged
from mrp_trainer.evaluate.problem_sets import JUDGES, file_set
from mrp_trainer.evaluate.provenance import digests
from mrp_trainer.evaluate.results import with_headers
from mrp_trainer.evaluate.table import printing
from mrp_trainer.loading import load_model
from mrp_trainer.picture.modes import show_model
from mrp_trainer.picture.options import ShowOptions
from transformers import PreTrainedTokenizerFast

from tests.support.commands import mrp
from tests.support.places import TINY

GOOD = {"prompt": "Ana has", "answer": "5"}
USER = {"role": "user", "content": "Ana has"}


def written(folder: Path, *lines: Any) -> str:
    path = folder / "asked.jsonl"
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    return str(path)


def test_what_is_read(tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast) -> None:
    """The chat template is for chats; for prompts, if that is asked for."""
    chat = [{"role": "system", "content": "pens"}, USER]
    more = [{"prompt": "Ana"}, {"prompt": "has", "answer": None}]
    path = written(tmp_path, GOOD, b"", {"messages": chat, "answer": 5, "id": 7}, *more)
    found = file_set(path, word_tokenizer, "last_number", max_new_tokens=3)
    assert found.locations == [f"{path}, line {line}" for line in (1, 3, 4, 5)]
    assert found.prompt_texts == ["Ana has", "Ana has", "Ana", "has"]
    assert found.answers == ["5", "5", None, None]
    assert found.judge(["5", "4", "5", ""]) == [True, False, None, None]

    def words(ids: list[int]) -> str:
        return " ".join(word_tokenizer.convert_ids_to_tokens(ids))

    assert list(map(words, found.prompts[:2])) == [
        "Ana has",
        "? : pens user : Ana has assistant :".replace("?", "<unk>"),
    ]
    chats = file_set(path, word_tokenizer, chat=True, max_new_tokens=3)
    assert words(chats.prompts[0]) == "user : Ana has assistant :"
    assert (
        chats.digest()
        != found.digest()
        == file_set(path, word_tokenizer, max_new_tokens=3).digest()
    )
    assert file_set(path, word_tokenizer, count=1).locations == found.locations[:1]
    found.check_room(12)
    with pytest.raises(
        ValueError,
        match=r"line 3: a prompt of 9 tokens and 3 new ones exceed the model's 11 positions",
    ):
        found.check_room(11)


@pytest.mark.parametrize(
    ("lines", "judge", "told"),
    [
        ([GOOD, {**GOOD, "answer": ["5"]}], "exact", ", line 2, field answer: found ['5']"),
        (
            [{**GOOD, "answer": "five"}],
            "last_number",
            ", line 1, field answer: 'five' holds no number",
        ),
        ([{"messages": [USER]}], "exact", ", line 1: the tokenizer has no chat template"),
        ([{"prompt": " "}], "exact", ", line 1: the prompt has no token"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, lines: list[Any], judge: str, told: str, id_tokenizer: PreTrainedTokenizerFast
) -> None:
    """With file, line and field; also behind the limit."""
    path = written(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(path + told)):
        file_set(path, id_tokenizer, judge, count=1)


@pytest.mark.parametrize(
    ("judge", "answer", "right", "wrong"),
    [
        ("exact", "yes", [" yes\n"], "yes."),
        ("contains", "yes ", ["oh yes."], "ye s"),
        ("last_number", "3 + 4 = 7\n#### 7", ["It is 7.0", "1 of 7, then", "2-7"], "7 or 8"),
        ("last_number", "1234.5", ["It costs $1,234.50."], "1234"),
        ("last_number", "-7", ["x = -7", "-$7"], "x = 7"),
        ("last_number", "1000", ["1,000, or"], "a thousand"),
    ],
)
def test_judges(judge: str, answer: str, right: list[str], wrong: str) -> None:
    assert all(JUDGES[judge](answer, text) for text in right)
    assert not JUDGES[judge](answer, wrong)


pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def measured(path: Path) -> list[dict[str, Any]]:
    return [line for _, line in with_headers(map(json.loads, path.read_text().splitlines()))]


def lines_of(*arguments: str) -> list[dict[str, Any]]:
    """What the command prints; arguments may hold several words."""
    shown = mrp("evaluate", "--model", str(TINY), "--json", *" ".join(arguments).split())
    return [json.loads(line) for line in shown.splitlines()]


def test_a_line_for_every_setting_whose_intervals_hold_its_values() -> None:
    modes = "--decoding static --decoding mrp_spec --decoding mrp_remask --target static"
    several = "--states 2 --states 4 --branches 1 --branches 3 --tau 0.3 --tau 0.9"
    lines = lines_of("--family math --count 4", modes, several)
    names = ("decoding", "num_draft_states", "draft_branches", "confidence_threshold")
    assert [tuple(map(line.get, names)) for line in lines] == [
        ("static", None, None, None),
        *(("mrp_spec", k, b, None) for k in (2, 4) for b in (1, 3)),
        *(("mrp_remask", None, None, tau) for tau in (0.3, 0.9)),
    ]
    assert all(
        line["identical_to_first"] == 100 and line["accuracy"] == lines[0]["accuracy"]
        for line in lines[:5]
    )
    assert (
        lines[0]["tokens_per_forward"]
        < lines[1]["tokens_per_forward"]
        < lines[3]["tokens_per_forward"]
    )
    assert lines[0]["head_per_token"] == 0 < lines[1]["head_per_token"]
    spec, remask = lines[4:6]
    for name in ("accuracy", "tokens_per_forward", "mean_accepted_length", "identical_to_first"):
        low, high = spec[f"{name}_95"]
        assert low <= spec[name] <= high
    accepted = sum(
        n * rate / 100
        for n, rate in zip(spec["offered_by_depth"], spec["acceptance_by_depth"], strict=True)
    )
    assert accepted == pytest.approx(spec["accepted"], abs=0.1)
    assert not {"mean_accepted_length", "acceptance_by_depth"} & set(remask)
    assert remask["revoked"] > 0


def test_what_is_drafted_by_default_is_the_checkpoints_own(tmp_path: Path) -> None:
    """Its target, and 4 states where its number is `auto`, 8 in a picture; whatever is asked for
    goes before."""
    path = tmp_path / "own" / "generation_config.json"
    shutil.copytree(TINY, path.parent)
    path.write_text(
        json.dumps(
            {**json.loads(path.read_text()), "target": "dynamic", "num_draft_states": "auto"}
        )
    )
    common = (
        f"evaluate --model {path.parent} --json --family math --count 1 --max-new-tokens 16 "
        "--decoding mrp_spec"
    )
    for asked, target, width in (("", "dynamic", 4), ("--target static --states 3", "static", 3)):
        line = json.loads(mrp(*common.split(), *asked.split()))
        assert (line["target"], line["num_draft_states"]) == (target, width)
    show = ShowOptions(model=str(path.parent), output=str(tmp_path / "a.svg"), max_new_tokens=16)
    assert re.fullmatch(r"dynamic.*; mrp_spec of dynamic K=8 .*", show_model(show).title)


def test_without_a_mode_the_target_is_compared_alone_and_drafted(tmp_path: Path) -> None:
    """Drafted without the head, and with it where there is one; `--target` names another."""
    few = "--family math --count 1 --max-new-tokens 16 --states 2"
    own = load_model(str(TINY)).generation_config.target
    modes = [(line["decoding"], line.get("target")) for line in lines_of(few)]
    assert modes == [(own, None), ("self_spec", own), ("mrp_spec", own)]
    bare = load_model(str(TINY))
    bare.detach_head()
    bare.save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--tokenizer", str(TINY), "--target", "dynamic", "--json"]
    lines = [json.loads(line) for line in mrp("evaluate", *options, *few.split()).splitlines()]
    assert [(line["decoding"], line.get("target")) for line in lines] == [
        ("dynamic", None),
        ("self_spec", "dynamic"),
    ]


def test_a_table_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the longest name of a mode, and intervals of the most digits; no value is cut or
    broken."""
    monkeypatch.setenv("COLUMNS", "80")
    line = {
        "family": "source",
        "decoding": "mrp_spec",
        "target": "entropy_bound",
        "num_draft_states": 128,
        "seconds": 99999.9,
    }
    line |= {"tokens_per_forward": 9.99, "head_per_token": 0.99, "confidence_threshold": 0.95}
    percent, ratio = (
        {"accuracy": 98.9, "identical_to_first": 98.9},
        {"mean_accepted_length": 9.87, "tokens_per_unit": 8.76},
    )
    for values, interval in ((percent, [97.5, 100.0]), (ratio, [7.65, 9.98])):
        line |= values | {f"{name}_95": interval for name in values}
    monkeypatch.setattr("mrp_trainer.evaluate.table.charged", lambda line, shape: line)
    with printing(as_json=False) as (print_line, _):
        print_line(line)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    words = shown.split()
    for value in (
        "98.9",
        "97.5-100.0",
        "9.87",
        "8.76",
        "7.65-9.98",
        "9.99",
        "0.99",
        "99999.9",
        "entropy_bound",
        "tau=0.95",
    ):
        assert value in words
    assert words.count("source") == 1


def test_a_table_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Its cells are the fields of the lines that the file gets, from where what is on a whole line
    is read again."""
    path = tmp_path / "out.jsonl"
    asked = (
        f"evaluate --model {TINY} --family math --count 2 --max-new-tokens 16 --target static "
        f"--output {path}"
    ).split()
    asked += ["--states", "auto", "--states", "2", "--decoding", "static", "--decoding", "mrp_spec"]
    shown = mrp(*asked, "--show", "1")
    assert shown.count("--- ") == 3, "an answer of each"
    header = json.loads(path.read_text().splitlines()[0])
    assert header.items() >= digests(load_model(str(TINY))).items()
    lines = measured(path)
    assert [line.get("num_draft_states") for line in lines] == [None, "auto", 2]
    last = charged(lines[2])
    assert last["charged_as"] == "4B"
    value, interval = (
        f"{last['tokens_per_unit']:.2f}",
        "{:.2f}-{:.2f}".format(*last["tokens_per_unit_95"]),
    )
    assert re.search(
        rf"^mrp_spec of static K=2 +\d+\.\d +{value} .*\n +\S+ {interval} ", shown, re.MULTILINE
    )
    alone = f"{lines[0]['tokens_per_forward']:.2f}"
    assert re.search(rf"^math *\nstatic +\d+\.\d +{alone} +{alone} +- +0\.00 ", shown, re.MULTILINE)
    path.write_bytes(path.read_bytes()[:-40])
    assert mrp(*asked).count("mrp_spec of static") == 2
    *first, again = measured(path)
    assert first == lines[:2]
    assert {**again, "seconds": 0} == {**lines[2], "seconds": 0}
    assert mrp(*asked, "--json") == ""
    mrp(*asked, "--json", "--count", "1")
    assert len(measured(path)) == 6, "another question"


def test_a_file_of_prompts_and_other_options_of_generate(tmp_path: Path) -> None:
    """The problems of a family, from a file: the second has another answer there, the third none,
    and the fourth lies behind the limit. Options reach `generate` in every mode, and are part of
    what a line measures."""
    asked = problems("math", "heldout", 4)
    answers = [{"answer": asked[0].number}, {"answer": "1234"}, {}, {"answer": "x = 3"}]
    records = (
        {"prompt": problem.prompt, **answer} for problem, answer in zip(asked, answers, strict=True)
    )
    path = written(tmp_path, *records)
    common = "--count 3 --max-new-tokens 64 --target static --decoding mrp_spec"
    (known,) = lines_of(common, "--family math")
    of_file = [
        "evaluate",
        "--model",
        str(TINY),
        "--json",
        "--prompts",
        path,
        "--chat",
        "--judge",
        "last_number",
        "--show",
        "1",
    ]
    line, *shown = mrp(*of_file, *common.split()).splitlines()
    found = json.loads(line)
    assert (shown[0], shown[-1]) == (f"--- {asked[0].prompt}", "[right]")
    assert (found["file"], found["accuracy"]) == (path, 50)
    assert found["tokens_per_forward"] == known["tokens_per_forward"]
    sampling = (
        f"--set {name}" for name in ("do_sample=true", "seed=3", "temperature=8e-1", "top_k=0")
    )
    sampled = lines_of(common, "--decoding static --family source", *sampling)
    assert "set" not in known
    assert sampled[0]["set"] == {"do_sample": True, "seed": 3, "temperature": 0.8, "top_k": 0}
    assert sampled[1]["identical_to_first"] == 100, "lossless for the same noise"
    assert sampled[0]["accuracy"] is None, "real source text has none"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "no file named model.safetensors"),
        (
            "--prompts GOOD --max-new-tokens 9000",
            "line 1: a prompt of 3 tokens and 9000 new ones exceed the model's",
        ),
        ("--output BAD", "bad.jsonl, line 1: no result of this command"),
        ("--output NOTES", "notes.jsonl, line 1: no result of this command"),
        ("--decoding dynamic --tau 2", "confidence_threshold is 2.0: it must be a probability"),
        (
            "--decoding mrp_spec --states two",
            "num_draft_states is 'two': it must be 'auto' or an int from 1 to 256",
        ),
        (
            "--set draft_pases=2",
            "--set draft_pases: generate has no such option (did you mean draft_passes?)",
        ),
        (
            "--set num_return_sequences=2",
            "--set num_return_sequences=2: this command decides on num_return_sequences",
        ),
    ],
)
def test_what_the_command_refuses(
    arguments: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it reads the weights, of which there are none."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, "without", ignore=shutil.ignore_patterns("*.safetensors"))
    held = '{"prompt": "x"}\n{"prompt": 7}\n'
    Path("bad.jsonl").write_text(held)
    Path("good.jsonl").write_text('{"prompt": "2 + 3"}\n')
    Path("notes.jsonl").write_text("notes without an end")
    words = (
        arguments.replace("NOTES", "notes.jsonl")
        .replace("BAD", "bad.jsonl")
        .replace("GOOD", "good.jsonl")
        .split()
    )
    said = mrp("evaluate", "--model", "without", *words, fails=True)
    assert told in " ".join(said.replace("│", " ").split())
    assert Path("bad.jsonl").read_text() == held
