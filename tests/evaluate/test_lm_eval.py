"""lm-eval runs the checkpoint unchanged through its `hf` backend, offline, from a task file; and with the model `mrp`."""

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import decode_prompts
from mrp_trainer.evaluate.problem_sets import JUDGES, family_set

from modeling_mrp import MRPForCausalLM

lm_eval: Any = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
COUNT, NEW_TOKENS = 5, 64
BASE = """\
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: NAME.jsonl}}
test_split: test
"""
TASKS = {
    "sums": """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<|im_end|>", "How many"], do_sample: false, temperature: 0.0, max_gen_toks: 64}
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "choices": """\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
}
RECORDS = [  # choices of one and of several tokens, contexts of several lengths and an empty one
    {"prompt": "Ana has 3 pens.", "choices": [" Bo gives Ana 4 more.", " 7", " Ana loses"], "text": "Ana has 3 pens."},
    {"prompt": "", "choices": ["n = 4", "def f(x):"], "text": "def f(x):\n    return x + 1\n"},
    {"prompt": "def f(x):\n    return x +", "choices": [" 1", " y"], "text": "for"},
]


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the tasks; in `sums` one problem has a wrong answer."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    sums = [{"prompt": problem.prompt, "answer": str(problem.number)} for problem in problems("math", "heldout", COUNT)]
    sums[1]["answer"] = "1234"
    for name, text in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(BASE.replace("NAME", name) + text)
        lines = map(json.dumps, sums if name == "sums" else RECORDS)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def evaluated(folder: Path, model: Any, names: list[str], **options: Any) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **options)


def test_lm_eval_scores_as_we_do(tasks: Path, tiny_model: MRPForCausalLM, tiny_tokenizer: Any) -> None:
    """With prompts of different length in a batch: both modes give the texts that `generate` gives here, and the score that
    our judge gives them. The checkpoint's own code is what runs."""
    from lm_eval.models.huggingface import HFLM

    remote = HFLM(pretrained=str(TINY), trust_remote_code=True, device="cpu", batch_size=3)
    assert type(remote.model).__module__.startswith("transformers_modules")
    prompts = family_set("math", "heldout", tiny_tokenizer, COUNT).prompts
    ours = decode_prompts(tiny_model, tiny_tokenizer, prompts, None, NEW_TOKENS, decoding="sequential")
    asked = [json.loads(line) for line in (tasks / "sums.jsonl").read_text().splitlines()]
    right = [JUDGES["last_number"](one["answer"], text) for one, text in zip(asked, ours.texts, strict=True)]
    assert 0 < sum(right) < COUNT
    for mode in ("sequential", "mrp_spec"):
        ran = evaluated(tasks, remote, ["sums"], gen_kwargs=f"decoding={mode}", apply_chat_template=True)
        said = {sample["doc"]["prompt"]: sample["resps"][0][0] for sample in ran["samples"]["sums"]}
        assert said == {one["prompt"]: text for one, text in zip(asked, ours.texts, strict=True)}
        assert ran["results"]["sums"]["exact_match,last"] == pytest.approx(sum(right) / COUNT)


def test_log_likelihoods_are_warned_of_once(tasks: Path, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Several batches of them; generating, and asking what stands at a mask, say nothing."""
    from lm_eval.models.huggingface import HFLM

    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # transformers adds it
    model = MRPForCausalLM.from_pretrained(TINY).eval()
    ids = tiny_tokenizer("def f(x):", return_tensors="pt")["input_ids"]
    model.generate(ids, max_new_tokens=4)
    model(torch.cat([ids, torch.full((1, 1), model.config.mask_token_id)], 1))
    assert "log-likelihoods" not in caplog.text
    evaluated(tasks, HFLM(pretrained=model, tokenizer=tiny_tokenizer, batch_size=2), ["choices"])
    assert caplog.text.count("log-likelihoods made of them") == 1


@pytest.mark.parametrize("most", [None, 8])
def test_its_log_likelihoods_are_scores(
    tasks: Path, tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Choices and whole texts, in batches; behind the eos where there is no context; in windows of 8 tokens."""
    from mrp_trainer.evaluate.lm_eval import MRPLM

    model, encode = tiny_model_float64, tiny_tokenizer.encode
    judged = MRPLM(pretrained=model, tokenizer=tiny_tokenizer, batch_size=2, max_length=most)
    samples = evaluated(tasks, judged, ["choices", "texts"])["samples"]

    def expected(context: list[int], rest: list[int]) -> tuple[Any, bool]:
        ids = (context + rest)[-(most or 1000) :]
        labels = torch.tensor([[-100] * (len(ids) - len(rest)) + rest])
        out = model.score(torch.tensor([ids]), labels=labels)
        return pytest.approx(out.sums.item(), abs=1e-9), bool(out.greedy[0, -len(rest) :].all())

    prefix = [tiny_tokenizer.bos_token_id or tiny_tokenizer.eos_token_id]
    for sample in samples["choices"]:
        record = RECORDS[sample["doc_id"]]
        context = encode(record["prompt"])
        for choice, said in zip(record["choices"], sample["resps"], strict=True):
            assert said[0] == expected(context or prefix, encode(record["prompt"] + choice)[len(context) :])
    if most is None:
        for sample in samples["texts"]:
            assert sample["resps"][0][0] == expected(prefix, encode(RECORDS[sample["doc_id"]]["text"]))[0]
    else:
        assert "longer than 8 tokens" in caplog.text


def test_its_command_line_has_our_model(tasks: Path) -> None:
    """By its name, with what the command line gives it; `auto` is a number of rows here."""
    importlib.import_module("mrp_trainer.evaluate.lm_eval")
    given = f"pretrained={TINY},trust_remote_code=True"
    ran = evaluated(tasks, "mrp", ["choices"], model_args=given, batch_size="auto", device="cpu")
    assert len(ran["samples"]["choices"]) == len(RECORDS)
