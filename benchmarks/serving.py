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
from mrp_trainer.data.tasks import FAMILIES, problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM

from .common import HUB_CONFIGS, TINY, emit, encode_prompts, header, parser_of
from .forced_engine import ACCEPTANCE
from .server import (
    CPU_ENVIRONMENT,
    CPU_FLAGS,
    Measured,
    Server,
    backbone_for_stock,
    stock_config,
)
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
    if options.backbone:
        backbone = Path(options.backbone)
    else:
        backbone = backbone_for_stock(Path(options.model), folder / "backbone")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    prompts: list[list[int]] = []
    budgets: list[int] = []
    for family in FAMILIES:
        prompts += encode_prompts(problems(family, "heldout", options.count), tokenizer)
        budgets += [NEW_TOKENS[family]] * options.count
    return Compared(
        Path(options.model),
        backbone,
        lambda clients: (prompts, budgets),
        options.threshold,
        {"flags": CPU_FLAGS},
    )


def shaped(options: Any, folder: Path) -> Compared:
    """Set up the comparison for a published shape, with fewer layers and random weights, on one
    random prompt per client."""
    config = json.loads((HUB_CONFIGS / f"sdar-{options.shape}-mrp" / "config.json").read_text())
    config |= {"num_hidden_layers": options.layers, "num_nextn_predict_layers": options.head_layers}
    folders = folder / "with_head", folder / "backbone"
    for checkpoint, fields in zip(folders, (config, stock_config(config)), strict=True):
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(fields))
        # any tokenizer will do: requests are ids
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (checkpoint / name).write_bytes((TINY / name).read_bytes())
    draw = torch.Generator().manual_seed(0)

    def workload(clients: int) -> Workload:
        prompts = torch.randint(5, 151000, (clients, 16), generator=draw).tolist()
        return prompts, [options.new_tokens] * clients

    server = {
        "flags": (*CPU_FLAGS, *RANDOM, "--dtype", options.dtype),
        "module": "benchmarks.forced_engine",
    }
    return Compared(
        *folders, workload, 1.0, {**server, "environment": {ACCEPTANCE: str(options.acceptance)}}
    )


def main(arguments: list[str] | None = None) -> None:
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
    options = parser.parse_args(arguments)
    model = None
    if not options.shape:
        model = MRPForCausalLM.from_pretrained(options.model)
    emit(header("serving", options, model))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        comparison = shaped(options, folder) if options.shape else trained(options, folder)
        block = json.loads((comparison.mrp / "config.json").read_text())["block_size"]
        drafted = {
            "decoding": "mrp_spec",
            "target": "dynamic",
            "confidence_threshold": comparison.threshold,
        }
        if comparison.threshold == 1:
            drafted["target"] = "static"
        drafted["num_draft_states"] = (
            options.states if options.states == "auto" else int(options.states)
        )
        if options.shape:
            drafted["draft_branches"] = 1  # forced drafts are chains
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
                workload = prompts, budgets, clients, block
                functions = {
                    "stock": partial(measure_turn, stock, workload, measurements["stock"]),
                    "mrp": partial(measure_turn, mrp, workload, measurements["mrp"]),
                }
                seconds = take_turns(functions, options.rounds, WARM_UPS)
                of_stock = measurements["stock"][WARM_UPS:]
                of_mrp = measurements["mrp"][WARM_UPS:]
                line: dict[str, Any] = {"concurrency": clients, **compared(of_stock, of_mrp)}
                line["speed_over_stock"] = speed_ratios(seconds["mrp"], seconds["stock"])
                line["speed_over_stock_by_cpu_time"] = speed_ratios(
                    cpu_seconds_per_token(of_mrp), cpu_seconds_per_token(of_stock)
                )
                emit(line)


def measure_turn(
    server: Server, workload: Any, measurements: list[Measured], _number: int
) -> float:
    """Measure a server in one turn, and append the result to `measurements`; return the seconds per
    token.

    Args:
        server: The server.
        workload: Prompts, limits of new tokens, number of clients and block size.
        measurements: The results of the server's turns.
    """
    measured = server.measure(*workload)
    measurements.append(measured)
    return float(measured.seconds / measured.tokens)


def cpu_seconds_per_token(measurements: list[Measured]) -> list[float]:
    """Return the CPU time per token of each turn."""
    return [measured.cpu_seconds / measured.tokens for measured in measurements]


def speed_of(measurements: list[Measured]) -> float:
    """Return tokens per forward over all turns."""
    tokens = sum(measured.tokens for measured in measurements)
    return tokens / sum(measured.forwards for measured in measurements)


def compared(stock: list[Measured], mrp: list[Measured]) -> dict[str, Any]:
    """Compute tokens per forward and acceptance over all turns, and count the texts of the first
    turn that differ."""
    stock_speed = speed_of(stock)
    mrp_speed = speed_of(mrp)
    accepted = 0
    drafted = 0
    for measured in mrp:
        for reply in measured.replies:
            accepted += reply["meta_info"]["mrp"]["accepted"]
            drafted += reply["meta_info"]["mrp"]["drafted"]
    differ = sum(a != b for a, b in zip(stock[0].ids, mrp[0].ids, strict=True))
    return {
        "tokens_per_forward": [round(stock_speed, 3), round(mrp_speed, 3)],
        "ratio": round(mrp_speed / stock_speed, 3),
        "acceptance": round(accepted / max(1, drafted), 3),
        "texts_that_differ": differ,
        "texts": len(stock[0].ids),
    }


if __name__ == "__main__":
    main()
