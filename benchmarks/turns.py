"""Two versions of the package in turns in one process: CPU time, texts and forwards of the same calls.

    git worktree add ../before 27b9ad0
    python -m benchmarks.turns ../before/hub_configs/sdar-tiny-mrp ./hub_configs/sdar-tiny-mrp --batches 1 16

A checkpoint's folder carries its code, so that each version runs as a user of that folder would run it. Problems of math from
the tuning split, greedy, one thread; the ratio of CPU times is told as the median over batches with its quartiles.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems
from transformers import AutoModel, PreTrainedTokenizerFast

from .common import emit, header

NEW = 64
TARGETS = ("static", "dynamic", "sequential")


def padded(prompts: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    """A batch of prompts, padded on the left."""
    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def compared(models: list[Any], batches: list[dict[str, torch.Tensor]], options: dict[str, Any]) -> dict[str, Any]:
    """Decode all batches with both, the first one twice to warm up; what the second takes over the first."""
    ratios: list[float] = []
    same, forwards = True, [0.0, 0.0]
    for turn, batch in enumerate([batches[0], *batches]):
        seconds, texts = [0.0, 0.0], [torch.empty(0), torch.empty(0)]
        for which in (0, 1) if turn % 2 else (1, 0):
            begun = time.process_time()
            out = models[which].generate(**batch, **options, return_dict_in_generate=True)
            seconds[which] = time.process_time() - begun
            texts[which] = out.sequences
            forwards[which] += out.stats.row_forwards.sum().item() * bool(turn)
        same &= torch.equal(*texts)
        if turn:
            ratios.append(seconds[1] / seconds[0])
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"texts_equal": same, "forwards": forwards, "ratio": [round(one, 3) for one in quartiles], "calls": len(ratios)}


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line for each number of rows, of states, and target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__)
    parser.add_argument("before", help="folder of a checkpoint with its code")
    parser.add_argument("after", help="another one, of the same weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="rows of a batch")
    parser.add_argument("--states", type=int, nargs="+", default=[1, 4, 8], help="1: the target alone")
    parser.add_argument("--count", type=int, default=16, help="batches of few rows, at most; of many one at least")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folders = (options.before, options.after)
    models = [
        AutoModel.from_pretrained(one, trust_remote_code=True).to(getattr(torch, options.dtype)).eval() for one in folders
    ]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.after)
    emit(header("turns", options))
    for rows in options.batches:
        count = max(2, options.count // rows) * rows
        prompts = [encode(problem, tokenizer)[0] for problem in problems("math", "tune", count)]
        batches = [padded(prompts[begin : begin + rows], tokenizer.pad_token_id) for begin in range(0, count, rows)]
        for states in options.states:
            for target in TARGETS:
                asked = (
                    {"decoding": target}
                    if states == 1
                    else {"decoding": "mrp_spec", "target": target, "num_draft_states": states}
                )
                found = compared(models, batches, {**asked, "max_new_tokens": NEW, "do_sample": False})
                emit({"rows": rows, "states": states, "target": target, **found})


if __name__ == "__main__":
    main()
