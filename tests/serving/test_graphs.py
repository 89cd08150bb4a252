"""Backbone and head by graphs that the engine's runner records: tapes of operations stand for those of a GPU."""

import os
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asking import BLOCK, ENVIRONMENT, STATES, Asked, Measure, target_of
from cpu_graphs import ENTRY_POINT, METADATA

from benchmarks.common import TINY
from benchmarks.server import CPU_FLAGS, Server

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")


def test_texts_are_those_without_graphs(tmp_path: Path, asked: Asked, measured: Measure) -> None:
    """Of two requests of up to four states some forwards fill a graph, some leave rows of it, some are wider than all."""
    found = tmp_path / "site" / "mrp_cpu_graphs-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(METADATA)
    (found / "entry_points.txt").write_text(ENTRY_POINT)
    here = Path(__file__).parent
    path = os.pathsep.join([*map(str, (found.parent, here, here.parent)), os.environ.get("PYTHONPATH", "")])
    options = {"decoding": "mrp_spec", "num_draft_states": STATES, **target_of(0.9)}
    flags = (*(flag for flag in CPU_FLAGS if flag != "--disable-cuda-graph"), "--cuda-graph-bs-decode", "2", "6")
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    with Server(TINY, tmp_path / "server", "MRP", options, flags, environment, max_running_requests=4) as server:
        served = server.measure(asked.prompts[:12], asked.budgets[:12], 2, BLOCK)
        log = server.log.read_text()
    for name, rows in product(("DecodeCudaGraphRunner", "HeadGraphs"), ("2 for 1", "2 for 2", "6 for 4", "6 for 6")):
        assert f"replayed by {name}: {rows}" in log
    assert "outside of them" not in log  # and the first replays were compared
    assert served.ids == measured("MRP", 0.9).ids[:12]


def test_a_graph_of_the_head_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mrp_serving.head_graphs import HeadGraphs
    from mrp_serving.model import MRPForCausalLM

    monkeypatch.setattr("mrp_serving.head_graphs.CHECKED_ON", {"cpu"})
    hidden, graphs = torch.ones(4, 2), object.__new__(HeadGraphs)
    graphs.buffers, graphs.compared, graphs.bs = SimpleNamespace(input_embeds=torch.zeros(8, 2)), Counter(), 8
    graphs.takes = lambda batch: True
    left = torch.empty(4, 2)  # where a graph leaves its result, and the next one writes
    graphs.execute = lambda batch: SimpleNamespace(hidden_states=torch.mul(graphs.buffers.input_embeds[:4], 3, out=left))
    model: Any = SimpleNamespace(head_graphs=graphs, residual=lambda ids, positions, batch, hidden: hidden * 3)
    engine = SimpleNamespace(attn_backend=SimpleNamespace(init_forward_metadata=lambda batch: None))
    batch = SimpleNamespace(input_ids=None, positions=None)
    made = MRPForCausalLM.run_head(model, engine, batch, hidden)
    left.zero_()
    assert torch.equal(made, hidden * 3)
    assert (model.head_graphs, graphs.compared[8]) == (graphs, 1)
    model.residual = lambda ids, positions, batch, hidden: hidden * 2
    assert torch.equal(MRPForCausalLM.run_head(model, engine, batch, hidden), hidden * 2)
    assert model.head_graphs is None
    assert "does not run rightly as CUDA graphs" in caplog.text
