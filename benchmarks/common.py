"""Shared parts of the benchmark commands: writing and reading of measurements, and decodes by other
loops than `generate`'s."""

import json
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import Problem
from mrp_trainer.evaluate import provenance
from mrp_trainer.evaluate.provenance import deciding, digests
from mrp_trainer.evaluate.results import check_clean, other_weights, with_headers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from modeling_mrp.generate.generation import laid_out
from modeling_mrp.generate.loop import Mode
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.kernels.dispatch import PYTORCH
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.layers import plan_layers
from modeling_mrp.networks.networks import Networks
from modeling_mrp.networks.picker import Picker
from modeling_mrp.rules.state import Counts, Row

ROOT = Path(__file__).parent.parent
HUB_CONFIGS = ROOT / "hub_configs"
TINY = HUB_CONFIGS / "sdar-tiny-mrp"
RESULTS = Path(__file__).parent / "results"


def parser_of(name: str, doc: str) -> ArgumentParser:
    """Make the argument parser of `python -m benchmarks.NAME`, with the module's docstring as its
    description."""
    return ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        formatter_class=RawDescriptionHelpFormatter,
    )


PRINTED = Path("/proc/self/fd/1")


def header(
    benchmark: str, options: Any, model: MRPForCausalLM | None = None, printed: Path = PRINTED
) -> dict[str, Any]:
    """Make the header of a benchmark's output (`provenance.header`), the file `options.output` or
    else `printed` (stdout).

    Raises:
        ValueError: if the output is a file of `benchmarks/results` and the code has uncommitted
            changes.
    """
    fields = provenance.header(benchmark, options, model)
    check_clean(getattr(options, "output", None) or printed, fields)
    return fields


def emit(line: dict[str, Any], file: TextIO | None = None) -> None:
    """Print a measurement as a JSON line, write it to `file` if given, and flush both: an
    interrupted run keeps its lines."""
    for target in filter(None, (sys.stdout, file)):
        print(json.dumps(line), file=target, flush=True)


@cache
def embedded_weights() -> dict[str, str | None]:
    """Return the digests of the embedded checkpoint's backbone and head (`provenance.digests`)."""
    return digests(load(TINY)[0])


def read_lines(path: Path, current: bool = True) -> list[dict[str, Any]]:
    """Read the measurements in a file of results, without the headers.

    Lines measured with other weights than the embedded checkpoint's, or with other decoding code
    than today's, are left out if the file ends with lines of these weights and this code.

    Args:
        path: The file.
        current: If False, read the lines of the checkpoint and the code that the last header names,
            whatever they are: of a finished study, or of weights that are not in the repository.

    Raises:
        ValueError: if the file ends with lines of other weights or code, or if its last header has
            no digest of them.
    """
    measured = list(with_headers(map(json.loads, path.read_text().splitlines())))
    last = measured[-1][0]
    if missing := {"backbone", "deciding"} - last.keys():
        raise ValueError(
            f"{path}: the last header has no digest `{sorted(missing)[0]}` of what was measured: "
            "measure again"
        )
    weights = {**embedded_weights(), "deciding": deciding()} if current else last
    lines = []
    stale = []
    for header, line in measured:
        component = other_weights(header, line, weights)
        if component is None:
            lines.append(line)
        else:
            stale.append((header, component))
    if stale and other_weights(last, {}, weights):
        first, component = stale[0]
        expected = "today's" if component == "deciding" else f"that of {TINY.name}"
        measured_part = "deciding code" if component == "deciding" else component
        remedy = f"measure again with {first['benchmark']} and {first.get('options')}"
        if component == "deciding":
            remedy += ", or show with benchmarks.confirm that the counts are the same"
        raise ValueError(
            f"{path}: measured with the {measured_part} {first.get(component, 'unknown')}, and "
            f"{expected} is {weights[component]}: {remedy}"
        )
    return lines


def encode_prompts(
    problem_set: Iterable[Problem], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Encode the prompts of problems; return the ids of each."""
    return [encode(problem, tokenizer)[0] for problem in problem_set]


def now(device: torch.device) -> float:
    """Read a host clock, in seconds, once the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def load(folder: str | Path) -> tuple[MRPForCausalLM, PreTrainedTokenizerFast]:
    """Load a checkpoint from a folder; return its model, in evaluation mode, and its tokenizer."""
    return MRPForCausalLM.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(
        folder
    )


def greedy_decode(
    model: MRPForCausalLM,
    mode: Mode,
    prompts: list[list[int]],
    new_tokens: int,
    eos: list[int],
    width: int,
) -> tuple[Networks, list[Row]]:
    """Set up a greedy decode of a batch on a CPU; return networks and rows for a `Decoder` or for a
    benchmark's own loop.

    Args:
        model: The model, in evaluation mode.
        mode: The decoding mode: the reveal rule, and how states are drafted.
        prompts: The ids of each row's prompt.
        new_tokens: Limit of new tokens per row.
        eos: Ids that end a text.
        width: Most states of a row in one forward.
    """
    config = model.config
    options = MRPGenerationConfig(eos_token_id=eos, do_sample=False)
    prompt_ids = list(map(torch.tensor, prompts))
    rows = laid_out(prompt_ids, None, new_tokens, options, 0, config, None)
    for row in rows:
        row.counts = Counts(width, mode.drafting is not None)
    picker = Picker(
        model.lm_head.weight,
        config.mask_token_id,
        entropy=mode.rule.needs_entropy,
        dispatch=PYTORCH,
    )
    capacity = max(len(row.text) for row in rows)
    cache = model.block_cache(len(rows), capacity, width * config.block_size, mode.uses_head)
    plans = plan_layers(model, mode.uses_head, PYTORCH)
    return Networks(model, cache, mode.uses_head, picker, plans), rows
