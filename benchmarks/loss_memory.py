"""How much memory the head's loss takes at its peak: in chunks of tokens, and with the logits of all tokens at once.

``python -m benchmarks.loss_memory > benchmarks/results/loss_memory.jsonl`` runs the residual KL forward and backward, both
ways, each in a process of its own, and prints what it added to the process's memory. The naive twin is what a plain reading
of the formula gives.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from mrp_trainer.losses import forward_kl, over_vocabulary, project
from torch import Tensor

from .common import emit, header


def chunked_kl(student: Tensor, teacher: Tensor, lm_head_weight: Tensor) -> Tensor:
    """The sum over tokens as the Trainer takes it."""

    def loss(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = project(teacher, lm_head_weight)
        return forward_kl(logits, wanted)[:, None], logits.new_zeros(len(logits), 0)

    values, _ = over_vocabulary(loss, student, lm_head_weight, teacher)
    return values.sum()


def naive_kl(student: Tensor, teacher: Tensor, lm_head_weight: Tensor) -> Tensor:
    """The same with all logits alive."""
    with torch.no_grad():
        wanted = F.linear(teacher, lm_head_weight).float().log_softmax(-1)
    given = F.linear(student, lm_head_weight).float().log_softmax(-1)
    return F.kl_div(given, wanted, log_target=True, reduction="none").sum()


WAYS = {"chunked": chunked_kl, "naive": naive_kl}


def peak_bytes() -> int:
    """The process's largest memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(way: str, tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Loss, seconds, and bytes added at the peak by one forward and backward pass."""
    random = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(tokens, hidden, generator=random) for _ in range(2))
    weight = torch.randn(vocab, hidden, generator=random).div_(hidden**0.5)  # in place: nothing was larger before
    student.requires_grad_()
    before, started = peak_bytes(), time.perf_counter()
    loss = WAYS[way](student, teacher, weight)
    loss.backward()
    assert student.grad is not None
    seconds = time.perf_counter() - started
    norm = student.grad.norm().item()
    return {"loss": loss.item(), "gradient": norm, "peak_bytes": peak_bytes() - before, "seconds": round(seconds, 1)}


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each way, then their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_memory", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--way", choices=WAYS, help="measure this one here, instead of each in its own process")
    options = parser.parse_args(arguments)
    if options.way:
        emit(measure(options.way, options.tokens, options.vocab, options.hidden))
        return
    emit(header("loss_memory", options))
    shape = {name: getattr(options, name) for name in ("tokens", "vocab", "hidden")}
    lines = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.loss_memory", "--way", way]
        command += [part for name, value in shape.items() for part in (f"--{name}", str(value))]
        lines[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        emit({"way": way, **shape, **lines[way]})
    emit({"chunked_over_naive": round(lines["chunked"]["peak_bytes"] / lines["naive"]["peak_bytes"], 4)})


if __name__ == "__main__":
    main()
