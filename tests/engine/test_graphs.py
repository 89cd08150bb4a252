"""Backbone and head by graphs that the engine's runner records: tapes of operations stand for those
of a GPU."""

import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from asking import BLOCK, ENVIRONMENT, STATES, Asked, Measure, target_of
from cpu_graphs import ENTRY_POINT, METADATA

from benchmarks.common import TINY
from benchmarks.server import CPU_FLAGS, Server

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")


def test_texts_are_those_without_graphs(tmp_path: Path, asked: Asked, measured: Measure) -> None:
    """Of two requests of up to four states some forwards fill a graph, some leave rows of it, some
    are wider than all."""
    found = tmp_path / "site" / "mrp_cpu_graphs-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(METADATA)
    (found / "entry_points.txt").write_text(ENTRY_POINT)
    here = Path(__file__).parent
    path = os.pathsep.join(
        [*map(str, (found.parent, here, here.parent)), os.environ.get("PYTHONPATH", "")]
    )
    options = {"decoding": "mrp_spec", "num_draft_states": STATES, **target_of(0.9)}
    flags = (
        *(flag for flag in CPU_FLAGS if flag != "--disable-cuda-graph"),
        "--cuda-graph-bs-decode",
        "2",
        "6",
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    with Server(
        TINY, tmp_path / "server", "MRP", options, flags, environment, max_running_requests=4
    ) as server:
        served = server.measure(asked.prompts[:12], asked.budgets[:12], 2, BLOCK)
        log = server.log.read_text()
    for name, rows in product(
        ("DecodeCudaGraphRunner", "HeadGraphs"), ("2 for 1", "2 for 2", "6 for 4", "6 for 6")
    ):
        assert f"replayed by {name}: {rows}" in log
    assert "outside of them" not in log  # and the first replays were compared
    assert served.ids == measured("MRP", 0.9).ids[:12]


def test_what_a_graph_of_the_head_returned_is_not_overwritten() -> None:
    from mrp_serving.head_graphs import HeadGraphs

    hidden, left, graphs = torch.ones(4, 2), torch.empty(4, 2), object.__new__(HeadGraphs)
    graphs.buffers, graphs.bs = SimpleNamespace(input_embeds=torch.zeros(8, 2)), 8
    graphs.execute = lambda batch: SimpleNamespace(
        hidden_states=torch.mul(graphs.buffers.input_embeds[:4], 3, out=left)
    )
    rows, made = graphs.replay(None, hidden)
    left.zero_()
    assert rows == 8
    assert torch.equal(made, hidden * 3)
