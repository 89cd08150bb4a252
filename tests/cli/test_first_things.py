"""What a person meets first: names, help, completion, flags that nearly exist, and errors of one
line."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer import cli, embedded_checkpoint
from mrp_trainer.evaluate.options import EvaluateOptions
from mrp_trainer.flags import suggest_flags
from mrp_trainer.loading import load_config, load_generation_fields, load_model, tokenizer_of
from mrp_trainer.publish import push

from modeling_mrp import MRPForCausalLM
from tests.support.commands import RUNNER, command, mrp
from tests.support.helpers import SHA, in_hub_cache, same_tensors
from tests.support.places import ROOT, TINY

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def paths(found: Any = None, *path: str) -> Iterator[tuple[str, ...]]:
    """Every command and group, such as ("train", "head")."""
    found = found or command()
    yield path
    for name, inner in getattr(found, "commands", {}).items():
        yield from paths(inner, *path, name)


PATHS = list(paths())
LEAVES = [path for path in PATHS if not hasattr(command(*path), "commands")]


def test_exported_names_are_listed_before_they_are_imported() -> None:
    """modeling_mrp imports torch at once, since it makes the Auto classes know its models."""
    code = """
    import sys, mrp_trainer
    names = set(mrp_trainer.__all__)
    print(names <= set(dir(mrp_trainer)), set(mrp_trainer._HOMES) <= names)
    print("torch" in sys.modules)
    import modeling_mrp
    names = set(modeling_mrp.__all__)
    print(names <= set(dir(modeling_mrp)), set(modeling_mrp._HOMES) <= names)
    for module in (modeling_mrp, mrp_trainer):
        print(all(hasattr(module, name) for name in module.__all__))
    """
    lines = "\n".join(line[4:] for line in code.splitlines())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "trainer")))}
    done = subprocess.run(
        [sys.executable, "-c", lines], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "False", "True", "True", "True", "True"]


# Help and completion


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_fits_a_terminal_and_shows_every_flag_whole(path: tuple[str, ...]) -> None:
    """By `-h`, too; without Python's None, and without choices that are cut in the middle of a
    word."""
    result = RUNNER.invoke(cli.app, [*path, "-h"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "…" not in result.output
    assert not re.search(r"\bNone\b", result.output)
    assert not re.search(r"<(list\[)?\w+\|[^>]*\n", result.output)
    for parameter in command(*path).params:
        assert all(
            re.search(rf"(?<![\w-]){name}(?![\w-])", result.output)
            for name in parameter.opts
            if name.startswith("--")
        )


def test_completion_needs_nothing_heavy() -> None:
    """The script that `--show-completion` prints, and what it then asks for."""
    code = """
    import sys, mrp_trainer.cli
    try:
        mrp_trainer.cli.main()
    finally:
        print(sorted({"torch", "transformers", "numpy"} & sys.modules.keys()))
    """
    lines = "\n".join(line[4:] for line in code.splitlines())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "trainer")))}

    def completed(words: str, instruction: str = "complete_bash") -> list[str]:
        asked = {
            "_MRP_COMPLETE": instruction,
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        run = subprocess.run(
            [sys.executable, "-c", lines],
            env=environment | asked,
            capture_output=True,
            text=True,
            check=False,
        )
        return run.stdout.splitlines()

    assert "complete -o default -F _mrp_completion mrp" in completed("", "source_bash")
    assert completed("mrp eva") == ["evaluate", "[]"]
    assert completed("mrp evaluate --decoding mrp_s") == ["mrp_spec", "[]"]
    assert "--show-completion" in mrp("--help")


# Flags


@pytest.mark.parametrize(
    ("path", "unknown", "meant"),
    [
        ("train head", "--batchsize", "--batch-size"),
        ("train head", "--num-train-epochs", "--epochs"),
        ("train head", "--epoch", "--epochs"),
        ("train head", "--max_steps", "--steps"),
        ("train head", "--gradient_accumulation_steps", "--accumulate"),
        ("train head", "--warmup-steps", "--set warmup_steps=VALUE"),
        ("evaluate", "--temperature", "--set temperature=VALUE"),
        ("decode", "--bs", "--batch-size"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_one_that_is_meant(
    path: str, unknown: str, meant: str
) -> None:
    assert meant in suggest_flags(unknown, command(*path.split()).params)
    message = " ".join(mrp(*path.split(), unknown, "1", fails=True).replace("│", " ").split())
    assert re.search(
        rf"No such option:? '?{unknown}'?\. Did you mean .*{re.escape(meant)}.*\?", message
    )


def test_a_mistyped_command_is_answered_with_the_one_that_is_meant() -> None:
    assert "No such command 'evaluat'. Did you mean 'evaluate'?" in mrp("evaluat", fails=True)


def test_every_command_that_takes_a_model_takes_its_revision_and_another_backbone() -> None:
    """Where training names a backbone alone, `--backbone` is another word for `--model`."""
    flags = {
        path: {name for each in command(*path).params for name in each.opts} for path in LEAVES
    }
    loading = {path: names for path, names in flags.items() if {"--model", "model"} & names}
    assert {path[0] for path in loading} == {
        "train",
        "evaluate",
        "decode",
        "serve",
        "show",
        "doctor",
    }
    assert all({"--revision", "--backbone"} <= names for names in loading.values())


@pytest.fixture
def moved(tmp_path: Path) -> tuple[Path, Path]:
    """A head whose backbone's folder is gone, and the folder where the backbone is now."""
    model: Any = MRPForCausalLM.from_pretrained(TINY)
    model.backbone_source = (str(tmp_path / "before"), None)
    model.save_pretrained(tmp_path / "head", head_only=True)
    tokenizer_of(EvaluateOptions()).save_pretrained(tmp_path / "head")
    model.detach_head()
    model.save_pretrained(tmp_path / "now")
    return tmp_path / "head", tmp_path / "now"


def test_a_head_whose_backbone_moved(moved: tuple[Path, Path]) -> None:
    """The error names the folder that is gone, and both remedies work."""
    head, backbone = map(str, moved)
    gone = str(moved[0].parent / "before")
    asked = ["evaluate", "--family", "math", "--count", "1", "--max-new-tokens", "16", "--json"]
    message = mrp(*asked, "--model", head, fails=True)
    assert message.splitlines()[-1].startswith(
        f"Error: the folder {gone} is gone, which the head in {head} names"
    )
    assert "--backbone" in message
    assert "from_backbone(folder, head=" in message
    with pytest.raises(ValueError, match=f"the folder {gone} is gone"):
        MRPForCausalLM.from_pretrained(head)
    whole: Any = MRPForCausalLM.from_pretrained(TINY)
    model = load_model(head, backbone=backbone)
    assert same_tensors(model, whole)
    assert same_tensors(MRPForCausalLM.from_backbone(backbone, head=head), whole)
    assert model.generation_config.to_dict().items() >= load_generation_fields(head).items()
    lines = mrp(*asked, "--model", head, "--backbone", backbone)
    assert lines.count('"decoding": "mrp_spec"') == 1
    assert f'"backbone": "{backbone}"' in lines, "part of what a line measures"


def test_a_revision_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config, options of generate and weights of a commit that is not the newest."""
    old, new = "1" * 40, SHA
    model: Any = MRPForCausalLM.from_pretrained(TINY)
    model.save_pretrained(tmp_path / "new")
    model.detach_head()
    model.generation_config.num_draft_states = 7
    model.save_pretrained(tmp_path / "old")
    in_hub_cache(tmp_path / "new", tmp_path / "hub", "org/model", new)
    repository = tmp_path / "hub" / "models--org--model"
    (tmp_path / "old").rename(repository / "snapshots" / old)
    (repository / "refs" / "v1").write_text(old)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision, has_head in ((None, True), ("v1", False), (old, False)):
        assert load_config("org/model", revision).has_head is has_head
        assert (load_model("org/model", revision=revision).mrp_head is not None) is has_head
        assert (
            load_generation_fields("org/model", revision)["num_draft_states"] == 7
        ) is not has_head


# Errors


def test_extras_are_advised_by_the_name_that_works_from_a_wheel() -> None:
    """Not by the path of a clone."""
    sources = [
        path
        for folder in ("modeling_mrp", "trainer", "serving")
        for path in (ROOT / folder).rglob("*.py")
    ]
    advised = [
        text
        for path in sources
        for text in re.findall(r"pip install ([^\s,)]*\[[^\s,)]*)", path.read_text())
    ]
    assert len(advised) >= 4
    for text in advised:
        name = re.fullmatch(r"""'modeling-mrp\[(\w+)\]'"?""", text)
        assert name is not None, text
        assert name[1] in EXTRAS


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As with a cable pulled: nothing listens where the Hub would be, and nothing was downloaded
    before."""
    away = "http://127.0.0.1:9"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", away)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", away)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        away + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    # between its attempts
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "1 + 1", "completion": "2"}\n')
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        "evaluate --model org/none",
        "evaluate --model org/none --revision v1 --backbone org/other",
        "evaluate --backbone org/other",
        "show --model org/none",
        "doctor --model org/none",
        "decode --model org/none --data p.jsonl --output out.jsonl",
        "train head --model org/none --data p.jsonl --output-dir run",
        "train head --model TINY --head org/none --data p.jsonl --output-dir run",
        "card org/none",
    ],
)
def test_an_id_without_a_network_is_an_error_in_a_line(arguments: str, no_network: Path) -> None:
    message = mrp(*arguments.replace("TINY", embedded_checkpoint()).split(), fails=True)
    assert [line for line in message.splitlines() if "rror" in line] == [
        line := message.splitlines()[-1]
    ]
    assert line.startswith("Error: ")
    assert re.search(r"org/(none|other)", line)
    assert not (no_network / "out.jsonl").exists()


def test_a_push_without_a_network(no_network: Path) -> None:
    with pytest.raises(
        OSError,
        match=r"the Hub at http://127\.0\.0\.1:9 cannot be reached: check the network, and repeat",
    ):
        push(TINY, "org/name", token="hf_none")
    message = mrp("push", embedded_checkpoint(), "org/name", fails=True)
    assert message.splitlines()[-1].startswith(
        "Error: the Hub at http://127.0.0.1:9 cannot be reached"
    )


def test_a_run_that_would_push_without_a_network(no_network: Path) -> None:
    train = [
        "train",
        "head",
        "--model",
        embedded_checkpoint(),
        "--data",
        "p.jsonl",
        "--output-dir",
        "run",
    ]
    message = mrp(*train, "--set", "push_to_hub=true", fails=True)
    assert message.splitlines()[-1].startswith(
        "Error: the Hub cannot be reached: check the network"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "train head --model TINY --data p.jsonl --output-dir run --report-to wandbee",
            "report_to is 'wandbee': this tracker",
        ),
        (
            "train head --model TINY --data p.jsonl --output-dir run --report-to wandb",
            "report_to is 'wandb': this tracker",
        ),
        (
            "train head --model TINY --data p.jsonl --output-dir run --accumulate 0",
            "for '--accumulate'",
        ),
        (
            "train head --model TINY --data p.jsonl --output-dir run --set num_train_epochs=-1",
            "num_train_epochs is -1",
        ),
        (
            "evaluate --device nonsense",
            "device is 'nonsense', which is not here: use cpu, or leave it out",
        ),
        (
            "doctor --device cuda:99",
            "device is 'cuda:99', which is not here: use cpu, or leave it out",
        ),
        (
            "show --device cuda:99",
            "device is 'cuda:99', which is not here: use cpu, or leave it out",
        ),
    ],
)
def test_what_is_missing_on_a_machine_is_named(
    arguments: str, message: str, no_network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mrp_trainer.train.arguments.get_available_reporting_integrations", lambda: ["tensorboard"]
    )
    assert message in mrp(*arguments.replace("TINY", embedded_checkpoint()).split(), fails=True)
    assert not (no_network / "run").exists()


@pytest.mark.parametrize("device", ["mps", "mps:0", None])
def test_an_apple_gpu_has_no_float64(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrp_trainer.loading.default_device", lambda: torch.device("mps"))
    with pytest.raises(ValueError, match=r"dtype is float64, which an Apple GPU \(mps\) has not"):
        load_model(embedded_checkpoint(), "float64", device)
