"""Prints what the compiler makes of the kernels for a GPU that need not be there: registers, stack, shared memory, accesses.

    python tests/compiled_kernels.py CAPABILITY

Every kernel is launched at sizes of the 4B shape in bfloat16, on tensors without memory; each launch is caught and compiled for
the capability (80: Ampere, 90: Hopper, 100 and 120: Blackwell) with just the arguments that it came with. Programs are those
that a multiprocessor holds at once. Narrow accesses are instructions that load or store a number of 16 bits or less by itself.
It takes a minute, and needs triton and no TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest.mock import patch

import torch
import triton
from mrp_trainer.doctor.roofline import PUBLISHED, Shape
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from modeling_mrp.kernels.pick import Unembedding, pick_rows
from modeling_mrp.kernels.round_layers import RoundMask, rotated, round_attention, sum_and_norm

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
REGISTERS, THREADS = 65_536, {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


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


def layer_launches(
    shape: Shape, states: int, prefix: int, dtype: torch.dtype, on: torch.device
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """List what a layer launches for a row: attention behind a prefix, a sum and norm, and rotated queries and keys."""
    heads, kv_heads, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    queries, width = states * shape.block_size, shape.hidden_size
    slots, parents = torch.full((1,), prefix, device=on), torch.full((1, states), -1, device=on)
    mask = RoundMask(slots, parents, states, shape.block_size)
    query = torch.empty(1, queries, heads, dim, dtype=dtype, device=on).transpose(1, 2)
    key, value = torch.empty(1, prefix + queries, 2, kv_heads, dim, dtype=dtype, device=on).permute(2, 0, 3, 1, 4)
    yield "round_attention", partial(round_attention, query, key, value, mask, dim**-0.5)

    def norm_of(width: int) -> Any:
        return Qwen3RMSNorm(width).to(on, dtype).requires_grad_(False)

    hidden, added = (torch.empty(1, queries, width, dtype=dtype, device=on) for _ in range(2))
    yield "sum_and_norm", partial(sum_and_norm, hidden, added, norm_of(width))
    rotary = torch.empty(2, 1, queries, dim, dtype=dtype, device=on).unbind(0)
    projected = torch.empty(1, queries, (heads + 2 * kv_heads) * dim, dtype=dtype, device=on)
    target = key[:, :, prefix:], value[:, :, prefix:]
    yield "rotated", partial(rotated, projected, (norm_of(dim), norm_of(dim)), rotary, target)


def launches(dtype: torch.dtype) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """List what a row of SDAR-4B launches in blocks of 16, plain and with K = 4 and 8 states, picks greedy and sampled."""
    shape, on = PUBLISHED["4B"], torch.device("meta")
    weight = torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype, device=on)
    for states in (1, 4, 8):
        rows = states * shape.block_size
        logits, least = torch.empty(rows, shape.vocab_size, device=on), torch.empty(rows, device=on)
        keys = torch.empty(rows, dtype=torch.int64, device=on)
        for sampled, truncated in ((False, False), (True, False), (True, True)):
            unembedding = Unembedding(weight, shape.vocab_size - 1, 0.7 if sampled else 1.0)
            given = unembedding, logits, least if truncated else None, keys if sampled else None
            yield {"launch": "pick", "rows": rows, "sampled": sampled, "truncated": truncated}, partial(pick_rows, *given)
        for name, launch in layer_launches(shape, states, 512, dtype, on):
            yield {"launch": name, "states": states}, launch


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set, under which nothing is compiled: unset it")
    for described, launch in launches(torch.bfloat16):
        for line in caught(launch, int(sys.argv[1])):
            print(json.dumps({**described, **line}))
