"""Compare the texts of requests that join and leave batches with those of `generate` alone.

    python -m benchmarks.joining --requests 3000
    python -m benchmarks.joining --requests 600 --seed 10 --output benchmarks/results/joining.jsonl

Random models in float64; requests of all kinds (targets, drafts, refinements, sampled by seed,
penalised, with stop strings and criteria, with prompts that are computed in parts) come in random
order while others are decoded, some are cancelled, and each model's manager decodes 1 to 16 at
once. Each text that was not cancelled has to be that of `generate` for its prompt alone, with its
steps. Prints a line for each that is not, and one of counts; the exit status is 1 if a text
differs. Each 60 requests are of another model, by seed: those from `--seed` on. With `--output` a
header and the lines are appended to a file.
"""

import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers.generation import ContinuousBatchingConfig

from modeling_mrp.generate.request import RequestOutput
from tests.support.batching_cases import random_request
from tests.support.random_cases import make_model

from .common import emit, header, parser_of

_OF_MODEL = 60  # requests of one model


def differing(seed: int, count: int, file: TextIO | None) -> tuple[int, int]:
    """Ask one model for `count` texts; return how many were compared, and how many differ, which
    `file` gets a line of."""
    rng = random.Random(seed)
    model = make_model(seed, block_size=rng.choice((4, 8)))
    limits = ContinuousBatchingConfig(
        max_requests_per_batch=rng.choice((1, 2, 5, 16)),
        max_batch_tokens=rng.choice((8, 40, None)),
    )
    manager = model.init_continuous_batching(continuous_batching_config=limits)
    manager.start()
    cases: dict[str, tuple[list[int], dict[str, Any]]] = {}
    outputs: dict[str, RequestOutput] = {}
    while len(outputs) < count:
        if len(cases) < count:
            prompt, options = random_request(rng)
            name = manager.add_request(prompt, **options)
            cases[name] = prompt, options
            if rng.random() < 0.1:
                manager.cancel_request(rng.choice(list(cases)))
        wait = rng.choice((0, 0, 0.05)) if len(cases) < count else 60
        if (output := manager.get_result(timeout=wait)) is not None:
            outputs[output.request_id] = output
        elif not manager.is_running():
            raise RuntimeError("the manager has ended") from manager.fatal_error
    manager.stop()
    compared = mismatches = 0
    for name, output in outputs.items():
        if output.error is not None:
            mismatches += output.error != "it was cancelled"
            continue
        prompt, options = cases[name]
        undrafted: Any = model.generate(
            torch.tensor([prompt]), return_dict_in_generate=True, **options
        )
        compared += 1
        equal = prompt + output.generated_tokens == undrafted.sequences[0].tolist()
        if not equal or output.reveal_step != undrafted.reveal_step[0].tolist():
            mismatches += 1
            emit({"seed": seed, "prompt": prompt, "options": repr(options)}, file)
    return compared, mismatches


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if a text differs."""
    parser = parser_of("joining", __doc__ or "")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--output", type=Path, help="a file that is appended to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = time.monotonic()
    compared = mismatches = 0
    with ExitStack() as files:
        file = None
        if options.output is not None:
            first = header("joining", options)
            file = files.enter_context(options.output.open("a"))
            emit(first, file)
        for index in range(-(-options.requests // _OF_MODEL)):
            count = min(_OF_MODEL, options.requests - index * _OF_MODEL)
            texts, differ = differing(options.seed + index, count, file)
            compared += texts
            mismatches += differ
        line = {
            "requests": options.requests,
            "compared": compared,
            "differ": mismatches,
            "seed": options.seed,
            "seconds": round(time.monotonic() - started),
        }
        emit(line, file)
    return int(mismatches > 0)


if __name__ == "__main__":
    raise SystemExit(main())
