"""The targets as the benchmarks decode them, and the rules from papers: each alone, or drafted."""

from typing import Any

from modeling_mrp.generate.option_table import PUBLISHED
from modeling_mrp.generate.option_table import TARGETS as NAMES

_OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"confidence_threshold": 0.9},
    "entropy_bound": {"entropy_threshold": 0.35},
}
# Those that the frontier has in every way and setting.
TARGETS: dict[str, dict[str, Any]] = {name: _OPTIONS.get(name, {}) for name in NAMES if name not in PUBLISHED}
# As published: where a paper's number is not our default, it is named.
RULES: dict[str, dict[str, Any]] = {**TARGETS, **{name: {} for name in PUBLISHED}, "cad": {"confidence_threshold": 0.8}}


def alone(target: str) -> dict[str, Any]:
    """Return the options of `generate` for a target by itself."""
    return {"decoding": target, **RULES[target]}


def drafted(mode: str, target: str, states: int | str, **more: Any) -> dict[str, Any]:
    """Return the options of `generate` for a target that a mode drafts for, with K states a round."""
    return {"decoding": mode, "target": target, **RULES[target], "num_draft_states": states, **more}
