"""Kernels and rounds on a GPU: first checked, all of them, then timed against PyTorch and their floors.

``python -m benchmarks.gpu --output benchmarks/results/gpu.jsonl`` takes 8 minutes and goes in this order: each kernel against
float64; texts with kernels and graphs against texts without, of random weights at a published shape and of the embedded
checkpoint, and whether anything fell back; times of kernels and of rounds; and `generate` with the embedded checkpoint. What
the clock leaves no time for is named and left out. The last line sums up, and the exit status is 1 where a check failed,
something raised or something fell back.

On a CPU, ``TRITON_INTERPRET=1 python -m benchmarks.gpu --device cpu --shape toy`` goes the same way at a toy's size; there only
the checks mean anything.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.modeling import MRPForCausalLM

from .common import HUB_CONFIGS, TINY, emit, header, load, parser_of
from .gpu_cases import Case, attention_cases, layer_cases, vocabulary_cases
from .gpu_rounds import WARM_UPS, Round, check_texts, published_config, random_model, time_round
from .roofline import Shape
from .timing import ceilings, reason
from .turns import CLOCKS, Way, batches_of, faster, take_turns

Line = dict[str, Any]
TOY: dict[str, int] = {
    "vocab_size": 203,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "block_size": 4,
}


class Bench:
    """What is checked and timed, part by part, in the order of importance.

    Args:
        options: The command line's.
    """

    def __init__(self, options: Namespace) -> None:
        self.options, self.on = options, torch.device(options.device)
        self.toy = options.shape == "toy"
        self.shape = Shape("toy", **TOY, head_layers=1) if self.toy else Shape.read(HUB_CONFIGS / f"sdar-{options.shape}-mrp")
        self.rounds = [Round(batch, states, options.prefix) for batch in options.batch for states in options.states]
        self.model, self.device = cache(self._model), cache(lambda: ceilings(options.device, self.on))

    def parts(self) -> Iterator[tuple[Line, Callable[[], Iterable[Line]]]]:
        """Each part's name and sizes, and what makes its lines."""
        cases = [case for dtype in (torch.bfloat16, torch.float32, torch.float16) for case in self.cases(dtype)]
        for sizes, make in cases:
            yield {"part": "kernel checks", **sizes}, partial(self.check_kernels, make)
        for round_ in self.rounds:
            yield {"part": "round check", **vars(round_)}, partial(self.check_round, round_)
        for states in self.options.states:
            for dtype in ("float32",) if self.on.type == "cpu" else ("bfloat16", "float32"):
                yield {"part": "text check", "states": states, "dtype": dtype}, partial(self.check_tiny, states, dtype)
        yield {"part": "ceilings"}, self.ceilings
        for sizes, make in cases:
            if sizes["dtype"] == "bfloat16":
                yield {"part": "kernel times", **sizes}, partial(self.time_kernels, make)
        for round_ in self.rounds:
            yield {"part": "round times", **vars(round_)}, partial(self.time_round, round_)
        yield {"part": "generate"}, self.generate

    def cases(self, dtype: torch.dtype) -> Iterator[tuple[Line, Callable[[], Iterable[Case]]]]:
        """List the kernels' cases at the shape; what shares inputs comes together."""
        shape, on, prefix, name = self.shape, self.on, self.options.prefix, str(dtype)[6:]
        for rows in self.options.rows:
            yield {"rows": rows, "dtype": name}, partial(vocabulary_cases, shape, rows, on)
        for round_ in self.rounds:
            batch, states = round_.batch, round_.states
            sizes = {"batch": batch, "states": states, "dtype": name}
            yield {**sizes, "prefix": prefix}, partial(attention_cases, shape, batch, states, prefix, dtype, on)
            yield sizes, partial(layer_cases, shape, batch, states, dtype, on)

    def check_kernels(self, make: Callable[[], Iterable[Case]]) -> Iterator[Line]:
        """Compare kernels with float64."""
        for case in make():
            try:
                yield case.check()
            except Exception as error:  # those that share its inputs are checked all the same
                yield {"failed": case.name, "error": reason(error)}

    def time_kernels(self, make: Callable[[], Iterable[Case]]) -> Iterator[Line]:
        """Time kernels and their twins."""
        for case in make():
            yield from case.time(self.device(), self.on)

    def check_round(self, round_: Round) -> Iterator[Line]:
        """Texts of random weights at the shape."""
        model, ids = self.model(), round_.ids(self.model(), self.options.prefix)
        inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
        ours = {"kernels": True} if self.on.type == "cpu" else {}  # a CPU interprets them where it must
        tokens = 2 * model.config.block_size
        yield {"check": "round", **check_texts(model, inputs, tokens, round_.options, ours)}

    def check_tiny(self, states: int, dtype: str) -> Iterator[Line]:
        """Compare texts of the embedded checkpoint."""
        model, (batch, *_) = self._tiny(dtype)
        inputs = {name: value.to(self.on) for name, value in batch.items()}
        yield {"check": "texts", **check_texts(model, inputs, 64, Round(1, states, 0).options, {})}

    def ceilings(self) -> Iterator[Line]:
        """What the device can do."""
        yield {"bandwidth": float(f"{self.device().bandwidth:.3g}"), "matrix_flops": float(f"{self.device().peak:.3g}")}

    def time_round(self, round_: Round) -> Iterator[Line]:
        """A round's times."""
        for line in time_round(self.model(), self.shape, self.device(), round_, self.options.repeats):
            yield {"time": "round", **line}
        self.model().release_graphs()

    def generate(self) -> Iterator[Line]:
        """Measure the embedded checkpoint's speed over `static` beside the ratio of their forwards, at batch 1."""
        model, batches = self._tiny("float32" if self.on.type == "cpu" else "bfloat16")
        every = sorted({1, *self.options.states})
        ways = {f"K={states}": Way(model, batches, CLOCKS["wall"], **Round(1, states, 0).options) for states in every}
        turns = self.options.repeats * len(batches)
        taken = take_turns(ways, turns, WARM_UPS * len(batches) if self.on.type == "cuda" else 1)
        base = ways["K=1"]
        for name, way in ways.items():
            fewer = sum(base.forwards.values()) / sum(way.forwards.values())
            yield {"generate": name, "over_static": faster(taken[name], taken["K=1"]), "fewer_forwards": round(fewer, 3)}

    def _model(self) -> MRPForCausalLM:
        if self.toy:
            sizes = {**TOY, "num_nextn_predict_layers": 1, "max_position_embeddings": 512, "pad_token_id": 1}
            config = MRPConfig(**sizes, mask_token_id=TOY["vocab_size"] - 1, eos_token_id=None)
        else:
            config = published_config(self.options.shape)
        model = random_model(config, torch.float32 if self.on.type == "cpu" else torch.bfloat16, str(self.on))
        model.generation_config.pad_token_id = 1
        return model

    def _tiny(self, dtype: str) -> tuple[MRPForCausalLM, list[dict[str, torch.Tensor]]]:
        model, tokenizer = load(TINY)
        return model.to(self.on, getattr(torch, dtype)), batches_of(tokenizer, "heldout", self.options.count, 1)


def run(parts: Iterable[tuple[Line, Callable[[], Iterable[Line]]]], until: float, on: torch.device) -> Iterator[Line]:
    """Lines of all parts that begin before `until` (`time.monotonic`), then one that sums up.

    A part that raises is told, and the others go on, unless the device takes no more work: an illegal access spoils all that
    follows in a process.
    """
    checks, wrong, left = 0, [], []
    for named, make in parts:
        if time.monotonic() >= until:
            left.append(named)
            continue
        try:
            for line in make():
                yield (found := {**named, **line})
                checks += "check" in line
                if "failed" in found or found.get("ok") is False:
                    wrong.append({name: found[name] for name in (*named, "check", "failed", "way") if name in found})
        except Exception as error:
            wrong.append(named)
            yield {**named, "failed": named["part"], "error": reason(error)}
            if on.type == "cuda":
                try:
                    torch.cuda.synchronize(on)
                except RuntimeError as lost:
                    wrong.append({"device lost": reason(lost)})
                    until = 0.0
    yield {"summary": "ok" if not wrong else "wrong", "checks": checks, "wrong": wrong, "left_out": left}


def main(arguments: list[str] | None = None) -> None:
    """Command line: JSON lines to standard output, and to a file."""
    parser = parser_of("gpu", __doc__)
    parser.add_argument("--device", default="cuda", help="such as cuda:0, or cpu for the toy (default: cuda)")
    parser.add_argument("--shape", default="4b", choices=("1.7b", "4b", "8b", "toy"), help="a published size (default: 4b)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="rows of a round (default: 1)")
    parser.add_argument("--states", nargs="+", type=int, default=[4, 1, 8], help="K; 1 is static (default: 4 1 8)")
    parser.add_argument("--prefix", type=int, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 1], help="rows of a vocabulary kernel (default: 64 1)")
    parser.add_argument("--count", type=int, default=16, help="problems for generate (default: 16)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of rounds and of generate (default: 5)")
    parser.add_argument("--seconds", type=int, default=450, help="begins nothing new after them (default: 450)")
    parser.add_argument("--output", type=Path, help="file that the lines are added to (default: none)")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    bench = Bench(options)
    first, last = header("gpu", Namespace(**{**vars(options), "output": None})), None
    with options.output.open("a") if options.output else nullcontext() as file:
        for last in chain([first], run(bench.parts(), until, bench.on)):
            emit(last, file)
    raise SystemExit(last is None or last["summary"] != "ok")


if __name__ == "__main__":
    main()
