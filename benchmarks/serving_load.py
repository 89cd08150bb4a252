"""Speed of the plugin over stock SGLang by requests at once, wall clock in turns: ``python -m benchmarks.serving_load``.

Two CPU engines of a backbone of published layer shapes, cut to a few layers, in bfloat16 with random weights. Both reveal a
token a step (`LowConfidence` at threshold 1, and `static`), and drafts are right as often as published, by a seeded coin
(`forced_engine`): 2.7 tokens a round of three drafts at 0.75 each. The one that is not asked sleeps. The head is cut, too; the
vocabulary is not, so that it weighs more here than in the whole model.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .common import HUB_CONFIGS, TINY, emit, header, parser_of
from .forced_engine import ACCEPTANCE
from .server import CPU_ENVIRONMENT, HEAD_FIELDS, Measured, Server
from .turns import faster, take_turns

BLOCK = 16
WARM_UPS = 1  # turns
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
    *("--max-total-tokens", "16384", "--context-length", "1024", "--dtype", "bfloat16", "--load-format", "dummy"),
)


def write_shape(shape: str, layers: int, head_layers: int, folder: Path) -> tuple[Path, Path]:
    """Write the configs of a published shape with fewer layers, and of its backbone as the engine's own SDAR takes it."""
    config = json.loads((HUB_CONFIGS / f"sdar-{shape}-mrp" / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": head_layers}
    # The shape is Qwen3's; `sdar` would need code from the checkpoint.
    backbone = {name: value for name, value in config.items() if name not in HEAD_FIELDS}
    backbone |= {"architectures": ["SDARForCausalLM"], "model_type": "qwen3"}
    made = folder / "mrp", folder / "backbone"
    for at, fields in zip(made, (config, backbone), strict=True):
        at.mkdir()
        (at / "config.json").write_text(json.dumps(fields))
        for name in ("tokenizer.json", "tokenizer_config.json"):  # any: requests are ids
            (at / name).write_bytes((TINY / name).read_bytes())
    return made


def asked(server: Server, prompts: list[list[int]], new_tokens: int, made: list[Measured], turn: int) -> float:
    """Ask a server for a text of each prompt at once, and note the answers; returns the seconds of a token."""
    made.append(server.measure(prompts, [new_tokens] * len(prompts), len(prompts), BLOCK))
    return made[-1].seconds / made[-1].tokens


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each number of requests at once."""
    parser = parser_of("serving_load", __doc__)
    parser.add_argument("--shape", default="1.7b", choices=("1.7b", "4b", "8b"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--head-layers", type=int, default=1)
    parser.add_argument("--acceptance", type=float, default=0.75, help="chance of a draft")
    parser.add_argument("--states", default="auto", help="K, or auto")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16], help="at once")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[32, 16, 16], help="by number of requests")
    parser.add_argument("--learn", type=int, nargs="+", default=[192, 48, 16], help="tokens before, by which `auto` learns")
    parser.add_argument("--rounds", type=int, nargs="+", default=[7, 5, 3], help="turns, by number of requests")
    options = parser.parse_args(arguments)
    emit(header("serving_load", options))
    drafted = {"decoding": "mrp_spec", "target": "static", "draft_branches": 1}
    drafted["num_draft_states"] = options.states if options.states == "auto" else int(options.states)
    more: dict[str, Any] = {"flags": FLAGS, "max_running_requests": max(options.requests), "module": "benchmarks.forced_engine"}
    more["environment"] = {**CPU_ENVIRONMENT, ACCEPTANCE: str(options.acceptance)}
    draw = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        full, backbone = write_shape(options.shape, options.layers, options.head_layers, folder)
        with (
            Server(backbone, folder / "of_stock", "LowConfidence", {"threshold": 1.0}, **more) as stock,
            Server(full, folder / "of_mrp", "MRP", drafted, **more) as mrp,
        ):
            by_count = options.new_tokens, options.learn, options.rounds
            for count, new_tokens, before, rounds in zip(options.requests, *by_count, strict=True):
                prompts = torch.randint(5, 151000, (count, options.prompt), generator=draw).tolist()
                asked(mrp, prompts, before, [], 0)
                made: dict[str, list[Measured]] = {"stock": [], "mrp": []}

                ways = {
                    name: partial(asked, server, prompts, new_tokens, made[name])
                    for name, server in (("stock", stock), ("mrp", mrp))
                }
                taken = take_turns(ways, rounds, WARM_UPS)
                worked = {name: [each.cpu_seconds / each.tokens for each in of[WARM_UPS:]] for name, of in made.items()}
                line: dict[str, Any] = {"requests": count, "speed_over_stock": faster(taken["mrp"], taken["stock"])}
                line["speed_over_stock_by_cpu_time"] = faster(worked["mrp"], worked["stock"])
                for name, turns in made.items():
                    tokens, forwards = (sum(getattr(turn, of) for turn in turns[WARM_UPS:]) for of in ("tokens", "forwards"))
                    line[f"{name}_tokens_per_forward"] = round(tokens / forwards, 3)
                    line[f"{name}_seconds_per_token"] = round(median(taken[name]), 4)
                costs = [reply["meta_info"]["mrp"] for turn in made["mrp"][WARM_UPS:] for reply in turn.replies]
                accepted, offered = (sum(cost[name] for cost in costs) for name in ("accepted", "drafted"))
                emit({**line, "accepted_of_scored": round(accepted / max(1, offered), 3)})


if __name__ == "__main__":
    main()
