"""What the benchmark commands share: a first line that says what ran, where and when, and the reading of such lines."""

import argparse
import json
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from modeling_mrp.generate.decode_state import Request, Text, laid_out
from modeling_mrp.generate.loop import Task
from modeling_mrp.generate.modes import Mode
from modeling_mrp.generate.sampling import Sampler
from modeling_mrp.generate.scoring import Reader
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.revealing import reveal_schedule
from modeling_mrp.rules.states import States
from modeling_mrp.runner.runner import Runner

ROOT = Path(__file__).parent.parent
HUB_CONFIGS = ROOT / "hub_configs"
TINY = HUB_CONFIGS / "sdar-tiny-mrp"
RESULTS = Path(__file__).parent / "results"


def header(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """The first line of a command's output: versions, date, threads, options. It alone has a field `benchmark`."""
    asked = {name: value.replace(f"{ROOT}/", "") if isinstance(value, str) else value for name, value in vars(options).items()}
    return {
        "benchmark": benchmark,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        "options": asked,
    }


def emit(line: dict[str, Any]) -> None:
    """Prints one measurement at once, so that a run that is cut short leaves what it had."""
    print(json.dumps(line), flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The measurements that a command left, without its first line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "benchmark" not in line]


def now(device: torch.device) -> float:
    """Seconds on a host clock, read when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def load(folder: str | Path) -> tuple[MRPForCausalLM, PreTrainedTokenizerFast]:
    """A checkpoint in evaluation mode, and its tokenizer."""
    return MRPForCausalLM.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)


def greedy_decode(
    model: MRPForCausalLM, mode: Mode, prompts: list[list[int]], new_tokens: int, eos: list[int], scratch_states: int
) -> tuple[Task, Runner, Text, States]:
    """Set up a greedy decode of a batch on a CPU, one reveal a step, to be run by a loop of one's own.

    Args:
        model: In evaluation mode.
        mode: What is revealed and drafted.
        prompts: Ids by row.
        new_tokens: At most.
        eos: Ids that end a text.
        scratch_states: States of a row that a forward has room for.
    """
    config, rows = model.config, len(prompts)
    text, ends, current = laid_out(
        [torch.tensor(prompt) for prompt in prompts], None, new_tokens, config.block_size, config.mask_token_id, model.device
    )
    request = Request(
        **ends,
        no_eos_before=ends["prompt_length"],
        seed=torch.zeros(rows, dtype=torch.long),
        schedule=reveal_schedule(config.block_size, None),
        eos=torch.tensor(eos, dtype=torch.long),
    )
    sampler = Sampler(model.lm_head.weight, config.mask_token_id, entropy=False)
    reader = Reader(mode.rule, sampler, sampler, request, config.mask_token_id, seeks=True, bars_eos=False)
    cache = model.block_cache(rows, text.capacity, scratch_states * config.block_size, with_head=mode.uses_head)
    runner = Runner(model, cache, mode.uses_head, sampler.dispatch, False, model.device)
    return Task(mode, reader, config.block_size, config.mask_token_id), runner, text, current


def tokens_of(text: Text, prompts: list[list[int]]) -> list[list[int]]:
    """What follows each prompt, to the end of its text."""
    stops: Tensor = text.stop
    return [text.tokens[row, len(prompt) : int(stops[row])].tolist() for row, prompt in enumerate(prompts)]
