"""The targets as the benchmarks decode them, at the demo's settings: each alone, or drafted."""

from typing import Any

from mrp_trainer.demo import TARGETS as SETTINGS

from modeling_mrp.generate.option_table import TARGETS as NAMES

_OPTIONS = {options["decoding"]: options for options in SETTINGS.values()}
TARGETS: dict[str, dict[str, Any]] = {
    name: {option: value for option, value in _OPTIONS[name].items() if option != "decoding"} for name in NAMES
}


def alone(target: str) -> dict[str, Any]:
    """Return the options of `generate` for a target by itself."""
    return {"decoding": target, **TARGETS[target]}


def drafted(mode: str, target: str, states: int | str, **more: Any) -> dict[str, Any]:
    """Return the options of `generate` for a target that a mode drafts for, with K states a round."""
    return {"decoding": mode, "target": target, **TARGETS[target], "num_draft_states": states, **more}
