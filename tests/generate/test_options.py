"""The table of `generate`'s options: what the documents, a config and the modes of decoding make of it."""

from functools import reduce
from itertools import product
from operator import or_
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from conftest import ROOT, make_model
from mrp_trainer.evaluate.options import EvaluateOptions
from transformers import GenerationConfig

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS, DRAFTING, OPTIONS, TARGETS, DecodingOptions
from modeling_mrp.generate.options import MRPGenerationConfig

NAMED = {option.name: option for option in OPTIONS}
# Of each option that a mode is made of, values of it and others under which it differs from that of the defaults.
CHANGES: dict[str, dict[str, Any]] = {
    **{"confidence_threshold": {"confidence_threshold": 0.5}, "low_threshold": {"low_threshold": 0.2}},
    **{"entropy_threshold": {"entropy_threshold": 0.1}, "factor": {"factor": 0.5}, "mrp_steps": {"mrp_steps": 2}},
    **{"num_draft_states": {"num_draft_states": 3}, "draft_branches": {"draft_branches": 1}},
    **{"draft_passes": {"draft_passes": 2}, "draft_shortlist": {"draft_shortlist": 4}},
    "remask_rule": {"remask_rule": "threshold"},
    "residual_delta": {"residual_delta": 0.5, "remask_rule": "residual"},
}


def checked(**options: Any) -> MRPGenerationConfig:
    config = MRPGenerationConfig(**options)
    config.check(block_size=4, has_head=True)
    return config


def test_the_documents_have_the_table() -> None:
    section = (ROOT / "docs/decoding.md").read_text().split("\n## Options\n")[1].split("\n## ")[0]
    expected = ["| option | default | modes | what it sets |", "|---|---|---|---|"]
    for option in OPTIONS:
        default = f"`{option.default}`" if isinstance(option.default, str) else option.default
        modes = "all" if option.modes == DECODINGS else ", ".join(f"`{mode}`" for mode in option.modes)
        expected.append(f"| `{option.name}` | {default} | {modes} | {option.help} |")
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert shown == expected, "the table is:\n" + "\n".join(expected)


def test_a_config_has_the_options_as_typed_fields() -> None:
    """Unset they are None, and take no room in a file."""
    hints = get_type_hints(DecodingOptions)
    assert issubclass(MRPGenerationConfig, DecodingOptions)
    assert hints.keys() == NAMED.keys()
    for name, option in NAMED.items():
        types = {int | float if one is float else get_origin(one) or one for one in get_args(hints[name])} - {type(None)}
        assert reduce(or_, {str if one is Literal else one for one in types}) == option.kind, name
        assert getattr(MRPGenerationConfig(), name) is None
    assert vars(MRPGenerationConfig()).keys() == vars(GenerationConfig()).keys()
    defaults = checked()
    assert {name: getattr(defaults, name) for name in NAMED} == {option.name: option.default for option in OPTIONS}


def test_a_wrong_value_is_refused_where_it_enters(tmp_path: Path) -> None:
    """In a config that is made, changed or saved, in the file of a checkpoint that is loaded, and with a model that is saved,
    which then leaves nothing."""
    model, config, good, bad = make_model(), MRPGenerationConfig(), tmp_path / "good", tmp_path / "bad"
    model.save_pretrained(good)
    (good / "generation_config.json").write_text('{"decoding": "x"}')
    wrong, *saved = [MRPGenerationConfig(), config, model.generation_config]
    for one in saved:
        one.decoding = "x"
    for call in (
        lambda: MRPGenerationConfig(decoding="x"),
        lambda: wrong.update(decoding="x"),
        lambda: config.save_pretrained(bad),
        lambda: MRPForCausalLM.from_pretrained(good),
        lambda: model.save_pretrained(bad),
    ):
        with pytest.raises(ValueError, match=r"^decoding is 'x'"):
            call()
    assert not list(bad.glob("*"))
    (good / "generation_config.json").write_text('{"decoding": "mrp_spec", "seed": 11}')
    loaded = MRPForCausalLM.from_pretrained(good).generation_config
    assert (type(loaded), loaded.decoding, loaded.seed) == (MRPGenerationConfig, "mrp_spec", 11)


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_counts_in_its_modes_only(name: str) -> None:
    others = {other: value for other, value in CHANGES[name].items() if other != name}

    def changes(**mode: str) -> bool:
        return checked(**mode, **others).mode(4) != checked(**mode, **CHANGES[name]).mode(4)

    assert tuple(mode for mode in DECODINGS if changes(decoding=mode)) == NAMED[name].modes
    for mode, target in product(DRAFTING, TARGETS):
        assert changes(decoding=mode, target=target) == NAMED[name].acts(mode, target)


def test_the_evaluations_flags_begin_with_the_defaults() -> None:
    """But for drafts, of which counts can be repeated: their number, and a tree of them in batches of any size."""
    spec, dynamic = EvaluateOptions(decoding=["mrp_spec", "dynamic"]).settings()
    assert spec == {"decoding": "mrp_spec", "target": "static", "num_draft_states": 4, "draft_branches": 3}
    assert dynamic == {"decoding": "dynamic", "confidence_threshold": 0.9}
    same = {**spec, **dynamic}.items() - {("num_draft_states", 4), ("draft_branches", 3), ("decoding", "dynamic")}
    assert all(NAMED[name].default == value for name, value in same)


def test_drafts_are_chains_where_rows_are_many() -> None:
    def branches(rows: int, **options: int) -> int:
        drafting = checked(decoding="self_spec", **options).mode(4, rows).drafting
        assert drafting is not None
        return drafting.branches

    assert (branches(15), branches(16), branches(64, draft_branches=2)) == (3, 1, 2)
