"""`MRPTrainer` as a program uses it: records of any layout, the command's defaults, and the Trainer's own habits."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from hub_client import HubClient
from hub_server import HubServer, run_python
from mrp_trainer.data.rows import open_rows
from mrp_trainer.data.samples import samples_of
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.inputs import encoder_of
from mrp_trainer.train.settings import read_settings
from mrp_trainer.train.trainer import MRPTrainer
from transformers import EarlyStoppingCallback, PreTrainedTokenizerFast, TrainerCallback, TrainingArguments

from modeling_mrp import MRPForCausalLM

CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n} + 4?"}, {"role": "assistant", "content": f"n = {n} + 4 = {n + 4}"}]}
    for n in range(6)
]
RECORDS = [
    *CHATS,
    {"prompt": "def double(x):\n", "completion": "    return 2 * x\n"},
    {"prompt": [{"role": "user", "content": "Say hi."}], "completion": [{"role": "assistant", "content": "Hi."}]},
    {"text": "Everything in this line is learned."},
]


class ByNumber:
    """Records as torch's datasets give them."""

    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return RECORDS[number]


def in_a_file(folder: Path) -> str:
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    return str(path)


def in_a_table(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="the dataset is one of its own")
    names = ("messages", "prompt", "completion", "text")
    # A column has one type: the conversational pair is left out.
    return datasets.Dataset.from_list([{name: record.get(name) for name in names} for record in [*RECORDS[:7], RECORDS[8]]])


def new_trainer(
    folder: Path, tokenizer: Any, train: Any = CHATS, held_out: Any = None, model: Any = None, **rest: Any
) -> MRPTrainer:
    of_trainer = {name: rest.pop(name) for name in ("callbacks", "model_init") if name in rest}
    chosen = {"objective": "mrp", "max_length": 64, "use_cpu": True, "disable_tqdm": True, "max_steps": 3, "logging_steps": 1}
    args = MRPTrainingArguments(str(folder), **{**chosen, **rest})
    model = MRPForCausalLM.from_pretrained(TINY) if model is None and "model_init" not in of_trainer else model
    return MRPTrainer(model, args, train, held_out, processing_class=tokenizer, **of_trainer)


def contents(rows: Any) -> list[tuple[int, list[int], list[bool]]]:
    return [(sample.index, sample.ids.tolist(), sample.response.tolist()) for row in rows for sample in samples_of(row)]


@pytest.mark.parametrize(
    ("given", "packed"),
    [(lambda _: RECORDS, True), (lambda _: ByNumber(), False), (in_a_file, True), (Path, False), (in_a_table, True)],
)
def test_records_become_the_rows_that_the_command_reads(
    given: Callable[[Path], Any], packed: bool, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = in_a_file(tmp_path)
    dataset = Path(path) if given is Path else given(tmp_path)
    trainer = new_trainer(tmp_path / "run", tiny_tokenizer, dataset, dataset, packed=packed, seed=7)
    if given is in_a_table:
        Path(path).write_text("\n".join(map(json.dumps, [*RECORDS[:7], RECORDS[8]])))
    encoder = encoder_of(trainer.model, tiny_tokenizer, 64)
    assert contents(trainer.train_dataset) == contents(open_rows([path], encoder, packed, seed=7))
    assert contents(trainer.eval_dataset) == contents(open_rows([path], encoder, packed, shuffle=False))


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_the_defaults_are_those_of_the_command(objective: str, tmp_path: Path) -> None:
    command = read_settings(objective, None, {"model": "m", "output_dir": str(tmp_path)}).arguments(use_cpu=True)
    program = MRPTrainingArguments(str(tmp_path), objective=objective, use_cpu=True)
    assert program.learning_rate == {"mrp": 1e-3, "block_diffusion": 1e-4}[objective]
    assert program.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    for one in fields(MRPTrainingArguments):
        if one.init and one.name not in ("accelerator_config", "logging_dir"):
            assert getattr(program, one.name) == getattr(command, one.name), one.name
    other = MRPTrainingArguments(
        str(tmp_path), objective=objective, use_cpu=True, lr_scheduler_type="linear", learning_rate=1.0
    )
    assert (other.lr_scheduler_kwargs, other.learning_rate) == (None, 1.0)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], r"train_dataset: found no records"),
        (
            [*CHATS, {"messages": [{"role": "user", "content": "Hi."}]}],
            r"train_dataset, line 7, field messages: .* no assistant",
        ),
        (
            {"train": CHATS, "test": CHATS},
            r"train_dataset has the splits train, test: give one of them, train_dataset\['train'\]",
        ),
        (iter(CHATS), "train_dataset is a list_iterator, which comes in order only: write its records to a .jsonl file"),
    ],
    ids=["empty", "nothing to learn", "splits", "stream"],
)
def test_refused_datasets(dataset: Any, message: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        new_trainer(tmp_path / "run", tiny_tokenizer, dataset)
    assert not (tmp_path / "run").exists()


def test_refused_calls(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_dataset holds records: give processing_class, the tokenizer"):
        new_trainer(tmp_path, None)
    stock: Any = TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="args is TrainingArguments: pass MRPTrainingArguments"):
        MRPTrainer(MRPForCausalLM.from_pretrained(TINY), stock)
    with pytest.raises(ValueError, match="model is None, or model_init is given: pass a model"):
        MRPTrainer(None, MRPTrainingArguments(str(tmp_path), objective="mrp", use_cpu=True))
    with pytest.raises(ValueError, match=r"the model is torch\.bfloat16: give bf16=True, or load it with dtype=torch\.float32"):
        new_trainer(tmp_path, tiny_tokenizer, model=MRPForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="eval_prompts is 1, but no record to evaluate on has a prompt: use 0"):
        new_trainer(tmp_path, tiny_tokenizer, held_out={"a": CHATS, "b": RECORDS[8:]}, eval_prompts=1)
    with pytest.raises(ValueError, match=r"hub_strategy is 'checkpoint', .* pickled, .* choose 'every_save' or 'end'"):
        MRPTrainingArguments(str(tmp_path), objective="mrp", use_cpu=True, hub_strategy="checkpoint")
    with pytest.raises(ValueError, match="blocking=False does nothing here"):
        new_trainer(tmp_path, tiny_tokenizer).push_to_hub(blocking=False)


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_what_trains_is_float32(objective: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Of a model of 16 bits, as published ones are loaded: a rate at which every update would be rounded away."""
    model = MRPForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    trainer = new_trainer(
        tmp_path, tiny_tokenizer, model=model, objective=objective, bf16=True, learning_rate=1e-6, max_steps=1
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    for name, value in model.state_dict().items():
        learns = name.startswith("mrp_head.") == (objective == "mrp")
        assert value.dtype == (torch.float32 if learns else torch.bfloat16), name
        assert learns or torch.equal(value, before[name]), name
    changed = "mrp_head.layers.0.mlp.up_proj.weight" if objective == "mrp" else "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(model.state_dict()[changed], before[changed])


class Events(TrainerCallback):
    """What a tracker is told."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(json.loads(args.to_json_string())["objective"])
        json.loads(kwargs["model"].config.to_json_string())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen += [f"{name}@{state.global_step}" for name in ("gap_closed", "eval_gap_closed") if name in logs]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"save@{state.global_step}")


@pytest.mark.parametrize("objective", ["mrp"])
def test_the_best_model_is_loaded_and_a_run_taken_up(
    objective: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """ "Best" is here the highest loss: training lowers it, so that this is step 1 and patience ends at step 3."""
    asked: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    asked |= {"metric_for_best_model": "eval_loss", "greater_is_better": True, "objective": objective, "max_steps": 9}
    asked |= {"save_total_limit": None, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    events = Events()
    trainer = new_trainer(tmp_path, tiny_tokenizer, CHATS, CHATS, callbacks=[events, EarlyStoppingCallback(2)], **asked)
    trainer.train()
    assert (trainer.state.global_step, Path(str(trainer.state.best_model_checkpoint)).name) == (3, "checkpoint-1")
    assert events.seen[0] == objective
    assert [event for event in events.seen if event.startswith("save")] == ["save@1", "save@2", "save@3"]
    if objective == "mrp":
        assert {f"{name}@{step}" for name in ("gap_closed", "eval_gap_closed") for step in (1, 2, 3)} < set(events.seen)
    best = MRPForCausalLM.from_pretrained(tmp_path / "checkpoint-1").state_dict()
    last = MRPForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, best[name]), name
    assert any(not torch.equal(value, last[name]) for name, value in best.items())
    further = new_trainer(tmp_path, tiny_tokenizer, CHATS, CHATS, **{**asked, "max_steps": 4})
    further.train(resume_from_checkpoint=True)
    steps = [line["step"] for line in further.state.log_history if "loss" in line]
    assert steps == [1, 2, 3, 4]  # the first three are the earlier run's


PUSHED = f"""
import torch
torch.set_num_threads(1)
from transformers import AutoModel, AutoTokenizer
from mrp_trainer import MRPTrainer, MRPTrainingArguments
chats = {CHATS!r}
tok = AutoTokenizer.from_pretrained({str(TINY)!r}, trust_remote_code=True)
def train(source, **options):
    model = AutoModel.from_pretrained(source, trust_remote_code=True)
    shared = dict(max_length=64, use_cpu=True, disable_tqdm=True, max_steps=1, save_steps=1, save_only_model=True)
    args = MRPTrainingArguments(options["hub_model_id"].split("/")[-1], push_to_hub=True, **shared, **options)
    trainer = MRPTrainer(model, args, train_dataset=chats, processing_class=tok)
    trainer.train()
    trainer.push_to_hub()
train({str(TINY)!r}, objective="block_diffusion", hub_model_id="org/whole")
train("org/whole", objective="mrp", hub_model_id="org/head", hub_strategy="end", hub_private_repo=False)
"""


def test_pushed_models_load_elsewhere(hub: HubServer, tmp_path: Path) -> None:
    """A backbone at every save and at the end; the head alone where the backbone is on the Hub. No pickle arrives."""
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir(), other.mkdir()
    with HubClient(home, hub.environment(home, "hf_alice"), ROOT, ROOT / "trainer") as client:
        done = client.run(PUSHED)
    assert done.error is None, done.error
    whole, head = hub.repository("org/whole"), hub.repository("org/head")
    assert (whole.private, head.private) == (True, False)
    assert whole.history("main")[0].title == "Training in progress, step 1", "nothing is new at the end"
    assert head.history("main")[0].title == "End of training"
    for repo_id in ("org/whole", "org/head"):
        names = set(hub.files(repo_id))
        assert {"model.safetensors", "modeling_mrp.py", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
        assert not [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    code = """
        from transformers import AutoModel
        model = AutoModel.from_pretrained("org/head", trust_remote_code=True)
        print(model.backbone_source.name, model.generation_config.decoding, model.mrp_head is not None)
    """
    assert run_python(code, other, hub.environment(other, "hf_alice")).split()[-3:] == ["org/whole", "mrp_spec", "True"]
