"""Parts of a session that train, and make training data."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mrp_trainer.data.samples import Sample
from mrp_trainer.doctor.checks import Check, decode, inputs_of
from mrp_trainer.doctor.replays import measure_device
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.attention import attention_implementation, training_attention
from mrp_trainer.train.collator import DiffusionCollator
from mrp_trainer.train.estimate import estimate_step
from mrp_trainer.train.objectives import HeadObjective
from mrp_trainer.train.packed import PackedBatch
from mrp_trainer.train.reveals import Reveals
from mrp_trainer.train.trainer import MRPTrainer
from transformers import TrainerCallback

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels.dispatch import relative_error

from ..common import ROOT, TINY, now
from .session import Session

# Those of the recipe `sdar-4b-mrp-ours` that decide what passes there are.
RECIPE: dict[str, Any] = {"noisy_copies": 2, "noise_per": "block", "unroll": 2}
STEPS = 5


@dataclass(frozen=True)
class Rows:
    """A data set of rows of random ids, of which all but the first sixteenth are learned."""

    tokens: int
    vocab_size: int

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, visit: int) -> Sample:
        ids = np.random.default_rng(visit).integers(2, self.vocab_size - 2, self.tokens)
        return Sample(visit, ids.astype(np.int32), np.arange(self.tokens) >= self.tokens // 16)


class Clock(TrainerCallback):
    """Notes the seconds of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin a step."""
        self.start = now(self.device)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End a step."""
        self.seconds.append(now(self.device) - self.start)


def arguments_of(session: Session, folder: str, tokens: int, attention: str) -> Any:
    """Make the arguments of a run of a few steps of one row."""
    return MRPTrainingArguments(
        folder,
        objective="mrp",
        packed_attention=attention,
        max_length=tokens,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        bf16=True,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        use_cpu=session.small,
        **RECIPE,
    )


def timed_steps(session: Session, tokens: int, attention: str) -> None:
    """Train the head of a random 4B model for a few steps; compare with the estimate and its
    floor."""
    model = session.random("4B")
    config = model.config
    if session.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(session.device)
    clock = Clock(session.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(session, folder, tokens, attention)
        rows = Rows(tokens, config.vocab_size)
        trainer = MRPTrainer(model, arguments, rows, callbacks=[clock])
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        with torch.device("meta"):
            outline: Any = MRPForCausalLM(config)
        outline.requires_grad_(False)
        outline.get_submodule("mrp_head").requires_grad_(True)
        estimate = estimate_step(outline, arguments, torch.bfloat16)
    seconds = min(clock.seconds[1:])
    rate = measure_device(session.device, torch.bfloat16).peak
    cells = {
        "first_step_s": clock.seconds[0],
        "step_s": seconds,
        "tokens_a_second": tokens / seconds,
    }
    cells |= {"floor_s": estimate.flops / rate, "TFLOP": estimate.flops / 1e12}
    if session.device.type == "cuda":
        cells["peak_GiB"] = torch.cuda.max_memory_allocated(session.device) / 2**30
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    predicted = weights + estimate.saved + estimate.transient + estimate.logits
    cells["predicted_GiB_without_optimizer"] = predicted / 2**30
    cells |= {"first_loss": losses[0], "last_loss": losses[-1]}
    chosen = training_attention(model, attention, session.device)
    session.line("Steps of the head, random 4B", tokens=tokens, attention=chosen, **cells)


def step(session: Session) -> None:
    """Steps of the documented recipe, of 4,096 tokens, by compiled attention."""
    timed_steps(session, 64 if session.small else 4096, "auto")


def dense_step(session: Session) -> None:
    """Shorter steps, by compiled and by dense attention."""
    for attention in ("auto", "sdpa"):
        timed_steps(session, 32 if session.small else 1024, attention)


def gradient(session: Session) -> None:
    """Gradients by compiled attention beside those by dense attention."""
    model = session.random("4B", torch.float32) if session.small else _narrow(session)
    config = model.config
    model.requires_grad_(False)
    model.get_submodule("mrp_head").requires_grad_(True)
    rows = Rows(64 if session.small else 1024, config.vocab_size)
    collator = DiffusionCollator(config.block_size, config.mask_token_id, 1, 2)
    fields = collator([[rows[0]]])
    batch = PackedBatch(**{name: value.to(session.device) for name, value in fields.items()})
    objective = HeadObjective(Reveals("on_policy", 0.5), unroll=2, order_weight=0.5)
    compiled = "tiles" if session.small else "flex_attention"
    for dtype, allowed in ((torch.float32, 2e-3), (torch.bfloat16, 0.1)):
        gradients: dict[str, dict[str, torch.Tensor]] = {}
        for attention in ("sdpa", compiled):
            name = training_attention(model, attention, session.device)
            model.zero_grad()
            casts = dtype != torch.float32
            with (
                attention_implementation(model, name),
                torch.autocast(session.device.type, dtype, enabled=casts),
            ):
                loss, _ = objective(model, batch)
            loss.backward()
            gradients[attention] = {
                key: weight.grad.clone()
                for key, weight in model.named_parameters()
                if weight.grad is not None
            }
        errors = {}
        for key, expected in gradients["sdpa"].items():
            errors[key] = relative_error(gradients[compiled][key], expected)
        worst = max(errors, key=errors.__getitem__)
        check = Check(
            f"gradient by {compiled} beside sdpa, {str(dtype)[6:]}",
            errors[worst] <= allowed,
            errors[worst],
            f"{worst}, of {len(errors)} weights",
        )
        session.check("training", check)


def _narrow(session: Session) -> MRPForCausalLM:
    """Make a model as narrow as a test can use, with the head dim and vocabulary of 4B."""
    config = session.random("1.7B").config
    config.num_hidden_layers, config.num_nextn_predict_layers = 4, 2
    config.layer_types = ["full_attention"] * 4
    torch.manual_seed(0)
    from mrp_trainer.doctor.checks import random_model

    return random_model(config, torch.float32, session.device)


def decoding(session: Session) -> None:
    """What `mrp decode` makes in a second: texts of random 4B weights by `static`, and drafted."""
    model = session.random("4B")
    for rows in (2, 4) if session.small else (16, 64, 256):
        inputs = inputs_of(model, None, rows, 16 if session.small else 256)
        tokens = 16 if session.small else 128
        for states in (1, 4):
            mode: dict[str, Any] = {"decoding": "static", "max_new_tokens": tokens}
            if states > 1:
                mode |= {"decoding": "mrp_spec", "target": "static", "num_draft_states": states}
            seconds = 0.0
            for _ in range(2):
                start = now(session.device)
                out = decode(model, inputs, **mode)
                seconds = now(session.device) - start
            cells = {"s": seconds, "tokens_a_second": rows * tokens / seconds}
            cells["forwards"] = sum(out.stats.forwards.values())
            session.line("Decoding of training data, random 4B", rows=rows, K=states, **cells)
            if session.left < 0:
                return
        model.release_graphs()


def commands(session: Session) -> None:
    """The documented commands with the embedded checkpoint: tasks, decode, train head, show."""
    if find_spec("datasets") is None:
        session.check("commands", Check("mrp train", None, None, "datasets is not installed"))
        return
    device = ["--device", session.device.type]
    count = "12" if session.small else "200"
    steps = ["--steps", "3" if session.small else "80"]
    model = ["--model", str(TINY)]
    with tempfile.TemporaryDirectory() as folder:
        math, decoded, head = (str(Path(folder) / name) for name in ("m.jsonl", "d.jsonl", "head"))
        train = [*model, "--data", decoded, "--output-dir", head, "--batch-size", "16", *steps]
        for words in (
            ["tasks", "--family", "math", "--count", count, "--output", math],
            ["decode", *model, "--data", math, "--output", decoded, *device],
            ["train", "head", *train, "--lr", "0.01", "--muon-learning-rate", "0.02"],
            ["show", "--run", head],
        ):
            start = now(session.device)
            command = [sys.executable, "-m", "mrp_trainer.cli", *words]
            finished = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=max(10, session.left)
            )
            print(finished.stdout, finished.stderr)
            output = (finished.stdout.strip() or finished.stderr.strip()).splitlines()
            note = f"{now(session.device) - start:.0f} s; {output[-1][:120] if output else ''}"
            name = f"mrp {words[0]}"
            session.check("commands", Check(name, finished.returncode == 0, None, note))
            if finished.returncode:
                break
