"""Results for the Hub's benchmarks, and the page of heads that are published."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard, parse_eval_result_entries
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.repocard_data import model_index_to_eval_results
from mrp_trainer.publish import push
from mrp_trainer.publish.collection import published_heads
from mrp_trainer.publish.evaluations import EVALUATIONS

from tests.support.commands import mrp
from tests.support.hub_server import HubServer
from tests.support.random_cases import make_model

# of a file of prompts: the backbone's own drafts, and two widths of the head's
MEASURED: list[dict[str, Any]] = [
    {"decoding": "self_spec", "target": "static", "tokens_per_forward": 2.0, "head_per_token": 0.0},
    {"decoding": "mrp_spec", "target": "static", "tokens_per_forward": 3.0, "head_per_token": 0.4},
    {"decoding": "mrp_spec", "target": "static", "tokens_per_forward": 3.2, "head_per_token": 0.3},
]
RUN = {"objective": "mrp", "model": "org/base", "data": ["org/chats"], "max_steps": 80, "unroll": 2}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head's folder, and results of it on `questions.jsonl` and on a family."""
    folder = tmp_path_factory.mktemp("published") / "head"
    model = make_model().float()
    model.backbone_source = ("org/base", "a" * 40)
    model.save_pretrained(folder, head_only=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    lines = []
    for number, line in enumerate(MEASURED):
        states = {"num_draft_states": 4 * number} if number else {}
        lines.append({"file": "data/questions.jsonl", "accuracy": 70.0 + number, **line, **states})
    lines.append({**lines[1], "file": "sums.jsonl", "accuracy": None})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder.parent / "results.jsonl").write_text(text)
    return folder


def test_results_of_a_benchmark_pass_the_hubs_own_checks(hub: HubServer, head: Path) -> None:
    """A file of entries for the benchmark, and nothing of the set that is on no Hub; the card names
    the dataset."""
    results = str(head.parent / "results.jsonl")
    arguments = ("--results", results, "--benchmark", "questions=openai/gsm8k:gsm8k")
    assert EVALUATIONS in mrp("push", str(head), "org/head", *arguments, "--dry-run")
    mrp("push", str(head), "org/head", *arguments)
    files = hub.files("org/head")
    entries = parse_eval_result_entries(yaml.safe_load(files[EVALUATIONS]))
    assert [(entry.dataset_id, entry.task_id, entry.value) for entry in entries] == [
        ("openai/gsm8k", "gsm8k", 70.0),
        ("openai/gsm8k", "gsm8k", 71.0),
        ("openai/gsm8k", "gsm8k", 72.0),
    ]
    assert entries[1].notes == "mrp_spec of static K=4, 3.00 tokens per forward"
    card = ModelCard(files["README.md"].decode())
    _, listed = model_index_to_eval_results(card.data.to_dict()["model-index"])
    types = {result.dataset_name: result.dataset_type for result in listed}
    assert types == {"questions": "openai/gsm8k", "sums": "sums"}
    # without the flag there is no such file, and one that is there stays
    push(head, "org/other", results=[results])
    assert EVALUATIONS not in hub.files("org/other")
    push(head, "org/head", results=[results])
    assert hub.files("org/head")[EVALUATIONS] == files[EVALUATIONS]


@pytest.mark.parametrize(
    ("benchmark", "message"),
    [
        ("openai/gsm8k", "benchmark is 'openai/gsm8k': write NAME=DATASET:TASK"),
        ("questions=gsm8k:main", "benchmark is 'questions=gsm8k:main'"),
        ("questions=openai/gsm8k", "benchmark is 'questions=openai/gsm8k'"),
        ("answers=openai/gsm8k:main", "names answers, and no result is of it: .* questions, sums"),
    ],
)
def test_a_benchmark_that_is_none_is_refused(head: Path, benchmark: str, message: str) -> None:
    results = [head.parent / "results.jsonl"]
    with pytest.raises(ValueError, match=message):
        push(head, "org/head", dry_run=True, results=results, benchmark=[benchmark])


def test_the_page_of_heads(hub: HubServer, head: Path, tmp_path: Path) -> None:
    """Made from cards: backbone, recipe, the best measured mode beside the best without a head."""
    assert "No head was found." in mrp("heads")
    push(head, "org/head", results=[head.parent / "results.jsonl"], license="mit")
    hub.commit("org/model", {"README.md": b"---\ntags: [mrp]\n---\n"})
    odd = b"---\ntags: [mrp, draft-model]\nmodel-index: [{name: 3}]\n---\n\n# Odd\n"
    hub.commit("me/odd", {"README.md": odd})
    torn = b"\n## Trained\n\nTrained by `mrp train head` so\n\n```yaml\na: [1\n```\n"
    hub.commit("me/torn", {"README.md": b"---\ntags: [mrp, draft-model]\n---\n" + torn})
    page = mrp("heads").splitlines()
    table = [line for line in page if line.startswith("| [")]
    hub_url = "https://huggingface.co"
    assert table == [
        f"| [org/head]({hub_url}/org/head) | [org/base]({hub_url}/org/base) "
        "| data: org/chats; max_steps: 80; unroll: 2 "
        "| questions: 2.50 (mrp_spec of static K=8), 2.00 without a head; sums: 2.31 (mrp_spec of "
        "static K=4) | mit |",
        f"| [me/odd]({hub_url}/me/odd) | not named | not told | not measured | unknown |",
        f"| [me/torn]({hub_url}/me/torn) | not named | not told | not measured | unknown |",
    ]
    assert [found.repo_id for found in published_heads(author="me")] == [
        "me/odd",
        "me/torn",
    ]
    assert [found.repo_id for found in published_heads(backbone="org/base")] == ["org/head"]
    assert len(published_heads(limit=1)) == 1
    mrp("heads", "--output", str(tmp_path / "heads.md"))
    assert (tmp_path / "heads.md").read_text().splitlines() == page


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line, and no traceback."""
    (http_error, *_) = HfHubHTTPError.__bases__
    monkeypatch.setattr(HfApi, "list_models", Mock(side_effect=http_error("refused")))
    told = mrp("heads", fails=True).replace("\n", " ")
    assert "cannot be reached: check the network, and repeat the command (refused)" in told
