"""Random requests of all kinds: for tests and `benchmarks.joining`."""

import random
from typing import Any

from modeling_mrp.generate.option_table import DRAFTING
from tests.support.random_cases import StopsBehind, Sways, word_tokenizer

EOS = [3, 5, 9, 11, 20]
MODES: list[dict[str, Any]] = [
    *({"decoding": target} for target in ("static", "dynamic", "sequential", "entropy_bound")),
    *(
        {"decoding": draft, "target": target, "num_draft_states": states}
        for draft in DRAFTING
        for target, states in (("static", 4), ("dynamic", 4), ("sequential", 3), ("credit", 3))
    ),
    {"decoding": "mrp_spec", "target": "sequential", "num_draft_states": "auto"},
    {"decoding": "mrp_spec", "target": "sequential", "prompt_lookup_num_tokens": 4},
    {"decoding": "mrp_direct", "mrp_steps": 2},
    {"decoding": "mrp_remask", "confidence_threshold": 0.05},
]
SAMPLING: list[dict[str, Any]] = [
    {},
    {},
    {},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 5},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[7], [9, 9]]},
]
SWAYS = Sways(0.3)


def random_request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and options of `generate`."""
    options: dict[str, Any] = {
        **rng.choice(MODES),
        **rng.choice(SAMPLING),
        "max_new_tokens": rng.randint(1, 24),
        "eos_token_id": EOS,
        "seed": rng.randrange(1 << 40),
    }
    if rng.random() < 0.15:
        options["stop_strings"] = [f"w{id:02d}" for id in rng.sample(range(1, 50), 5)]
        options["tokenizer"] = word_tokenizer()
    if rng.random() < 0.15:
        options["stopping_criteria"] = [StopsBehind(rng.sample(range(1, 50), 6))]
    if rng.random() < 0.1:
        options["logits_processor"] = [SWAYS]
    if rng.random() < 0.2:
        options["min_new_tokens"] = rng.randint(1, options["max_new_tokens"])
    length = rng.randint(1, 14) if rng.random() < 0.8 else rng.randint(15, 120)
    return [rng.randrange(1, 50) for _ in range(length)], options
