"""Kernels and rounds on a GPU: checked against float64, then timed against PyTorch, plain transformers and their floors.

``python -m benchmarks.gpu --output benchmarks/results/gpu.jsonl`` does everything: each kernel's error, then its time beside
its PyTorch twin, `torch.compile` of that and the floor; a round at the published shapes with random weights; `generate` with
the embedded checkpoint; peak memory of `pick`. Lines are added to the file as they come, and a short table is printed last.
On a CPU, ``TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --shape toy`` goes the same way at a toy's size; there only
the errors mean anything.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import triton

from modeling_mrp.card_mrp import markdown_table
from modeling_mrp.configuration_mrp import MRPConfig
from modeling_mrp.pick_mrp import pick, pick_ref
from modeling_mrp.readout_mrp import Readout

from . import gpu_rounds
from .common import HUB_CONFIGS, header
from .cost_model import DEVICES
from .gpu_kernels import KERNEL, MASK_ID, Case, Vocabulary, attention_case, head_input_case
from .gpu_rounds import Round
from .roofline import Device, Shape
from .timing import ceilings, reason
from .wallclock import make_job, published_config, random_model, take_turns

SECTIONS = ("kernels", "rounds", "generate", "memory")
SHAPES = ("1.7b", "4b", "8b", "toy")
TOY: dict[str, int] = {
    "vocab_size": 203,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "block_size": 4,
    "num_nextn_predict_layers": 1,
}
# Options of `generate` by name; the first are the defaults.
WAYS: dict[str, dict[str, Any]] = {
    "ours": {},
    "without graphs": {"graphs": False},
    "without kernels": {"kernels": False},
    "neither": {"graphs": False, "kernels": False},
}
ROWS = (1, 16, 64, 128, 512)


def config_of(shape: str) -> MRPConfig:
    """A published shape's config, or the toy's."""
    if shape != "toy":
        return published_config(shape, None)
    return MRPConfig(**TOY, mask_token_id=TOY["vocab_size"] - 1, pad_token_id=1, eos_token_id=None, max_position_embeddings=512)


def shape_of(shape: str) -> Shape:
    """The sizes, for the floor."""
    if shape != "toy":
        return Shape.read(HUB_CONFIGS / f"sdar-{shape}-mrp")
    sizes = {name: value for name, value in TOY.items() if name != "num_nextn_predict_layers"}
    return Shape("toy", **sizes, head_layers=TOY["num_nextn_predict_layers"])


def cases(shape: str, options: argparse.Namespace, on: torch.device) -> Iterator[Case]:
    """Every kernel at a shape: bfloat16 at all sizes, the other dtypes at few."""
    sizes, toy = shape_of(shape), shape == "toy"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        few = toy or dtype != torch.bfloat16
        for seed, rows in enumerate((1, 5) if toy else (1, 64) if few else ROWS):
            yield from Vocabulary.random(sizes.vocab_size, sizes.hidden_size, rows, dtype, on, seed).cases()
            yield head_input_case(sizes.vocab_size, sizes.hidden_size, rows, dtype, on, seed)
        for prefix in options.prefix[:1] if few else options.prefix:
            for batch in options.batch[:1] if few else options.batch:
                for states in options.states[-1:] if few else options.states:
                    yield attention_case(sizes, batch, states, prefix, dtype, on)


def kernels(options: argparse.Namespace, device: Device, on: torch.device) -> Iterator[dict[str, Any]]:
    """Errors of all, then times in bfloat16."""
    for shape in options.shape:
        for case in cases(shape, options, on):
            try:
                yield {"shape": shape, **case.check()}
            except Exception as error:
                yield {"failed": case.name, "shape": shape, **case.fields, "way": "check", "error": reason(error)}
        for case in cases(shape, options, on):
            if case.fields["dtype"] == "bfloat16":
                yield from ({"shape": shape, **line} for line in case.time(device, on, options.repeats))


def rounds(options: argparse.Namespace, device: Device, on: torch.device) -> Iterator[dict[str, Any]]:
    """A round of each shape, batch, K and prefix."""
    grid = [Round(b, k, p) for p in options.prefix for b in options.batch for k in options.states]
    for shape in options.shape:
        dtype = torch.float32 if on.type == "cpu" else torch.bfloat16
        model = random_model(config_of(shape), dtype, str(on))
        model.generation_config.pad_token_id = 1
        ways = {name: WAYS[name] for name in options.way}
        if options.compile:
            for part in (model.model, model.mrp_head):
                assert part is not None
                part.compile(dynamic=False)
            ways = {f"{name}, compiled": way for name, way in ways.items()}
        yield from gpu_rounds.rounds(model, shape_of(shape), device, grid, ways, max(3, options.repeats // 4))


def generation(options: argparse.Namespace, device: Device, on: torch.device) -> Iterator[dict[str, Any]]:
    """`generate` with the embedded checkpoint at batch 1: speed over `static` beside the ratio of their forwards."""
    job = make_job(
        argparse.Namespace(shape="tiny", dtype=None, device=str(on), count=options.count, batch_size=1, new_tokens=None)
    )
    modes: dict[str, dict[str, Any]] = {"static": {"decoding": "static"}}
    modes |= {f"mrp_spec K={k}": {"decoding": "mrp_spec", "num_draft_states": k} for k in options.states if k > 1}
    for way in options.way:
        speeds = take_turns(job, {mode: {**asked, **WAYS[way]} for mode, asked in modes.items()}, max(3, options.repeats // 4))
        tokens = {mode: _tokens_per_forward(job, asked) for mode, asked in modes.items()}
        for mode in modes:
            over = sorted(mine / base for mine, base in zip(speeds[mode], speeds["static"], strict=True))
            yield {
                "generate": mode,
                "way": way,
                "over_static": round(over[len(over) // 2], 3),
                "over_static_range": [round(over[0], 3), round(over[-1], 3)],
                "forwards_over": round(tokens[mode] / tokens["static"], 3),
            }


def _tokens_per_forward(job: Any, asked: dict[str, Any]) -> float:
    tokens, forwards = 0, 0
    for batch in job.batches:
        inputs = {name: value.to(job.model.device) for name, value in batch.items()}
        out = job.model.generate(**inputs, max_new_tokens=job.new_tokens, return_dict_in_generate=True, **asked)
        tokens += int((out.reveal_step >= 0).sum())
        forwards += out.stats.forwards["denoise"] + out.stats.forwards["verify"]
    return tokens / forwards


def memory(options: argparse.Namespace, device: Device, on: torch.device) -> Iterator[dict[str, Any]]:
    """What `pick` and its twin hold at most beside inputs, at a vocabulary and at four times that."""
    if on.type != "cuda":
        return
    hidden = torch.randn(64, 2560, device=on, dtype=torch.bfloat16)
    for vocab in (37_984, 151_936):
        readout = Readout(torch.randn(vocab, 2560, device=on).bfloat16(), MASK_ID)
        for way, call in (("kernel", lambda r: pick(r, hidden, dispatch=KERNEL)), ("torch", lambda r: pick_ref(r, hidden))):
            call(readout)
            torch.cuda.synchronize(on)
            torch.cuda.reset_peak_memory_stats(on)
            before = torch.cuda.memory_allocated(on)
            call(readout)
            torch.cuda.synchronize(on)
            yield {"memory": "pick", "vocab": vocab, "way": way, "bytes": torch.cuda.max_memory_allocated(on) - before}


MEASURE = {"kernels": kernels, "rounds": rounds, "generate": generation, "memory": memory}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """What was found, briefly: errors out of bounds, times over their floors, speeds over other ways."""
    lines = list(lines)
    checks = [line for line in lines if "check" in line]
    wrong = [line for line in checks if not line["ok"]]
    parts = [f"{len(checks)} checks against float64, {len(wrong)} out of bounds", *map(json.dumps, wrong)]
    parts += [json.dumps(line) for line in lines if "failed" in line]
    rows = [
        [line["time"], line["shape"], _sizes(line), line["way"], f"{line['us']:.1f}", f"{line['over_floor']:.2f}"]
        for line in lines
        if "time" in line
    ]
    if rows:
        parts.append(markdown_table(["kernel", "shape", "sizes", "way", "us", "over its floor"], rows))
    rows = [
        [
            *(str(line[name]) for name in ("shape", "batch", "states", "prefix", "way")),
            f"{line['us']:.0f}",
            f"{line['over_floor']:.2f}",
            f"{line['faster_than_transformers']:.2f}x" if "faster_than_transformers" in line else "",
        ]
        for line in lines
        if "prefix" in line and "us" in line
    ]
    if rows:
        columns = ["shape", "batch", "K", "prefix", "way", "us", "over its floor", "over transformers"]
        parts.append(markdown_table(columns, rows))
    rows = [
        [line["generate"], line["way"], f"{line['over_static']:.2f}x", f"{line['forwards_over']:.2f}x"]
        for line in lines
        if "generate" in line
    ]
    if rows:
        parts.append(markdown_table(["generate", "way", "speed over static", "forwards"], rows))
    parts += [json.dumps(line) for line in lines if "memory" in line]
    return "\n\n".join(parts)


def _all_of(section: str, options: argparse.Namespace, device: Device, on: torch.device) -> Iterator[dict[str, Any]]:
    """A section's lines; where it fails, what it had, and why. The other sections and the table come all the same."""
    try:
        yield from MEASURE[section](options, device, on)
    except Exception as error:
        traceback.print_exc()
        yield {"failed": section, "error": reason(error)}


def _sizes(line: dict[str, Any]) -> str:
    if "rows" in line:
        return f"{line['rows']} rows"
    return f"batch {line['batch']}, K {line['states']}, prefix {line['prefix_tokens']}"


def main(arguments: list[str] | None = None) -> None:
    """Command line: JSON lines to a file or to standard error, and a table to standard output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1.7b", "4b", "8b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--states", nargs="+", type=int, default=[1, 4, 8], help="K; 1 is static")
    parser.add_argument("--prefix", nargs="+", type=int, default=[512, 4096, 16384], help="committed tokens")
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=["ours", "neither"])
    parser.add_argument(
        "--compile", action="store_true", help="rounds with backbone and head under torch.compile, transformers' too"
    )
    parser.add_argument("--count", type=int, default=16, help="problems for generate")
    parser.add_argument("--repeats", type=int, default=20, help="turns of the kernels; a quarter of them for rounds")
    parser.add_argument("--output", type=Path, help="adds JSON lines to this file")
    options = parser.parse_args(arguments)
    on = torch.device(options.device)
    bandwidth, product = ceilings(on) if on.type == "cuda" else ceilings(on, 1 << 22)
    device = Device(options.device, bandwidth, product, achievable=1.0)
    first = header("gpu", argparse.Namespace(**{**vars(options), "output": None}))
    measured = {"bandwidth": float(f"{bandwidth:.3g}"), "matrix_flops": float(f"{product:.3g}")}
    first |= {"triton": triton.__version__, **measured, "datasheet_bandwidth": DEVICES["H200"].bandwidth}
    lines = []
    with options.output.open("a") if options.output else nullcontext(sys.stderr) as file:
        print(json.dumps(first), file=file, flush=True)
        for section in options.section:
            for line in _all_of(section, options, device, on):
                print(json.dumps(line), file=file, flush=True)
                lines.append(line)
    print(table(lines))


if __name__ == "__main__":
    main()
