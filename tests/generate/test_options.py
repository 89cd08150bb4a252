"""The table of `generate`'s options: what the documents, a config and the modes of decoding make of
it."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import (
    DECODINGS,
    DRAFTING,
    OPTIONS,
    TARGETS,
    closest_name,
)
from modeling_mrp.generate.options import MRPGenerationConfig
from tests.support.places import ROOT
from tests.support.random_cases import SOME_VALUES, make_model, options_of_rules

NAMED = {option.name: option for option in OPTIONS}
# Of each option that a mode is made of a value that is not the default.
CHANGES: dict[str, Any] = {
    name: next(value for value in SOME_VALUES[option.values] if value != option.default)
    for name, option in options_of_rules().items()
    if name != "denoising_steps"  # `mrp_direct` and one rule of a schedule read it elsewhere
}
CHANGES |= {
    "mrp_steps": 2,
    "num_draft_states": 3,
    "draft_branches": 1,
    "draft_passes": 2,
    "draft_shortlist": 4,
    "draft_next_block": True,
}
CHANGES |= {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3}
CHANGES |= {"remask_rule": "threshold", "residual_delta": 0.5}


def checked(**options: Any) -> MRPGenerationConfig:
    config = MRPGenerationConfig(**options)
    config.check(block_size=4, has_head=True)
    return config


def test_the_documents_have_the_table() -> None:
    section = (ROOT / "docs/decoding.md").read_text().split("\n## Options\n")[1].split("\n## ")[0]
    expected = ["| option | default | modes | what it sets |", "|---|---|---|---|"]
    for option in OPTIONS:
        default = f"`{option.default}`" if isinstance(option.default, str) else option.default
        modes = (
            "all" if option.modes == DECODINGS else ", ".join(f"`{mode}`" for mode in option.modes)
        )
        expected.append(f"| `{option.name}` | {default} | {modes} | {option.help} |")
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert shown == expected, "the table is:\n" + "\n".join(expected)


def test_a_wrong_value_is_refused_where_it_enters(tmp_path: Path) -> None:
    """In a config that is made, changed or saved, in the file of a checkpoint that is loaded, and
    with a model that is saved, which then leaves nothing."""
    model, config, good, bad = (
        make_model(),
        MRPGenerationConfig(),
        tmp_path / "good",
        tmp_path / "bad",
    )
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


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_counts_in_its_modes_only(name: str) -> None:
    others = {"remask_rule": "residual"} if name == "residual_delta" else {}

    def changes(**mode: str) -> bool:
        return checked(**mode, **others).mode(4) != checked(
            **mode, **others, **{name: CHANGES[name]}
        ).mode(4)

    assert tuple(mode for mode in DECODINGS if changes(decoding=mode)) == NAMED[name].modes
    for mode, target in product(DRAFTING, TARGETS):
        assert changes(decoding=mode, target=target) == bool({mode, target} & {*NAMED[name].modes})


def test_drafts_are_chains_where_rows_are_many() -> None:
    calls: list[tuple[int, dict[str, Any]]] = [(15, {}), (16, {}), (64, {"draft_branches": 2})]
    drafting = [
        checked(decoding="self_spec", **options).mode(4, rows).drafting for rows, options in calls
    ]
    assert [one.branches for one in drafting if one] == [3, 1, 2]


def test_a_name_is_suggested_only_if_it_is_much_alike() -> None:
    names = [option.name for option in OPTIONS]
    assert closest_name("draft_shortlists", names) == " (did you mean draft_shortlist?)"
    assert closest_name("draft_size", names) == "", "nearly two thirds of draft_shortlist"
