"""Tokens per forward and per second of a served model, with MRP and by stock `LowConfidence`: ``python -m benchmarks.serving``.

Two engines of SGLang, of the same weights, answer the same prompts in turns, each with an empty prefix cache; the one that is
not asked sleeps. The answers are those of `LowConfidence`, token for token, but for near ties. Needs the engine: on a CPU that
is the environment of `make test-serving`; on a GPU give both engines a share of it: `--flag=--mem-fraction-static --flag=0.4`.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import FAMILIES, problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM

from .common import TINY, emit, header, parser_of
from .server import CPU_ENVIRONMENT, CPU_FLAGS, Measured, Server, backbone_for_stock
from .turns import faster, take_turns


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each number of clients."""
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
    model = MRPForCausalLM.from_pretrained(options.model)
    emit(header("serving", options, model))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    asked = [problem for family in FAMILIES for problem in problems(family, "heldout", options.count)]
    prompts = [encode(problem, tokenizer)[0] for problem in asked]
    budgets = [NEW_TOKENS[problem.family] for problem in asked]
    drafted = {"decoding": "mrp_spec", "num_draft_states": options.states, "target": "dynamic"}
    drafted["confidence_threshold"] = options.threshold
    more: dict[str, Any] = {"flags": options.flag or CPU_FLAGS}
    more["max_running_requests"] = max(options.concurrency)
    more["environment"] = {} if torch.cuda.is_available() else CPU_ENVIRONMENT
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        backbone = options.backbone or backbone_for_stock(Path(options.model), folder / "backbone")
        with (
            Server(backbone, folder / "stock", "LowConfidence", {"threshold": options.threshold}, **more) as stock,
            Server(options.model, folder / "mrp", "MRP", drafted, **more) as mrp,
        ):
            for clients in options.concurrency:
                made: dict[str, list[Measured]] = {"stock": [], "mrp": []}

                def asking(name: str, server: Server, clients: int = clients, made: Any = made) -> Any:
                    def turn(_: int) -> float:
                        made[name].append(server.measure(prompts, budgets, clients, model.config.block_size))
                        return float(made[name][-1].seconds / made[name][-1].tokens)

                    return turn

                taken = take_turns({"stock": asking("stock", stock), "mrp": asking("mrp", mrp)}, options.rounds)
                counted = compared(made["stock"][1:], made["mrp"][1:])
                emit({"concurrency": clients, **counted, "tokens_per_second_ratio": faster(taken["mrp"], taken["stock"])})


def compared(stock: list[Measured], mrp: list[Measured]) -> dict[str, Any]:
    """Give tokens per forward over all turns, and the texts of the first that differ."""
    speeds = [sum(turn.tokens for turn in turns) / sum(turn.forwards for turn in turns) for turns in (stock, mrp)]
    differ = sum(a != b for a, b in zip(stock[0].ids, mrp[0].ids, strict=True))
    line = {"tokens_per_forward": [round(speed, 3) for speed in speeds], "ratio": round(speeds[1] / speeds[0], 3)}
    return {**line, "texts_that_differ": differ, "texts": len(stock[0].ids)}


if __name__ == "__main__":
    main()
