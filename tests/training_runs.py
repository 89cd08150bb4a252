"""Training runs of a very small model, each in its own processes, that are compared with each other."""

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from helpers import naive_norm
from mrp_trainer import TINY
from mrp_trainer.data.samples import Sample
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.trainer import MRPTrainer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp import MRPConfig, MRPForCausalLM

BLOCK, MASK = 4, 60
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n} + 4?"}, {"role": "assistant", "content": f"n = {n} + 4 = {n + 4}"}]}
    for n in range(6)
]
# Once, in the process from which all others are forked: what takes seconds to import.
_PRELOADED = [
    "transformers.trainer",
    "accelerate.utils.fsdp_utils",
    "torch.distributed.checkpoint.state_dict",
    "mrp_trainer.train.trainer",
]
OPTIONS: dict[str, Any] = {
    "objective": "block_diffusion",
    "save_total_limit": None,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_num_workers": 0,
}


class Rows:
    """Rows of one or two blocks and a half of random ids, the same for the same number; some have nothing to learn."""

    def __init__(self, size: int, without_response: tuple[int, ...] = ()) -> None:
        self.size = size
        self.without_response = without_response

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, visit: int) -> Sample:
        row = visit % self.size
        numbers = np.random.default_rng(row)
        ids = numbers.integers(1, 50, BLOCK * int(numbers.integers(2, 5)))
        response = (np.arange(len(ids)) >= BLOCK - 1) & (row not in self.without_response)
        return Sample(visit, ids, response, len(ids) - 1)


def small_model(double: bool = False, seed: int = 0, **config: Any) -> MRPForCausalLM:
    """Random weights, with a head that says something."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_nextn_predict_layers": 1}
    ids = {"block_size": BLOCK, "mask_token_id": MASK, "pad_token_id": 0}
    torch.manual_seed(seed)
    model = MRPForCausalLM(MRPConfig(**{**sizes, **heads, **ids, "initializer_range": 0.2, **config}))
    if model.mrp_head is not None:
        nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    return model.double() if double else model


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        folder: Its checkpoints, and what it leaves for the test.
        options: Of `MRPTrainingArguments`, beside `OPTIONS`.
        rows: How many rows the dataset has, of which some have nothing to learn (`without_response`).
        double: Whether all is computed in float64.
        seed: Of torch's generator and of the weights that training starts from.
        kill: The process kills itself, with SIGKILL, at a step's event: `(3, "on_step_end")`.
        scramble: Whether every step is preceded by another seed of every global generator.
        sharded: Whether FSDP2 shards the model.
        adapter: Whether only a LoRA adapter of the head trains.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 12
    without_response: tuple[int, ...] = ()
    double: bool = False
    seed: int = 0
    resume: bool = False
    kill: tuple[int, str] | None = None
    scramble: bool = False
    sharded: bool = False
    adapter: bool = False
    eval_rows: int = 0


class _Watch(TrainerCallback):
    """Does to a run what its `Run` says, and keeps the gradients of its first step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.gradients: dict[str, Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.scramble:
            torch.manual_seed(1000 + state.global_step)
            random.seed(state.global_step)
            np.random.seed(state.global_step)
        self._kill("on_step_begin", state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._kill("on_pre_optimizer_step", state.global_step)
        if not self.gradients:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    self.gradients[name] = whole(parameter.grad).clone()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._kill("on_step_end", state.global_step)

    def _kill(self, event: str, step: int) -> None:
        if self.run.kill == (step, event):
            os.kill(os.getpid(), signal.SIGKILL)


def whole(tensor: Any) -> Tensor:
    """A tensor, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def prepare(run: Run) -> MRPTrainer:
    """The trainer of a run."""
    chosen = {**OPTIONS, **run.options}
    arguments = MRPTrainingArguments(output_dir=str(run.folder), **chosen)
    if run.sharded:
        _let_accelerate_shard_on_cpus()
    model: Any = small_model(run.double, run.seed)
    if run.adapter:
        torch.manual_seed(run.seed)
        targets = r"mrp_head\.(eh_proj|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))"
        lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    held_out: Any = Rows(run.eval_rows) if run.eval_rows else None
    trainer = MRPTrainer(model, arguments, Rows(run.rows, run.without_response), held_out)
    trainer.add_callback(_Watch(run))
    torch.manual_seed(run.seed)
    return trainer


def _let_accelerate_shard_on_cpus() -> None:
    """accelerate refuses FSDP on CPUs, where torch has it: it is told that these processes have a GPU each. Behind this one
    question, devices are asked for by name, and that stays `cpu`."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _join(rank: int, processes: int, port: int) -> None:
    """Makes this process one of several, as a launcher does."""
    torch.set_num_threads(1)
    if processes > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in address.items()})


def _train(run: Run, rank: int, processes: int, port: int) -> None:
    _join(rank, processes, port)
    if processes > 1:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if run.double:  # Qwen3's norms would round to float32
        Qwen3RMSNorm.forward = lambda norm, x: naive_norm(norm, x)  # type: ignore[method-assign]
    trainer = prepare(run)
    trainer.train(resume_from_checkpoint=run.resume)
    trainer.save_model(str(run.folder / "final"))
    watch = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, _Watch))
    weights = {name: whole(value).detach().clone() for name, value in trainer.model.state_dict().items()}
    here = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in trainer.model.parameters())
    share = here / sum(p.numel() for p in trainer.model.parameters())
    save_file(weights, run.folder / f"{rank}.weights.safetensors")
    save_file(watch.gradients, run.folder / f"{rank}.gradients.safetensors")
    (run.folder / f"{rank}.json").write_text(json.dumps({"history": trainer.state.log_history, "share": share}))


@dataclass(frozen=True)
class Result:
    """What a run left behind: the lines of its log with a loss and those with held-out ones, without what depends on the clock;
    its weights, the gradients of its first step, and how much of all parameters this process held between steps."""

    lines: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    share: float


def result(run: Run, rank: int = 0) -> Result:
    """Reads what a run left behind."""
    left = json.loads((run.folder / f"{rank}.json").read_text())
    timed = ("per_second", "runtime")
    history = [{k: v for k, v in line.items() if not k.endswith(timed)} for line in left["history"]]
    return Result(
        [line for line in history if "loss" in line],
        [line for line in history if "eval_loss" in line],
        load_file(run.folder / f"{rank}.weights.safetensors"),
        load_file(run.folder / f"{rank}.gradients.safetensors"),
        left["share"],
    )


def _call(work: Callable[[int], None], rank: int, processes: int, port: int) -> None:
    _join(rank, processes, port)
    work(rank)


def start(run: Run | Callable[[int], None], processes: int = 1) -> list[int | None]:
    """Trains, or calls a function with its rank, and waits for all processes; their exit codes, None for one that was not done
    in two minutes (it is ended)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # Python 3.11 does not pass it on
        forkserver.ensure_running()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    work: Any = _train if isinstance(run, Run) else _call
    ranks = [context.Process(target=work, args=(run, rank, processes, port)) for rank in range(processes)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 120
    codes = []
    for process in ranks:
        process.join(max(0.0, end - time.monotonic()))
        codes.append(process.exitcode)
        if process.is_alive():
            process.kill()
            process.join()
    return codes


def saved(model: Any, tokenizer: Any, folder: Path) -> Path:
    """A checkpoint with its tokenizer, whose texts end with the tokenizer's eos."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_trainer(folder: Path, model: Any = None, **options: Any) -> MRPTrainer:
    """A trainer of a very small model that saves every step."""
    chosen = {**OPTIONS, "save_strategy": "steps", "save_steps": 1, **options}
    return MRPTrainer(model or small_model(), MRPTrainingArguments(str(folder), **chosen), Rows(12), Rows(4))


def chat_trainer(
    folder: Path, tokenizer: Any, train: Any = CHATS, held_out: Any = None, model: Any = None, **rest: Any
) -> MRPTrainer:
    """A trainer of the embedded checkpoint on records, as a program makes one; three steps."""
    callbacks = rest.pop("callbacks", None)
    chosen = {"objective": "mrp", "max_length": 64, "use_cpu": True, "disable_tqdm": True, "max_steps": 3, "logging_steps": 1}
    args = MRPTrainingArguments(str(folder), **{**chosen, **rest})
    model = MRPForCausalLM.from_pretrained(TINY) if model is None else model
    return MRPTrainer(model, args, train, held_out, processing_class=tokenizer, callbacks=callbacks)
