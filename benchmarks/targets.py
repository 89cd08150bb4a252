"""The options with which benchmarks decode targets, and reveal rules from papers: each alone, or
drafted."""

from typing import Any

from modeling_mrp.generate.option_table import PUBLISHED
from modeling_mrp.generate.option_table import TARGETS as NAMES

_OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"confidence_threshold": 0.9},
    "entropy_bound": {"entropy_threshold": 0.35},
}
# The targets that the frontier measures alone and with all drafts; published rules are in `RULES`
# alone.
TARGETS: dict[str, dict[str, Any]] = {
    name: _OPTIONS.get(name, {}) for name in NAMES if name not in PUBLISHED
}
# The rules as published: a paper's number is given where our default differs.
RULES: dict[str, dict[str, Any]] = {
    **TARGETS,
    **{name: {} for name in PUBLISHED},
    "cad": {"confidence_threshold": 0.8},
}


def alone(target: str) -> dict[str, Any]:
    """Return the options of `generate` for a target without drafts."""
    return {"decoding": target, **RULES[target]}


def drafted(mode: str, target: str, states: int | str, **options: Any) -> dict[str, Any]:
    """Return the options of `generate` for a target drafted by `mode` with K = `states`, and
    further `options`."""
    return {
        "decoding": mode,
        "target": target,
        **RULES[target],
        "num_draft_states": states,
        **options,
    }
