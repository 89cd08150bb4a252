"""lm-eval against `mrp serve`, over HTTP and with its own command's function: its models
`local-completions` and `local-chat-completions` give what `hf` and `mrp` give in process."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.tasks import problems

from tests.support.places import TINY

for needed in ("lm_eval", "tenacity", "aiohttp", "openai", "fastapi"):
    pytest.importorskip(needed, reason="lm-eval's models of servers, and the server")

import lm_eval  # noqa: E402

from tests.support.openai_server import MODEL, OPTIONS, Served, served  # noqa: E402

COUNT = 6
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
"""
SUMS = """\
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["How many", "####"], do_sample: false, max_gen_toks: 48}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
CHOICES = """\
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
TEXTS = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
"""


@pytest.fixture(scope="module")
def server(tiny_model_float64: Any, tiny_tokenizer: Any) -> Iterator[Served]:
    with served(tiny_model_float64, tiny_tokenizer) as running:
        yield running


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task of each kind, of which no file comes from elsewhere."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    sums = []
    choices = []
    texts = []
    for problem in problems("math", "heldout", COUNT):
        sums.append({"prompt": problem.prompt, "answer": str(problem.number)})
        options = [f" {problem.number}", f" {problem.number + 1}", " no pens at all"]
        choices.append({"prompt": problem.prompt, "choices": options, "answer": 0})
        texts.append({"text": problem.prompt})
    for name, kind, lines in (
        ("sums", SUMS, sums),
        ("choices", CHOICES, choices),
        ("texts", TEXTS, texts),
    ):
        (tmp_path / f"{name}.yaml").write_text(COMMON.format(name=name) + kind)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def evaluated(folder: Path, model: Any, task: str, **options: Any) -> Any:
    """What lm-eval makes of a task: its numbers, and each answer by the number of its problem."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    report = lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, **options
    )
    answers = {}
    for sample in report["samples"][task]:
        answers[sample["doc_id"]] = sample["filtered_resps"]
    numbers = {}
    for name, value in report["results"][task].items():
        if isinstance(value, float):
            numbers[name] = value
    assert len(answers) == COUNT
    return numbers, answers


def arguments(server: Served, path: str, **more: Any) -> dict[str, Any]:
    """The flags of `lm_eval run` for a server, as its function takes them."""
    fields = {"model": MODEL, "base_url": server.url + path, "tokenizer": TINY, "max_length": 1024}
    fields |= {"num_concurrent": 4, "max_retries": 1, **more}
    return {"model_args": ",".join(f"{name}={value}" for name, value in fields.items())}


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chats"])
def test_texts_are_those_of_hf(
    server: Served, tasks: Path, tiny_model_float64: Any, tiny_tokenizer: Any, chat: bool
) -> None:
    from lm_eval.models.huggingface import HFLM

    expected = evaluated(
        tasks,
        HFLM(pretrained=tiny_model_float64, tokenizer=tiny_tokenizer, batch_size=4),
        "sums",
        gen_kwargs="decoding=sequential",
        apply_chat_template=chat,
    )
    name, path = "local-completions", "/v1/completions"
    if chat:
        name, path = "local-chat-completions", "/v1/chat/completions"
    for concurrent in (1, 4):
        found = evaluated(
            tasks,
            name,
            "sums",
            apply_chat_template=chat,
            **arguments(server, path, num_concurrent=concurrent),
        )
        assert found == expected
    assert any(any(answer) for answer in expected[1].values())
    assert OPTIONS["decoding"] == "mrp_spec"  # the server drafts for `sequential`


@pytest.mark.parametrize("task", ["choices", "texts"])
def test_log_likelihoods_are_exact_scores(
    server: Served, tasks: Path, tiny_model_float64: Any, tiny_tokenizer: Any, task: str
) -> None:
    """`hf` reads logits of visible positions, which mean nothing here; `mrp` has exact ones."""
    judged = importlib.import_module("mrp_trainer.evaluate.lm_eval").MRPLM(
        pretrained=tiny_model_float64, tokenizer=tiny_tokenizer, batch_size=4
    )
    numbers, answers = evaluated(tasks, judged, task)
    flags = arguments(server, "/v1/completions")
    found_numbers, found_answers = evaluated(tasks, "local-completions", task, **flags)
    assert found_numbers == pytest.approx(numbers, rel=1e-9)
    for index, values in answers.items():
        for value, found in zip(values, found_answers[index], strict=True):
            assert found == pytest.approx(value, abs=1e-6)
