"""Tokens per forward and per second of a served model, with MRP and by stock `LowConfidence`:
``python -m benchmarks.serving``.

Two SGLang engines with the same weights answer the same prompts in turns, each with an empty prefix
cache; the other one sleeps meanwhile. The answers are those of `LowConfidence`, token for token,
except for near ties. Needs the engine: on a CPU that is the environment of `make test-serving`; on
a GPU give each engine a share of it: `--flag=--mem-fraction-static --flag=0.4`.

With `--shape` the model has published layer shapes, cut to a few layers, with random weights in
`--dtype`. Both engines reveal one token a step (threshold 1), and drafts are right as often as
published, by a seeded coin (`forced_engine`): 2.7 tokens a round of three drafts at 0.75 each. The
head is cut as well; the vocabulary is not, so it weighs more than in the whole model.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import FAMILIES, problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM

from .common import HUB_CONFIGS, TINY, emit, header, parser_of
from .forced_engine import ACCEPTANCE
from .server import CPU_ENVIRONMENT, CPU_FLAGS, HEAD_FIELDS, Measured, Server, backbone_for_stock
from .turns import speed_ratios, take_turns

WARM_UPS = 1  # turns
RANDOM = ("--context-length", "1024", "--max-total-tokens", "16384", "--load-format", "dummy")
Workload = tuple[list[list[int]], list[int]]  # prompts, and the most new tokens of each


@dataclass(frozen=True)
class Compared:
    """The models to compare, and their prompts.

    Attributes:
        mrp, stock: Checkpoints, with a head and without.
        workload: Function of the number of clients that makes prompts, and the limit of new tokens
            for each.
        threshold: Confidence threshold of both models.
        server: Further arguments of `Server`.
    """

    mrp: Path
    stock: Path
    workload: Callable[[int], Workload]
    threshold: float
    server: dict[str, Any]


def trained(options: Any, folder: Path) -> Compared:
    """Set up the comparison for a trained model, on held-out problems of the families that it was
    trained on."""
    backbone = (
        Path(options.backbone)
        if options.backbone
        else backbone_for_stock(Path(options.model), folder / "backbone")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    chosen = [
        problem for family in FAMILIES for problem in problems(family, "heldout", options.count)
    ]
    workload = (
        [encode(problem, tokenizer)[0] for problem in chosen],
        [NEW_TOKENS[problem.family] for problem in chosen],
    )
    return Compared(
        Path(options.model),
        backbone,
        lambda clients: workload,
        options.threshold,
        {"flags": CPU_FLAGS},
    )


def shaped(options: Any, folder: Path) -> Compared:
    """Set up the comparison for a published shape, with fewer layers and random weights, on one
    random prompt per client."""
    config = json.loads((HUB_CONFIGS / f"sdar-{options.shape}-mrp" / "config.json").read_text())
    config |= {"num_hidden_layers": options.layers, "num_nextn_predict_layers": options.head_layers}
    # The layers are Qwen3's; the model type `sdar` would need code from the checkpoint.
    backbone = {name: value for name, value in config.items() if name not in HEAD_FIELDS}
    backbone |= {"architectures": ["SDARForCausalLM"], "model_type": "qwen3"}
    folders = folder / "with_head", folder / "backbone"
    for checkpoint, fields in zip(folders, (config, backbone), strict=True):
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(fields))
        # any tokenizer will do: requests are ids
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (checkpoint / name).write_bytes((TINY / name).read_bytes())
    draw = torch.Generator().manual_seed(0)

    def workload(clients: int) -> Workload:
        return torch.randint(5, 151000, (clients, 16), generator=draw).tolist(), [
            options.new_tokens
        ] * clients

    server = {
        "flags": (*CPU_FLAGS, *RANDOM, "--dtype", options.dtype),
        "module": "benchmarks.forced_engine",
    }
    return Compared(
        *folders, workload, 1.0, {**server, "environment": {ACCEPTANCE: str(options.acceptance)}}
    )


def main(command_line: list[str] | None = None) -> None:
    """Run the command line: print a JSON line for each number of clients."""
    parser = parser_of("serving", __doc__)
    parser.add_argument("--model", default=str(TINY), help="a checkpoint with a head")
    parser.add_argument(
        "--backbone", help="the same without a head, for stock; default: written from --model"
    )
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--states", default="4", help="K, or auto")
    parser.add_argument("--count", type=int, default=60, help="problems of each family")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--flag", action="append", help="a flag of both engines, in place of those for a CPU"
    )
    parser.add_argument("--shape", choices=("1.7b", "4b", "8b"), help="in place of a model")
    parser.add_argument("--layers", type=int, default=4, help="of a shape")
    parser.add_argument("--head-layers", type=int, default=1, help="of a shape")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of a shape"
    )
    parser.add_argument(
        "--acceptance", type=float, default=0.75, help="chance that a shape's draft is right"
    )
    parser.add_argument("--new-tokens", type=int, default=16, help="of a shape's texts")
    parser.add_argument(
        "--learn", type=int, default=0, help="tokens of texts from which `auto` learns first"
    )
    options = parser.parse_args(command_line)
    emit(
        header(
            "serving",
            options,
            None if options.shape else MRPForCausalLM.from_pretrained(options.model),
        )
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        comparison = shaped(options, folder) if options.shape else trained(options, folder)
        block = json.loads((comparison.mrp / "config.json").read_text())["block_size"]
        drafted = {
            "decoding": "mrp_spec",
            "target": "dynamic",
            "confidence_threshold": comparison.threshold,
        }
        drafted |= {"target": "static"} if comparison.threshold == 1 else {}
        drafted["num_draft_states"] = (
            options.states if options.states == "auto" else int(options.states)
        )
        drafted |= {"draft_branches": 1} if options.shape else {}  # forced drafts are chains
        server_options = {**comparison.server, "max_running_requests": max(options.concurrency)}
        server_options["flags"] = options.flag or server_options["flags"]
        server_options["environment"] = {
            **({} if torch.cuda.is_available() else CPU_ENVIRONMENT),
            **server_options.get("environment", {}),
        }
        with (
            Server(
                comparison.stock,
                folder / "of_stock",
                "LowConfidence",
                {"threshold": comparison.threshold},
                **server_options,
            ) as stock,
            Server(comparison.mrp, folder / "of_mrp", "MRP", drafted, **server_options) as mrp,
        ):
            for clients in options.concurrency:
                prompts, budgets = comparison.workload(clients)
                if options.learn:
                    mrp.measure(prompts, [options.learn] * len(prompts), clients, block)
                measurements: dict[str, list[Measured]] = {"stock": [], "mrp": []}
                arguments = prompts, budgets, clients, block
                functions = {
                    name: partial(measure_turn, name, server, arguments, measurements)
                    for name, server in (("stock", stock), ("mrp", mrp))
                }
                seconds = take_turns(functions, options.rounds, WARM_UPS)
                measured = [measurements[name][WARM_UPS:] for name in ("stock", "mrp")]
                line: dict[str, Any] = {"concurrency": clients, **compared(*measured)}
                line["speed_over_stock"] = speed_ratios(seconds["mrp"], seconds["stock"])
                worked = [
                    [
                        measurement.cpu_seconds / measurement.tokens
                        for measurement in measurements_of_server
                    ]
                    for measurements_of_server in measured
                ]
                emit({**line, "speed_over_stock_by_cpu_time": speed_ratios(worked[1], worked[0])})


def measure_turn(
    name: str, server: Server, arguments: Any, measurements: dict[str, list[Measured]], _number: int
) -> float:
    """Measure a server in one turn, and append the result to `made[name]`; return the seconds per
    token."""
    measurements[name].append(server.measure(*arguments))
    return float(measurements[name][-1].seconds / measurements[name][-1].tokens)


def compared(stock: list[Measured], mrp: list[Measured]) -> dict[str, Any]:
    """Compute tokens per forward and acceptance over all turns, and count the texts of the first
    turn that differ."""
    speeds = [
        sum(measurement.tokens for measurement in measurements)
        / sum(measurement.forwards for measurement in measurements)
        for measurements in (stock, mrp)
    ]
    differ = sum(a != b for a, b in zip(stock[0].ids, mrp[0].ids, strict=True))
    costs = [reply["meta_info"]["mrp"] for measurement in mrp for reply in measurement.replies]
    accepted, drafted = (sum(cost[name] for cost in costs) for name in ("accepted", "drafted"))
    line = {
        "tokens_per_forward": [round(speed, 3) for speed in speeds],
        "ratio": round(speeds[1] / speeds[0], 3),
    }
    line["acceptance"] = round(accepted / max(1, drafted), 3)
    return {**line, "texts_that_differ": differ, "texts": len(stock[0].ids)}


if __name__ == "__main__":
    main()
