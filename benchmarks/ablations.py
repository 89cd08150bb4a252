"""What matters in training a head: many small runs from the embedded backbone, each decoded on held-out problems.

``python -m benchmarks.ablations --work runs/ablations --output benchmarks/results/tiny_ablations.jsonl`` trains and measures
every cell with every seed; a run that is done is not repeated, one that was cut off goes on. All runs of a comparison have
the same number of steps, samples and noisy copies.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.arguments import MRPTrainingArguments
from mrp_trainer.evaluate import decode_problems
from mrp_trainer.results import ResultsFile
from mrp_trainer.samples import Sample
from mrp_trainer.tasks import Family, problems
from mrp_trainer.train_tiny import head_on_backbone, trajectories
from mrp_trainer.trainer import MRPTrainer
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, set_seed

from modeling_mrp.modeling import MRPForCausalLM

from .common import TINY, header, load

# What a cell changes; `random_masks` hides response tokens at random instead of as decoding left them.
CELLS: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "random": {"reveal_rule": "random", "random_masks": True},
    "random_count": {"reveal_rule": "random_count", "random_masks": True},
    "on_policy on random masks": {"random_masks": True},
    "random on decoded states": {"reveal_rule": "random"},
    "hidden": {"head_predicts": "hidden"},
    "hidden K=1": {"head_predicts": "hidden", "unroll": 1},
    "K=1": {"unroll": 1},
    "K=3": {"unroll": 3},
    "1 layer": {"layers": 1},
    "2 layers": {"layers": 2},
    "4 layers": {"layers": 4},
    "reverse KL": {"head_loss": "reverse_kl"},
    "without order": {"order_weight": 0.0},
    "without rereading": {"reread_weight": 0.0, "eager_share": 0.0},
    "plain": {"reread_weight": 0.0, "eager_share": 0.0, "order_weight": 0.0},
    "from nothing": {"init": "identity"},
    "hidden from nothing": {"init": "identity", "head_predicts": "hidden"},
    "K=1 from nothing": {"init": "identity", "unroll": 1},
    "hidden K=1 from nothing": {"init": "identity", "head_predicts": "hidden", "unroll": 1},
}
DEFAULTS = {"layers": 3, "unroll": 2, "order_weight": 0.5, "init": "backbone", "head_predicts": "residual"}
# Seeds of the cells that a difference is claimed of; the others have the first alone.
SEEDS = (1, 2, 3)


class _RandomMasks(Dataset[Sample]):
    """The same texts without the order in which they were decoded: the collator masks them at random."""

    def __init__(self, decoded: Any) -> None:
        self.decoded = decoded

    def __len__(self) -> int:
        return len(self.decoded)

    def __getitem__(self, visit: int) -> Sample:
        return replace(self.decoded[visit], reveal_step=None)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


def train(cell: dict[str, Any], seed: int, folder: Path, options: argparse.Namespace) -> tuple[MRPForCausalLM, dict[str, Any]]:
    """A head trained as a cell says, and the means of its log's last fifth."""
    chosen = {**DEFAULTS, **cell}
    set_seed(seed)
    shape = {name: chosen.pop(name) for name in ("layers", "init", "head_predicts")}
    model = head_on_backbone(TINY, **shape)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    dataset: Any = trajectories(options.work, tokenizer, options.steps * options.batch_size, seed)
    if chosen.pop("random_masks", False):
        dataset = _RandomMasks(dataset)
    arguments = MRPTrainingArguments(
        output_dir=str(folder),
        seed=seed,
        report_to=[],
        objective="mrp",
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        muon_learning_rate=options.learning_rate / 2,
        lr_scheduler_type="linear",
        warmup_steps=50,
        adam_beta2=0.98,
        logging_steps=25,
        save_steps=100,
        save_total_limit=1,
        bf16=options.bf16,
        packed_attention="eager" if options.bf16 else "auto",  # with bfloat16 faster than the fused one on the CPUs tried
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        **chosen,
    )
    trainer = MRPTrainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=True)
    lines = [line for line in trainer.state.log_history if "gap_closed" in line and line["step"] > 0.8 * options.steps]
    names = ("gap_closed", "reread_gap_closed", "agreement", "kl_order")
    logged = {name: round(sum(line[name] for line in lines) / len(lines), 4) for name in names if name in lines[-1]}
    return model.eval(), logged


def measure(model: MRPForCausalLM, family: Family, count: int) -> Iterator[dict[str, Any]]:
    """`mrp_spec` with 4 and 8 states, and `mrp_direct` with 1 to 4 unverified reveals, on held-out problems."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    asked = problems(family, "heldout", count)
    settings: list[dict[str, Any]] = [{"decoding": "mrp_spec", "num_draft_states": k} for k in (4, 8)]
    settings += [{"decoding": "mrp_direct", "mrp_steps": k} for k in (1, 2, 3, 4)]
    for setting in settings:
        decoded = decode_problems(model, tokenizer, asked, 50, **setting)
        yield {
            "family": family,
            **setting,
            "tokens_per_forward": round(decoded.tokens_per_forward, 4),
            "accuracy": round(100 * sum(decoded.judged) / len(decoded.judged), 1),
            "right": "".join(str(int(right)) for right in decoded.judged),
            "tokens": decoded.tokens,
            "row_forwards": decoded.row_forwards,
        }


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each run and setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablations", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--cell", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--seed", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--count", type=int, default=100, help="held-out problems a family")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    results = ResultsFile(options.output, "cell")
    named = argparse.Namespace(**{**vars(options), "work": options.work.name})
    results.begin({**header("ablations", named, load(TINY)[0]), "head": None})  # each cell has its own
    for seed in options.seed:
        for name in options.cell:
            if results.find(cell=name, seed=seed) is not None:
                continue
            started = time.perf_counter()
            folder = options.work / f"{name.replace(' ', '-')}-{seed}"
            model, logged = train(CELLS[name], seed, folder, options)
            random.seed(0)
            lines = [line for family in ("math", "code") for line in measure(model, family, options.count)]
            head = {"cell": name, "seed": seed, **logged, "minutes": round((time.perf_counter() - started) / 60, 1)}
            results.add(*({**head, **line} for line in lines))  # at once, so that a run is done or not
            print(json.dumps(head), flush=True)


if __name__ == "__main__":
    main()
