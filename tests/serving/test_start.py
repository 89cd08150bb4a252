"""Servers that cannot serve say why as they start, and end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import ENVIRONMENT
from safetensors.torch import load_file, save_file

from benchmarks.common import TINY
from benchmarks.server import Server, ServerDied, backbone_for_stock
from modeling_mrp import MRPForCausalLM

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")


def copy_of(folder: Path, **fields: Any) -> Path:
    """The embedded checkpoint, with other fields in its config."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


def without_head_tensors(folder: Path) -> Path:
    tensors = load_file(copy_of(folder) / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mrp_head.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def head_of_another(folder: Path) -> Path:
    """A head that names a backbone whose blocks are shorter."""
    other = copy_of(folder / "backbone", block_size=8)
    MRPForCausalLM.from_pretrained(TINY).save_pretrained(
        folder / "head", head_only=True, base_model_name_or_path=str(other.absolute())
    )
    return folder / "head"


def backbone(folder: Path) -> Path:
    return backbone_for_stock(TINY, folder)


def embedded(folder: Path) -> Path:
    return TINY


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (embedded, {"num_draft_state": 4}, "num_draft_state is no option of MRP (did you mean num_draft_states?)"),
        (without_head_tensors, {}, "missing: mrp_head."),
        (head_of_another, {}, "does not belong to this backbone: its block_size is 16, the backbone's 8"),
        (backbone, {}, "--dllm-algorithm MRP serves checkpoints with an MRP head"),
    ],
)
def test_a_server_that_cannot_serve_says_why(
    make: Callable[[Path], Path], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    refuses(make(tmp_path / "model"), tmp_path, options, reason)


def test_another_version_of_the_engine_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "site" / "sglang-0.5.99.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    refuses(TINY, tmp_path, {}, "0.5.99 is installed: pip install 'sglang", PYTHONPATH=str(other.parent))


def refuses(model: Path, folder: Path, options: dict[str, Any], reason: str, **environment: str) -> None:
    """Starts a server that is to end with a reason."""
    server = Server(model, folder / "server", "MRP", options, environment={**ENVIRONMENT, **environment})
    with pytest.raises(ServerDied), server:
        pass
    assert reason in server.log.read_text()
