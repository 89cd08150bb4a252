"""The model card: what it says of a checkpoint, and that the command prints it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from mrp_trainer.evaluate.cost import Deployment, charged, pass_units
from mrp_trainer.evaluate.results import mode_name
from mrp_trainer.publish import push
from mrp_trainer.publish.card import eval_results, read_results, renamed, render_card, results_table
from mrp_trainer.publish.folder import PICTURE
from mrp_trainer.train.settings import read_settings

from benchmarks import tables
from modeling_mrp.versions import TESTED
from tests.support.commands import mrp
from tests.support.places import ROOT, TINY
from tests.support.random_cases import make_model

RESULTS = [f"benchmarks/results/tiny_heldout_{family}.jsonl" for family in ("math", "code")]
ABOUT = "benchmarks/results/tiny_card.md"
LINES: list[dict[str, Any]] = [
    {
        "family": "sums",
        "decoding": "static",
        "accuracy": 50.0,
        "tokens_per_forward": 1.0,
        "head_per_token": 0.0,
    },
    {
        "family": "sums",
        "decoding": "dynamic",
        "confidence_threshold": 0.5,
        "accuracy": 25.0,
        "tokens_per_forward": 4.0,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("card") / "model"
    make_model().float().save_pretrained(path)
    return path


def metadata(card: ModelCard) -> dict[str, Any]:
    """The card's metadata as the Hub reads it."""
    return yaml.safe_load(str(card).split("---")[1])


def test_the_embedded_card_is_what_the_command_prints_and_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its code runs."""
    monkeypatch.chdir(ROOT)
    results = [word for path in RESULTS for word in ("--results", path)]
    text = mrp("card", "hub_configs/sdar-tiny-mrp", *results, "--about", ABOUT)
    assert text == (TINY / "README.md").read_text()
    data = yaml.safe_load(text.split("---")[1])
    assert (data["library_name"], data["pipeline_tag"], data["license"]) == (
        "transformers",
        "text-generation",
        "apache-2.0",
    )
    assert "| parameters here | 1,017,216 of the backbone, 550,208 of the head |" in text
    (index,) = data["model-index"]
    metrics = [metric for result in index["results"] for metric in result["metrics"]]
    unit = "tokens per unit (the predicted time of a forward of one state, 4B on one H200 at "
    unit += "batch 1), mrp_spec of sequential K=4"
    lines = [
        line for line in read_results(RESULTS) if mode_name(line) == "mrp_spec of sequential K=4"
    ]
    found = [metric["value"] for metric in metrics if metric["name"] == unit]
    assert found == pytest.approx([charged(line)["tokens_per_unit"] for line in lines], abs=5e-4)
    assert f"\n{tables.heldout()}\n" in text
    shipped = json.loads((TINY / "generation_config.json").read_text())
    for option in ("decoding", "target", "num_draft_states"):
        assert f"\n| `{option}` | `{shipped[option]}` | " in text
    assert f"transformers: tested with {TESTED[0]} to {TESTED[1]}.\n" in text
    assert f"transformers\n{TESTED[0]} to {TESTED[1]}, on" in (ROOT / "MODEL_CARD.md").read_text()
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)
    assert "#### 5" in capsys.readouterr().out
    assert float(names["out"].tokens_per_forward[0]) >= 1


def test_a_card_claims_nothing_that_no_person_said(folder: Path, tmp_path: Path) -> None:
    """A backbone's asks for no head; a picture that lies in the folder is shown."""
    card = render_card(folder, "full", "org/some-model")
    assert metadata(card) == {
        "library_name": "transformers",
        "license": "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["dllm", "diffusion-lm", "block-diffusion", "speculative-decoding", "sdar", "mrp"],
    }
    assert "# some-model\n\nAn SDAR block-diffusion language model with an MRP head.\n" in str(card)
    assert "## Measured\n\nNot measured yet.\n" in str(card)
    assert "\n| `decoding` | `static` | " in str(card)
    assert "\n| `target` | `static` | " in str(card)
    assert not [word for word in ("## Trained", f"]({PICTURE})") if word in str(card)]
    assert 'use `mrp serve "org/some-model"`. `transformers serve` only knows' in str(card)
    make_model(num_nextn_predict_layers=0).save_pretrained(tmp_path)
    (tmp_path / PICTURE).write_text("<svg/>")
    alone = str(render_card(tmp_path, "full", "org/backbone"))
    assert 'decoding="self_spec"' in alone
    assert "custom_generate" not in alone
    assert f"]({PICTURE})" in alone
    assert push(tmp_path, "org/m", dry_run=True).sizes[PICTURE] == len("<svg/>")


@pytest.mark.parametrize(
    ("name", "repository"),
    [("org/some-model", "org/some-model"), ("./folder/some-model", "org/some-model")],
)
def test_custom_generate_names_a_repository(folder: Path, name: str, repository: str) -> None:
    """Never a folder, which its code refuses; that to which the card is pushed, once it is."""
    text = str(render_card(folder, "full", name))
    assert text.count(f'custom_generate="{repository}"') == text.count("custom_generate=") == 1
    pushed = renamed(text, "me/mine")
    assert pushed.count('custom_generate="me/mine"') == pushed.count("custom_generate=") == 1


def test_only_models_that_transformers_knows_are_offered_to_custom_generate(
    folder: Path, tmp_path: Path
) -> None:
    """Other families have no stock model to decode with."""
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"family": "llada2_moe"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    text = str(render_card(tmp_path / "model", "full", "org/some-model"))
    assert "A LLaDA2" in text
    assert "custom_generate" not in text


@pytest.mark.parametrize("kind", ["head", "adapter"])
def test_cards_of_heads_and_adapters_name_their_base(tmp_path: Path, kind: str) -> None:
    model = make_model()
    model.backbone_source = ("org/base", "v1")
    model.save_pretrained(tmp_path, head_only=True)
    if kind == "adapter":
        (tmp_path / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": "org/base"})
        )
    card = render_card(tmp_path, kind, "org/mine")
    data, text = metadata(card), str(card)
    assert (data["base_model"], data["base_model_relation"]) == ("org/base", "adapter")
    assert data["tags"][6:] == (["draft-model"] if kind == "head" else [])
    assert data["library_name"] == {"head": "transformers", "adapter": "peft"}[kind]
    assert {"head": "holds the head alone", "adapter": 'model.load_adapter("org/mine")'}[
        kind
    ] in text
    assert 'AutoTokenizer.from_pretrained("org/base"' in text


RUN = {
    **{
        "objective": "mrp",
        "model": "/home/me/backbone",
        "tokenizer": None,
        "data": ["/home/me/chats.jsonl", "more.jsonl"],
    },
    **{
        "eval_data": ["/home/me/held.jsonl"],
        "max_length": 64,
        "output_dir": "/home/me/head",
        "learning_rate": 0.5,
    },
    **{
        "deepspeed": "./secret/zero2.json",
        "hub_token": "hf_secret",
        "logging_dir": "/home/me",
        "data_digest": "ab12",
    },
}


def test_no_card_names_a_folder_of_this_machine(tmp_path: Path) -> None:
    """Neither as the base of a head nor among the data of its run, with weights or without."""
    model = make_model()
    model.backbone_source = ("/home/me/backbone", None)
    model.save_pretrained(tmp_path / "head", head_only=True)
    run = {"objective": "mrp", "model": "/home/me/backbone"}
    run["data"] = ["/home/me/a.jsonl*2", "org/chats:math", "/home/me/b.jsonl"]
    (tmp_path / "head" / "run.yaml").write_text(yaml.safe_dump(run))
    card = str(render_card(tmp_path / "head", "head", "org/mine"))
    assert "/home/me" not in card
    assert "data:\n- a.jsonl*2\n- org/chats:math\n- b.jsonl\n" in card
    assert "`org/backbone`" in card


@pytest.mark.parametrize("base", ["org/base", "/home/me/backbone"])
def test_the_recipe_comes_from_the_run(folder: Path, tmp_path: Path, base: str) -> None:
    """What made the weights, with the names of files alone; what is left is a file for `--config`.
    A model that was trained names the one it began with, if that is on the Hub."""
    model = make_model()
    model.backbone_source = (base, None)
    model.save_pretrained(tmp_path / "head", head_only=True)
    (tmp_path / "head" / "run.yaml").write_text(yaml.safe_dump(RUN))
    told = (
        str(render_card(tmp_path / "head", "head", "org/mine"))
        .split("## Trained\n\n")[1]
        .split("\n## ")[0]
    )
    assert told.startswith("Trained by `mrp train head` with these settings")
    (tmp_path / "again.yaml").write_text(told.split("```yaml\n")[1].split("```")[0])
    assert yaml.safe_load((tmp_path / "again.yaml").read_text()) == {
        **{
            "model": "org/base" if base == "org/base" else "backbone",
            "data": ["chats.jsonl", "more.jsonl"],
            "max_length": 64,
        },
        **{"learning_rate": 0.5, "deepspeed": "zero2.json", "data_digest": "ab12"},
    }
    assert (
        read_settings("mrp", str(tmp_path / "again.yaml"), {"output_dir": "o"}).training[
            "learning_rate"
        ]
        == 0.5
    )
    assert not [word for word in ("secret", "/home/me/", "held.jsonl") if word in told]
    trained = shutil.copytree(folder, tmp_path / "model")
    (trained / "run.yaml").write_text(
        yaml.safe_dump({"objective": "block_diffusion", "model": base})
    )
    data = metadata(render_card(trained, "full", "org/m"))
    named = (base, "finetune") if base == "org/base" else (None, None)
    assert (data.get("base_model"), data.get("base_model_relation")) == named


def test_a_table_of_uneven_results(tmp_path: Path) -> None:
    """One pass for four tokens, and so for each forward, at 23 % of it: 4 / 1.229 = 3.25. Lines
    that are no results are refused."""
    lines = [
        *LINES,
        {"family": "words", "decoding": "static", "accuracy": 99.95, "tokens_per_forward": 0.994},
    ]
    lines[1] = {**lines[1], "head_per_token": 0.25}
    assert results_table(lines) == (
        "| mode | sums % | words % | tokens / unit, 4B on one H200 at batch 1 (sums, words) | "
        "tokens / forward (sums, words) | head forwards / token | same as static % (sums, words) |"
        "\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| static | 50.0 | 100.0 | 1.00, - | 1.00, 0.99 | 0.00, - | -, - |\n"
        "| dynamic tau=0.5 | 25.0 | - | 3.25, - | 4.00, - | 0.25, - | -, - |"
    )
    deployment = Deployment("1.7B")
    per_unit = round(4 / (1 + pass_units(lines[1], deployment)), 3)
    assert [one.metric_value for one in eval_results(lines[1:2], deployment)] == [
        25.0,
        per_unit,
        4.0,
    ]
    (tmp_path / "results.jsonl").write_text(
        "".join(json.dumps({**line, "file": "a.jsonl"}) + "\n" for line in LINES)
    )
    assert len(read_results([tmp_path / "results.jsonl"])) == 2
    (tmp_path / "results.jsonl").write_text(json.dumps(LINES[0]) + "\n{}")
    with pytest.raises(
        ValueError, match=r"results\.jsonl, line 2 lacks accuracy: give lines of mrp evaluate"
    ):
        read_results([tmp_path / "results.jsonl"])
