"""What a run says of itself: its log in words, a verdict on held-out prompts, and a picture."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.sources import Source
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.evaluate.cost import Deployment
from mrp_trainer.heads import with_new_head
from mrp_trainer.picture.run import draw_run
from mrp_trainer.train.inputs import prompts_of
from mrp_trainer.train.measures import LOG_KEYS
from mrp_trainer.train.verdict import Comparison, compare, verdict
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM
from tests.support.commands import mrp
from tests.support.helpers import sample, word_model
from tests.support.places import ROOT, TINY
from tests.support.training_runs import saved

QUICK = ["--set", "use_cpu=true", "--set", "disable_tqdm=true", "--set", "logging_steps=1"]
PREFIX = re.compile(r"^(eval_|train_|verdict_(static|dynamic)_)?(reread_)?")


def table_of(page: str) -> dict[str, str]:
    text = (ROOT / "docs" / page).read_text().split("\n## What the log says\n")[1]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text.split("\n## ")[0], re.MULTILINE))


def test_a_verdict_in_words() -> None:
    won = Comparison("dynamic", 2.1, 2.66, 2.0, 2.5)
    lost = Comparison("static", 2.2, 2.2, 2.13, 1.84)
    text = verdict([lost, won], 7, Deployment("8B"))
    assert text.splitlines()[0].startswith("7 held-out prompts, tokens per forward at K = 8")
    assert "one state, 8B on one H200 at batch 1" in text
    assert "  static             2.20       2.20                2.13   1.84" in text
    assert text.endswith("\nverdict: worth publishing, 1.25 times the tokens per unit with dynamic")
    assert verdict([lost], 7, Deployment()).endswith(
        "verdict: no better than none (0.86 times the tokens per unit): train longer, or on texts "
        "that the backbone wrote (mrp decode)"
    )


def test_a_trained_head_wins_and_a_new_one_does_not(tiny_tokenizer: Any) -> None:
    model = MRPForCausalLM.from_pretrained(TINY)
    encoder = RecordEncoder(tiny_tokenizer, 16, 512, tiny_tokenizer.mask_token_id)
    lines = [json.loads(line) for line in training_lines("math", "tune", 6)]
    prompts = prompts_of(RecordRows(Source({"rows": lines}), encoder), 6)
    trained = compare(model, tiny_tokenizer, prompts, 48)
    new = compare(with_new_head(model), tiny_tokenizer, prompts, 48)
    for with_head, without in zip(trained, new, strict=True):
        assert with_head.gain > 1 > without.gain
        # a head that adds nothing drafts as the backbone's own logits do
        assert without.drafted == pytest.approx(without.without, rel=0.1)
        assert with_head.drafted > with_head.per_unit


def test_a_prompt_is_what_comes_before_the_first_response_token() -> None:
    """A text that is learned whole has none, nor has one of which nothing is learned."""
    learned_from = (1, 3, 0, 9, 5)
    samples = [sample(index, 9, start) for index, start in enumerate(learned_from)]
    prompts = [samples[index].ids[:length].tolist() for index, length in ((0, 1), (1, 3), (4, 5))]
    rows = [samples[:2], *samples[2:]]
    assert prompts_of(rows, 5) == prompts
    assert prompts_of(rows, 2) == prompts[:2]


def test_prompts_are_held_back(word_tokenizer: Any) -> None:
    """A tenth of the records at most, of those with prompts; they are in no row, and the seed
    decides which."""
    encoder = RecordEncoder(word_tokenizer, 4, 32, word_tokenizer.mask_token_id)
    records = [{"prompt": f"{i // 10} {i % 10}", "completion": "the sum"} for i in range(40)]
    source = Source({"rows": [*records, *[{"text": "the sum"}] * 10]})
    every = {tuple(sample.ids) for row in RecordRows(source, encoder) for sample in row}
    taken = []
    for seed, count, expected in ((1, 3, 3), (1, 16, 5), (2, 16, 5)):
        rows = RecordRows(source, encoder, seed=seed, hold_back=count)
        held_back = {tuple(sample.ids) for sample in rows.held_back}
        trained = {tuple(sample.ids) for row in rows for sample in row}
        assert len(held_back) == expected
        assert held_back | trained == every
        assert not held_back & trained
        assert all(not sample.response[0] for sample in rows.held_back)
        taken.append(held_back)
    assert taken[0] < taken[1] != taken[2]
    few = Source({"rows": records[:9]})
    assert RecordRows(few, encoder, hold_back=16).held_back == []


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, word_tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    """A small backbone, chats, and a run on them with evaluations, which its output describes."""
    root = tmp_path_factory.mktemp("verdict")
    model = word_model(word_tokenizer)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    saved(model, word_tokenizer, root / "model")
    lines = list(training_lines("math", "train", 32))
    (root / "train.jsonl").write_text("\n".join(lines[:24]))
    (root / "held.jsonl").write_text("\n".join(lines[24:]))
    found = {path.stem: str(path) for path in root.iterdir()} | {"run": str(root / "run")}
    command = ["train", "head", "--model", found["model"], "--data", found["train"]]
    command += ["--eval-data", found["held"], "--eval-steps", "2", "--eval-prompts", "2"]
    command += ["--steps", "4", "--batch-size", "4", "--output-dir", found["run"], *QUICK]
    found["told"] = mrp(*command, "--set", "eval_new_tokens=8")
    return found


def test_every_key_of_the_log_is_explained(files: dict[str, str]) -> None:
    """On the page of training, and at the end of a run for those that say how it went."""
    history = json.loads((Path(files["run"]) / "trainer_state.json").read_text())["log_history"]
    names = {PREFIX.sub("", name) for line in history for name in line} - {"step"}
    assert names == LOG_KEYS.keys()
    assert table_of("training.md") == LOG_KEYS
    last: dict[str, Any] = {}
    for line in history:
        last |= line
    told = files["told"].splitlines()
    for name in ("loss", "gap_closed", "agreement"):
        assert f"{name} {last[name]:.4g} ({LOG_KEYS[name]})" in told
        held_out = f"eval_{name} {last[f'eval_{name}']:.4g} (held-out data: {LOG_KEYS[name]})"
        assert (held_out in told) == (name != "agreement")
    rows = [line for line in told if line.startswith("  static ")]
    assert rows == [
        f"  static   {last['verdict_static_stale_tokens_per_forward']:>14.2f}"
        f"{last['verdict_static_tokens_per_forward']:>11.2f}{'':>11}"
        f"{last['verdict_static_stale_tokens_per_unit']:>9.2f}"
        f"{last['verdict_static_tokens_per_unit']:>7.2f}"
    ]
    assert any(line.startswith("verdict: ") for line in told)
    assert any(line.startswith("8 held-out prompts") for line in told)


def test_no_prompt_no_verdict(files: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "the sum of two numbers"}\n' * 12)
    command = ["train", "head", "--model", files["model"], "--data", str(tmp_path / "texts.jsonl")]
    command += ["--steps", "1", *QUICK, "--output-dir"]
    told = mrp(*command, str(tmp_path / "a"))
    assert "no verdict: no prompt is held out; give --eval-data with prompts" in told
    assert "verdict:" not in mrp(*command, str(tmp_path / "b"), "--verdict-prompts", "0")


def test_a_picture_of_a_run(files: dict[str, str], tmp_path: Path) -> None:
    """A curve for each key that is drawn, a point for each of its lines; also of a run that goes
    on, by its newest checkpoint."""
    output = tmp_path / "run.svg"
    told = mrp("show", "--run", files["run"], "--output", str(output))
    svg = output.read_text()
    history = json.loads((Path(files["run"]) / "trainer_state.json").read_text())["log_history"]
    expected = []
    for names in (
        ("loss", "eval_loss"),
        ("gap_closed", "eval_gap_closed"),
        ("eval_tokens_per_forward", "eval_stale_tokens_per_forward"),
    ):
        expected += [sum(name in line for line in history) for name in names]
    points = [len(curve.split()) for curve in re.findall(r'points="([^"]*)"', svg)]
    assert points == expected == [4, 2, 4, 2, 2, 2]
    assert told.startswith(f"wrote {output}: run, 4 steps: loss, training: ")
    mrp("show", "--run", files["run"], "--output", str(output))  # its own picture
    (tmp_path / "run" / "checkpoint-9").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-10").mkdir()
    for name, loss in (("checkpoint-9", 1.0), ("checkpoint-10", 0.25)):
        state = {"log_history": [{"loss": loss, "step": 9}]}
        (tmp_path / "run" / name / "trainer_state.json").write_text(json.dumps(state))
    assert draw_run(tmp_path / "run").title == "run, 9 steps: loss, training: 0.25"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no log of a training run"),
        ("[]", "is no log of a training run: TypeError"),
        ("{", "is no log of a training run: JSONDecodeError"),
        ('{"log_history": []}', "has no losses to draw: set logging_steps"),
    ],
)
def test_what_is_no_run(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "trainer_state.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        draw_run(tmp_path)
