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
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from modeling_mrp.generate.sampling import LIKELIEST
from modeling_mrp.kernels.grow import DRAFT_COLUMNS, DraftTable, grow_kernel
from modeling_mrp.kernels.settle import Known, Written, settle_kernel
from modeling_mrp.rules.revealing import Dynamic, EntropyBound, RevealRule, Sequential, Static
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from modeling_mrp.kernels.fused_layers import _gated_kernel, _rotated_kernel, _sum_and_norm_kernel
from modeling_mrp.kernels.pick import Plan, _pick_above_kernel, _pick_kernel
from modeling_mrp.kernels.round_attention import RoundMask, round_attention
from modeling_mrp.kernels.unembedding import Unembedding

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
        "programs": programs(used["REG"], 32 * made.metadata.num_warps, made.metadata.shared, capability),
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", ptx)),
        "asynchronous_copies": ptx.count("cp.async.c"),
        "narrow_accesses": len(re.findall(r"(?:ld|st)\.global\S*\.[bsu](?:8|16)\b", ptx)),
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


def pick_launch(
    rows: int, dtype: torch.dtype, capability: int, given: bool = False, sampled: bool = False, barred: bool = False
) -> None:
    """`pick` over the whole vocabulary, greedy or sampled, or a given token's log-odds; with ids that are barred from rows."""
    keys, token = (_empty(rows, dtype=torch.int64) for _ in range(2))
    _pick_kernel(
        Unembedding(_empty(VOCAB, HIDDEN, dtype=dtype), VOCAB - 1, 0.7 if sampled else 1.0, (1, 2) if barred else ()),
        _empty(rows, HIDDEN, dtype=dtype),
        keys if sampled else None,
        token if given else None,
        _empty(rows, dtype=torch.bool) if barred else None,
        _empty(rows, dtype=torch.bool),
        Plan.of(rows, VOCAB, PROCESSORS, tensor_memory=capability // 10 == 10),
    )


def pick_above_launch(rows: int, dtype: torch.dtype) -> None:
    """A sampled `pick_above`, as behind a top-k."""
    unembedding = Unembedding(_empty(VOCAB, HIDDEN, dtype=dtype), VOCAB - 1, 0.7)
    logits, least, keys = _empty(rows, VOCAB, dtype=dtype), _empty(rows, dtype=dtype), _empty(rows, dtype=torch.int64)
    active, plan = _empty(rows, dtype=torch.bool), Plan.of_logits(rows, VOCAB, PROCESSORS)
    _pick_above_kernel(unembedding, logits, least, keys, active, plan)


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


def grow_launch(states: int, block: int, rule: RevealRule, sampled: bool, batch: int = 1, branches: int = 3) -> None:
    """The states of a drafting round; log-odds are float32 whatever the model's dtype."""
    long, flags = partial(_empty, dtype=torch.int64), partial(_empty, dtype=torch.bool)
    known = 3 * states
    table = DraftTable(
        first=long(batch, block + DRAFT_COLUMNS),
        valid=flags(batch),
        token=long(batch, known, block, LIKELIEST if sampled else 1),
        odds=_empty(batch, known, block, LIKELIEST if sampled else 1, dtype=torch.float32),
        known=long(batch, known, block + 1),
        known_valid=flags(batch, known),
        ahead=long(batch, known, block + DRAFT_COLUMNS),
        successor=long(batch, block + DRAFT_COLUMNS),
        open_successor=flags(batch),
        open_end=long(batch),
        eos=long(2),
        schedule=long(block),
        seed=long(batch) if sampled else None,
        rule=rule,
        mask_id=VOCAB - 1,
        branches=branches,
    )
    grow_kernel(table, states, states)


def settle_launch(batch: int, states: int, block: int = 4, drafts: bool = True) -> None:
    """What a round of so many states a row settles, and as many remembered ones."""
    long, flags = partial(_empty, dtype=torch.int64), partial(_empty, dtype=torch.bool)
    single = partial(_empty, dtype=torch.float32)

    def known() -> Known:
        of_block = batch, states, block
        return Known(
            *(long(batch, states, block + 4), flags(batch, states), flags(*of_block), long(*of_block)),
            *(single(*of_block), single(*of_block)),
        )

    text, depths = (batch, 4097), 2 * states - 1 if drafts else 0
    written = Written(
        tokens=long(*text),
        logprob=single(*text),
        reveal_step=long(*text),
        total_steps=long(batch),
        stop=long(batch),
        drafted=long(batch),
        accepted=long(batch),
        accepted_lengths=long(batch, 2 * states + 1),
        offered_at_depth=long(batch, depths),
        accepted_at_depth=long(batch, depths),
    )
    current = long(batch, block + 4), flags(batch)
    others = long(batch, block + 4), long(batch), long(batch), long(2)
    settle_kernel(known(), known() if drafts else None, written, current, *others, VOCAB - 1, max(2, states))


def shipped(dtype: torch.dtype, capability: int) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What a row of SDAR-4B launches in blocks of 16, plain and with K = 4 and 8 states, greedy and sampled."""
    block = 16
    for states in (1, 4, 8):
        tokens = states * block
        if dtype != torch.float32:
            yield {"launch": "pick", "rows": tokens}, partial(pick_launch, tokens, dtype, capability)
            yield (
                {"launch": "pick", "rows": tokens, "sampled": True},
                partial(pick_launch, tokens, dtype, capability, sampled=True),
            )
            yield {"launch": "pick_above", "rows": tokens}, partial(pick_above_launch, tokens, dtype)
        sizes = {"launch": "round_attention", "batch": 1, "states": states, "block": block, "used": 512}
        yield sizes, partial(attention_launch, 1, states, 512, dtype, block)
        for kernel in ("sum_and_norm", "rotated", "gated"):
            yield {"launch": kernel, "tokens": tokens}, partial(layer_launch, kernel, tokens, dtype)
        if states > 1:
            rules: tuple[RevealRule, ...] = (Static(), Sequential(), Dynamic(2.2), EntropyBound(0.35))
            for rule, sampled in product(rules if states > 4 else rules[:1], (False, True)):
                sizes = {"states": states, "block": block, "rule": type(rule).__name__, "sampled": sampled}
                yield {"launch": "grow", **sizes}, partial(grow_launch, states, block, rule, sampled)
        settled = partial(settle_launch, 1, states, block, states > 1)
        yield {"launch": "settle", "states": states, "block": block}, settled


def others(dtype: torch.dtype, capability: int) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """What blocks of 4, larger batches and rarer options launch."""
    if dtype != torch.float32:
        yield {"launch": "pick", "rows": 512}, partial(pick_launch, 512, dtype, capability)
        for rows in (16, 64):
            yield {"launch": "pick", "rows": rows, "given": True}, partial(pick_launch, rows, dtype, capability, given=True)
            asked = {"sampled": True, "barred": True}
            yield {"launch": "pick", "rows": rows, **asked}, partial(pick_launch, rows, dtype, capability, **asked)
    for batch, states, used in ((1, 4, 512), (1, 1, 512), (8, 8, 4096)):
        sizes = {"launch": "round_attention", "batch": batch, "states": states, "block": 4, "used": used}
        yield sizes, partial(attention_launch, batch, states, used, dtype)
    for states, block in ((4, 4), (8, 4), (16, 16)):
        sizes = {"states": states, "block": block, "rule": "Static", "sampled": False}
        yield {"launch": "grow", **sizes}, partial(grow_launch, states, block, Static(), False)


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
