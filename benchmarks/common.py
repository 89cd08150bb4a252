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
from transformers import PreTrainedTokenizerFast

from modeling_mrp.modeling import MRPForCausalLM

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
