"""Ask whether it would pay to store the backbone's hidden states once and train a head from them
(offline), instead of computing them in each step.

    python -m benchmarks.stored_states

Prints JSON lines. For each recipe: bytes a token of what can be stored at the 4B shape in bfloat16,
the backbone's share of that work, and the rate at which a disk has to read to be as fast as an
H100's 989 TFLOP/s, of which 60 % are reached (predicted). States after a reveal that the head
chooses cannot be stored; then the keys and values of the clean text are computed, too. For each
recipe on the embedded checkpoint: CPU seconds of a step, those of the backbone in it, and those of
writing and reading what could be stored (measured on this machine). Last what storing costs in
quality: the share of the gap that a head closes on held-out records after the same steps with noise
that is new in every epoch, and with the noise of the first epoch over and over.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.samples import Sample
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.heads import with_new_head
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.inputs import as_rows
from mrp_trainer.train.trainer import MRPTrainer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, set_seed

from modeling_mrp import MRPConfig
from modeling_mrp.modeling import MRPForCausalLM

from .common import HUB_CONFIGS, TINY, emit, header, parser_of

_FLOPS = 0.6 * 989e12
RECIPES: dict[str, dict[str, Any]] = {
    "published": {
        "noisy_copies": 1,
        "unroll": 1,
        "reread_weight": 0.0,
        "reveal_rule": "random",
    },
    "ours": {"noisy_copies": 2, "unroll": 2, "reread_weight": 1.0, "reveal_rule": "on_policy"},
}


class TimedModel(MRPForCausalLM):
    """A model that sums the CPU seconds of its backbone's passes."""

    backbone_seconds = 0.0

    def backbone(self, *args: Any) -> Tensor:
        """Compute hidden states, and count the time."""
        started = time.process_time()
        hidden = super().backbone(*args)
        self.backbone_seconds += time.process_time() - started
        return hidden


class FirstEpoch(Dataset[list[Sample]]):
    """Rows of a sample each, with the noise of the first epoch in every epoch."""

    def __init__(self, rows: RecordRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, visit: int) -> list[Sample]:
        (sample,) = self.rows[visit]
        return [replace(sample, index=sample.index % len(self))]


def columns_of(recipe: dict[str, Any]) -> tuple[int, int]:
    """Return how many columns of the backbone a learned token takes in a step, and of these how
    many do not depend on the head and need not be computed if they are stored."""
    copies = recipe["noisy_copies"]
    rereads = recipe["reread_weight"] > 0
    columns = 1 + copies * (1 + recipe["unroll"] + rereads)
    if recipe["reveal_rule"] == "random" or recipe["unroll"] == 1:
        return columns, columns
    # later passes follow the head's reveals, and read the keys of the clean text
    return columns, copies * (2 + rereads)


def predicted(name: str, shape: str = "sdar-4b-mrp") -> dict[str, Any]:
    """Predict bytes and work a token at a published shape."""
    config = MRPConfig.from_pretrained(HUB_CONFIGS / shape)
    with torch.device("meta"):
        model: Any = MRPForCausalLM(config)
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    columns, stored = columns_of(RECIPES[name])
    size = 2 * config.hidden_size * (stored + (stored < columns))  # the head reads the clean text's
    seconds = 2 * layers * stored / _FLOPS
    return {
        "predicted": shape,
        "recipe": name,
        "bytes_per_token": size,
        "gigabytes_per_million_tokens": round(size / 1e3, 1),
        "share_of_the_backbones_work": round(stored / columns, 2),
        "h100_seconds_per_million_tokens": round(1e6 * seconds, 1),
        "disk_as_fast_gigabytes_per_second": round(size / seconds / 1e9, 2),
    }


def trained(
    model: Any, recipe: dict[str, Any], records: list[Any], steps: int, fixed: bool, folder: str
) -> tuple[MRPTrainer, float]:
    """Train a new head; return the trainer, and the CPU seconds of training."""
    arguments = MRPTrainingArguments(
        folder,
        objective="mrp",
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        muon_learning_rate=0.02,
        packed=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **recipe,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    set_seed(1)
    with_new_head(model)
    rows: Any = as_rows(records[20:], "records", model, arguments, tokenizer)
    if fixed:
        rows = FirstEpoch(rows)
    trainer = MRPTrainer(model, arguments, rows, records[:20], processing_class=tokenizer)
    started = time.process_time()
    trainer.train()
    return trainer, time.process_time() - started


def measured(name: str, records: list[Any], steps: int, folder: str) -> dict[str, Any]:
    """Measure the time of steps on the embedded checkpoint, and of stored states of as many
    tokens."""
    model: Any = TimedModel.from_pretrained(TINY)
    trainer, seconds = trained(model, RECIPES[name], records, steps, False, folder)
    rows = [row for visit in range(16) for row in trainer.train_dataset[visit]]
    tokens = sum(int(row.response.sum()) for row in rows)
    _, stored = columns_of(RECIPES[name])
    states = np.ones((tokens * stored, model.config.hidden_size), np.float32)
    path = Path(folder) / "states.npy"
    started = time.perf_counter()
    np.save(path, states)
    written = time.perf_counter()
    read = np.load(path).sum()
    finished = time.perf_counter()
    assert read == states.size
    return {
        "measured": "a step on the embedded checkpoint",
        "recipe": name,
        "cpu_seconds": round(seconds / steps, 3),
        "of_the_backbone": round(model.backbone_seconds / steps, 3),
        "learned_tokens": tokens,
        "bytes_stored": states.nbytes,
        "seconds_to_write": round(written - started, 4),
        "seconds_to_read_back": round(finished - written, 4),
    }


def qualities(records: list[Any], steps: int, folder: str) -> Iterator[dict[str, Any]]:
    """Measure a head on held-out records after noise that is always new, and the same each time."""
    for fixed in (False, True):
        model = MRPForCausalLM.from_pretrained(TINY)
        trainer, _ = trained(model, RECIPES["published"], records, steps, fixed, folder)
        evaluated = trainer.evaluate()
        yield {
            "measured": "a head after the same steps",
            "noise": "of the first epoch" if fixed else "new in every epoch",
            "epochs": round(trainer.state.epoch or 0.0, 1),
            "eval_loss": round(evaluated["eval_loss"], 4),
            "eval_gap_closed": round(evaluated["eval_gap_closed"], 4),
        }


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of("stored_states", __doc__ or "")
    parser.add_argument("--records", type=int, default=120)
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--quality-steps", type=int, default=60, help="0: only what it saves")
    options = parser.parse_args(arguments)
    emit(header("stored_states", options))
    records = [json.loads(line) for line in training_lines("math", "train", options.records)]
    for name in RECIPES:
        emit(predicted(name))
    with TemporaryDirectory() as folder:
        for name in RECIPES:
            emit(measured(name, records, options.steps, folder))
        if options.quality_steps:
            for line in qualities(records, options.quality_steps, folder):
                emit(line)


if __name__ == "__main__":
    main()
