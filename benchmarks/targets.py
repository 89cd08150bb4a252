"""The targets as the benchmarks decode them: each alone, or drafted."""

from typing import Any

from modeling_mrp.generate.option_table import TARGETS as NAMES

_OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"confidence_threshold": 0.9},
    "entropy_bound": {"entropy_threshold": 0.35},
}
TARGETS: dict[str, dict[str, Any]] = {name: _OPTIONS.get(name, {}) for name in NAMES}


def alone(target: str) -> dict[str, Any]:
    """Return the options of `generate` for a target by itself."""
    return {"decoding": target, **TARGETS[target]}


def drafted(mode: str, target: str, states: int | str, **more: Any) -> dict[str, Any]:
    """Return the options of `generate` for a target that a mode drafts for, with K states a round."""
    return {"decoding": mode, "target": target, **TARGETS[target], "num_draft_states": states, **more}
