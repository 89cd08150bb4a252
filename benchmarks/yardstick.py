"""The package's drafting modes beside the released reference, on the same model, cache and picks.

``python -m benchmarks.yardstick`` prints tokens per forward of `static`, the released reference (`benchmarks.released`),
`self_spec` and `mrp_spec` on the same prompts, their ratios with 95 % intervals (a paired bootstrap over problems;
`over_batch_1` is the same mode alone in its batch), and the share of texts that equal those of `static`. The published results
are of K = 3, so that K = 3 and 4 are what to compare at; `released K=3, head prefix` says what the reference would gain by a
head that sees the text before its block. For CPU.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from mrp_trainer.tasks import FAMILIES, Problem, problems
from transformers import PreTrainedTokenizerBase

from modeling_mrp.modeling import MRPForCausalLM

from .common import TINY, emit, header, load
from .loops import measure_loop
from .measure import Measured, measure
from .released import Released


def compare(
    model: MRPForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: list[Problem], batch_size: int, states: list[int]
) -> Iterator[tuple[str, Measured, dict[str, Any]]]:
    """Every mode on the same problems: its name, what it measured, and ratios to the modes it is compared with."""
    static = measure(model, tokenizer, asked, batch_size, decoding="static")
    yield "static", static, {}
    for k in states:
        released = measure_loop(Released(k), model, tokenizer, asked, batch_size)
        yield f"released K={k}", released, released.over(static=static)
        seeing = measure_loop(Released(k, head_prefix=True), model, tokenizer, asked, batch_size)
        yield f"released K={k}, head prefix", seeing, seeing.over(released=released, static=static)
        own: Measured | None = None
        for name, drafted in variants(k).items():
            measured = measure(model, tokenizer, asked, batch_size, num_draft_states=k, **drafted)
            own = measured if name == f"self_spec K={k}" else own
            against = {"self_spec": own} if drafted["decoding"] == "mrp_spec" else {}
            yield name, measured, measured.over(released=released, static=static, **against)


def variants(states: int) -> dict[str, dict[str, Any]]:
    """The modes that draft, by name: as they are by default, as the simple chain, and with a head pass for every draft."""
    chain, each = {"draft_branches": 1}, {"draft_passes": max(1, states - 1)}
    return {
        f"self_spec K={states} chain": {"decoding": "self_spec", **chain},
        f"self_spec K={states}": {"decoding": "self_spec"},
        f"mrp_spec K={states} chain, {states - 1} head passes": {"decoding": "mrp_spec", **chain, **each},
        f"mrp_spec K={states}, {states - 1} head passes": {"decoding": "mrp_spec", **each},
        f"mrp_spec K={states}": {"decoding": "mrp_spec"},
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line per family, batch size and mode."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yardstick", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--states", nargs="+", type=int, default=[3, 4, 8])
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("yardstick", options, model))
    for family in options.family:
        asked = problems(family, "heldout", options.count)
        alone: dict[str, Measured] = {}
        for batch_size in options.batch_size:
            static: Measured | None = None
            for name, measured, ratios in compare(model, tokenizer, asked, batch_size, options.states):
                static = static or measured
                if batch_size == 1:
                    alone[name] = measured
                else:
                    ratios |= measured.over(batch_1=alone.get(name))
                line = {"family": family, "batch_size": batch_size, "mode": name, **measured.line(), **ratios}
                emit({**line, "same": measured.same(static)})


if __name__ == "__main__":
    main()
