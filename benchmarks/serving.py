"""Tokens per forward and per second of a served model, with MRP and by stock `LowConfidence`: ``python -m benchmarks.serving``.

Two SGLang engines with the same weights answer the same prompts in turns, each with an empty prefix cache; the other one sleeps
meanwhile. The answers are those of `LowConfidence`, token for token, except for near ties. Needs the engine: on a CPU that is
the environment of `make test-serving`; on a GPU give each engine a share of it: `--flag=--mem-fraction-static --flag=0.4`.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import FAMILIES, problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS

from .common import TINY, emit, header, load, parser_of
from .server import CPU_ENVIRONMENT, CPU_FLAGS, Measured, Server, backbone_for_stock
from .turns import faster, take_turns

WARM_UPS = 1  # turns


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each number of clients."""
    parser = parser_of("serving", __doc__)
    parser.add_argument("--model", default=str(TINY), help="a checkpoint with a head")
    parser.add_argument("--backbone", type=Path, help="the same without, for stock; left out: written from a model of one file")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--states", default="4", help="K, or auto")
    parser.add_argument("--count", type=int, default=60, help="problems of each family")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flag", action="append", default=[], help="a flag of both engines, in place of those for a CPU")
    parser.add_argument("--learn", type=int, default=0, help="tokens of each text before, by which `auto` learns")
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("serving", options, model))
    asked = [problem for family in FAMILIES for problem in problems(family, "heldout", options.count)]
    prompts, budgets = [encode(problem, tokenizer)[0] for problem in asked], [NEW_TOKENS[problem.family] for problem in asked]
    drafted: dict[str, Any] = {"decoding": "mrp_spec", "target": "static" if options.threshold == 1 else "dynamic"}
    drafted |= {"confidence_threshold": options.threshold}
    drafted |= {"num_draft_states": options.states if options.states == "auto" else int(options.states)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        backbone = options.backbone or backbone_for_stock(Path(options.model), folder / "backbone")
        more: dict[str, Any] = {"flags": options.flag or CPU_FLAGS, "max_running_requests": max(options.concurrency)}
        more["environment"] = {} if torch.cuda.is_available() else CPU_ENVIRONMENT
        with (
            Server(backbone, folder / "of_stock", "LowConfidence", {"threshold": options.threshold}, **more) as stock,
            Server(options.model, folder / "of_mrp", "MRP", drafted, **more) as mrp,
        ):
            for clients in options.concurrency:
                given = prompts, budgets, clients, model.config.block_size
                if options.learn:
                    mrp.measure(prompts, [options.learn] * len(prompts), clients, model.config.block_size)
                made: dict[str, list[Measured]] = {"stock": [], "mrp": []}
                ways = {name: partial(ask, name, server, given, made) for name, server in (("stock", stock), ("mrp", mrp))}
                taken = take_turns(ways, options.rounds, WARM_UPS)
                turns = [made[name][WARM_UPS:] for name in ("stock", "mrp")]
                line: dict[str, Any] = {"concurrency": clients, **compared(*turns)}
                line["speed_over_stock"] = faster(taken["mrp"], taken["stock"])
                worked = [[turn.cpu_seconds / turn.tokens for turn in of] for of in turns]
                emit({**line, "speed_over_stock_by_cpu_time": faster(worked[1], worked[0])})


def ask(name: str, server: Server, given: Any, made: dict[str, list[Measured]], turn: int) -> float:
    """Let a server take its turn; return the seconds per token."""
    made[name].append(server.measure(*given))
    return float(made[name][-1].seconds / made[name][-1].tokens)


def compared(stock: list[Measured], mrp: list[Measured]) -> dict[str, Any]:
    """Compute tokens per forward over all turns, the share of right drafts, and the texts of the first turn that differ."""
    speeds = [sum(turn.tokens for turn in turns) / sum(turn.forwards for turn in turns) for turns in (stock, mrp)]
    differ = sum(a != b for a, b in zip(stock[0].ids, mrp[0].ids, strict=True))
    costs = [reply["meta_info"]["mrp"] for turn in mrp for reply in turn.replies]
    accepted, drafted = (sum(cost[name] for cost in costs) for name in ("accepted", "drafted"))
    line = {"tokens_per_forward": [round(speed, 3) for speed in speeds], "ratio": round(speeds[1] / speeds[0], 3)}
    line["acceptance"] = round(accepted / max(1, drafted), 3)
    return {**line, "texts_that_differ": differ, "texts": len(stock[0].ids)}


if __name__ == "__main__":
    main()
