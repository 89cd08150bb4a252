"""What the compiler makes of the kernels, for a GPU that need not be there: registers, stack, shared memory, accesses.

``python -m benchmarks.compiled > benchmarks/results/compiled.jsonl`` launches every kernel at sizes of the 4B shape on tensors
without memory; each launch is caught and compiled for `--capability` (80: Ampere, 90: Hopper, 100 and 120: Blackwell) with just
the arguments that it came with. Programs are those that a multiprocessor holds at once. Narrow accesses are instructions that
load or store a number of 16 bits or less by itself. It takes a minute, needs triton and no GPU, and must not run under
TRITON_INTERPRET.
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

from modeling_mrp.kernels.fused_layers import _rotated_kernel, _sum_and_norm_kernel
from modeling_mrp.kernels.pick import Unembedding, _pick_kernel
from modeling_mrp.kernels.round_attention import RoundMask, round_attention

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
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
REGISTERS, THREADS = 65_536, {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 151_936, 2560, 32, 8, 128


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
    before, *told = re.split(r"atom\.global\.gpu\.acq_rel", ptx)
    ordered = {"tells_behind_a_barrier": before.rfind("bar.sync") > before.rfind("st.global")} if told else {}
    return {
        "kernel": kernel.__name__.lstrip("_"),
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "shared_bytes": made.metadata.shared,
        "programs": programs(used["REG"], 32 * made.metadata.num_warps, made.metadata.shared, capability),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx)),
        "asynchronous_copies": ptx.count("cp.async.c"),
        "narrow_accesses": len(re.findall(r"(?:ld|st)\.global\S*\.[bsu](?:8|16)\b", ptx)),
        **ordered,
    }


def programs(registers: int, threads: int, shared: int, capability: int) -> int:
    """How many programs a multiprocessor holds at once; the hardware keeps a KB of shared memory for each."""
    of_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(of_registers, THREADS[capability] // threads, (SHARED[capability] << 10) // (shared + 1024))


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


def pick_launch(rows: int, sampled: bool = False, truncated: bool = False) -> None:
    """The row kernel of the pick over float32 logits of the whole vocabulary, greedy or sampled, behind a top-k or not."""
    keys, least = _empty(rows, dtype=torch.int64), _empty(rows, dtype=torch.float32)
    unembedding = Unembedding(_empty(VOCAB, HIDDEN, dtype=torch.bfloat16), VOCAB - 1, 0.7 if sampled else 1.0)
    logits = _empty(rows, VOCAB, dtype=torch.float32)
    _pick_kernel(unembedding, logits, least if truncated else None, keys if sampled else None)


def attention_launch(batch: int, states: int, used: int, dtype: torch.dtype, block: int = 4) -> None:
    """A round's attention behind `used` slots."""
    queries = states * block
    slots = _empty(batch, queries + used, 39, 2, KV_HEADS, HEAD_DIM, dtype=dtype)[:, :, 0]  # of 36 layers and a head's three
    keys = slots.permute(2, 0, 3, 1, 4)
    query = _empty(batch, queries, HEADS, HEAD_DIM, dtype=dtype).transpose(1, 2)
    parent = _empty(batch, states, dtype=torch.int64) if states > 1 else None
    round_attention(query, keys[0], keys[1], RoundMask(_empty(batch, dtype=torch.int64), parent, states, block), 0.1)


def layer_launch(kernel: str, tokens: int, dtype: torch.dtype) -> None:
    """One of the kernels between a layer's matrix products, in a round of a row."""
    with torch.device("meta"):
        norm, q_norm, k_norm = (Qwen3RMSNorm(size).to(dtype) for size in (HIDDEN, HEAD_DIM, HEAD_DIM))
    if kernel == "sum_and_norm":
        hidden, added = (_empty(1, tokens, HIDDEN, dtype=dtype) for _ in range(2))
        _sum_and_norm_kernel(hidden, added, norm)
    else:
        attention = SimpleNamespace(head_dim=HEAD_DIM, q_norm=q_norm, k_norm=k_norm)
        projected = _empty(1, tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
        rotary = _empty(1, tokens, HEAD_DIM, dtype=dtype), _empty(1, tokens, HEAD_DIM, dtype=dtype)
        kept = _empty(1, tokens, 39, 2, KV_HEADS, HEAD_DIM, dtype=dtype)[:, :, 0].permute(2, 0, 3, 1, 4)
        _rotated_kernel(attention, projected, rotary, kept[0], kept[1])


def shipped(dtype: torch.dtype, capability: int) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What a row of SDAR-4B launches in blocks of 16, plain and with K = 4 and 8 states, greedy and sampled."""
    block = 16
    for states in (1, 4, 8):
        tokens = states * block
        for sampled, truncated in ((False, False), (True, False), (True, True)):
            sizes = {"launch": "pick", "rows": tokens, "sampled": sampled, "truncated": truncated}
            yield sizes, partial(pick_launch, tokens, sampled, truncated)
        sizes = {"launch": "round_attention", "batch": 1, "states": states, "block": block, "used": 512}
        yield sizes, partial(attention_launch, 1, states, 512, dtype, block)
        for kernel in ("sum_and_norm", "rotated"):
            yield {"launch": kernel, "tokens": tokens}, partial(layer_launch, kernel, tokens, dtype)


def others(dtype: torch.dtype, capability: int) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What blocks of 4 and larger batches launch."""
    for batch, states, used in ((1, 4, 512), (1, 1, 512), (8, 8, 4096)):
        sizes = {"launch": "round_attention", "batch": batch, "states": states, "block": 4, "used": used}
        yield sizes, partial(attention_launch, batch, states, used, dtype)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each kernel of each launch."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED))
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--shipped", action="store_true", help="only what a row of SDAR-4B launches in blocks of 16")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, under which nothing is compiled: unset it")
    emit({**header("compiled", options), "triton": triton.__version__})
    for name in options.dtype:
        for launches in (shipped,) if options.shipped else (shipped, others):
            for described, launch in launches(getattr(torch, name), options.capability):
                for line in caught(launch, options.capability):
                    emit({"dtype": name, **described, **line})


if __name__ == "__main__":
    main()
