"""int8 and 4-bit weights beside bfloat16 on a CPU: bytes in memory and time of a forward, with
random weights.

    OMP_NUM_THREADS=1 python -m benchmarks.quantized_cpu \\
        --output benchmarks/results/quantized_cpu.jsonl
    python -m benchmarks.quantized_cpu --table benchmarks/results/quantized_cpu.jsonl

A model of Qwen3's 0.6B or of SDAR's 1.7B layers with a head of three, embedding and `lm_head`
apart, is written to a temporary folder in bfloat16, and read from there once as it is and once for
each kind of weights. Its `lm_head` and embedding stay bfloat16 in all of them. Each kind takes
turns with bfloat16 in one process: a text of one block in four steps, with one state a forward
(`static`), and with up to four (`self_spec`, whose drafts random weights seldom accept). Times are
CPU time of the process, a forward's share of it; ratios are over the time of bfloat16 in the same
turn.

Bytes are those of the storages that loading and a first text leave, without the cache of keys and
values.
"""

import argparse
import gc
import json
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mrp_trainer.doctor.checks import inputs_of, published_config, random_model
from mrp_trainer.evaluate.roofline import WEIGHT_BYTES, Shape
from mrp_trainer.publish.card import markdown_table
from torch import Tensor
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from modeling_mrp import MRPConfig, MRPForCausalLM

from .common import emit, header, parser_of
from .turns import spread, take_turns

STATES = (1, 4)
INT4 = vars(torch)["int4"]  # a dtype that torch's own types do not declare
PROMPT, STEPS = 32, 4  # tokens of the prompt; steps of the block behind it


def _torchao_int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _torchao_int4() -> TorchAoConfig:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=INT4, granularity=PerGroup(32)))


# By name, the format whose bytes are computed (`WEIGHT_BYTES`), and what makes the
# `quantization_config`.
KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "bitsandbytes int8": (
        "int8",
        lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "torchao int8": ("int8", _torchao_int8),
    "quanto int8": ("int8", lambda: QuantoConfig(weights="int8")),
    "bitsandbytes nf4": (
        "4-bit",
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ),
    "torchao int4": ("4-bit", _torchao_int4),
    "quanto int4": ("4-bit", lambda: QuantoConfig(weights="int4")),
}


def config_of(shape: str) -> MRPConfig:
    """Make the config of a shape, with a head of three layers."""
    config = published_config("1.7B")
    if shape == "0.6b":  # Qwen3-0.6B's layers, of which there are as many, with as many heads
        config.hidden_size = 1024
        config.intermediate_size = 3072
    return config


def storages() -> dict[int, int]:
    """Collect the bytes of all storages that tensors of this process use, by address."""
    sizes: dict[int, int] = {}
    for value in gc.get_objects():
        with suppress(Exception):  # other libraries' proxies raise anything when they are looked at
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def loaded(
    folder: Path, inputs: dict[str, Tensor], config: Any = None
) -> tuple[MRPForCausalLM, int]:
    """Load a model and decode once; return it and the bytes that it takes."""
    gc.collect()
    earlier = storages()
    options = {} if config is None else {"quantization_config": config}
    model = MRPForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    seconds_a_forward(model, inputs, 1, 0)
    gc.collect()
    size = 0
    for address, storage_size in storages().items():
        if address not in earlier:
            size += storage_size
    return model, size


def seconds_a_forward(
    model: MRPForCausalLM, inputs: dict[str, Any], states: int, _number: int
) -> float:
    """Decode a block with K = `states`; return the process's CPU time per forward of the
    backbone."""
    mode: dict[str, Any] = {"decoding": "static"}
    if states > 1:
        mode = {"decoding": "self_spec", "target": "static", "num_draft_states": states}
    start_time = time.process_time()
    length: dict[str, Any] = {"max_new_tokens": model.config.block_size, "denoising_steps": STEPS}
    out: Any = model.generate(**inputs, **mode, **length, return_dict_in_generate=True)
    return (time.process_time() - start_time) / sum(out.stats.forwards.values())


def measure(options: argparse.Namespace) -> None:
    """Measure each kind in turns with bfloat16, and emit a line for it."""
    config = config_of(options.shape)
    shape = Shape.of(options.shape, config)
    file = options.output.open("a") if options.output else None
    emit({**header("quantized_cpu", options), "cpu": cpu_name()}, file)
    with tempfile.TemporaryDirectory() as folder:
        source = random_model(config, torch.bfloat16, torch.device("cpu"))
        source.save_pretrained(folder)
        del source
        inputs = inputs_of(
            MRPForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), None, 1, PROMPT
        )
        plain, size = loaded(Path(folder), inputs)
        computed = shape.weight_bytes(WEIGHT_BYTES["bfloat16"])
        emit({"kind": "bfloat16", "bytes": size, "computed": computed}, file)
        for name in options.kinds:
            format_name, make_config = KINDS[name]
            model, size = loaded(Path(folder), inputs, make_config())
            computed = shape.weight_bytes(WEIGHT_BYTES[format_name])
            line = {"kind": name, "bytes": size, "computed": computed}
            for states in STATES:
                functions = {
                    "plain": partial(seconds_a_forward, plain, inputs, states),
                    "it": partial(seconds_a_forward, model, inputs, states),
                }
                seconds = take_turns(functions, options.turns)
                plain_seconds = np.array(seconds["plain"])
                kind_seconds = np.array(seconds["it"])
                line[f"K={states}"] = {
                    "plain_ms": spread(1000 * plain_seconds, 1),
                    "it_ms": spread(1000 * kind_seconds, 1),
                    "ratio": spread(kind_seconds / plain_seconds, 2),
                }
            emit(line, file)
            del model, functions
    if file:
        file.close()


def cpu_name() -> str:
    """Return the processor's name, from Linux's list of processors where there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def table(path: Path) -> str:
    """Tabulate the lines of a file as Markdown."""
    plain_lines = []
    quantized_lines = []
    for line in map(json.loads, path.read_text().splitlines()):
        if line.get("kind") == "bfloat16":
            plain_lines.append(line)
        elif "kind" in line:
            quantized_lines.append(line)
    plain = plain_lines[0]
    rows = []
    for line in (plain, *quantized_lines):
        entries = [
            line["kind"],
            f"{line['bytes']:,}",
            f"{line['bytes'] / plain['bytes']:.2f}",
            f"{line['computed']:,}",
        ]
        for states in STATES:
            if line is plain:
                entries += ["", ""]
                continue
            times = line[f"K={states}"]
            median = times["ratio"]["median"]
            low, high = times["ratio"]["range"]
            entries.append(f"{times['plain_ms']['median']:.0f}, {times['it_ms']['median']:.0f}")
            entries.append(f"{median:.2f} ({low:.2f}-{high:.2f})")
        rows.append(entries)
    timed = []
    for states in STATES:
        timed += [f"K = {states}: ms of bfloat16, of this", "over bfloat16"]
    return markdown_table(["weights", "bytes", "of bfloat16", "computed", *timed], rows)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: print JSON lines, or with `--table` a Markdown table of measured
    ones."""
    parser = parser_of("quantized_cpu", __doc__)
    parser.add_argument("--shape", choices=("0.6b", "1.7b"), default="0.6b")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file that gets the lines, too, behind its own")
    parser.add_argument("--table", type=Path, help="only print the table of this file of lines")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(options.table))
    else:
        measure(options)


if __name__ == "__main__":
    main()
