"""What a repository of somebody else cannot do: damaged files, configs that lie or climb, code that nobody asked for.

What a pushed repository holds, and that loading one speaks to the Hub alone, is in `test_hub_round_trip`.
"""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from hub_server import HubServer, run_python
from safetensors.torch import load_file, save_file

from modeling_mrp import MRPForCausalLM

IDS = torch.tensor([[1, 2, 3, 4, 5]])


class Trap:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a small model: "full", "sharded" and its "head" (of the backbone "full")."""
    folder = tmp_path_factory.mktemp("saved")
    model = make_model().float()
    model.save_pretrained(folder / "full")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    model.save_pretrained(folder / "head", head_only=True, base_model_name_or_path=str(folder / "full"))
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a saved folder, two folders deep, to be spoilt."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / "a" / "b" / name))


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("kind", ["full", "sharded", "head"])
def test_damaged_weights_are_refused_and_no_pickle_is_read(copy: Callable[[str], Path], kind: str, tmp_path: Path) -> None:
    """Neither a pickle that lies beside them: it would leave a mark."""
    folder = copy(kind)
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "mark")))
    weights = max(folder.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is not whole"):
        MRPForCausalLM.from_pretrained(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises((OSError, ValueError), match=r"no (file named )?model\.safetensors"):
        MRPForCausalLM.from_pretrained(folder)
    assert not (tmp_path / "mark").exists()


ATTENTION = ("attn_implementation", "_attn_implementation")
LIES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 16}, "'mismatched_keys': [('lm_head.weight'"),
    ({"num_nextn_predict_layers": 3}, "'missing_keys': ['mrp_head.layers.2."),
    ({"block_size": 513}, "block_size is 513: it must be an int from 1 to 512 (max_position_embeddings)"),
    ({"mask_token_id": -4}, "mask_token_id is -4: it must be an int from 0"),
    ({"pad_token_id": 64}, "pad_token_id is 64: it must be an int from 0 to 63"),
    ({"head_predicts": "hidden"}, "head_predicts is 'hidden': a head here is one, of residuals"),
    ({"num_mrp_heads": 2}, "num_mrp_heads is 2: a head here is one"),
    ({"block_size": "4"}, "block_size is '4': it must be an int from 1 to 512"),
    # transformers would fetch and run a kernel of that name.
    *(({name: "org/kernel"}, "'org/kernel', code of another repository, which is not run") for name in ATTENTION),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "needs 'full_attention' in each of the 2 layers"),
]


def test_a_config_that_lies(copy: Callable[[str], Path]) -> None:
    """Or is no object."""
    path = copy("full") / "config.json"
    good, broken = path.read_text(), "config.json holds no JSON object: save it again, or download it again"
    lies = [(json.dumps({**json.loads(good), **fields}), message) for fields, message in LIES]
    for text, message in [*lies, ("[]", broken), ('{"a": ' + "[" * 100_000, broken)]:
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            MRPForCausalLM.from_pretrained(path.parent)


ELSEWHERE = ["org/evil--modeling_mrp.MRPForCausalLM", "../../evil_mrp.MRPForCausalLM", "/evil_mrp.MRPForCausalLM"]


@pytest.mark.parametrize("reference", ELSEWHERE)
def test_code_in_a_folder_does_not_run_when_the_installed_package_loads_it(
    saved: Path, copy: Callable[[str], Path], reference: str
) -> None:
    folder = copy("full")
    change_json(folder / "config.json", auto_map={"AutoConfig": reference, "AutoModelForCausalLM": reference})
    for path in (*folder.glob("*.py"), *folder.glob("*/*.py"), folder.parent.parent / "evil_mrp.py"):
        path.write_text("raise SystemExit('this ran')")
    model = MRPForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert torch.equal(model(IDS).logits, MRPForCausalLM.from_pretrained(saved / "full").eval()(IDS).logits)


REVISIONS = """
import json, os, sys
sys.modules["modeling_mrp"] = sys.modules["mrp_trainer"] = None
import torch
from transformers import AutoModel
def load(name, **options):
    model = AutoModel.from_pretrained(name, trust_remote_code=True, **options).eval()
    assert not os.path.exists("trap"), (name, options)
    return model, round(float(model(torch.tensor([[1, 2, 3, 4, 5]])).logits.detach().double().sum()), 3)
def refused(kind, **options):
    try:
        AutoModel.from_pretrained(trust_remote_code=True, **options)
    except kind as error:
        assert not os.path.exists("trap"), options
        return str(error)
    raise AssertionError(f"{options} was not refused")
pinned, found = load("org/model", revision=FIRST)
assert found == LOGITS[0] and FIRST in type(pinned).__module__
mixed, found = load("org/model", code_revision=FIRST)
assert found == LOGITS[1] and FIRST in type(mixed).__module__
headed, found = load("org/head", revision="main")
assert found == LOGITS[0] and headed.mrp_head is not None and headed.backbone_source.revision == FIRST
assert "which is not followed" in refused(ValueError, pretrained_model_name_or_path="org/climbing")
assert "is not whole" in refused(ValueError, pretrained_model_name_or_path="org/damaged")
refused(ValueError, pretrained_model_name_or_path="local")
AutoModel.from_pretrained("org/model", trust_remote_code=True)
assert os.path.exists("trap")

"""


def test_code_and_weights_from_the_hub(hub: HubServer, saved: Path, tmp_path: Path) -> None:
    """A later commit changes a repository's weights and its code, which then springs a trap when it is imported. What is pinned
    stays what it was: a revision, the revision of the code alone, and the backbone that a head names."""
    files = read_files(saved / "full")
    first = hub.commit("org/model", files)
    weights = {name: value * 1.5 for name, value in load_file(saved / "full" / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    trap = b"\nopen('trap', 'w').close()\n"
    springs = {name: content + trap for name, content in files.items() if name.endswith("configuration_mrp.py")}
    hub.commit("org/model", {"model.safetensors": (tmp_path / "model.safetensors").read_bytes(), **springs})

    head = read_files(saved / "head")
    for name, backbone in (("org/head", "org/model"), ("org/climbing", "../../secret")):
        config = json.loads(head["config.json"]) | {"base_model_name_or_path": backbone, "base_model_revision": first}
        hub.commit(name, head | {"config.json": json.dumps(config).encode()})
    hub.commit("org/damaged", files | {"model.safetensors": files["model.safetensors"][:-1]})
    work = tmp_path / "x" / "y" / "work"
    shutil.copytree(saved / "full", work / "local")
    shutil.copytree(saved / "full", tmp_path / "x" / "secret")
    (tmp_path / "x" / "y" / "evil.py").write_bytes(trap)
    change_json(work / "local" / "config.json", auto_map={"AutoConfig": "../../evil.C", "AutoModel": "../../evil.C"})

    model = MRPForCausalLM.from_pretrained(saved / "full").eval()
    logits = [round(model(IDS).logits.double().sum().item(), 3)]
    model.load_state_dict(weights)
    logits.append(round(model(IDS).logits.double().sum().item(), 3))
    given = f"FIRST, LOGITS = {first!r}, {logits}\n"
    run_python(given + REVISIONS, work, hub.environment(tmp_path, "hf_alice", OMP_NUM_THREADS="1"))


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
