"""The table of `generate`'s options: what the documents, a config and the modes of decoding make of it."""

from itertools import product
from typing import Any

import pytest
from conftest import ROOT
from mrp_trainer.evaluate_options import EvaluateOptions
from transformers import GenerationConfig

from modeling_mrp.generate.option_table import DECODINGS, DRAFTING, OPTIONS, TARGETS
from modeling_mrp.generate.options import MRPGenerationConfig

NAMED = {option.name: option for option in OPTIONS}
# Of each option that a mode is made of, values of it and others under which it differs from that of the defaults.
CHANGES: dict[str, dict[str, Any]] = {
    "confidence_threshold": {"confidence_threshold": 0.5},
    "entropy_threshold": {"entropy_threshold": 0.1},
    "mrp_steps": {"mrp_steps": 2},
    "num_draft_states": {"num_draft_states": 3},
    "draft_branches": {"draft_branches": 1},
    "draft_passes": {"draft_passes": 2},
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


def test_a_config_has_the_options_and_no_others() -> None:
    assert vars(MRPGenerationConfig()).keys() - vars(GenerationConfig()).keys() == NAMED.keys()
    defaults = checked()
    assert {name: getattr(defaults, name) for name in NAMED} == {option.name: option.default for option in OPTIONS}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_counts_in_its_modes_only(name: str) -> None:
    others = {other: value for other, value in CHANGES[name].items() if other != name}

    def changes(**mode: str) -> bool:
        return checked(**mode, **others).mode(4) != checked(**mode, **CHANGES[name]).mode(4)

    assert tuple(mode for mode in DECODINGS if changes(decoding=mode)) == NAMED[name].modes
    for mode, target in product(DRAFTING, TARGETS):
        assert changes(decoding=mode, target=target) == NAMED[name].counts(mode, target)


def test_the_evaluations_flags_begin_with_the_defaults() -> None:
    """But for the number of drafts, with which counts can be repeated."""
    flags = EvaluateOptions(decoding=["mrp_spec", "dynamic"])
    spec, dynamic = flags.settings()
    assert spec == {"decoding": "mrp_spec", "target": "static", "num_draft_states": 4, "draft_branches": 3}
    assert dynamic == {"decoding": "dynamic", "confidence_threshold": 0.9}
    same = {**spec, **dynamic}.items() - {("num_draft_states", 4), ("decoding", "dynamic")}
    assert all(NAMED[name].default == value for name, value in same)


def test_the_evaluation_sweeps_a_targets_options_with_it() -> None:
    flags = EvaluateOptions(decoding=["self_spec"], target=["static", "dynamic"], tau=[0.5, 0.9], branches=[3])
    spec = {"decoding": "self_spec", "target": "static", "num_draft_states": 4, "draft_branches": 3}
    of_dynamic = {**spec, "target": "dynamic"}
    assert flags.settings() == [spec, *({**of_dynamic, "confidence_threshold": tau} for tau in (0.5, 0.9))]
