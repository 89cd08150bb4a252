"""What a call of `generate` takes on the host beside its forwards, on a random model of 36 backbone
and 3 head layers, as many as SDAR-4B has.

    OMP_NUM_THREADS=1 python -m benchmarks.call_overhead

Prints CPU milliseconds of this thread, medians: of each part when it looks at the whole model, and
in a call whose model is as it was before (`networks/inspection.py`).
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mrp_trainer.doctor.checks import random_model
from mrp_trainer.publish.card import markdown_table
from torch import device, float32

from modeling_mrp import MRPConfig
from modeling_mrp.kernels.dispatch import PYTORCH
from modeling_mrp.networks.inspection import check_weights, decide, fingerprint, weight_versions
from modeling_mrp.networks.layers import pack, plan_layers

from .common import parser_of

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "mask_token_id": 127,
    "block_size": 16,
}


def milliseconds(call: Callable[[], Any], repetitions: int) -> float:
    """Return the median CPU time of a call in this thread, after one that does not count."""
    call()
    times = []
    for _ in range(repetitions):
        start = time.thread_time()
        call()
        times.append(1e3 * (time.thread_time() - start))
    return statistics.median(times)


def table(layers: int, head_layers: int, repetitions: int) -> str:
    """Tabulate the parts of a call on a model of so many layers, as Markdown."""
    config = MRPConfig(
        **SIZES,
        num_hidden_layers=layers,
        num_nextn_predict_layers=head_layers,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = random_model(config, float32, device("cpu"))
    pack(model)
    model_key = fingerprint(model)
    pair = (model.model, model.mrp_head)

    def record(versions_of: Any) -> list[Any]:
        return [weight_versions(network, versions_of) for network in pair]

    components: dict[str, tuple[Callable[[], Any] | None, Callable[[], Any]]] = {
        "fingerprint": (None, partial(fingerprint, model)),
        "adapters and lm_head": (
            partial(check_weights, model),
            partial(decide, model, model_key, "readable", partial(check_weights, model)),
        ),
        "packing": (
            partial(pack, model),
            partial(decide, model, model_key, "packed", partial(pack, model)),
        ),
        "plan of fused layers": (
            partial(plan_layers, model, True, PYTORCH),
            partial(plan_layers, model, True, PYTORCH, model_key),
        ),
        "versions of weights": (partial(record, None), partial(record, model_key)),
    }
    rows = []
    totals = [0.0, 0.0]
    for name, (first, later) in components.items():
        cost = milliseconds(later, repetitions)
        total = cost if first is None else milliseconds(first, repetitions)
        totals[0] += total
        totals[1] += cost
        rows.append([name, f"{total:.2f}", f"{cost:.2f}"])
    rows.append(["sum", f"{totals[0]:.2f}", f"{totals[1]:.2f}"])
    return markdown_table(["part", "whole model, ms", "model unchanged, ms"], rows)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: print a Markdown table."""
    parser = parser_of("call_overhead", __doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--head-layers", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=50)
    print(table(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    main()
