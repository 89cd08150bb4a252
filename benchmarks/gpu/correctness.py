"""Parts of a session that look for wrong results."""

import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.doctor.checks import (
    Check,
    check_drafts,
    check_fast_paths,
    check_kernels,
    check_noise,
    check_weights,
    checked,
    inputs_of,
)
from mrp_trainer.doctor.kernels import pseudo_random
from mrp_trainer.doctor.log_odds import check_log_odds, play, scripts_of
from mrp_trainer.doctor.page import machine_of
from mrp_trainer.doctor.replays import measure_device
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp.kernels.dispatch import Kernel, relative_error
from modeling_mrp.kernels.pick import LIST, PICK, Unembedding
from modeling_mrp.kernels.round_layers import (
    GATED,
    ROTATED,
    ROUND_ATTENTION,
    SUM_AND_NORM,
    RoundMask,
)
from modeling_mrp.networks.graphs import Graphs, recording_report
from modeling_mrp.networks.picker import LIKELIEST
from modeling_mrp.rules.draft import noise_key

from ..common import ROOT
from .session import Session

STATES, PREFIX, ROWS = 8, 512, 3
# Errors may be this many times those of the PyTorch twin in the same dtype, and a last bit more.
ALLOWED = 3.0
REPEATS = 200


def machine(session: Session) -> None:
    """Versions, memory, and the rates of copies and products."""
    device = session.device
    for name, value in machine_of(device).items():
        session.line("Machine", name=name, value=value)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        session.line("Machine", name="memory, GiB", value=properties.total_memory / 2**30)
        session.line("Machine", name="multiprocessors", value=properties.multi_processor_count)
        if (program := shutil.which("nvidia-smi")) is not None:
            words = [program, "--query-gpu=driver_version,clocks.max.sm,power.limit"]
            finished = subprocess.run(
                [*words, "--format=csv,noheader"], capture_output=True, text=True
            )
            session.line("Machine", name="driver, clock, power", value=finished.stdout.strip())
    for dtype in (torch.bfloat16, torch.float32):
        rates = measure_device(device, dtype)
        bandwidth = rates.bandwidth * dtype.itemsize / 2 / 1e9
        fields = {"GB_a_second": bandwidth, "TFLOP_a_second": rates.peak / 1e12}
        session.line("Rates", dtype=str(dtype)[6:], **fields)


def embedded(session: Session) -> None:
    """The embedded checkpoint as `mrp doctor` checks it, in float32 and bfloat16; drafted texts in
    float64."""
    for dtype in (torch.bfloat16, torch.float32):
        label = f"embedded, {str(dtype)[6:]}"
        model = session.embedded(dtype)
        inputs = inputs_of(model, None, ROWS, 64)
        session.checks(label, check_weights(model))
        session.checks(label, check_noise(session.device))
        session.checks(label, check_kernels(model))
        session.checks(label, check_log_odds(model, 64))
        session.checks(label, check_fast_paths(model, inputs, STATES))
    model = session.embedded(torch.float64)
    inputs = inputs_of(model, None, ROWS, 64)
    session.checks("embedded, float64", check_drafts(model, inputs, STATES))


def published(session: Session) -> None:
    """Random weights of the 4B shape in bfloat16."""
    model = session.random("4B")
    session.checks("random 4B, bfloat16", check_log_odds(model, PREFIX))
    session.checks("random 4B, bfloat16", check_kernels(model))
    inputs = inputs_of(model, None, ROWS, PREFIX)
    session.checks("random 4B, bfloat16", check_fast_paths(model, inputs, STATES))


def broken(session: Session) -> None:
    """Broken models, each of which the log-odds must find."""
    import pytest

    faults: Any = import_module("tests.support.faults")

    for name in ("flipped MLPs in rounds", "reversed lm_head", "flipped MLPs"):
        model = session.embedded(torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch:
            faults.BROKEN[name](patch)
            checks = list(check_log_odds(model, 64))
        failed = [check.name for check in checks if check.ok is False]
        note = f"{len(failed)} of {len(checks)} checks found it"
        session.check("broken", Check(f"{name} is found", bool(failed), None, note))


def attention_cases(small: bool) -> Iterator[tuple[int, int, int]]:
    """Yield rows, committed slots and head dims: those of rows 1 to 64 and prefixes of up to 32,000
    tokens that fit in memory in float64."""
    rows = (1, 3) if small else (1, 2, 4, 16, 64)
    lengths = (0, 40) if small else (0, 1, 31, 129, 512, 4096, 32000)
    for count, length, dim in product(rows, lengths, (16,) if small else (64, 128)):
        if count * length <= 64 * 4096:
            yield count, length, dim


def attention_arguments(
    rows: int, committed: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, ...]:
    """Make arguments of the attention kernel: two states of 16 tokens a row, the second a child of
    the first; slots behind what a row has committed are NaN."""
    block, width, heads, kv_heads = 16, 2, 8, 2
    template = torch.zeros((), dtype=dtype, device=device)
    slots = -(-max(committed, 1) // 64) * 64
    queries = pseudo_random(rows, width * block, heads, dim, template=template, seed=1)
    cache = pseudo_random(2, rows, slots + width * block, kv_heads, dim, template=template, seed=2)
    lengths = [max(0, committed - 3 * (row % 4)) for row in range(rows)]
    for row, length in enumerate(lengths):
        cache[:, row, length:slots] = torch.nan
    keys, values = cache.transpose(2, 3)
    parent = torch.arange(-1, width - 1, device=device).repeat(rows, 1)
    seen = torch.tensor(lengths, device=device)[:, None].repeat(1, width)
    mask = RoundMask(seen, parent, block)
    return queries.transpose(1, 2), keys, values, mask, dim**-0.5


def widened(value: Any) -> Any:
    """Convert tensors of floats to float64, also those within; NaN becomes 0, since twins multiply
    by weight 0 what is masked."""
    if isinstance(value, Tensor):
        return value.double().nan_to_num() if value.is_floating_point() else value
    if isinstance(value, Qwen3RMSNorm):
        norm = Qwen3RMSNorm(len(value.weight), value.variance_epsilon)
        return norm.to(value.weight.device, torch.float64).requires_grad_(False)
    if type(value) in (list, tuple):
        return type(value)(widened(component) for component in value)
    return value


def results_of(result: Any) -> list[Tensor]:
    """List copies of the results of a kernel."""
    results = result if isinstance(result, tuple) else (result,)
    return [tensor.clone() for tensor in results]


@torch.no_grad()
def compare(session: Session, kernel: Kernel, case: str, arguments: Callable[..., Any]) -> None:
    """Compare a kernel with its twin in float64, the twin in the same dtype as control."""

    def agrees() -> Check:
        given = arguments()
        ours = results_of(kernel.launch(*given))
        finite = tuple(v.nan_to_num() if isinstance(v, Tensor) else v for v in given)
        control = results_of(kernel.twin(*finite))
        exact = results_of(kernel.twin(*widened(given)))
        worst = 0.0
        for result, rounded, expected in zip(ours, control, exact, strict=True):
            bit = torch.finfo(result.dtype).eps if result.is_floating_point() else 1e-9
            error = relative_error(result, expected)
            worst = max(worst, error / (relative_error(rounded, expected) + bit))
        return Check(f"{kernel.name}, {case}", worst <= ALLOWED, worst, "times the twin's error")

    session.check("kernels", checked(f"{kernel.name}, {case}", agrees))


def norm_of(size: int, template: Tensor) -> Qwen3RMSNorm:
    """Make a norm of weight one."""
    return Qwen3RMSNorm(size).to(template.device, template.dtype).requires_grad_(False)


def kernels(session: Session) -> None:
    """Kernels against float64, in memory that holds NaN before they write; repeated, too."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    device = session.device
    for dtype in (torch.bfloat16, torch.float32):
        template = torch.zeros((), dtype=dtype, device=device)
        name = str(dtype)[6:]
        for rows, committed, dim in attention_cases(session.small):
            case = f"{name}, {rows} rows, {committed} slots, heads of {dim}"
            make = partial(attention_arguments, rows, committed, dim, dtype, device)
            compare(session, ROUND_ATTENTION, case, make)
            if session.left < 0:
                return
        for tokens in (1, 64) if session.small else (1, 64, 8192):
            size = 96 if session.small else 2560
            pair = [pseudo_random(1, tokens, size, template=template, seed=seed) for seed in (1, 2)]
            for added in (pair[1], None):
                given = (pair[0], added, norm_of(size, template))
                case = f"{name}, {tokens} tokens, {'a' if added is not None else 'no'} sum"
                compare(session, SUM_AND_NORM, case, partial(tuple, given))
            halves = pseudo_random(1, tokens, 4 * size, template=template).chunk(2, -1)
            compare(session, GATED, f"{name}, {tokens} tokens", partial(tuple, halves))
            compare(
                session,
                ROTATED,
                f"{name}, {tokens} tokens",
                partial(rotation, tokens, name, device),
            )
    pick_cases(session)
    repeated(session)


def rotation(tokens: int, dtype: str, device: torch.device) -> tuple[Any, ...]:
    """Make arguments of the kernel of norms and rotations."""
    heads, kv_heads, dim = 4, 2, 32
    template = torch.zeros((), dtype=getattr(torch, dtype), device=device)
    size = (heads + 2 * kv_heads) * dim
    projected = pseudo_random(1, tokens, size, template=template)
    angles = 3 * pseudo_random(1, tokens, dim // 2, template=template, seed=1).repeat(1, 1, 2)
    target = torch.zeros(2, 1, kv_heads, tokens, dim, dtype=template.dtype, device=device)
    norms = norm_of(dim, template), norm_of(dim, template)
    return projected, norms, (angles.cos(), angles.sin()), tuple(target.unbind(0))


def pick_cases(session: Session) -> None:
    """Picks, greedy and sampled, of 1 to 64 rows and one of 1,024."""
    vocab = 320 if session.small else 151936
    template = torch.zeros((), device=session.device)
    for rows, sampled in product((1, 5) if session.small else (1, 4, 64, 1024), (False, True)):
        logits = 4 * pseudo_random(rows, vocab, template=template, seed=3)
        numbers = torch.arange(3 * rows, device=session.device).view(3, rows)
        keys = noise_key(*numbers) if sampled else None
        given = (Unembedding(logits, 0, 0.7 if sampled else 1.0), logits, None, keys)
        case = f"{rows} rows, {'sampled' if sampled else 'greedy'}"
        compare(session, PICK, case, partial(tuple, given))
        compare(session, LIST, case, partial(tuple, (*given, LIKELIEST)))


@torch.no_grad()
def repeated(session: Session) -> None:
    """The attention kernel again and again on the same numbers, whose programs merge shares in
    whatever order they end."""
    lengths = (40,) if session.small else (512, 32000)
    for length in lengths:
        given = attention_arguments(
            2, length, 16 if session.small else 128, torch.float32, session.device
        )
        first = ROUND_ATTENTION.launch(*given)
        count = 3 if session.small else REPEATS
        differing = 0
        for _ in range(count):
            differing += not ROUND_ATTENTION.launch(*given).equal(first)
        note = f"{differing} of {count} repetitions differ"
        name = f"round_attention again, {length} slots"
        session.check("kernels", Check(name, not differing, None, note))


def recordings(session: Session) -> None:
    """Replays one to six of each recording beside the forward itself; two models in turns, a second
    thread, and a recording that fails."""
    for dtype in (torch.float32, torch.bfloat16):
        model = session.embedded(dtype)
        for replay in range(8):  # the first two calls run and record
            odds = []
            for graphs in (None, False):
                scripts = scripts_of(model, 64, replay)
                play(model, scripts, None, graphs)
                odds.append(_odds_of(scripts))
            difference = (odds[0] - odds[1]).abs().max().item()
            allowed = 1e-3 if dtype == torch.float32 else 0.5
            name = f"call {replay + 1} beside no graphs, {str(dtype)[6:]}"
            session.check("recordings", Check(name, difference <= allowed, difference))
        report = recording_report(model)
        note = ", ".join(f"{key}: {value:,}" for key, value in report.items())
        name = f"recordings are used, {str(dtype)[6:]}"
        ok = bool(report["replays"]) and not report["failed"]
        session.check("recordings", Check(name, ok, None, note))
        model.release_graphs()
    for name, check in (
        ("two models in turns", two_models),
        ("a second thread", second_thread),
        ("a recording that fails", failing),
    ):
        session.check("recordings", checked(name, partial(check, session, name)))


def _odds_of(scripts: Any) -> Tensor:
    """Return the log-odds of all that scripts have recorded, as one row."""
    odds = []
    for script in scripts:
        for recorded in script.recorded.values():
            for _, _, _, value in recorded.columns():
                odds.append(value)
    return torch.tensor(odds, dtype=torch.float64)


def _texts(session: Session, model: Any, seed: int, **options: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 1000, (2, 20), generator=generator).to(session.device)
    mode: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 4, "max_new_tokens": 24}
    texts: list[list[int]] = model.generate(ids, **mode, **options).tolist()
    return texts


def two_models(session: Session, name: str) -> Check:
    """Decode with two models in turns, each with recordings of its own."""
    models = [session.embedded(torch.float64), session.embedded(torch.float64)]
    with torch.no_grad():
        models[1].lm_head.weight.copy_(models[1].lm_head.weight.roll(1, 0))
    differing = 0
    for seed in range(4):
        for model in models:
            differing += _texts(session, model, seed) != _texts(session, model, seed, graphs=False)
    return Check(name, not differing, None, f"{differing} of 8 texts differ")


def second_thread(session: Session, name: str) -> Check:
    """Decode in two threads at once with one model."""
    model = session.embedded(torch.float64)
    expected = [_texts(session, model, seed, graphs=False) for seed in range(4)]
    decoded: dict[int, Any] = {}

    def decode(seeds: tuple[int, ...]) -> None:
        for seed in seeds:
            try:
                decoded[seed] = _texts(session, model, seed)
            except Exception as error:
                decoded[seed] = repr(error)

    threads = [threading.Thread(target=decode, args=(seeds,)) for seeds in ((0, 1), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong_texts = [repr(decoded[seed])[:80] for seed in range(4) if decoded[seed] != expected[seed]]
    return Check(name, not wrong_texts, None, "; ".join(wrong_texts) or "4 texts equal")


def failing(session: Session, name: str) -> Check:
    """Record a forward that reads a number on the host, which no graph can hold, and decode."""
    model = session.embedded(torch.float64)
    graphs = Graphs(model.block_cache(1, 64, 16, with_head=False), ())
    numbers = torch.ones(4, device=session.device)
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            results.append(graphs.call("key", lambda x: x * x.sum().item(), numbers).tolist())
    reported = any("could not be recorded" in str(warning.message) for warning in caught)
    decodes = _texts(session, model, 0) == _texts(session, model, 0, graphs=False)
    results_right = results == [[4.0] * 4] * 3
    note = f"told: {reported}; results right: {results_right}; decoding after it: {decodes}"
    return Check(name, reported and decodes and results_right, None, note)


def tests(session: Session) -> None:
    """The tests that a GPU machine runs: `make test-gpu`."""
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    seconds = max(10.0, session.left - 5)
    folders = ["tests/networks", "tests/kernels", "tests/train/test_objectives.py"]
    command = [*words, "--maxfail=20", "--ignore=tests/kernels/test_compiled.py", *folders]
    try:
        finished = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout if isinstance(error.stdout, str) else ""
        session.check("tests", Check("pytest -m gpu", False, None, f"not done: {output[-200:]}"))
        return
    print(finished.stdout, finished.stderr)
    summary = (
        finished.stdout.strip().splitlines()[-1]
        if finished.stdout.strip()
        else finished.stderr[-200:]
    )
    session.check("tests", Check("pytest -m gpu", finished.returncode == 0, None, summary))
    for failed in re.findall(r"^(?:FAILED|ERROR) (.*)$", finished.stdout, re.MULTILINE):
        session.check("tests", Check(failed[:120], False))


def sanitizer(session: Session) -> None:
    """The kernels under `compute-sanitizer`, where CUDA's tools are at hand."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        session.check("kernels", Check("compute-sanitizer", None, None, "it is not installed"))
        return
    words = [program, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu.sanitized"]
    try:
        finished = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=max(10.0, session.left - 5)
        )
    except subprocess.TimeoutExpired:
        session.check("kernels", Check("compute-sanitizer", None, None, "no time was left"))
        return
    print(finished.stdout, finished.stderr)
    note = next(iter(reversed(finished.stdout.strip().splitlines())), "")
    session.check("kernels", Check("compute-sanitizer", finished.returncode == 0, None, note))
