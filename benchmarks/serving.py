"""Tokens per forward and per second of a served model, with MRP and by stock `LowConfidence`: ``python -m benchmarks.serving``.

Two engines of SGLang, of the same weights, answer the same prompts in turns, each with an empty prefix cache; the one that is
not asked sleeps. The answers are those of `LowConfidence`, token for token, but for near ties. Needs the engine: on a CPU that
is the environment of `make test-serving`; on a GPU give both engines a share of it: `--flag=--mem-fraction-static --flag=0.4`.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import FAMILIES, problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPConfig, MRPForCausalLM

from .common import TINY, emit, header, parser_of
from .server import CPU_ENVIRONMENT, CPU_FLAGS, Measured, Server, backbone_for_stock


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each turn of each engine, and one that compares them."""
    parser = parser_of("serving", __doc__)
    parser.add_argument("--model", default=str(TINY), help="a checkpoint with a head")
    parser.add_argument("--backbone", help="the same without, for stock; left out: written from a model of one file")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--states", type=int, default=4, help="K")
    parser.add_argument("--count", type=int, default=60, help="problems of each family")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flag", action="append", help="a flag of both engines, in place of those for a CPU")
    options = parser.parse_args(arguments)
    emit(header("serving", options, MRPForCausalLM.from_pretrained(options.model)))
    block = MRPConfig.from_pretrained(options.model).block_size
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    asked = [problem for family in FAMILIES for problem in problems(family, "heldout", options.count)]
    prompts = [encode(problem, tokenizer)[0] for problem in asked]
    budgets = [NEW_TOKENS[problem.family] for problem in asked]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as engines:
        folder = Path(temporary)
        backbone = options.backbone or backbone_for_stock(Path(options.model), folder / "backbone")
        drafted = {"decoding": "mrp_spec", "num_draft_states": options.states, "target": "dynamic"}
        drafted["confidence_threshold"] = options.threshold
        # What requests leave of these is drafted in.
        rows = options.states * max(options.concurrency)
        more: dict[str, Any] = {"flags": options.flag or CPU_FLAGS, "max_running_requests": rows}
        more["environment"] = {} if torch.cuda.is_available() else CPU_ENVIRONMENT
        servers = {
            "stock": Server(backbone, folder / "stock", "LowConfidence", {"threshold": options.threshold}, **more),
            "mrp": Server(options.model, folder / "mrp", "MRP", drafted, **more),
        }
        for server in servers.values():
            engines.enter_context(server)
        for concurrency in options.concurrency:
            turns: dict[str, list[Measured]] = {name: [] for name in servers}
            for turn in range(options.rounds + 1):  # the first warms up
                for name, server in list(servers.items())[:: -1 if turn % 2 else 1]:
                    turns[name].append(measured := server.measure(prompts, budgets, concurrency, block))
                    if turn:
                        emit({"engine": name, "concurrency": concurrency, "turn": turn, **line(measured)})
            emit({"engine": "both", "concurrency": concurrency, **compared(turns["stock"][1:], turns["mrp"][1:])})


def line(measured: Measured) -> dict[str, Any]:
    """One turn's counts."""
    return {
        "tokens": measured.tokens,
        "forwards": measured.forwards,
        "tokens_per_forward": round(measured.tokens_per_forward, 3),
        "seconds": round(measured.seconds, 2),
        "tokens_per_second": round(measured.tokens / measured.seconds, 1),
    }


def compared(stock: list[Measured], mrp: list[Measured]) -> dict[str, Any]:
    """The ratios of MRP over stock: of all turns together, and of seconds the median, least and most of the turns."""
    faster = [a.seconds / b.seconds * b.tokens / a.tokens for a, b in zip(stock, mrp, strict=True)]
    forwards = [sum(turn.tokens for turn in turns) / sum(turn.forwards for turn in turns) for turns in (stock, mrp)]
    return {
        "tokens_per_forward_ratio": round(forwards[1] / forwards[0], 3),
        "tokens_per_second_ratio": round(median(faster), 3),
        "tokens_per_second_ratio_range": [round(min(faster), 3), round(max(faster), 3)],
        "texts_that_differ": sum(a != b for a, b in zip(stock[0].ids, mrp[0].ids, strict=True)),
        "texts": len(stock[0].ids),
    }


if __name__ == "__main__":
    main()
