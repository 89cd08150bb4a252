"""Requests of all kinds, as clients write their `sampling_params`, and the options of `generate`
that say the same."""

from typing import Any

from mrp_serving.picker import CountPenalties

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "custom_params": {"num_draft_states": 2}},
    {
        "temperature": 1.5,
        "min_p": 0.05,
        "min_new_tokens": 20,
        "custom_params": {"target": "entropy_bound"},
    },
    {
        **{
            "temperature": 1.2,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.6,
            "presence_penalty": 0.4,
        },
        "custom_params": {"target": "sequential"},
    },
    {
        **{"temperature": 1.0, "logit_bias": {"40": 4.0, "41": -100.0}, "ignore_eos": True},
        "custom_params": {"confidence_threshold": 0.3},
    },
    {"temperature": 1.0, "custom_params": {"decoding": "static", "denoising_steps": 8}},
    {"temperature": 1.0, "custom_params": {"decoding": "self_spec", "target": "cad"}},
    {
        "temperature": 1.0,
        "custom_params": {
            "decoding": "mrp_remask",
            "remask_rule": "threshold",
            "confidence_threshold": 0.5,
        },
    },
    {"temperature": 1.0, "custom_params": {"decoding": "mrp_direct", "mrp_steps": 2}},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0, "custom_params": {"target": "klass"}},
)


def as_engine(asked: dict[str, Any]) -> dict[str, Any]:
    """Convert a client's `sampling_params` to the fields of the engine's `SamplingParams`."""
    greedy = asked["temperature"] == 0
    return {
        **asked,
        "temperature": asked["temperature"] or 1.0,
        "top_k": 1 if greedy else asked.get("top_k", 1 << 30),
    }


def as_options(asked: dict[str, Any], prompt: int) -> dict[str, Any]:
    """Convert a client's `sampling_params` to options of `generate`; the prompt has `prompt`
    tokens."""
    names = ("top_p", "min_p", "repetition_penalty", "min_new_tokens")
    given: dict[str, Any] = {name: asked[name] for name in names if name in asked}
    if asked["temperature"] > 0:
        given |= {
            "do_sample": True,
            "temperature": asked["temperature"],
            "seed": asked["sampling_seed"],
        }
        given["top_k"] = asked.get("top_k", 0)
    if "logit_bias" in asked:
        given["sequence_bias"] = {
            (int(token),): bias for token, bias in asked["logit_bias"].items()
        }
    if "presence_penalty" in asked:
        given["logits_processor"] = [
            CountPenalties(prompt, asked["frequency_penalty"], asked["presence_penalty"])
        ]
    if asked.get("ignore_eos"):
        given["eos_token_id"] = []
    return given | asked.get("custom_params", {})
