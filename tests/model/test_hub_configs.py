"""The folders of the published shapes, which load as they lie, and that of the embedded
checkpoint."""

import json

import pytest
from mrp_trainer.doctor.checks import PUBLISHED, published_config
from mrp_trainer.publish.folder import read_folder
from transformers import GenerationConfig

from modeling_mrp import MRPConfig, MRPGenerationConfig
from modeling_mrp.model.code import code_files
from tests.support.places import ROOT, TINY


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_folder_is_that_of_the_published_model(size: str) -> None:
    """Its config, that of `mrp doctor`'s random weights, and how it decodes. A folder without
    weights holds no code, nor does its config name any: the installed package reads it."""
    folder = ROOT / "hub_configs" / f"sdar-{size.lower()}-mrp"
    assert {path.name for path in folder.rglob("*")} == {
        "README.md",
        "config.json",
        "generation_config.json",
    }
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    theirs, ours = MRPConfig.from_pretrained(folder), published_config(size.lower()).to_dict()
    others = {name for name, value in ours.items() if theirs.to_dict().get(name) != value}
    ids = {"bos_token_id": 151643, "eos_token_id": 151643, "pad_token_id": 151643}
    assert others <= {*ids, "architectures", "dtype", "_name_or_path"}
    assert {name: getattr(theirs, name) for name in ids} == ids
    options = MRPGenerationConfig.from_dict(GenerationConfig.from_pretrained(folder).to_dict())
    options.check(16, True)
    expected = {
        "decoding": "mrp_spec",
        "target": "dynamic",
        "num_draft_states": "auto",
        "do_sample": False,
    }
    expected |= {**ids, "eos_token_id": [151645, 151643]}
    assert {name: getattr(options, name) for name in expected} == expected


def test_the_embedded_checkpoint_holds_what_its_repository_would() -> None:
    """Its code to the letter as the exporter generates it, in three files at most, and nothing that
    a push would leave out."""
    found = read_folder(TINY)
    code = {name: (TINY / name).read_text(encoding="utf-8") for name in found.code}
    assert code == code_files(), (
        "the package was changed: run python -m modeling_mrp.bundle hub_configs/sdar-tiny-mrp"
    )
    assert len(found.code) <= 3
    assert found.left_out == []
