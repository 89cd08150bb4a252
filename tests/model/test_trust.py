"""What a repository of somebody else cannot do: damaged files, configs that lie or climb, code that
nobody asked for.

What a pushed repository holds is in `test_publish`; that loading one speaks to nobody, `fresh` sees
to.
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
from mrp_trainer.loading import load_model, load_tokenizer
from safetensors.torch import load_file, save

from modeling_mrp import MRPForCausalLM
from tests.support.fresh import Fresh
from tests.support.hub_server import HubServer
from tests.support.places import TINY
from tests.support.published import as_published
from tests.support.random_cases import make_model


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
    model.backbone_source = (str(folder / "full"), None)
    model.save_pretrained(folder / "head", head_only=True)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a saved folder, to be spoilt."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name))


@pytest.mark.parametrize("kind", ["sharded", "head"])
def test_damaged_weights_are_refused_and_no_pickle_is_read(
    copy: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
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
    (
        {"num_nextn_predict_layers": 3},
        "num_nextn_predict_layers is 3, and it holds 2 layers mrp_head.layers.*: correct",
    ),
    ({"num_nextn_predict_layers": 1}, "'unexpected_keys': ['mrp_head.layers.1."),
    (
        {"block_size": 513},
        "block_size is 513: it must be an int from 1 to 512 (max_position_embeddings)",
    ),
    ({"mask_token_id": -4}, "mask_token_id is -4: it must be an int from 0"),
    ({"pad_token_id": 64}, "pad_token_id is 64: it must be an int from 0 to 63"),
    ({"head_predicts": "hidden"}, "head_predicts is 'hidden': a head here is one, of residuals"),
    ({"num_mrp_heads": 2}, "num_mrp_heads is 2: a head here is one"),
    ({"block_size": "4"}, "block_size is '4': it must be an int from 1 to 512"),
    # transformers would fetch and run a kernel of that name.
    *(
        ({name: "org/kernel"}, "'org/kernel', code of another repository, which is not run")
        for name in ATTENTION
    ),
    (
        {"layer_types": ["sliding_attention", "full_attention"]},
        "needs 'full_attention' in each of the 2 layers",
    ),
]


def test_a_config_that_lies(copy: Callable[[str], Path]) -> None:
    """Or is no object."""
    path = copy("full") / "config.json"
    good, broken = (
        path.read_text(),
        "config.json holds no JSON object: save it again, or download it again",
    )
    lies = [(json.dumps({**json.loads(good), **fields}), message) for fields, message in LIES]
    for text, message in [*lies, ("[]", broken), ('{"a": ' + "[" * 100_000, broken)]:
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            MRPForCausalLM.from_pretrained(path.parent)


@pytest.mark.parametrize("module", ["org/evil--modeling_sdar", "../evil", "modeling_sdar"])
def test_code_of_a_repository_does_not_run_where_the_package_is(
    module: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """Of the embedded checkpoint in the published layout; the code leaves a mark if it runs."""
    folder, mark = as_published(TINY, tmp_path / "published"), tmp_path / "it ran"
    own = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), f"{module}.Anything")
    for name in ("config", "tokenizer_config"):
        path = folder / f"{name}.json"
        path.write_text(
            json.dumps(
                {
                    **json.loads(path.read_text()),
                    "auto_map": {**own, "AutoTokenizer": [None, f"{module}.T"]},
                }
            )
        )
    for path in ("modeling_sdar.py", "../evil.py", "custom_generate/generate.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(
            f"open({str(mark)!r}, 'w').close()\nraise SystemExit('this ran')\n"
        )
    ours = MRPForCausalLM.from_pretrained(TINY).state_dict()
    for model in (
        load_model(str(folder)),
        MRPForCausalLM.from_pretrained(folder, trust_remote_code=True),
    ):
        assert all(torch.equal(value, ours[name]) for name, value in model.state_dict().items())
    assert load_tokenizer(str(folder)).get_vocab() == tiny_tokenizer.get_vocab()
    assert not mark.exists()


def test_what_is_pinned_stays_what_it_was(
    hub: HubServer, saved: Path, fresh: Fresh, tmp_path: Path
) -> None:
    """A later commit changes a repository's weights and its code, which then springs a trap when it
    is imported: pinned are a revision, the revision of the code alone, and the backbone that a head
    names."""
    files, head = (
        {path.name: path.read_bytes() for path in (saved / kind).glob("*.*")}
        for kind in ("full", "head")
    )
    first, mark = hub.commit("pinned/model", files), tmp_path / "sprung"
    weights = {
        name: value * 1.5 for name, value in load_file(saved / "full" / "model.safetensors").items()
    }
    spring = files["modeling_mrp.py"] + f"\nopen({str(mark)!r}, 'w').close()\n".encode()
    changed = {"model.safetensors": save(weights, {"format": "pt"}), "modeling_mrp.py": spring}
    hub.commit("pinned/model", files | changed)
    config = json.loads(head["config.json"]) | {
        "base_model_name_or_path": "pinned/model",
        "base_model_revision": first,
    }
    hub.commit("pinned/head", head | {"config.json": json.dumps(config).encode()})
    shutil.copytree(hub.cache, fresh.hub_cache, dirs_exist_ok=True)
    printed = fresh(
        f"""
        import os
        from transformers import AutoModel
        def load(name, **options):
            model = AutoModel.from_pretrained(name, trust_remote_code=True, **options)
            pinned, ran = {first!r} in type(model).__module__, os.path.exists({str(mark)!r})
            print(model.model.norm.weight[0].item(), pinned, ran)
            return model
        load("pinned/model", revision={first!r})
        load("pinned/model", code_revision={first!r})
        model = load("pinned/head", revision="main")
        print(model.mrp_head is not None, model.backbone_source[1])
        load("pinned/model")
        """
    )
    pinned = ["1.0 True False", "1.5 True False", "1.0 False False", f"True {first}"]
    assert printed.splitlines() == [*pinned, "1.5 False True"]
