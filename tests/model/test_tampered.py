"""Tampered repositories: every field of their JSON files with values of every type, and tensors
that are elsewhere.

Whatever does not load and decode ends in a `ValueError` or `OSError`, which a command prints in a
line, and which names what is wrong. A value that changes nothing may pass.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modeling_mrp import MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.model import head as head_module
from modeling_mrp.model.layouts import json_object
from tests.support.helpers import older_than
from tests.support.random_cases import make_model

PROMPT = torch.tensor([[11, 12, 13, 14, 15]])
INF = float("inf")
VALUES: tuple[Any, ...] = (None, "x", -1, 0, 1.5, INF, 10**20, True, [1], {"x": 1})
ROPE = {
    "factor": 2.0,
    "original_max_position_embeddings": 256,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPE |= {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
INDEX = "model.safetensors.index.json"
MISSING = object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a small model: "full", "sharded" and its "head" (of the backbone "full")."""
    folder, model = tmp_path_factory.mktemp("saved"), make_model().float()
    model.save_pretrained(folder / "full")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    model.backbone_source = (str(folder / "full"), None)
    model.save_pretrained(folder / "head", head_only=True)
    return folder


def outcome(folder: Path) -> str:
    """Load and decode with and without drafts; return "" or the message of a `ValueError` or
    `OSError`. Others are raised."""
    try:
        model = MRPForCausalLM.from_pretrained(folder)
        model.generate(
            PROMPT, max_new_tokens=1, decoding="mrp_spec" if model.config.has_head else "static"
        )
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def tampered(
    good: dict[str, Any], name: str, values: tuple[Any, ...] = VALUES
) -> Iterator[dict[str, Any]]:
    """Yield the fields with each value in place of one field's, and without the field."""
    yield {field: value for field, value in good.items() if field != name}
    for value in values:
        yield {**good, name: value}


def check(folder: Path, file: str, contents: Iterator[Any], says: str) -> int:
    """Write each content to a file; check that errors, of which the number is returned, match
    `says`, and restore the file."""
    path, errors = folder / file, 0
    before = path.read_text()
    for content in contents:
        path.write_text(json.dumps(content))
        try:
            if message := outcome(folder):
                assert re.search(says, message), (content, message)
                errors += 1
        except Exception as error:
            raise AssertionError(f"{file} with {content}: {error!r}") from error
    path.write_text(before)
    return errors


# Fields that no value changes: notes, and what other kinds of checkpoints have.
NOTES = {"architectures", "auto_map", "transformers_version", "base_model_revision"}
# What the error is about where a field is wrong, beside the field's name.
ABOUT = {
    "tie_word_embeddings": "lm_head",
    "hidden_size": "mismatched",
    "num_hidden_layers": "layers",
}
ABOUT |= {"model_type": "model_type|family"}


@pytest.mark.parametrize("kind", ["full", "head"])
def test_every_field_of_a_config(saved: Path, kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / kind, tmp_path / kind))
    good = json_object(folder / "config.json")
    for name in good:
        said = f"{name}|{ABOUT.get(name, 'does not fit|backbone')}"
        errors = check(folder, "config.json", tampered(good, name), said)
        if name in NOTES and older_than("5.18"):  # transformers' own errors
            continue
        assert (errors > 0) == (name not in NOTES), name


@pytest.mark.parametrize(
    "kind", ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
)
def test_every_field_of_rotary_embeddings(saved: Path, tmp_path: Path, kind: str) -> None:
    folder = Path(shutil.copytree(saved / "full", tmp_path / "full"))
    good = json_object(folder / "config.json")
    whole = {"rope_type": kind, "rope_theta": 10000.0, **ROPE}
    optional = ("attention_factor", "beta_fast", "beta_slow", "partial_rotary_factor", "mscale")
    for name in (*whole, *optional):
        ropes = tampered(whole, name, (None, "x", -1, float("nan"), [1]))
        errors = check(
            folder, "config.json", ({**good, "rope_parameters": rope} for rope in ropes), name
        )
        assert errors or (
            name.endswith("_factor") and kind != "longrope" and name[:5] in ("short", "long_")
        ), name


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "quantization_config",
            (*VALUES[1:], {"quant_method": "evil"}, {"quant_method": 5}, {"quant_method": "gptq"}),
        ),
        ("attn_implementation", ("org/kernel", 5, 1.5, [])),
        ("base_model_name_or_path", VALUES[1:]),
        ("base_model_tp_plan", VALUES[1:]),
        ("to_dict", VALUES),
        ("torch_dtype", ("x", 5, [], "int8")),
        ("rope_scaling", ("x", 5, [1], {"type": "yarn"}, {"type": "evil"})),
    ],
)
def test_fields_that_are_added_to_a_config(
    saved: Path, tmp_path: Path, name: str, values: tuple[Any, ...]
) -> None:
    folder = Path(shutil.copytree(saved / "full", tmp_path / "full"))
    good = json_object(folder / "config.json")
    if name in ("torch_dtype", "rope_scaling"):
        good = {
            field: value
            for field, value in good.items()
            if field not in ("dtype", "rope_parameters")
        }
    said = f"{name}|rope_type|rope_parameters|in rope|backbone|dtype"
    assert check(folder, "config.json", ({**good, name: value} for value in values), said) == len(
        values
    )


def test_every_field_of_a_generation_config(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "full", tmp_path / "full"))
    good = json_object(folder / "generation_config.json")
    model = MRPForCausalLM.from_pretrained(folder)
    names = {
        name
        for name in MRPGenerationConfig().to_dict()
        if name not in ("transformers_version", "_from_model_config")
    }
    for name in names:
        said = {"repetition_penalty": "penalty"}.get(name, re.sub("_config", "", name))
        for fields in tampered(good, name):
            message = ""
            try:
                model.generation_config = MRPGenerationConfig.from_dict(fields)
                model.generate(PROMPT[:, :1], max_new_tokens=1)
            except ValueError as error:
                message = str(error)
            assert not message or re.search(said, message, re.IGNORECASE), (fields, message)
    (folder / "generation_config.json").write_text('{"max_new_tokens": "8"}')
    assert outcome(folder) == "max_new_tokens is '8', of type str: it must be an int of 1 or more"
    said = "generation_config.json holds no JSON object: save it again, or download it again"
    assert check(folder, "generation_config.json", iter(([], 5, "x", None)), said) == 4
    (folder / "generation_config.json").write_text("{")
    assert re.search(said, outcome(folder))


def test_every_field_of_an_index(saved: Path, tmp_path: Path) -> None:
    """And a file that is elsewhere, no weights, or not there, for a tensor of the backbone or of
    the head."""
    folder = Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))
    shutil.copytree(saved / "full", tmp_path / "full")
    good = json_object(folder / INDEX)
    assert check(folder, INDEX, iter(VALUES), "index.json") == len(VALUES)
    assert (
        check(folder, INDEX, tampered(good, "weight_map"), "index.json|does not fit|nor? file")
        == len(VALUES) + 1
    )
    check(folder, INDEX, tampered(good, "metadata"), "metadata")
    elsewhere = (
        "../full/model.safetensors",
        str(tmp_path / "full/model.safetensors"),
        "/etc/passwd",
        "config.json",
        "no.safetensors",
    )
    for tensor in ("lm_head.weight", "mrp_head.eh_proj.weight"):
        maps = tampered(good["weight_map"], tensor, (*VALUES, *elsewhere))
        next(maps)  # without the tensor it is found in its file all the same
        said = f"{tensor}|no.safetensors"
        assert check(folder, INDEX, ({**good, "weight_map": files} for files in maps), said) == len(
            VALUES
        ) + len(elsewhere)


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "num_hidden_layers"])
def test_layers_that_are_not_there_are_not_made(saved: Path, tmp_path: Path, field: str) -> None:
    """1,024 layers took 39 s and a GB before the error; in a whole model, in shards, and where only
    the head is read."""
    said = rf"{field} is 1000, and it holds 2 layers .*: correct config\.json"
    for kind in ("full", "sharded"):
        folder = Path(shutil.copytree(saved / kind, tmp_path / kind))
        config = json_object(folder / "config.json") | {field: 1000}
        (folder / "config.json").write_text(
            json.dumps({name: value for name, value in config.items() if name != "layer_types"})
        )
        model = make_model().float()
        with mock.patch.object(
            head_module.Qwen3DecoderLayer,
            "__init__",
            side_effect=AssertionError("a layer was made"),
        ):
            for load in (MRPForCausalLM.from_pretrained, model.attach_head):
                with pytest.raises(ValueError, match=said):
                    load(folder)
