"""The paper's ablations of a head, small, as one table: the residual against the distribution
itself (MRP, arXiv 2605.18817), K unrolled steps, depth, and how a new head starts.

    python -m benchmarks.ablations --output ablations.jsonl
    python -m benchmarks.ablations --table ablations.jsonl

The embedded backbone decodes 200 problems of `math`. Heads that differ in what `CELLS` names learn
from these for as many steps, by the published objective. Each decodes held-out problems with
`mrp_direct`, K = 1 to 4 unverified reveals a forward, and drafts `static` and `dynamic` with
`mrp_spec`, K = 8. A cell that stands in the output is not trained again: the command, interrupted
and repeated, goes on. `--table` prints the lines of a file as Markdown.

A head of the distribution predicts the hidden states after a reveal outright, in place of what is
added to those before. It decodes here alone: checkpoints of such heads are refused.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.tasks import problems, training_lines
from mrp_trainer.evaluate.decoded import decode_problems
from mrp_trainer.evaluate.intervals import wilson
from mrp_trainer.heads import with_new_head
from mrp_trainer.publish.card import markdown_table
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.decode import decode
from mrp_trainer.train.options import DecodeOptions
from mrp_trainer.train.trainer import MRPTrainer
from torch import Tensor
from transformers import PreTrainedTokenizerFast, set_seed

from modeling_mrp.modeling import MRPForCausalLM

from .common import TINY, emit, header, parser_of

DEFAULTS: dict[str, Any] = {
    "distribution": False,
    "unroll": 1,
    "layers": 3,
    "init": "backbone",
}
# By name, what differs from the defaults. From random layers is the paper's own comparison.
CELLS: dict[str, dict[str, Any]] = {
    "residual, K = 1, 3 layers, from the backbone's": {},
    "distribution": {"distribution": True},
    "from random layers": {"init": "identity"},
    "from random layers, distribution": {"init": "identity", "distribution": True},
    "as published, std 0.2": {"init": "published"},
    "K = 2": {"unroll": 2},
    "K = 3": {"unroll": 3},
    "1 layer": {"layers": 1},
    "2 layers": {"layers": 2},
    "4 layers": {"layers": 4},
}
# The published objective: a random true token is revealed, and nothing is learned beside B.
OBJECTIVE: dict[str, Any] = {
    "noisy_copies": 1,
    "reveal_rule": "random",
    "order_weight": 0.0,
    "reread_weight": 0.0,
}
DIRECT_STEPS = (1, 2, 3, 4)
TARGETS = ("static", "dynamic")
GREEDY: dict[str, Any] = {"do_sample": False, "num_draft_states": 8}
_HELD_BACK = 20  # records that measure the gap


class DistributionModel(MRPForCausalLM):
    """A model whose head predicts hidden states after a reveal, not what a reveal adds to them."""

    def residual(self, input_ids: Tensor, hidden_states: Tensor, *args: Any) -> Tensor:
        """Return what has to be added to the hidden states to make them the head's output."""
        return super().residual(input_ids, hidden_states, *args) - hidden_states


def new_model(cell: dict[str, Any], seed: int) -> MRPForCausalLM:
    """Load the embedded backbone with a new head as a cell says."""
    set_seed(seed)
    base = DistributionModel if cell["distribution"] else MRPForCausalLM
    model: Any = base.from_pretrained(TINY)
    with_new_head(model, cell["layers"], cell["init"])
    if cell["distribution"]:
        torch.nn.init.ones_(model.mrp_head.norm.weight)  # of zeros it would predict no token at all
    return model


def train(model: MRPForCausalLM, cell: dict[str, Any], records: Any, options: Any) -> float:
    """Train a model's head; return the share of the gap that it closes on the records held back."""
    arguments = MRPTrainingArguments(
        str(options.work / "run"),
        objective="mrp",
        seed=options.seed,
        unroll=cell["unroll"],
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=0.008,
        muon_learning_rate=0.004,
        adam_beta2=0.98,
        warmup_steps=options.steps // 10,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **OBJECTIVE,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    trainer = MRPTrainer(
        model,
        arguments,
        records[_HELD_BACK:],
        records[:_HELD_BACK],
        processing_class=tokenizer,
    )
    trainer.train()
    return float(trainer.evaluate()["eval_gap_closed"])


def measure(model: MRPForCausalLM, count: int) -> dict[str, Any]:
    """Decode held-out problems; return right answers by K of `mrp_direct`, and tokens per forward
    by the target of `mrp_spec`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    held_out = problems("math", "heldout", count)
    solved = []
    for steps in DIRECT_STEPS:
        decoded = decode_problems(
            model.eval(), tokenizer, held_out, decoding="mrp_direct", mrp_steps=steps, **GREEDY
        )
        solved.append(sum(decoded.judged))
    speed = {}
    for target in TARGETS:
        decoded = decode_problems(
            model, tokenizer, held_out, decoding="mrp_spec", target=target, **GREEDY
        )
        speed[target] = round(decoded.tokens_per_forward, 3)
    return {"problems": count, "solved": solved, "tokens_per_forward": speed}


def decoded_records(work: Path, count: int) -> list[dict[str, Any]]:
    """Decode training problems with the embedded backbone, or read those decoded before."""
    path = work / f"decoded-{count}.jsonl"
    if not path.exists():
        requests = work / f"math-{count}.jsonl"
        lines = training_lines("math", "train", count)
        requests.write_text("".join(f"{line.strip()}\n" for line in lines))
        decode(DecodeOptions(model=str(TINY), data=[str(requests)], output=str(path)))
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> str:
    """Tabulate the cells of a file as Markdown."""
    columns = ["head", "gap closed", *(f"K={steps} %" for steps in DIRECT_STEPS)]
    columns += [f"{target}, K = 8" for target in TARGETS]
    rows = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "cell" not in line:
            continue
        row = [line["cell"], f"{line['gap_closed']:.2f}"]
        for correct in line["solved"]:
            interval = wilson(correct, line["problems"])
            row.append(
                f"{100 * interval.value:.0f} ({100 * interval.low:.0f}-{100 * interval.high:.0f})"
            )
        row += [f"{line['tokens_per_forward'][target]:.2f}" for target in TARGETS]
        rows.append(row)
    return markdown_table(columns, rows)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of("ablations", __doc__ or "")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/ablations"), help="folder of the data"
    )
    parser.add_argument("--output", type=Path, help="file that the lines are added to")
    parser.add_argument("--table", type=Path, help="only print the table of this file of lines")
    parser.add_argument("--cell", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--count", type=int, default=60, help="held-out problems")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(options.table))
        return
    if options.output is None:
        parser.error("no --output: name the file that gets the lines")
    options.work.mkdir(parents=True, exist_ok=True)
    finished = set()
    if options.output.exists():
        lines = map(json.loads, options.output.read_text().splitlines())
        finished = {line.get("cell") for line in lines}
    records = decoded_records(options.work, options.records)
    with options.output.open("a") as file:
        if missing := [name for name in options.cell if name not in finished]:
            emit(header("ablations", options), file)
        for name in missing:
            cell = {**DEFAULTS, **CELLS[name]}
            started = time.process_time()
            model = new_model(cell, options.seed)
            gap_closed = train(model, cell, records, options)
            measured = measure(model, options.count)
            emit(
                {
                    "cell": name,
                    **cell,
                    "gap_closed": round(gap_closed, 4),
                    **measured,
                    "cpu_seconds": round(time.process_time() - started, 1),
                },
                file,
            )


if __name__ == "__main__":
    main()
