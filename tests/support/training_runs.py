"""Training runs of a very small model, each in its own processes, that are compared with each
other."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from mrp_trainer.data.samples import Sample
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.trainer import MRPTrainer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import TCPStore
from transformers import TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.support.helpers import BLOCK, naive_norm
from tests.support.random_cases import make_model

# Modules that take seconds to import, imported once in the process from which all others are
# forked.
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
    """A data set of rows of two to four blocks of random ids, the same for the same number; some
    have no response to learn."""

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


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        folder: The folder for the run's checkpoints and results.
        options: Options of `MRPTrainingArguments`, beside `OPTIONS`.
        double: Whether all is computed in float64.
        seed: Seed of torch's generator, and of the weights that training starts from.
        kill: The step in which the process kills itself, with SIGKILL, before its weights change.
        sharded: Whether FSDP2 shards the model.
        adapter: Whether only a LoRA adapter of the head trains.
        backbone: The name of the backbone, if it has one.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: Rows(12))
    held_out: Rows | None = None
    double: bool = False
    seed: int = 0
    resume: bool = False
    kill: int | None = None
    sharded: bool = False
    adapter: bool = False
    backbone: str | None = None


class _Kill(TrainerCallback):
    """Kills the process at the step that `Run.kill` gives."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.run.kill == state.global_step:
            os.kill(os.getpid(), signal.SIGKILL)


def whole(tensor: Any) -> Tensor:
    """Return the tensor, gathered if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trainer_of(
    folder: Path,
    model: Any,
    train: Any = None,
    held_out: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> MRPTrainer:
    """Make a trainer with `OPTIONS` and further options."""
    arguments = MRPTrainingArguments(str(folder), **{**OPTIONS, **options})
    return MRPTrainer(model, arguments, train, held_out, processing_class=tokenizer)


def _let_accelerate_shard_on_cpus() -> None:
    """Tell accelerate that each process has a GPU, since it refuses FSDP on CPUs, where torch
    supports it. After that check, accelerate asks for the device by name, which stays `cpu`."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _train(run: Run, rank: int) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if run.double:  # Qwen3's norms would round to float32
        Qwen3RMSNorm.forward = lambda norm, x: naive_norm(norm, x)  # type: ignore[method-assign]
    arguments = MRPTrainingArguments(str(run.folder), **{**OPTIONS, **run.options})
    if run.sharded:
        _let_accelerate_shard_on_cpus()
    model: Any = make_model(run.seed) if run.double else make_model(run.seed).float()
    torch.manual_seed(run.seed)
    if run.backbone:
        model.backbone_source = (run.backbone, None)
    if run.adapter:
        targets = (
            r"mrp_head\.(eh_proj|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))"
        )
        lora = LoraConfig(
            r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, lora)
    trainer = MRPTrainer(model, arguments, run.rows, run.held_out, callbacks=[_Kill(run)])
    trainer.train(resume_from_checkpoint=run.resume)
    trainer.save_model(str(run.folder / "final"))
    weights = {
        name: whole(value).detach().clone() for name, value in trainer.model.state_dict().items()
    }
    here = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in trainer.model.parameters())
    share = here / sum(p.numel() for p in trainer.model.parameters())
    save_file(weights, run.folder / f"{rank}.weights.safetensors")
    (run.folder / f"{rank}.json").write_text(
        json.dumps({"history": trainer.state.log_history, "share": share})
    )


@dataclass(frozen=True)
class Result:
    """The results of a run: the lines of its log with a loss, without fields that depend on the
    clock; its weights; and the share of all parameters that this process held between steps."""

    lines: list[dict[str, float]]
    weights: dict[str, Tensor]
    share: float


def result(run: Run, rank: int = 0) -> Result:
    """Read the results of a run."""
    left = json.loads((run.folder / f"{rank}.json").read_text())
    lines = [line for line in left["history"] if {"loss", "eval_loss"} & line.keys()]
    timeless = [
        {k: v for k, v in line.items() if not k.endswith(("per_second", "runtime"))}
        for line in lines
    ]
    return Result(timeless, load_file(run.folder / f"{rank}.weights.safetensors"), left["share"])


def _call(work: Callable[[int], None], rank: int, processes: int, port: int) -> None:
    """Make this process one of several, as a launcher does, and call a function with its rank."""
    torch.set_num_threads(1)
    if processes > 1:
        address = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": processes,
            "RANK": rank,
            "LOCAL_RANK": rank,
            # they meet at a store that is there already, as torchrun's do
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        os.environ.update({name: str(value) for name, value in address.items()})
    work(rank)


def start(run: Run | Callable[[int], None], processes: int = 1) -> list[int | None]:
    """Train, or call a function with its rank, in one or more processes; return their exit codes,
    None for a process that was ended because it took more than two minutes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Python 3.11 does not pass it on
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    # a port of its own while the processes run, which other tests run beside
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = partial(_train, run) if isinstance(run, Run) else run
    ranks = [
        context.Process(target=_call, args=(work, rank, processes, store.port))
        for rank in range(processes)
    ]
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
    """Save a checkpoint with its tokenizer, so that texts end with the tokenizer's eos; return the
    folder."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
