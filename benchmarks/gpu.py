"""Kernels and rounds on a GPU: checked against float64, then timed against PyTorch, plain transformers and their floors.

``python -m benchmarks.gpu --output benchmarks/results/gpu.jsonl`` takes what matters most first: errors and times of the
kernels at batch 1 of the 4B shape, beside their PyTorch twins, `torch.compile` of those and the floor; peak memory of `pick`; a
round with random weights; `generate` with the embedded checkpoint; and how far the tokens with graphs and kernels are those
without. When `--seconds` are over nothing new is begun, and a short table is printed, also where it is interrupted; what was
left out is named. `--all` measures every shape, batch, K and prefix. Lines are added to the file as they come.

An illegal access spoils all that follows in its process: where one is to be feared, run the sections one by one. On a CPU,
``TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --shape toy`` goes the same way at a toy's size; there only the
errors mean anything.
"""

import json
import signal
import sys
import threading
import traceback
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from modeling_mrp.generate.generation import MRPGenerateOutput
from modeling_mrp.kernels.pick import pick, pick_ref
from modeling_mrp.kernels.unembedding import Unembedding
from modeling_mrp.model.configuration import MRPConfig

from . import gpu_rounds
from .agreement import agreement, without_cache
from .common import HUB_CONFIGS, header
from .cost_model import DEVICES
from .gpu_kernels import KERNEL, MASK_ID, Case, Vocabulary, attention_case
from .gpu_layers import Layer
from .gpu_rounds import Round
from .gpu_table import Line, table
from .roofline import Device, Shape
from .timing import Budget, DeviceLostError, copy_bandwidth, matrix_flops, reason, still_there
from .wallclock import Job, make_job, published_config, random_model, take_turns

# Parts of the time, in the order in which they run.
SECTIONS = {"kernels": 4, "memory": 1, "rounds": 3, "generate": 2}
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
# Options of `generate` by name.
WAYS: dict[str, dict[str, Any]] = {
    "ours": {},
    "no-graphs": {"graphs": False},
    "no-kernels": {"kernels": False},
    "neither": {"graphs": False, "kernels": False},
}
# What is measured without being asked for: what the project's bars are about. With `--all`, the whole grid; bars first, too.
FEW: dict[str, Any] = {"shape": ["4b"], "batch": [1], "states": [4, 1], "prefix": [512], "rows": [64, 1], "seconds": 450.0}
ALL: dict[str, Any] = {
    "shape": ["4b", "1.7b", "8b"],
    "batch": [1, 8, 32],
    "states": [4, 1, 8],
    "prefix": [512, 4096, 16384],
    "rows": [64, 1, 16, 128, 512],
    "seconds": None,
}
# What was begun in time may take so many seconds more.
GRACE = 40.0


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


def groups(shape: str, options: Namespace, on: torch.device) -> Iterator[tuple[Line, Callable[[], Iterable[Case]]]]:
    """Every kernel at a shape, what shares inputs together, and its sizes: bfloat16 at all, then the other dtypes at few."""
    sizes, toy = shape_of(shape), shape == "toy"
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        few = toy or dtype != torch.bfloat16
        rows = [1, 5] if toy else options.rows[:2] if few else options.rows
        name = str(dtype)[6:]
        vocabularies = [({"rows": n, "dtype": name}, partial(_on_rows, sizes, n, dtype, on)) for n in rows]
        yield vocabularies[0]
        for prefix in options.prefix[:1] if few else options.prefix:
            for batch in options.batch[:1] if few else options.batch:
                for states in [max(options.states)] if few else options.states:
                    place = {"batch": batch, "states": states, "prefix_tokens": prefix, "dtype": name}
                    yield place, partial(_layer, sizes, batch, states, prefix, dtype, on)
        yield from vocabularies[1:]


def _on_rows(sizes: Shape, rows: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    yield from Vocabulary.random(sizes.vocab_size, sizes.hidden_size, rows, dtype, on).cases()


def _layer(sizes: Shape, batch: int, states: int, prefix: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    yield attention_case(sizes, batch, states, prefix, dtype, on)
    yield from Layer(sizes, batch, states, dtype, on).cases()


def kernels(options: Namespace, device: Device, on: torch.device, budget: Budget) -> Iterator[Line]:
    """Errors of all; times in bfloat16."""
    for shape in options.shape:
        for sizes, group in groups(shape, options, on):
            if budget.over:
                yield {"left_out": "kernels", "shape": shape, **sizes, "why": "no time is left"}
                continue
            try:
                for case in group():
                    yield from ({"shape": shape, **line} for line in _measured(case, options, device, on, budget))
            except Exception as error:  # of inputs that do not fit, for instance
                still_there(on, error)
                yield {"failed": "kernels", "shape": shape, **sizes, "error": reason(error)}


def _measured(case: Case, options: Namespace, device: Device, on: torch.device, budget: Budget) -> Iterator[Line]:
    if budget.over:
        yield {"left_out": case.name, **case.fields, "why": "no time is left"}
        return
    try:
        yield case.check()
    except Exception as error:
        still_there(on, error)
        yield {"failed": case.name, **case.fields, "way": "check", "error": reason(error)}
    if case.fields["dtype"] == "bfloat16":
        yield from case.time(device, on, options.repeats)


def rounds(options: Namespace, device: Device, on: torch.device, budget: Budget) -> Iterator[Line]:
    """A round of each shape, batch, K and prefix."""
    grid = [Round(b, k, p) for p in options.prefix for b in options.batch for k in options.states]
    for shape in options.shape:
        if budget.over:
            yield {"left_out": "rounds", "shape": shape, "why": "no time is left"}
            continue
        dtype = torch.float32 if on.type == "cpu" else torch.bfloat16
        model = random_model(config_of(shape), dtype, str(on))
        model.generation_config.pad_token_id = 1
        ways = {name: WAYS[name] for name in options.way}
        if options.compile:
            for part in (model.model, model.mrp_head):
                assert part is not None
                part.compile(dynamic=False)
            ways = {f"{name}, compiled": way for name, way in ways.items()}
        repeats = _few(options.repeats)
        yield from gpu_rounds.rounds(model, shape_of(shape), device, grid, ways, repeats, budget, options.compile)


def generation(options: Namespace, device: Device, on: torch.device, budget: Budget) -> Iterator[Line]:
    """`generate` with the embedded checkpoint at batch 1: speed over `static` beside the ratio of their forwards, and how far
    the texts of each way are those of the last one."""
    job = make_job(Namespace(shape="tiny", dtype=None, device=str(on), count=options.count, batch_size=1, new_tokens=None))
    modes: dict[str, dict[str, Any]] = {"static": {"decoding": "static"}}
    modes |= {f"mrp_spec K={k}": {"decoding": "mrp_spec", "num_draft_states": k} for k in options.states if k > 1}
    outputs: dict[str, dict[str, list[MRPGenerateOutput]]] = {}
    for way in options.way:
        if budget.over:
            yield {"left_out": "generate", "way": way, "why": "no time is left"}
            continue
        asked = {mode: {**settings, **WAYS[way]} for mode, settings in modes.items()}
        speeds = take_turns(job, asked, _few(options.repeats), 2 if on.type == "cuda" else 0, budget)
        outputs[way] = {mode: _outputs(job, settings) for mode, settings in asked.items()}
        tokens = {mode: _tokens_per_forward(each) for mode, each in outputs[way].items()}
        for mode in modes:
            over = sorted(mine / base for mine, base in zip(speeds[mode], speeds["static"], strict=True))
            yield {
                "generate": mode,
                "way": way,
                "over_static": round(over[len(over) // 2], 3),
                "over_static_range": [round(over[0], 3), round(over[-1], 3)],
                "forwards_over": round(tokens[mode] / tokens["static"], 3),
            }
    for way in list(outputs)[:-1]:
        last = list(outputs)[-1]
        for mode in modes:
            told = agreement(outputs[way][mode], outputs[last][mode])
            yield {"same_tokens": mode, "way": way, "as": last, **told}


@torch.inference_mode()
def _outputs(job: Job, asked: dict[str, Any]) -> list[MRPGenerateOutput]:
    made = []
    for batch in job.batches:
        inputs: dict[str, Any] = {name: value.to(job.model.device) for name, value in batch.items()}
        out = job.model.generate(**inputs, max_new_tokens=job.new_tokens, return_dict_in_generate=True, **asked)
        assert isinstance(out, MRPGenerateOutput)
        made.append(without_cache(out))
    return made


def _tokens_per_forward(outputs: list[MRPGenerateOutput]) -> float:
    tokens = forwards = 0
    for out in outputs:
        assert out.reveal_step is not None
        assert out.stats is not None
        assert out.stats.forwards is not None
        tokens += int((out.reveal_step >= 0).sum())
        forwards += out.stats.forwards["denoise"] + out.stats.forwards["verify"]
    return tokens / forwards


def memory(options: Namespace, device: Device, on: torch.device, budget: Budget) -> Iterator[Line]:
    """What `pick` and its twin hold at most beside inputs, at a vocabulary and at four times that."""
    if on.type != "cuda":
        return
    hidden = torch.randn(64, 2560, device=on, dtype=torch.bfloat16)
    for vocab in (37_984, 151_936):
        unembedding = Unembedding(torch.randn(vocab, 2560, device=on).bfloat16(), MASK_ID)
        for way, call in (("kernel", lambda r: pick(r, hidden, dispatch=KERNEL)), ("torch", lambda r: pick_ref(r, hidden))):
            call(unembedding)
            torch.cuda.synchronize(on)
            torch.cuda.reset_peak_memory_stats(on)
            before = torch.cuda.memory_allocated(on)
            call(unembedding)
            torch.cuda.synchronize(on)
            yield {"memory": "pick", "vocab": vocab, "way": way, "bytes": torch.cuda.max_memory_allocated(on) - before}


MEASURE = {"kernels": kernels, "rounds": rounds, "generate": generation, "memory": memory}


def _few(repeats: int) -> int:
    """Turns of what takes long."""
    return max(min(3, repeats), repeats // 4)


def _flops(on: torch.device, dtype: torch.dtype) -> float:
    return matrix_flops(on, dtype) if on.type == "cuda" else matrix_flops(on, dtype, 128)


def _all_of(section: str, options: Namespace, device: Device, on: torch.device, budget: Budget) -> Iterator[Line]:
    """A section's lines; where it fails, what it had, and why. The other sections and the table come all the same."""
    try:
        yield from MEASURE[section](options, device, on, budget)
    except DeviceLostError:
        raise
    except Exception as error:
        traceback.print_exc()
        still_there(on, error)
        yield {"failed": section, "error": reason(error)}


class Stopped(BaseException):
    """A signal came, or what was begun took too long."""


@contextmanager
def stopping(seconds: float | None) -> Iterator[None]:
    """Raises `Stopped` in the body when the process is told to end, and after so many seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for each, handler in before.items():
            signal.signal(each, handler)


def measured(options: Namespace, on: torch.device, budget: Budget) -> Iterator[Line]:
    """All lines, the first of them of versions and ceilings."""
    size = 1 << 31 if on.type == "cuda" else 1 << 22
    bandwidth, product = copy_bandwidth(on, size), _flops(on, torch.bfloat16)
    device = Device(options.device, bandwidth, product, achievable=1.0)
    first = header("gpu", Namespace(**{**vars(options), "output": None}))
    ceilings = {"bandwidth": float(f"{bandwidth:.3g}"), "matrix_flops": float(f"{product:.3g}")}
    yield first | {"triton": triton.__version__, **ceilings, "datasheet_bandwidth": DEVICES["H200"].bandwidth}
    sections = [section for section in SECTIONS if section in options.section]
    for number, section in enumerate(sections):
        share = SECTIONS[section] / sum(SECTIONS[each] for each in sections[number:])
        yield from _all_of(section, options, device, on, budget.share(share))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def read_options(arguments: list[str] | None = None) -> Namespace:
    """The command line's, with `FEW` or `ALL` for what it does not tell."""
    parser = ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    few = {name: " ".join(map(str, value)) if isinstance(value, list) else f"{value}" for name, value in FEW.items()}
    parser.add_argument("--device", default="cuda", help="such as cuda:0, or cpu for the toy (default: cuda)")
    parser.add_argument(
        "--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="what is measured (default: all)"
    )
    parser.add_argument(
        "--all", action="store_true", help="every shape, batch, K and prefix that is not given, and no limit (default: few)"
    )
    parser.add_argument("--seconds", type=_positive, help=f"begins nothing new after them (default: {few['seconds']})")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help=f"published sizes, or a toy's (default: {few['shape']})")
    parser.add_argument("--batch", nargs="+", type=_positive, help=f"rows of a round (default: {few['batch']})")
    parser.add_argument("--states", nargs="+", type=_positive, help=f"K; 1 is static (default: {few['states']})")
    parser.add_argument("--prefix", nargs="+", type=_positive, help=f"committed tokens of a row (default: {few['prefix']})")
    parser.add_argument(
        "--rows", nargs="+", type=_positive, help=f"hidden states for kernels over the vocabulary (default: {few['rows']})"
    )
    parser.add_argument(
        "--way",
        nargs="+",
        choices=list(WAYS),
        default=["ours", "neither"],
        help="generate as it is, or without CUDA graphs, Triton kernels, or both (default: ours neither)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="rounds with backbone and head under torch.compile, transformers' too (default: neither)",
    )
    parser.add_argument("--count", type=_positive, default=16, help="problems for generate (default: 16)")
    parser.add_argument(
        "--repeats", type=_positive, default=20, help="turns of the kernels; a quarter of them for rounds (default: 20)"
    )
    parser.add_argument("--output", type=Path, help="file that lines are added to, in place of standard error (default: none)")
    options = parser.parse_args(arguments)
    for name, default in (ALL if options.all else FEW).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def main(arguments: list[str] | None = None) -> None:
    """Command line: JSON lines to a file or to standard error, and a table to standard output."""
    options = read_options(arguments)
    on, ended, lines = torch.device(options.device), None, []
    limit = None if options.seconds is None else options.seconds + GRACE
    with (
        options.output.open("a") if options.output else nullcontext(sys.stderr) as file,
        torch.cuda.device(on) if on.type == "cuda" else nullcontext(),  # events and kernels are the current device's
    ):

        def add(line: Line) -> None:
            print(json.dumps(line), file=file, flush=True)
            lines.append(line)

        try:
            with stopping(limit):
                for line in measured(options, on, Budget.of(options.seconds)):
                    add(line)
        except (Stopped, DeviceLostError) as end:
            ended = end
            add({"stopped": reason(end)})
    print(table(lines), flush=True)
    if ended is not None:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
