"""lm-eval runs the checkpoint unchanged through its `hf` backend, in a process of its own, offline, from a task file."""

import json
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.command import family_set
from mrp_trainer.evaluate.decoded import decode_prompts
from mrp_trainer.evaluate.questions import JUDGES

from modeling_mrp import MRPForCausalLM

pytestmark = [
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed"),
    pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here"),
]

COUNT, NEW_TOKENS = 5, 64
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|im_end|>", "How many"], do_sample: false, temperature: 0.0, max_gen_toks: NEW}
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
# Both modes in one process: its imports take most of the time. `simple_evaluate` is what the command line calls.
PROGRAM = """\
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
model, tasks, out, *modes = sys.argv[1:]
found = {}
for mode in modes:
    ran = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={model},trust_remote_code=True",
        tasks=["sums"],
        task_manager=TaskManager(include_path=tasks, include_defaults=False),
        device="cpu",
        batch_size=3,
        gen_kwargs=f"decoding={mode}",
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    found[mode] = {
        "score": ran["results"]["sums"]["exact_match,last"],
        "answers": {sample["doc"]["prompt"]: sample["resps"][0][0] for sample in ran["samples"]["sums"]},
    }
assert "modeling_mrp" not in sys.modules, "the checkpoint's own code is what runs"
json.dump(found, open(out, "w"))
"""


def test_lm_eval_scores_as_we_do(tmp_path: Path, tiny_model: MRPForCausalLM, tiny_tokenizer: Any) -> None:
    """With prompts of different length in a batch, and with the wrong answer to one problem in the data: both modes give the
    texts that `generate` gives here, and the score that our judge gives them."""
    asked = problems("math", "heldout", COUNT)
    answers = [str(problem.number) for problem in asked]
    answers[1] = "1234"
    records = [{"prompt": problem.prompt, "answer": answer} for problem, answer in zip(asked, answers, strict=True)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "sums.yaml").write_text(TASK.replace("DATA", str(data)).replace("NEW", str(NEW_TOKENS)))
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "program.py", str(TINY), str(tmp_path), "found.json", "sequential", "mrp_spec"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    prompts = family_set("math", "heldout", COUNT, tiny_tokenizer).prompts
    assert len({len(prompt) for prompt in prompts}) > 1
    ours = decode_prompts(tiny_model, tiny_tokenizer, prompts, None, NEW_TOKENS, decoding="sequential")
    right = [JUDGES["last_number"](answer, text) for answer, text in zip(answers, ours.texts, strict=True)]
    assert 0 < sum(right) < COUNT
    for mode in ("sequential", "mrp_spec"):
        assert found[mode]["answers"] == {problem.prompt: text for problem, text in zip(asked, ours.texts, strict=True)}
        assert found[mode]["score"] == pytest.approx(sum(right) / COUNT)


CHOICES = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def test_log_likelihoods_are_warned_of_once(
    tmp_path: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two batches of them; generating, and asking what stands at a mask, say nothing."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # transformers adds it
    model = MRPForCausalLM.from_pretrained(TINY).eval()
    data = tmp_path / "choices.jsonl"
    data.write_text("".join(f'{{"prompt": "{n} + 1 =", "choices": [" {n + 1}", " {n}"]}}\n' for n in range(3)))
    (tmp_path / "choices.yaml").write_text(CHOICES.replace("DATA", str(data)))
    ids = tiny_tokenizer("def f(x):", return_tensors="pt")["input_ids"]
    model.generate(ids, max_new_tokens=4)
    model(torch.cat([ids, torch.full((1, 1), model.config.mask_token_id)], 1))
    assert "log-likelihoods" not in caplog.text
    lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tiny_tokenizer, batch_size=2),
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert caplog.text.count("log-likelihoods made of them") == 1


ROLLING = """\
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""
RECORDS = [  # choices of one and of several tokens, contexts of several lengths and an empty one
    {"prompt": "Ana has 3 pens.", "choices": [" Bo gives Ana 4 more.", " 7", " Ana loses"], "text": "Ana has 3 pens."},
    {"prompt": "", "choices": ["n = 4", "def f(x):"], "text": "def f(x):\n    return x + 1\n"},
    {"prompt": "def f(x):\n    return x +", "choices": [" 1", " y"], "text": "for"},
]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two tasks, `choices` and `texts`, of the same records."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "records.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    for name, task in (("choices", CHOICES), ("texts", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    return tmp_path


@pytest.mark.parametrize("most", [None, 8])
def test_its_log_likelihoods_are_scores(
    tasks: Path, tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Choices and whole texts, in batches; behind the eos where there is no context; in windows of 8 tokens."""
    import lm_eval
    from lm_eval.tasks import TaskManager
    from mrp_trainer.evaluate.lm_eval import MRPLM

    model, encode = tiny_model_float64, tiny_tokenizer.encode
    ran = lm_eval.simple_evaluate(
        model=MRPLM(pretrained=model, tokenizer=tiny_tokenizer, batch_size=2, max_length=most),
        tasks=["choices", "texts"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )

    def expected(context: list[int], rest: list[int]) -> tuple[float, bool]:
        ids = (context + rest)[-(most or 1000) :]
        labels = torch.tensor([[-100] * (len(ids) - len(rest)) + rest])
        out = model.score(torch.tensor([ids]), labels=labels)
        return out.sums.item(), bool(out.greedy[0, -len(rest) :].all())

    prefix = [tiny_tokenizer.bos_token_id or tiny_tokenizer.eos_token_id]
    samples = {sample["doc_id"]: sample["resps"] for sample in ran["samples"]["choices"]}
    for at, record in enumerate(RECORDS):
        context = encode(record["prompt"]) or prefix
        for choice, said in zip(record["choices"], samples[at], strict=True):
            total, greedy = expected(context, encode(record["prompt"] + choice)[len(encode(record["prompt"])) :])
            assert said[0] == (pytest.approx(total, abs=1e-9), greedy)
    if most is None:
        for sample in ran["samples"]["texts"]:
            assert sample["resps"][0][0] == pytest.approx(
                expected(prefix, encode(RECORDS[sample["doc_id"]]["text"]))[0], abs=1e-9
            )
    else:
        assert "longer than 8 tokens" in caplog.text
        text = encode(RECORDS[1]["text"])
        parts = [
            expected((prefix + text)[begin : begin + 1], text[begin : begin + 7]) for begin in range(0, len(text) // 7 * 7, 7)
        ]
        rest = len(text) % 7
        parts += [expected((prefix + text)[-8:-rest], text[-rest:])] if rest else []
        said = next(sample["resps"][0][0] for sample in ran["samples"]["texts"] if sample["doc_id"] == 1)
        assert said == pytest.approx(sum(total for total, _ in parts), abs=1e-9)


def test_its_command_line_with_our_model(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints a table; `auto` is a number of rows here."""
    from mrp_trainer.evaluate.lm_eval import main

    words = f"run --model mrp --model_args pretrained={TINY},trust_remote_code=True --batch_size auto --device cpu"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words.split(), "--include_path", str(tasks), "--tasks", "choices"])
    main()
    assert "|choices|" in capsys.readouterr().out
