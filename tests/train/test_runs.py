"""Training runs: settings and their errors, recipes, the folder, resuming; and texts that a model
decodes itself as data."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from mrp_trainer.heads import with_new_head
from mrp_trainer.outputs import LISTING
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.decode import ModelDecoder, decode
from mrp_trainer.train.inputs import digest, encoder_of
from mrp_trainer.train.objectives import HeadObjective
from mrp_trainer.train.optimizer import MuonAdamW
from mrp_trainer.train.options import DecodeOptions
from mrp_trainer.train.reveals import Reveals
from mrp_trainer.train.runs import dry_run, meta_model, open_run, rounded
from mrp_trainer.train.settings import Settings, known_names, read_settings, recipe_names
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from modeling_mrp import MRPForCausalLM
from tests.support.commands import mrp
from tests.support.helpers import word_model
from tests.support.places import ROOT
from tests.support.training_runs import saved, start

RUN = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "max_length": 128}
QUICK = ["use_cpu=true", "disable_tqdm=true", "logging_strategy=no", "dataloader_pin_memory=false"]


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory, word_tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    """A checkpoint with a head, its backbone alone, an autoregressive one, and chats."""
    root = tmp_path_factory.mktemp("runs")
    model = word_model(word_tokenizer)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    saved(model, word_tokenizer, root / "full")
    model.detach_head()
    saved(model, word_tokenizer, root / "backbone")
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    torch.manual_seed(0)
    qwen = Qwen3Config(
        vocab_size=len(word_tokenizer), num_key_value_heads=1, pad_token_id=0, **shape
    )
    saved(Qwen3ForCausalLM(qwen), word_tokenizer, root / "qwen3")
    lines = list(training_lines("math", "train", 24))
    (root / "train.jsonl").write_text("\n".join(lines[:16]))
    (root / "held.jsonl").write_text("\n".join(lines[16:]))
    return {path.stem: str(path) for path in root.iterdir()}


def settings_of(
    files: dict[str, str],
    folder: Path,
    objective: str = "mrp",
    config: str | None = None,
    **flags: Any,
) -> Settings:
    given = {
        "model": files["backbone"],
        "data": [files["train"]],
        "output_dir": str(folder),
        **RUN,
        **flags,
    }
    return read_settings(objective, config, given, QUICK)


def test_flags_win_over_yaml_and_that_over_defaults(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: m\n"
        "learning_rate: 1e-2\n"
        "max_length: 64\n"
        "report_to: tensorboard\n"
        "data: [a, b]\n"
        "warmup_steps: 3\n"
    )
    more = ["weight_decay=0.5", "run_name=a", "max_grad_norm=2", "warmup_steps=7"]
    read = read_settings("mrp", str(config), {"max_length": 32, "output_dir": "out"}, more)
    assert (read.options.model, read.training["max_length"], read.options.data) == (
        "m",
        32,
        ["a", "b"],
    )
    assert read.options.head_layers == 3
    # a text in YAML 1.1, which has a point in its floats
    assert read.training["learning_rate"] == 0.01
    assert (
        read.training["report_to"],
        read.training["weight_decay"],
        read.training["run_name"],
    ) == ("tensorboard", 0.5, "a")
    assert (type(read.training["max_grad_norm"]), read.training["warmup_steps"]) == (float, 7)
    config.write_text(yaml.safe_dump(read.as_dict()))
    assert read_settings("mrp", str(config)) == read  # what is written is read again
    config.write_text("model: m\noutput_dir: out\nfsdp: true\nfsdp_config: {version: 2}\n")
    assert read_settings("mrp", str(config)).arguments(use_cpu=True).fsdp


@pytest.mark.parametrize(
    ("text", "assignments", "message"),
    [
        (
            "learning_rat: 1",
            [],
            r"bad\.yaml: nothing is called 'learning_rat' here: did you mean learning_rate",
        ),
        (
            "objective: block_diffusion",
            [],
            "is for another objective than 'mrp': use the other command",
        ),
        ("- a", [], r"bad\.yaml holds list: needed are lines of 'name: value'"),
        ("seed: 1", ["unroll"], "--set unroll: write it as NAME=VALUE"),
        ("seed: 1", [], "no model: give --model"),
        ("model: m", ["head_init=zeros"], "head_init is 'zeros': choose 'identity', 'backbone'"),
        ("model: m\nhead: h", ["head_layers=2"], "head is 'h', and head_layers describe a new one"),
    ],
)
def test_bad_settings(text: str, assignments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings("mrp", str(tmp_path / "bad.yaml"), {"output_dir": "out"}, assignments)
    with pytest.raises(
        ValueError,
        match=r"nowhere\.yaml is neither a file nor one of the recipes packages, packages-head, ",
    ):
        read_settings("mrp", "nowhere.yaml")


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_a_value_of_another_type_is_refused_for_every_name(objective: str) -> None:
    """The options' own declarations say which; none holds a tuple."""
    for name in known_names(objective):
        with pytest.raises(ValueError, match=rf"^a flag: {name} is \(1, 'a'\), and must be "):
            read_settings(objective, None, {"model": "m", "output_dir": "o", name: (1, "a")})


@pytest.mark.parametrize(
    "given",
    [
        {"head": "h"},
        {"head_layers": 1},
        {"head_init": "identity"},
        {"save": "full"},
        {"lora_rank": 4},
        {"lora_alpha": 4},
        {"verdict_prompts": 2},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_backbone_has_no_options_of_a_head(given: dict[str, Any]) -> None:
    """They would do nothing."""
    options = {"model": "m", "output_dir": "o", **given}
    with pytest.raises(ValueError, match=f"nothing is called '{next(iter(given))}' here"):
        read_settings("block_diffusion", None, options)


def test_a_default_that_is_written_out_is_no_other_setting() -> None:
    """A run goes on whether or not an option at its default is named."""
    options: dict[str, Any] = {"model": "m", "output_dir": "o"}
    defaults = {"unroll": MRPTrainingArguments.unroll, "weight_decay": 0.0, "head_layers": 3}
    plain = read_settings("mrp", None, options)
    written = read_settings("mrp", None, {**options, **defaults})
    assert plain.differences(written.as_dict()) == written.differences(plain.as_dict()) == []
    other = read_settings("mrp", None, {**options, "weight_decay": 0.5})
    assert plain.differences(other.as_dict()) == ["weight_decay was 0.5 and is 0.0"]


def test_a_model_that_is_nowhere_is_named_as_the_model(
    files: dict[str, str], tmp_path: Path
) -> None:
    """Not as a tokenizer; also by a dry run, which connects to nothing."""
    settings = settings_of(files, tmp_path / "o", model="org/none")
    for call in (open_run, dry_run):
        with pytest.raises(
            OSError, match=r"^'org/none' is no folder here, and could not be read as a repository"
        ):
            call(settings)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["model", "head"])
def test_a_dry_run_asks_no_repository(
    name: str, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is online, too: a config that is not in the cache is an error."""
    asked: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", fail)
    monkeypatch.setattr(
        "huggingface_hub.file_download.get_hf_file_metadata",
        lambda url, *_, **__: asked.append(url) or fail(),
    )
    with pytest.raises(OSError, match=r"^'org/none' is no folder here"):
        dry_run(settings_of(files, tmp_path / "o", **{name: "org/none"}))
    assert asked == []


def test_a_run_with_other_settings_or_records_is_not_taken_up(
    files: dict[str, str], tmp_path: Path
) -> None:
    """Nor one that goes on."""
    data, folder = Path(shutil.copy(files["train"], tmp_path / "data.jsonl")), tmp_path / "run"
    files = {**files, "train": str(data)}
    first = settings_of(files, folder, max_steps=2)
    open_run(first).train()
    other = settings_of(
        files,
        folder,
        max_steps=2,
        learning_rate=0.5,
        head_init="published",
        eval_data=[files["held"]],
    )
    message = (
        r"head_init was None and is 'published'; learning_rate was 0\.001 and is 0\.5\. Name "
        r"another folder"
    )
    message += (
        rf".*--restart\. To train its head further, give --head {folder} and another --output-dir$"
    )
    with pytest.raises(ValueError, match=message):
        open_run(other)
    weight_decay = read_settings("mrp", str(folder / "run.yaml"), None, ["weight_decay=0.5"])
    with pytest.raises(ValueError, match=r"other settings: weight_decay was 0\.0 and is 0\.5\. "):
        open_run(weight_decay)
    written = yaml.safe_load((folder / "run.yaml").read_text())
    assert (
        written.items()
        >= {
            **first.as_dict(),
            "learning_rate": 1e-3,
            "lr_scheduler_type": "cosine_with_min_lr",
        }.items()
    )
    assert written["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    data.write_text(data.read_text())
    run = open_run(first)
    for restart in (False, True):
        with pytest.raises(
            ValueError,
            match="is held by a run that goes on: wait for it, end it, or name another folder",
        ):
            open_run(first, restart)
    run.lock.release()
    data.write_text("\n".join(reversed(data.read_text().splitlines())))
    with pytest.raises(
        ValueError,
        match=r"other settings: data_digest was '\w{32}' and is '\w{32}'\. Name another folder",
    ):
        open_run(first)
    bad = settings_of({**files, "train": "nowhere.jsonl"}, folder, max_steps=2)
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        open_run(bad, restart=True)
    assert (folder / "checkpoint-2").is_dir()  # nothing is removed before all is known to be there
    open_run(other, restart=True)
    assert not (folder / "checkpoint-2").exists()
    assert yaml.safe_load((folder / "run.yaml").read_text())["learning_rate"] == 0.5
    (folder / "checkpoint-1").mkdir()
    (folder / "run.yaml").write_text("data: " + "[" * 5000)
    with pytest.raises(ValueError, match=r"run\.yaml is not YAML"):
        open_run(first)
    (folder / "run.yaml").unlink()
    with pytest.raises(
        ValueError,
        match=r"holds checkpoints and no run\.yaml\. Name another folder, or begin again",
    ):
        open_run(first)


def test_a_run_ends_early_with_the_best_weights(files: dict[str, str], tmp_path: Path) -> None:
    """ "Best" is here the highest loss: training lowers it, so that this is step 1 and patience
    ends at step 3."""
    flags = {
        "eval_steps": 1,
        "max_steps": 9,
        "eval_data": [files["held"]],
        "metric_for_best_model": "eval_loss",
    }
    flags |= {
        "save_steps": 1,
        "save_total_limit": 5,
        "greater_is_better": True,
        "lr_scheduler_type": "constant",
    }
    run = open_run(settings_of(files, tmp_path, early_stopping_patience=2, **flags))
    run.train()
    assert run.trainer.state.global_step == 3
    best, last, final = (
        load_file(tmp_path / name / "model.safetensors")
        for name in ("checkpoint-1", "checkpoint-3", "")
    )
    assert all(torch.equal(final[name], value) for name, value in best.items())
    assert any(not torch.equal(final[name], value) for name, value in last.items())


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
    dry = meta_model(settings_of(files, tmp_path, "block_diffusion", **flags))
    assert dry.num_parameters(only_trainable=True) == model.num_parameters()


def test_a_head_to_go_on_from(files: dict[str, str], tmp_path: Path) -> None:
    """What trains is float32, and what is saved is not."""
    with pytest.raises(ValueError, match="head"):
        open_run(settings_of(files, tmp_path, head=files["backbone"]))
    assert not list(tmp_path.iterdir())
    flags = {
        "bf16": True,
        "save": "full",
        "max_steps": 2,
        "eval_data": [files["held"]],
        "eval_prompts": 1,
    }
    given = settings_of(files, tmp_path, head=files["full"], **flags)
    run = open_run(given)
    model, head = (
        run.trainer.model,
        MRPForCausalLM.from_pretrained(files["full"]).mrp_head.state_dict(),
    )
    assert meta_model(given).num_parameters(only_trainable=True) == sum(
        value.numel() for value in head.values()
    )
    assert all(
        torch.equal(value, head[name].bfloat16().float())
        for name, value in model.mrp_head.state_dict().items()
    )
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}
    run.train()
    written = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    assert not torch.equal(written["mrp_head.norm.weight"], head["norm.weight"].bfloat16())
    assert json.loads((tmp_path / "config.json").read_text()).get("base_model_name_or_path") is None


# By recipe: the parameters that train, those of the published heads, and what they train for.
PUBLISHED = HeadObjective(Reveals("random", 0.5), 1, order_weight=0, reread_weight=0)
OURS = HeadObjective(Reveals("on_policy", 0.5), 2, order_weight=0.5, reread_weight=1.0)
RECIPES = {
    "sdar-1.7b-mrp": ("sdar-1.7b-mrp", 159_402_752, PUBLISHED),
    "sdar-4b-mrp": ("sdar-4b-mrp", 315_907_328, PUBLISHED),
    "sdar-8b-mrp": ("sdar-8b-mrp", 612_406_016, PUBLISHED),
    "sdar-4b-mrp-ours": ("sdar-4b-mrp", 315_907_328, OURS),
}


def test_recipes() -> None:
    """The published ones have the options of the published recipe."""
    assert {*recipe_names()} > RECIPES.keys()
    for name, (folder, trained, objective) in RECIPES.items():
        settings = read_settings(
            "mrp", name, {"model": str(ROOT / "hub_configs" / folder), "output_dir": "unused"}
        )
        model, said = meta_model(settings), dry_run(settings)
        assert model.num_parameters(only_trainable=True) == trained
        frozen = model.num_parameters() - trained
        assert f"\nweights: {(2 * frozen + 6 * trained) / 2**30:.4g} GiB\n" in said
        assert (
            "\n"
            f"gradients: {4 * trained / 2**30:.4g} GiB\n"
            f"optimizer: {8 * trained / 2**30:.4g} GiB\n" in said
        )
        copies = 1 if objective is PUBLISHED else 2
        assert f"\nrows per step: 16, of at most {4096 * copies:,} noisy and 4,096 clean" in said
        arguments = settings.arguments(bf16=False, use_cpu=True)
        assert arguments.head_objective() == objective
        of_noise = (arguments.noisy_copies, arguments.inverse_level, arguments.noise_per)
        assert of_noise == ((1, True, "sample") if objective is PUBLISHED else (2, False, "block"))


def test_muon_keeps_one_number_of_a_matrix_where_adam_keeps_two() -> None:
    options = {
        "model": str(ROOT / "hub_configs/sdar-1.7b-mrp"),
        "output_dir": "unused",
        "muon_learning_rate": 0.01,
    }
    settings = read_settings("mrp", "sdar-1.7b-mrp", options)
    sizes = [(p.numel(), p.dim() == 2) for p in meta_model(settings).mrp_head.layers.parameters()]
    matrices = sum(size for size, matrix in sizes if matrix)
    assert 0 < matrices < 159_402_752
    assert f"\noptimizer: {(8 * 159_402_752 - 4 * matrices) / 2**30:.4g} GiB\n" in dry_run(settings)


def test_embeddings_have_both_numbers_of_adam_beside_muon(
    files: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_of(files, tmp_path, "block_diffusion", muon_learning_rate=0.01)
    model = meta_model(settings)
    optimizer = MuonAdamW(model, 0.01, 0.01)
    muon, adamw = (
        {id(p) for g in part.param_groups for p in g["params"]} for part in optimizer.optimizers
    )
    numbers = sum((1 if id(p) in muon else 2) * p.numel() for p in model.parameters())
    assert id(model.get_input_embeddings().weight) in adamw
    assert f"\noptimizer: {4 * numbers / 2**30:.4g} GiB\n" in dry_run(settings)


# Texts that a model decodes itself

COUNT = 5


@pytest.fixture(scope="module")
def decoded(
    tmp_path_factory: pytest.TempPathFactory, word_tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    """A model whose greedy texts end now and then, the chats that it is asked, and what it
    wrote."""
    root = tmp_path_factory.mktemp("decode")
    model = word_model(word_tokenizer, head_layers=0)
    often = 312
    with torch.no_grad():
        model.lm_head.weight[[often, word_tokenizer.eos_token_id]] = model.lm_head.weight[
            [word_tokenizer.eos_token_id, often]
        ]
    saved(model, word_tokenizer, root / "backbone")
    (root / "train.jsonl").write_text("\n".join(training_lines("math", "train", COUNT)))
    found = {path.stem: str(path) for path in root.iterdir()} | {"wrote": str(root / "wrote.jsonl")}
    flags = ["--model", found["backbone"], "--data", found["train"], "--output", found["wrote"]]
    told = mrp("decode", *flags, "--max-new-tokens", str(NEW_TOKENS["math"]))
    cut = sum(line["ids"][-1] != word_tokenizer.eos_token_id for line in lines_of(found["wrote"]))
    assert 0 < cut < COUNT
    also = f", {cut} of them without an end (of these training takes whole blocks)"
    assert told.splitlines()[-1] == f"wrote {COUNT} texts to {found['wrote']}{also}"
    return found


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def short(decoded: dict[str, str], path: Path, **others: Any) -> DecodeOptions:
    given = {
        "model": decoded["backbone"],
        "data": [decoded["train"]],
        "max_new_tokens": 8,
        "batch_size": 2,
        "device": "cpu",
    }
    return DecodeOptions(output=str(path), **{**given, **others})


def decode_as(rank: int, options: DecodeOptions) -> None:
    """One of two processes, of which each makes one batch, and the first tells of the file."""
    with mock.patch.object(
        ModelDecoder, "batches", autospec=True, side_effect=ModelDecoder.batches
    ) as made:
        assert (decode(options) is None) == (rank > 0)
    assert len(made.call_args.args[1]) == 1


def test_a_head_trains_on_decoded_texts_among_chats(
    decoded: dict[str, str], tmp_path: Path
) -> None:
    flags = {
        "data": [decoded["wrote"], decoded["train"]],
        "eval_data": [decoded["wrote"]],
        "packed": False,
        "head_layers": 1,
    }
    run = open_run(
        settings_of(
            decoded, tmp_path, **flags, max_steps=2, logging_strategy="steps", logging_steps=1
        )
    )
    assert sum(sample.reveal_step is not None for (sample,) in run.trainer.train_dataset) == COUNT
    assert len(run.trainer.train_dataset) == 2 * COUNT
    run.train()
    log = run.trainer.state.log_history
    assert [line["kl_head"] > 0 for line in log if "kl_head" in line] == [True, True]
    assert [line["eval_kl_head"] > 0 for line in log if "eval_kl_head" in line] == [True]
    assert MRPForCausalLM.from_pretrained(tmp_path).mrp_head.norm.weight.abs().max() > 0


def test_a_digest_is_of_the_backbone(
    decoded: dict[str, str], word_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the type nor the head nor an adapter changes it; one number of the last layer does,
    and it is told, once, that another backbone than the one that trains wrote texts."""
    model = MRPForCausalLM.from_pretrained(decoded["backbone"], dtype=torch.bfloat16)
    with_head = with_new_head(MRPForCausalLM.from_pretrained(decoded["backbone"]), 1)
    get_peft_model(with_head, LoraConfig(r=2, target_modules=r".*layers\.0\.self_attn\.q_proj"))
    line, told = (
        lines_of(decoded["wrote"])[0],
        f"{decoded['backbone']!r} wrote texts of the data, and another backbone trains",
    )
    assert digest(with_head) == digest(model) == line["decoded_by"]["digest"]
    encoder_of(model, word_tokenizer, 64).sample(line)
    assert told not in caplog.text
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    for _ in range(2):
        encoder_of(model, word_tokenizer, 64).sample(line)
    assert caplog.text.count(told) == 1


def test_what_is_there_is_kept_and_the_rest_is_made(
    decoded: dict[str, str], tmp_path: Path
) -> None:
    """Of calls that were stopped behind a batch the one with the same prompts and options is taken
    up, whatever the checkpoint is called, by two processes, of which each makes its own; a file
    that is done is refused."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "whole.jsonl.part"
    batches = ModelDecoder.batches

    def interrupted(*arguments: Any) -> Any:
        for begin, lines in batches(*arguments):
            if begin == 0:
                yield begin, lines
                break
        raise KeyboardInterrupt

    for change in ({}, {"max_new_tokens": 16}, {"limit": 4}):
        once = mock.patch.object(ModelDecoder, "batches", interrupted)
        with once, pytest.raises(KeyboardInterrupt):
            decode(short(decoded, whole, **change))
    first = sorted(part.glob("*-0.jsonl"))
    assert len(first) == len([path for path in part.iterdir() if path.name != LISTING]) == 3
    for path in first:
        path.write_text(path.read_text().replace("}", ', "kept": 1}', 1))
    first[0].with_suffix(".partial").write_text("{")
    assert start(
        partial(decode_as, options=short(decoded, whole, model=decoded["backbone"] + "/")), 2
    ) == [0, 0]
    assert [line["decoded_by"].get("kept") for line in lines_of(whole)] == [
        1,
        *[None] * (COUNT - 1),
    ]
    decode(short(decoded, tmp_path / "again.jsonl"))
    assert [line["ids"] for line in lines_of(tmp_path / "again.jsonl")] == [
        line["ids"] for line in lines_of(whole)
    ]
    assert not part.exists()
    for path, change, message in (
        (whole, {}, r"whole\.jsonl is there already: name another file, or remove it"),
        (
            tmp_path / "new.jsonl",
            {"max_new_tokens": 7},
            "max_new_tokens is 7: training takes whole blocks, give at least 8",
        ),
        (
            tmp_path / "new.jsonl",
            {"max_new_tokens": 240},
            "line 1: its prompt has 28 tokens, and 16 leave room for the new ones",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            decode(short(decoded, path, **change))
    assert not (tmp_path / "new.jsonl").exists()


def test_a_gathered_state_is_saved_in_the_runs_dtype() -> None:
    """Of what FSDP gathers, in float32; numbers that are no floats stay as they are."""
    state = {"weight": torch.tensor([1.0009765625]), "steps": torch.tensor([3])}
    saved_state = rounded(state, torch.bfloat16)
    assert saved_state["weight"].dtype == torch.bfloat16
    assert saved_state["weight"].item() == 1.0
    assert saved_state["steps"].dtype == torch.int64
    assert torch.equal(rounded(state, torch.float32)["weight"], state["weight"])
