"""Servers that cannot serve say why as they start, and end."""

from pathlib import Path
from typing import Any

import pytest
from asking import ENVIRONMENT

from benchmarks.common import TINY
from benchmarks.server import Server, ServerDied, backbone_for_stock

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")


@pytest.mark.parametrize(
    ("has_head", "options", "reason"),
    [
        (True, {"num_draft_state": 4}, "num_draft_state is no option of MRP (did you mean num_draft_states?)"),
        (False, {}, "--dllm-algorithm MRP serves checkpoints with an MRP head"),
    ],
)
def test_a_server_that_cannot_serve_says_why(has_head: bool, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = TINY if has_head else backbone_for_stock(TINY, tmp_path / "model")
    server = Server(model, tmp_path / "server", "MRP", options, environment=ENVIRONMENT)
    with pytest.raises(ServerDied), server:
        pass
    assert reason in server.log.read_text()
