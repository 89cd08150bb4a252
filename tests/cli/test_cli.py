"""The console script, in this process; its help, its errors, and the way from tasks to a head that
decodes."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import mrp_trainer
import pytest
from mrp_trainer import cli
from mrp_trainer.evaluate.options import Judge
from mrp_trainer.evaluate.problem_sets import JUDGES
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.options import HeadInit, RevealRule, TrainCommand
from mrp_trainer.train.settings import known_names
from mrp_trainer.train.trainer import MRPTrainer
from transformers import PreTrainedTokenizerFast

from tests.support.commands import RUNNER, command, mrp
from tests.support.helpers import word_model
from tests.support.places import ROOT, TINY
from tests.support.training_runs import saved

TRAIN = ["--model", "m", "--output-dir", "o"]
OBJECTIVES = {"head": "mrp", "backbone": "block_diffusion"}


def test_help_waits_for_nothing_heavy() -> None:
    """Nor does the package, whose classes are imported when they are asked for."""
    code = (
        "import sys, mrp_trainer.cli; print(sorted({'torch', 'transformers', 'numpy'} & "
        "sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
    assert mrp_trainer.MRPTrainer is MRPTrainer
    with pytest.raises(AttributeError, match="'mrp_trainer' has no attribute 'MRPTrain'"):
        mrp_trainer.MRPTrain  # noqa: B018


@pytest.mark.parametrize(("name", "rate"), [("head", 1e-3), ("backbone", 1e-4)])
def test_flags_are_settings(name: str, rate: float) -> None:
    """The one default that depends on the objective is shown in words."""
    of_command = {"help", *(one.name for one in fields(TrainCommand))}
    flags = {
        one.name: one.show_default
        for one in command("train", name).params
        if one.name not in of_command
    }
    assert flags.keys() <= set(known_names(OBJECTIVES[name]))
    assert {
        word: float(shown) for shown, word in map(str.split, flags["learning_rate"].split(", "))
    }[name] == rate
    assert MRPTrainingArguments("o", objective=OBJECTIVES[name], use_cpu=True).learning_rate == rate


def test_every_judge_can_be_chosen() -> None:
    assert {*get_args(Judge)} == {*JUDGES}


def test_from_tasks_to_a_head_that_decodes(
    tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast
) -> None:
    backbone = saved(
        word_model(word_tokenizer, head_layers=0), word_tokenizer, tmp_path / "backbone"
    )
    head, data = tmp_path / "head", {}
    for split, count in (("train", 12), ("tune", 4)):
        data[split] = str(tmp_path / f"{split}.jsonl")
        told = mrp(
            "tasks",
            "--family",
            "math",
            "--split",
            split,
            "--count",
            str(count),
            "--output",
            data[split],
        )
        assert told == f"wrote {count} records to {data[split]}\n"
    arguments = [
        "train",
        "head",
        "--model",
        str(backbone),
        "--data",
        data["train"],
        "--eval-data",
        data["tune"],
    ]
    arguments += [
        "--output-dir",
        str(head),
        "--max-length",
        "128",
        "--steps",
        "3",
        "--batch-size",
        "2",
        "--head-layers",
        "1",
    ]
    arguments += [
        "--eval-steps",
        "2",
        "--eval-prompts",
        "2",
        "--set",
        "use_cpu=true",
        "--set",
        "eval_new_tokens=8",
    ]
    printed = mrp(*arguments, "--logging-steps", "1", "--set", "disable_tqdm=true")
    assert printed.splitlines()[-2:] == [f"saved to {head}", f"next: mrp show --model {head}"]
    assert printed.count("'eval_loss'") == 2  # behind step 2, and at the end
    assert printed.count("'eval_mean_accepted_length'") == 2
    assert printed.count("'kl_head'") == 3
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Ana has 3 pens .", "answer": "3"}\n')
    asked = [
        "evaluate",
        "--model",
        str(head),
        "--prompts",
        str(tmp_path / "questions.jsonl"),
        "--max-new-tokens",
        "8",
    ]
    lines = mrp(*asked, "--json", "--decoding", "static", "--decoding", "mrp_spec").splitlines()
    static, spec = map(json.loads, lines)
    assert (static["decoding"], spec["identical_to_first"], spec["asked"]["problems"]) == (
        "static",
        100,
        1,
    )
    assert spec["drafted"] > 0
    again = mrp(*arguments, "--logging-steps", "1", "--set", "disable_tqdm=true")
    assert again.startswith("resuming from checkpoint-3\n")
    assert "\nall 3 steps of this run are done. To train its head further, give --head" in again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "head", "--output-dir", "o"], "Error: no model: give --model"),
        (["train", "head", "--model", "m", "--output-dir", "o"], "Error: no data: give --data"),
        (
            [
                "train",
                "backbone",
                *TRAIN,
                "--data",
                str(ROOT / "LICENSE"),
                "--eval-data",
                "no.jsonl",
            ],
            "no.jsonl: there is no",
        ),
        (
            ["train", "backbone", "--config", "sdar-4b-mrp", "--output-dir", "o"],
            "nothing is called 'head_layers' here",
        ),
        (
            ["tasks", "--family", "math", "--count", "1", "--output", "."],
            "is a folder: name a file",
        ),
        (
            ["push", str(TINY), "org/name", "--branch", "b", "--pull-request"],
            "push to a branch, or open a pull request",
        ),
    ],
)
def test_errors_in_a_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in mrp(*arguments, fails=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["train"]], ids=" ".join)
def test_a_command_without_its_name_lists_what_there_is(arguments: list[str]) -> None:
    listed = RUNNER.invoke(cli.app, arguments).output
    names = command(*arguments).commands
    assert names
    assert all(f" {name} " in listed for name in names)


@pytest.mark.parametrize(
    ("flag", "choices"),
    [("--reveal-rule", get_args(RevealRule)), ("--head-init", get_args(HeadInit))],
)
def test_a_flag_names_its_choices(flag: str, choices: tuple[str, ...]) -> None:
    message = mrp("train", "head", *TRAIN, flag, "another", fails=True)
    assert f"for '{flag}'" in message
    assert all(f"'{choice}'" in message for choice in choices)


def test_a_backbone_has_no_flags_of_a_head() -> None:
    names = {parameter.name for parameter in command("train", "backbone").params}
    of_head = {"head", "head_layers", "head_init", "lora_rank", "lora_alpha", "unroll"}
    of_head |= {"reveal_rule", "verdict_prompts", "eval_prompts"}
    assert of_head <= {parameter.name for parameter in command("train", "head").params}
    assert not names & of_head
