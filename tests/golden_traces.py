"""A record of the texts and costs of every decoding mode, with which those after a change to the
engine are compared.

``python -m tests.golden_traces > tests/golden_traces.json`` writes the record
anew: only if texts or costs are meant to change. Everything is float64, so that no two scores tie.
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from modeling_mrp import MRPForCausalLM
from tests.support.places import TINY
from tests.support.random_cases import MASK, batch_of, dampened, make_model, word_tokenizer

MODES: dict[str, dict[str, Any]] = {
    "static": {"decoding": "static"},
    "static, 3 steps": {"decoding": "static", "denoising_steps": 3},
    "dynamic": {"decoding": "dynamic", "confidence_threshold": 0.04},
    "sequential": {"decoding": "sequential", "denoising_steps": 5},
    "entropy_bound": {"decoding": "entropy_bound", "entropy_threshold": 5.0},
    "self_spec": {"decoding": "self_spec", "target": "static"},
    "mrp_direct": {"decoding": "mrp_direct", "mrp_steps": 2},
    "mrp_spec": {"decoding": "mrp_spec", "target": "static"},
    "mrp_spec K=8, 3 passes": {
        "decoding": "mrp_spec",
        "target": "static",
        "num_draft_states": 8,
        "draft_passes": 3,
    },
    "mrp_spec of dynamic": {
        "decoding": "mrp_spec",
        "target": "dynamic",
        "confidence_threshold": 0.04,
    },
    "self_spec of sequential": {
        "decoding": "self_spec",
        "target": "sequential",
        "denoising_steps": 5,
    },
    "mrp_spec of entropy_bound": {
        "decoding": "mrp_spec",
        "target": "entropy_bound",
        "entropy_threshold": 5.0,
    },
    "mrp_spec chain, 2 steps": {
        "decoding": "mrp_spec",
        "draft_branches": 1,
        "denoising_steps": 2,
        "draft_passes": 3,
    },
    "mrp_remask reread": {"decoding": "mrp_remask", "confidence_threshold": 0.04},
    "mrp_remask threshold": {
        "decoding": "mrp_remask",
        "remask_rule": "threshold",
        "confidence_threshold": 0.04,
    },
    "mrp_remask residual": {
        "decoding": "mrp_remask",
        "remask_rule": "residual",
        "residual_delta": 0.3,
        "confidence_threshold": 0.04,
    },
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "eos_token_id": None},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 0.8, "eos_token_id": [3, 9]},
    "truncated": {
        "do_sample": True,
        "top_k": 20,
        "top_p": 0.9,
        "eos_token_id": [3, 9],
        "min_new_tokens": 4,
    },
}
COUNTS = ("row_forwards", "row_head_forwards", "drafted", "accepted", "revoked", "accepted_lengths")
_LENGTHS = (3, 9, 6, 17, 1, 8, 12, 5)
ROWS = [
    [(7 * i + 5 * j + i * j) % 50 + 1 for j in range(length)] for i, length in enumerate(_LENGTHS)
]
_GIVEN = [[MASK, 5, MASK, MASK, 9, MASK, MASK, 7, MASK, MASK][i:] + [4] * i for i in range(8)]


def trace(
    model: MRPForCausalLM, rows: list[list[int]], **options: Any
) -> tuple[dict[str, Any], Any]:
    """Decode rows in one call; return a record of texts and costs, and the call's output."""
    out: Any = model.generate(
        **batch_of(rows), return_dict_in_generate=True, pad_token_id=0, seed=11, **options
    )
    width = max(map(len, rows))
    told = {
        "ids": [" ".join(map(str, row)) for row in out.sequences[:, width:].tolist()],
        "steps": [" ".join(map(str, row)) for row in out.reveal_step.tolist()],
        "forwards": dict(out.stats.forwards),
        **{name: str(getattr(out.stats, name).tolist()) for name in COUNTS},
    }
    return told, out


def of_mode(mode: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cases of one mode: names and records."""
    model, options = dampened(make_model(4, block_size=8), 0.3), MODES[mode]
    for sampling, drawn in SAMPLINGS.items():
        yield (
            f"{mode}, {sampling}, eight rows",
            trace(model, ROWS, max_new_tokens=19, **options, **drawn)[0],
        )
    greedy, sampled = ({**options, **SAMPLINGS[name]} for name in ("greedy", "sampled"))
    yield (
        f"{mode}, infilling",
        trace(model, ROWS, infill_ids=torch.tensor(_GIVEN), max_new_tokens=17, **sampled)[0],
    )
    _, out = trace(model, ROWS[:3], max_new_tokens=13, **greedy)
    longer = [
        [*row, *new]
        for row, new in zip(
            ROWS[:3], out.sequences[:, max(map(len, ROWS[:3])) :].tolist(), strict=True
        )
    ]
    yield (
        f"{mode}, continued",
        trace(model, longer, max_new_tokens=9, past_key_values=out.past_key_values, **sampled)[0],
    )
    stop = {"stop_strings": f"w{int(out.sequences[0, -6]):02d}", "tokenizer": word_tokenizer()}
    yield f"{mode}, stop string", trace(model, ROWS[:3], max_new_tokens=13, **stop, **greedy)[0]
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    yield (
        f"{mode}, processor",
        trace(model, ROWS[:2], max_new_tokens=11, logits_processor=processors, **sampled)[0],
    )


def of_others() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cases of other models: names and records."""
    calm = dampened(make_model(4, block_size=8), 0.3)
    for name, sampling in SAMPLINGS.items():
        yield (
            f"shortlist, {name}",
            trace(
                calm, ROWS, max_new_tokens=19, draft_shortlist=8, **MODES["mrp_spec"], **sampling
            )[0],
        )
    tiny = MRPForCausalLM.from_pretrained(TINY).double().eval()
    tiny.generation_config.num_draft_states = 4
    prompts = [[(31 * i + 7 * j) % 900 + 20 for j in range(20 + i)] for i in range(3)]
    for mode in ("static", "mrp_spec", "mrp_remask reread"):
        yield (
            f"embedded checkpoint, {mode}",
            trace(tiny, prompts, max_new_tokens=40, **MODES[mode], **SAMPLINGS["greedy"])[0],
        )


if __name__ == "__main__":
    print(
        json.dumps(
            dict(pair for mode in MODES for pair in of_mode(mode)) | dict(of_others()), indent=0
        )
    )
