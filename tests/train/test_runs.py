"""Training runs: settings and their errors, recipes, the folder, resuming."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT
from helpers import word_model
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.train.objectives import HeadObjective
from mrp_trainer.train.reveals import Reveals
from mrp_trainer.train.runs import dry_run, meta_model, open_run
from mrp_trainer.train.settings import Settings, known_names, read_settings, recipe_names
from safetensors.torch import load_file
from training_runs import saved
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from modeling_mrp import MRPForCausalLM

RUN = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "max_length": 128}
QUICK = ["use_cpu=true", "disable_tqdm=true", "logging_strategy=no", "dataloader_pin_memory=false"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, word_tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """A checkpoint with a head, its backbone alone, an autoregressive one, and chats."""
    root = tmp_path_factory.mktemp("runs")
    model = word_model(word_tokenizer)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    saved(model, word_tokenizer, root / "full")
    model.detach_head()
    saved(model, word_tokenizer, root / "backbone")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    qwen = Qwen3Config(vocab_size=len(word_tokenizer), num_key_value_heads=1, pad_token_id=0, **shape)
    saved(Qwen3ForCausalLM(qwen), word_tokenizer, root / "qwen3")
    lines = list(training_lines("math", "train", 24))
    (root / "train.jsonl").write_text("\n".join(lines[:16]))
    (root / "held.jsonl").write_text("\n".join(lines[16:]))
    return {path.stem: str(path) for path in root.iterdir()}


def settings_of(
    files: dict[str, str], folder: Path, objective: str = "mrp", config: str | None = None, **flags: Any
) -> Settings:
    given = {"model": files["backbone"], "data": [files["train"]], "output_dir": str(folder), **RUN, **flags}
    return read_settings(objective, config, given, QUICK)


def test_flags_win_over_yaml_and_that_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: m\nlearning_rate: 1e-2\nmax_length: 64\nreport_to: tensorboard\ndata: [a, b]\nwarmup_steps: 3\n")
    more = ["weight_decay=0.5", "run_name=a", "max_grad_norm=2", "warmup_steps=7"]
    read = read_settings("mrp", str(config), {"max_length": 32, "output_dir": "out"}, more)
    assert (read.options.model, read.training["max_length"], read.options.data) == ("m", 32, ["a", "b"])
    assert read.options.head_layers == 3
    assert read.training["learning_rate"] == 0.01  # a text in YAML 1.1, which has a point in its floats
    assert (read.training["report_to"], read.training["weight_decay"], read.training["run_name"]) == ("tensorboard", 0.5, "a")
    assert (type(read.training["max_grad_norm"]), read.training["warmup_steps"]) == (float, 7)
    config.write_text(yaml.safe_dump(read.as_dict()))
    assert read_settings("mrp", str(config)) == read  # what is written is read again
    shards = ["fsdp=true", "fsdp_config={version: 2}"]
    config.write_text("model: m\noutput_dir: out\nfsdp: true\n")
    for sharded in (read_settings("mrp", None, {"model": "m", "output_dir": "out"}, shards), read_settings("mrp", str(config))):
        assert sharded.training["fsdp"] is True
        assert sharded.arguments(use_cpu=True).fsdp


@pytest.mark.parametrize(
    ("text", "assignments", "message"),
    [
        ("learning_rat: 1", [], r"bad\.yaml: nothing is called 'learning_rat' here: did you mean learning_rate"),
        ("resume_from_checkpoint: a", [], "nothing is called 'resume_from_checkpoint'"),
        ("objective: block_diffusion", [], "is for another objective than 'mrp': use the other command"),
        ("- a", [], r"bad\.yaml holds list: needed are lines of 'name: value'"),
        ("a: [", [], r"bad\.yaml is not YAML"),
        ("seed: 1", ["unroll"], "--set unroll: write it as NAME=VALUE"),
        ("seed: 1", [], "no model: give --model"),
        ("model: m", ["head_init=zeros"], "head_init is 'zeros': choose 'identity', 'backbone' or"),
        ("model: m\nhead: h", ["head_layers=2"], "head is 'h', and head_layers describe a new one"),
    ],
)
def test_bad_settings(text: str, assignments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings("mrp", str(tmp_path / "bad.yaml"), {"output_dir": "out"}, assignments)
    with pytest.raises(ValueError, match=r"nowhere\.yaml is neither a file nor one of the recipes packages, packages-head, "):
        read_settings("mrp", "nowhere.yaml")


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_a_value_of_another_type_is_refused_for_every_name(objective: str) -> None:
    """The options' own declarations say which; none holds a tuple."""
    for name in known_names(objective):
        with pytest.raises(ValueError, match=rf"^a flag: {name} is \(1, 'a'\), and must be "):
            read_settings(objective, None, {"model": "m", "output_dir": "o", name: (1, "a")})


def test_a_model_that_is_nowhere_is_named_as_the_model(files: dict[str, str], tmp_path: Path) -> None:
    """Not as a tokenizer; also by a dry run, which connects to nothing."""
    settings = settings_of(files, tmp_path / "o", model="org/none")
    for call in (open_run, dry_run):
        with pytest.raises(OSError, match=r"^'org/none' is no folder here, and as a repository it could not be read"):
            call(settings)
    assert not (tmp_path / "o").exists()


def test_a_run_that_is_done_is_only_saved_again(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 rows of one sample in steps of 4 make 4 an epoch."""
    flags = {"num_train_epochs": 1.5, "max_steps": -1, "packed": False, "gradient_accumulation_steps": 2}
    first = open_run(settings_of(files, tmp_path, **flags))
    assert len(first.trainer.train_dataset) == 16
    first.train()
    written = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").unlink()
    again = open_run(settings_of(files, tmp_path, **flags))
    capsys.readouterr()
    again.train()
    remedy = f" To train its head further, give --head {tmp_path} and another --output-dir"
    first_line, *_, last_line = capsys.readouterr().out.splitlines()
    assert (first_line, last_line) == ("resuming from checkpoint-6", f"all 6 steps of this run are done.{remedy}")
    assert first.trainer.state.global_step == again.trainer.state.global_step == 6
    assert json.loads((tmp_path / "config.json").read_text())["base_model_name_or_path"] == files["backbone"]
    assert json.loads((tmp_path / "generation_config.json").read_text())["decoding"] == "mrp_spec"
    assert (tmp_path / "model.safetensors").read_bytes() == written


def test_a_run_with_other_settings_is_not_taken_up(files: dict[str, str], tmp_path: Path) -> None:
    first = settings_of(files, tmp_path, max_steps=2)
    open_run(first).train()
    other = settings_of(files, tmp_path, max_steps=2, learning_rate=0.5, head_init="published", eval_data=[files["held"]])
    message = r"head_init was 'identity' and is 'published'; learning_rate was 0\.001 and is 0\.5\. Name another folder"
    message += rf".*--restart\. To train its head further, give --head {tmp_path} and another --output-dir$"
    with pytest.raises(ValueError, match=message):
        open_run(other)
    weight_decay = read_settings("mrp", str(tmp_path / "run.yaml"), None, ["weight_decay=0.5"])
    with pytest.raises(ValueError, match=r"other settings: weight_decay was 0\.0 and is 0\.5\. "):
        open_run(weight_decay)
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert written.items() >= {**first.as_dict(), "learning_rate": 1e-3, "lr_scheduler_type": "cosine_with_min_lr"}.items()
    assert written["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    assert (tmp_path / "checkpoint-2").is_dir()
    bad = settings_of({**files, "train": "nowhere.jsonl"}, tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        open_run(bad, restart=True)
    assert (tmp_path / "checkpoint-2").is_dir()  # nothing is removed before all is known to be there
    open_run(other, restart=True)
    assert not (tmp_path / "checkpoint-2").exists()
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["learning_rate"] == 0.5
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "run.yaml").write_text("data: " + "[" * 5000)
    with pytest.raises(ValueError, match=r"run\.yaml is not YAML"):
        open_run(first)
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(ValueError, match=r"holds checkpoints and no run\.yaml\. Name another folder, or begin again"):
        open_run(first)


def test_other_records_under_the_same_name_are_another_run(files: dict[str, str], tmp_path: Path) -> None:
    data = Path(shutil.copy(files["train"], tmp_path / "data.jsonl"))
    settings = settings_of(files, tmp_path / "run", data=[str(data)], max_steps=2)
    open_run(settings).train()
    data.write_text(data.read_text())
    open_run(settings)
    data.write_text("\n".join(reversed(data.read_text().splitlines())))
    with pytest.raises(ValueError, match=r"other settings: data_digest was '\w{32}' and is '\w{32}'\. Name another folder"):
        open_run(settings)
    open_run(read_settings("mrp", str(tmp_path / "run" / "run.yaml")), restart=True)


def test_a_folder_is_one_runs(files: dict[str, str], tmp_path: Path) -> None:
    """As long as that lives."""
    run = open_run(settings_of(files, tmp_path, max_steps=1))
    for restart in (False, True):
        with pytest.raises(ValueError, match="is held by a run that goes on: wait for it, end it, or name another folder"):
            open_run(settings_of(files, tmp_path, max_steps=1), restart)
    run.lock.release()
    open_run(settings_of(files, tmp_path, max_steps=1))


def how_many_train(settings: Any) -> int:
    return sum(parameter.numel() for parameter in meta_model(settings).parameters() if parameter.requires_grad)


def test_a_run_ends_early_where_the_held_out_loss_falls_no_more(files: dict[str, str], tmp_path: Path) -> None:
    """And saves the weights of the lowest one."""
    flags = {"eval_steps": 1, "save_steps": 1, "max_steps": 9, "eval_data": [files["held"]], "learning_rate": 1e-30}
    run = open_run(settings_of(files, tmp_path, early_stopping_patience=2, **flags))
    run.train()
    assert run.trainer.state.global_step == 3
    assert run.trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_a_backbone_from_an_autoregressive_one(files: dict[str, str], tmp_path: Path) -> None:
    """Everything trains, and the folder holds a block-diffusion model."""
    flags = {"model": files["qwen3"], "block_size": 8, "mask_token_id": 2, "learning_rate": 0.01}
    run = open_run(settings_of(files, tmp_path, "block_diffusion", **flags))
    assert all(parameter.requires_grad for parameter in run.trainer.model.parameters())
    run.train()
    model = MRPForCausalLM.from_pretrained(tmp_path)
    assert (model.config.block_size, model.config.mask_token_id, model.mrp_head) == (8, 2, None)
    start = Qwen3ForCausalLM.from_pretrained(files["qwen3"]).state_dict()
    assert all(not torch.equal(value, start[name]) for name, value in model.state_dict().items())
    assert how_many_train(settings_of(files, tmp_path, "block_diffusion", **flags)) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_what_trains_is_float32_and_what_is_saved_is_not(files: dict[str, str], tmp_path: Path) -> None:
    run = open_run(settings_of(files, tmp_path, bf16=True, save="full", max_steps=2, eval_data=[files["held"]], eval_prompts=1))
    model = run.trainer.model
    assert {parameter.dtype for parameter in model.mrp_head.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    run.train()
    written = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    assert written["mrp_head.norm.weight"].abs().max() > 0
    assert json.loads((tmp_path / "config.json").read_text()).get("base_model_name_or_path") is None


def test_a_head_to_go_on_from(files: dict[str, str], tmp_path: Path) -> None:
    run = open_run(settings_of(files, tmp_path, head=files["full"]))
    head = MRPForCausalLM.from_pretrained(files["full"]).mrp_head.state_dict()
    assert all(torch.equal(value, head[name]) for name, value in run.trainer.model.mrp_head.state_dict().items())
    assert how_many_train(settings_of(files, tmp_path, head=files["full"])) == sum(v.numel() for v in head.values())


def test_what_is_missing_is_told_before_anything_is_written(files: dict[str, str], tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "Ana has 3 pens ."}\n')
    for flags, message in (
        ({"data": []}, r"no data: give --data"),
        ({"eval_data": [str(texts)], "eval_prompts": 1}, "eval_prompts is 1: give eval_dataset, with prompts, and"),
        ({"eval_prompts": 1}, "eval_prompts is 1: give eval_dataset"),
        ({"head": files["backbone"]}, "mrp_head|head"),
    ):
        with pytest.raises(ValueError, match=message):
            open_run(settings_of(files, tmp_path / "o", **flags))
    assert not (tmp_path / "o").exists()


# By hand: hidden, intermediate, query width; key width 1024 and heads of 128 at every size.
SHAPES = {"1.7b": (2048, 6144, 2048, 28), "4b": (2560, 9728, 4096, 36), "8b": (4096, 12288, 4096, 36)}
VOCABULARY = 151936


def layer_parameters(hidden: int, intermediate: int, queries: int) -> int:
    """q, k, v, o; gate, up, down; two norms, and those of queries and keys."""
    return 2 * hidden * queries + 2 * hidden * 1024 + 3 * hidden * intermediate + 2 * hidden + 2 * 128


@pytest.mark.parametrize("size", SHAPES)
def test_published_recipes(size: str) -> None:
    """The parameters that train are those of the published heads, and the options those of the published recipe."""
    flags = {"model": str(ROOT / "hub_configs" / f"sdar-{size}-mrp"), "output_dir": "unused"}
    settings = read_settings("mrp", f"sdar-{size}-mrp", flags)
    model, said = meta_model(settings), dry_run(settings)
    hidden, intermediate, queries, depth = SHAPES[size]
    layer = layer_parameters(hidden, intermediate, queries)
    head = 2 * hidden * hidden + 3 * hidden + 3 * layer
    frozen = 2 * VOCABULARY * hidden + depth * layer + hidden
    assert model.num_parameters(only_trainable=True) == head
    assert model.num_parameters() == head + frozen
    if size == "1.7b":
        assert round(head / 1e6) == 159  # published: about 159M
    assert f"\nweights: {(2 * frozen + 6 * head) / 2**30:.4g} GiB\n" in said
    assert f"\nin all: {(2 * frozen + 18 * head) / 2**30:.4g} GiB\n" in said
    assert said.endswith("\nrows per step: 16")
    arguments = settings.arguments(bf16=False, use_cpu=True)
    assert arguments.head_objective() == HeadObjective(Reveals("random", 0.5), 1, order_weight=0, reread_weight=0)
    assert (arguments.noisy_copies, arguments.inverse_level, arguments.noise_per) == (1, True, "sample")
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 16


def test_our_recipe() -> None:
    published = [f"sdar-{size}-mrp" for size in ("1.7b", "4b", "8b")]
    assert sorted(recipe_names()) == sorted(["packages", "packages-head", "sdar-4b-mrp-ours", "tiny", *published])
    flags = {"model": str(ROOT / "hub_configs" / "sdar-4b-mrp"), "output_dir": "unused"}
    for recipe in ("sdar-4b-mrp-ours", "sdar-4b-mrp"):
        assert meta_model(read_settings("mrp", recipe, flags)).num_parameters(only_trainable=True) == 315_907_328
    objective = read_settings("mrp", "sdar-4b-mrp-ours", flags).arguments(bf16=False, use_cpu=True).head_objective()
    assert objective == HeadObjective(Reveals("on_policy", 0.5), 2, order_weight=0.5, reread_weight=1.0)
