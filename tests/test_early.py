"""Errors that need no model come before torch is imported, which takes seconds."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY
from mrp_trainer import early
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.options import RunOptions
from mrp_trainer.train.settings import early_names, known_names, read_settings
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

T, LICENSE, NOT_FOUND = str(TINY), str(ROOT / "LICENSE"), "is no folder here, and as a repository it could not be read"
RUN = ["train", "head", "--output-dir", "o"]
CASES = [
    (["--version"], "0.1.0"),
    (RUN, "no model: give --model"),
    (["train", "backbone", "--model", T, "--data", LICENSE], "no output folder: give --output-dir"),
    ([*RUN, "--model", T], "no data: give --data"),
    ([*RUN, "--model", T, "--data", "no.jsonl"], "no.jsonl: there is no such file"),
    ([*RUN, "--model", T, "--data", LICENSE, "--eval-data", "no.jsonl"], "no.jsonl: there is no such file"),
    ([*RUN, "--model", "nosuch", "--data", LICENSE], f"Error: 'nosuch' {NOT_FOUND}"),
    (
        [*RUN, "--model", "./no", "--data", LICENSE, "--dry-run"],
        "'./no' is no folder here, and as a repository it could not be read",
    ),
    (
        [*RUN, "--model", T, "--data", LICENSE, "--head", "./no"],
        "'./no' is no folder here, and as a repository it could not be read",
    ),
    ([*RUN, "--model", T, "--set", "wieght_decay=1"], "nothing is called 'wieght_decay' here: did you mean weight_decay?"),
    ([*RUN, "--model", T, "--set", "weight_decay=much"], "weight_decay is 'much', and must be float"),
    ([*RUN, "--model", T, "--set", "unroll=two"], "unroll is 'two', and must be int"),
    ([*RUN, "--config", "no.yaml"], "no.yaml is neither a file nor one of the recipes"),
    ([*RUN, "--model", T, "--data", LICENSE, "--report-to", "clearml"], "report_to is 'clearml', which is not installed: pip"),
    (["evaluate", "--model", "nosuch"], f"Error: 'nosuch' {NOT_FOUND}"),
    (["evaluate", "--model", "./no"], "'./no' is no folder here, and as a repository it could not be read"),
    (["evaluate", "--model", T, "--set", "sed=1"], "generate has no such option (did you mean seed?)"),
    (
        ["evaluate", "--model", T, "--decoding", "mrp_spec", "--states", "two"],
        "num_draft_states is 'two': it must be 'auto' or",
    ),
    (["evaluate", "--model", T, "--decoding", "static", "--set", "denoising_steps=17"], "from 1 to block_size (16)"),
    (["evaluate", "--model", T, "--prompts", "no.jsonl"], "no.jsonl: cannot be read"),
    (["evaluate", "--model", T, "--output", LICENSE], "line 1: no result of this command"),
    (["decode", "--model", "nosuch", "--data", "no.jsonl", "--output", "o.jsonl"], "no.jsonl: there is no such file"),
    (["decode", "--model", "nosuch", "--data", LICENSE, "--output", "o.jsonl"], f"Error: 'nosuch' {NOT_FOUND}"),
    (["convert", "nosuch", "new"], f"Error: 'nosuch' {NOT_FOUND}"),
    (["convert", T, str(ROOT / "tests")], "is not empty: name a new folder"),
    (["show", "--model", "nosuch"], f"Error: 'nosuch' {NOT_FOUND}"),
    (["show", "--model", T, "--set", "sed=1"], "generate has no such option (did you mean seed?)"),
    (["serve", "nosuch"], f"Error: 'nosuch' {NOT_FOUND}"),
    (["serve", T, "--set", "draft_passes=0"], "draft_passes is 0: it must be"),
    (["push", "./no", "org/name"], "'./no' is neither a folder nor the id of a repository"),
    (["push", T, "a/b/c"], "Repo id must be in the form"),
    (["push", T, "org/name", "--card", "no.md"], "no.md is not a file: give the card to publish"),
    (
        ["push", T, "org/name", "--results", "no.jsonl"],
        "no.jsonl is not a file: give result files, the lines that mrp evaluate",
    ),
    (["card", "no"], "no is not a folder: save the model there first"),
    (["card", T, "--about", "no.md"], "no.md is not a file: give a Markdown file"),
]
# One interpreter for all: a torch that an error imports shows at those behind it, too.
SCRIPT = """
import json, sys
from typer.testing import CliRunner
from mrp_trainer import cli
sys.modules["clearml"] = None
runner = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
for arguments in json.load(sys.stdin):
    done = runner.invoke(cli.app, arguments)
    print(json.dumps([done.exit_code, " ".join(done.output.split()), "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Exit status, output and whether torch was imported, for each case."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "trainer")])}
    folder, asked = tmp_path_factory.mktemp("early"), json.dumps([arguments for arguments, _ in CASES])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, env=environment, input=asked, capture_output=True, text=True, check=True
    )
    assert not list(folder.iterdir())
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("number", "message"), [(n, message) for n, (_, message) in enumerate(CASES)])
def test_an_error_without_torch(number: int, message: str, answers: list[Any]) -> None:
    status, output, imported = answers[number]
    assert (status, imported) == (0 if number == 0 else 1, False)
    assert message in output


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_the_source_tells_the_trainers_fields(objective: str) -> None:
    """As their class does."""
    assert set(early_names(objective)) == set(known_names(objective))
    assert {one.name for one in (*fields(RunOptions), *fields(MRPTrainingArguments))} >= set(early_names(objective))


def test_early_settings_are_the_settings(tmp_path: Path) -> None:
    """Of values whose types the source tells; others are left for later."""
    config = tmp_path / "run.yaml"
    config.write_text("model: m\noutput_dir: o\nlearning_rate: 1e-2\nfsdp: true\nreport_to: tensorboard\n")
    given: dict[str, Any] = {"max_length": 32, "data": ["d"]}
    assert read_settings("mrp", str(config), given, early=True) == read_settings("mrp", str(config), given)
    assert read_settings("mrp", str(config), given, ["lr_scheduler_kwargs=3"], early=True).training["lr_scheduler_kwargs"] == 3


@pytest.mark.parametrize("name", sorted(INTEGRATION_TO_CALLBACK.keys() - {"kubeflow"}))
def test_a_tracker_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the Trainer has, one needs no package."""
    monkeypatch.setattr(early, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=f"^report_to is '{name}', which is not installed: pip install [a-z-]+, or name"):
        early.check_trackers(["all", name])
    monkeypatch.setattr(early, "find_spec", lambda module: module)
    early.check_trackers(name)


def test_no_tracker() -> None:
    for names in (None, [], "none", ["all", "kubeflow"]):
        early.check_trackers(names)
