"""What the compiler makes of the kernels, for a GPU that need not be there: registers, stack, shared memory, accesses.

``python -m benchmarks.compiled > benchmarks/results/compiled.jsonl`` launches every kernel at sizes of the 4B shape on tensors
without memory; each launch is caught and compiled for `--capability` (90: Hopper, 80: Ampere) with just the arguments that it
came with. Narrow accesses are instructions that load or store a number of 16 bits or less by itself. It takes half a minute,
needs triton and no GPU, and must not run under TRITON_INTERPRET.
"""

import argparse
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from modeling_mrp.kernels.fused_layers import _gated_kernel, _rotated_kernel, _sum_and_norm_kernel
from modeling_mrp.kernels.grow import MORE, Ground
from modeling_mrp.kernels.pick import Plan, _pick_kernel
from modeling_mrp.kernels.round_attention import RoundMask, round_attention
from modeling_mrp.kernels.unembedding import Readout

from .common import emit, header

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
PROCESSORS = 132
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
VOCAB, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 151_936, 2560, 9728, 32, 8, 128


def source(kernel: JITFunction, given: dict[str, Any]) -> ASTSource:
    """A kernel with the types, constants and alignments that a launch with these arguments has."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(kernel.params):
        value, name = given[parameter.name], parameter.name
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0 and specialised):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def compiled(kernel: JITFunction, given: dict[str, Any], options: dict[str, Any], capability: int) -> dict[str, Any]:
    """What one launch compiles to."""
    made = triton.compile(source(kernel, given), target=GPUTarget("cuda", capability, 32), options=options)
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said)}
    ptx = made.asm["ptx"]
    return {
        "kernel": kernel.__name__.lstrip("_"),
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "shared_bytes": made.metadata.shared,
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
        "asynchronous_copies": ptx.count("cp.async.c"),
        "narrow_accesses": len(re.findall(r"(?:ld|st)\.global\S*\.[bsu](?:8|16)\b", ptx)),
    }


def caught(launch: Callable[[], Any], capability: int) -> list[dict[str, Any]]:
    """Calls what launches kernels, and compiles them in place of that."""
    found: list[dict[str, Any]] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options: dict[str, Any] = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        names = [parameter.name for parameter in kernel.params]
        found.append(compiled(kernel, {**dict(zip(names, args, strict=False)), **kwargs}, options, capability))

    with patch.object(JITFunction, "run", run):
        launch()
    return found


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def pick_launch(rows: int, dtype: torch.dtype, given: bool = False, everything: bool = False) -> None:
    """`pick` over the whole vocabulary: greedy, a given token's log-odds, or sampled with all options."""
    some = {name: _empty(rows, dtype=torch.int64) for name in ("keys", "given")}
    _pick_kernel(
        Readout(_empty(VOCAB, HIDDEN, dtype=dtype), VOCAB - 1, 0.7 if everything else 1.0, (1, 2) if everything else ()),
        _empty(rows, HIDDEN, dtype=dtype),
        some["keys"] if everything else None,
        some["given"] if given else None,
        _empty(rows, dtype=torch.bool) if everything else None,
        _empty(rows, dtype=torch.bool),
        Plan.of(rows, VOCAB, dtype.itemsize, PROCESSORS),
    )


def attention_launch(batch: int, states: int, used: int, dtype: torch.dtype, block: int = 4) -> None:
    """A round's attention behind `used` slots."""
    queries = states * block
    keys = _empty(2, batch, KV_HEADS, queries + 32_768, HEAD_DIM, dtype=dtype)[:, :, :, : queries + used]
    query = _empty(batch, queries, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)
    parent = _empty(batch, states, dtype=torch.int64) if states > 1 else None
    round_attention(query, keys[0], keys[1], RoundMask(_empty(batch, dtype=torch.int64), parent, states, block), 0.1)


def layer_launch(kernel: str, tokens: int, dtype: torch.dtype) -> None:
    """One of the kernels between a layer's matrix products, in a round of a row."""
    with torch.device("meta"):
        norm, q_norm, k_norm = (Qwen3RMSNorm(size).to(dtype) for size in (HIDDEN, HEAD_DIM, HEAD_DIM))
    if kernel == "sum_and_norm":
        hidden, added = (_empty(1, tokens, HIDDEN, dtype=dtype) for _ in range(2))
        _sum_and_norm_kernel(hidden, added, norm.weight, norm.variance_epsilon)
    elif kernel == "gated":
        _gated_kernel(*(_empty(1, tokens, MLP, dtype=dtype) for _ in range(2)))
    else:
        attention = SimpleNamespace(head_dim=HEAD_DIM, q_norm=q_norm, k_norm=k_norm)
        query, key, value = (_empty(1, tokens, many * HEAD_DIM, dtype=dtype) for many in (HEADS, KV_HEADS, KV_HEADS))
        rotary = _empty(1, tokens, HEAD_DIM, dtype=dtype), _empty(1, tokens, HEAD_DIM, dtype=dtype)
        kept = _empty(2, 1, KV_HEADS, tokens + 32_768, HEAD_DIM, dtype=dtype)[:, :, :, :tokens]
        _rotated_kernel(attention, query, key, value, rotary, kept[0], kept[1])


def grow_launch(batch: int, states: int, branches: int, block: int = 4) -> None:
    """The states of a drafting round; log-odds are float32 whatever the model's dtype."""
    long, flags = partial(_empty, dtype=torch.int64), partial(_empty, dtype=torch.bool)
    known = 3 * states
    ground = Ground(
        slots=long(batch, 1, block + MORE),
        valid=flags(batch, 1),
        token=long(batch, known, block),
        odds=_empty(batch, known, block, dtype=torch.float32),
        known=long(batch, known, block + 1),
        known_valid=flags(batch, known),
        ahead=long(batch, known, block + MORE),
        rider=long(batch, block + MORE),
        rides=flags(batch),
        open_end=long(batch),
        eos=long(2),
        mask_id=VOCAB - 1,
        branches=branches,
    )
    ground.grown(states, states)


def launches(dtype: torch.dtype) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What is compiled, each with what it is called and which sizes it has."""
    for rows in (16, 64, 512):
        yield {"launch": "pick", "rows": rows}, partial(pick_launch, rows, dtype)
    yield {"launch": "pick", "rows": 16, "given": True}, partial(pick_launch, 16, dtype, given=True)
    yield {"launch": "pick", "rows": 16, "sampled": True}, partial(pick_launch, 16, dtype, everything=True)
    for batch, states, used in ((1, 4, 512), (1, 1, 512), (8, 8, 4096)):
        sizes = {"launch": "round_attention", "batch": batch, "states": states, "used": used}
        yield sizes, partial(attention_launch, batch, states, used, dtype)
    for kernel in ("sum_and_norm", "rotated", "gated"):
        yield {"launch": kernel, "tokens": 16}, partial(layer_launch, kernel, 16, dtype)
    for states, branches, block in ((4, 3, 4), (8, 3, 4), (8, 1, 16), (16, 3, 16)):
        sizes = {"launch": "grow", "states": states, "branches": branches, "block": block}
        yield sizes, partial(grow_launch, 1, states, branches, block)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each kernel of each launch."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--capability", type=int, default=90, choices=(80, 86, 89, 90))
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--least", action="store_true", help="only the first launch of each kernel")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, under which nothing is compiled: unset it")
    emit({**header("compiled", options), "triton": triton.__version__})
    for name in options.dtype:
        done: set[str] = set()
        for described, launch in launches(getattr(torch, name)):
            if options.least and described["launch"] in done:
                continue
            done.add(described["launch"])
            for line in caught(launch, options.capability):
                emit({"dtype": name, **described, **line})


if __name__ == "__main__":
    main()
