"""Print registers, stack, shared memory and accesses of the kernels as compiled for a GPU that need
not be there.

    python tests/support/compiled_kernels.py CAPABILITY

Every kernel is launched at sizes of the 4B shape in bfloat16, on tensors without memory; each
launch is caught and compiled for the capability (80: Ampere, 90: Hopper, 100 and 120: Blackwell)
with exactly its arguments. `programs` counts the programs that a multiprocessor holds at once,
`narrow_accesses` the instructions that load or store a single number of 16 bits or less. It takes a
minute, and needs triton and no TRITON_INTERPRET.
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
from mrp_trainer.evaluate.roofline import PUBLISHED
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from modeling_mrp.kernels.pick import Unembedding, list_rows, pick_rows
from modeling_mrp.kernels.round_layers import (
    RoundMask,
    gated,
    rotated,
    round_attention,
    sum_and_norm,
)

SHARED = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
REGISTERS, THREADS = 65_536, {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}


class Absent:
    """A stand-in for the driver of a GPU with a compute capability."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def told_of(made: Any, capability: int) -> dict[str, Any]:
    """Describe the code that one launch was compiled to."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", said)}
    ptx = made.asm["ptx"]
    before, *told = re.split(r"atom\.global\.gpu\.acq_rel", ptx)
    ordered = (
        {"tells_behind_a_barrier": before.rfind("bar.sync") > before.rfind("st.global")}
        if told
        else {}
    )
    return {
        "kernel": made.metadata.name.lstrip("_"),
        "registers": used["REG"],
        "stack_bytes": used["STACK"],
        "shared_bytes": made.metadata.shared,
        "programs": programs(
            used["REG"], 32 * made.metadata.num_warps, made.metadata.shared, capability
        ),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx)),
        "asynchronous_copies": ptx.count("cp.async.c"),
        "narrow_accesses": len(re.findall(r"(?:ld|st)\.global\S*\.[bsu](?:8|16)\b", ptx)),
        **ordered,
    }


def programs(registers: int, threads: int, shared: int, capability: int) -> int:
    """Count the programs that a multiprocessor holds at once; the hardware keeps a KB of shared
    memory for each."""
    of_registers = REGISTERS // (-(-registers // 8) * 8 * threads)
    return min(
        of_registers, THREADS[capability] // threads, (SHARED[capability] << 10) // (shared + 1024)
    )


def caught(launch: Callable[[], Any], capability: int) -> list[dict[str, Any]]:
    """Call a function that launches kernels; compile them instead, and return a description of
    each."""
    found, run = list[dict[str, Any]](), JITFunction.run

    def compiled(kernel: JITFunction, *args: Any, **kwargs: Any) -> None:
        found.append(told_of(run(kernel, *args, **{**kwargs, "warmup": True}), capability))

    with patch.object(JITFunction, "run", compiled):
        launch()
    return found


def launches(dtype: torch.dtype) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Yield the launches for a row of SDAR-4B in blocks of 16, plain and with K = 4 and 8 states:
    greedy and sampled picks and, of one layer, attention after a prefix, sum and norm, and the
    rotation of queries and keys."""
    shape, prefix = PUBLISHED["4B"], 512
    heads, kv_heads, dim, width = (
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.hidden_size,
    )

    def empty(*size: int, dtype: torch.dtype = dtype) -> Any:
        return torch.empty(*size, dtype=dtype, device="meta")

    def norm_of(width: int) -> Any:
        return Qwen3RMSNorm(width).to("meta", dtype).requires_grad_(False)

    weight = empty(shape.vocab_size, width)
    for states in (1, 4, 8):
        rows = states * shape.block_size
        logits, least = (
            empty(*size, dtype=torch.float32) for size in ((rows, shape.vocab_size), (rows,))
        )
        for sampled, truncated in ((False, False), (True, False), (True, True)):
            unembedding, keys = (
                Unembedding(weight, shape.vocab_size - 1, 0.7 if sampled else 1.0),
                empty(rows, dtype=torch.int64),
            )
            given = unembedding, logits, least if truncated else None, keys if sampled else None
            yield (
                {"launch": "pick", "rows": rows, "sampled": sampled, "truncated": truncated},
                partial(pick_rows, *given),
            )
            yield (
                {"launch": "list", "rows": rows, "sampled": sampled, "truncated": truncated},
                partial(list_rows, *given, 64 if sampled else 16),
            )
        parents = torch.full((1, states), -1, device="meta")
        mask = RoundMask(torch.full_like(parents, prefix), parents, shape.block_size)
        query = empty(1, rows, heads, dim).transpose(1, 2)
        key, value = empty(1, prefix + rows, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
        inputs = (
            empty(1, rows, (heads + 2 * kv_heads) * dim),
            (norm_of(dim), norm_of(dim)),
            empty(2, 1, rows, dim).unbind(0),
        )
        layer = {
            "round_attention": partial(round_attention, query, key, value, mask, dim**-0.5),
            "sum_and_norm": partial(
                sum_and_norm, empty(1, rows, width), empty(1, rows, width), norm_of(width)
            ),
            "gated": partial(gated, *empty(1, rows, 2 * shape.intermediate_size).chunk(2, -1)),
            "rotated": partial(rotated, *inputs, (key[:, :, prefix:], value[:, :, prefix:])),
        }
        for name, launch in layer.items():
            yield {"launch": name, "states": states}, launch


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set, under which nothing is compiled: unset it")
    driver.set_active(Absent(int(sys.argv[1])))
    for described, launch in launches(torch.bfloat16):
        for line in caught(launch, int(sys.argv[1])):
            print(json.dumps({**described, **line}))
