"""Rivals of the head's drafts, the released reference, draft graphs and PSD: texts are their
target's.

`test_headlines.py` decodes again what they are measured to do, to the last forward.
"""

import random
from typing import Any

import pytest

from benchmarks.draft_graph import DraftGraph, graph_drafts, recorded_paths
from benchmarks.frontier import rule_of
from benchmarks.psd import parallel_speculative
from benchmarks.released import Released
from tests.support.helpers import generate, texts
from tests.support.random_cases import make_model, random_prompts

OPTIONS: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"confidence_threshold": 0.3},
    "sequential": {},
    "entropy_bound": {"entropy_threshold": 5.0},
}


@pytest.mark.parametrize("target", OPTIONS)
def test_texts_are_those_of_the_target(target: str) -> None:
    """Random models, float64, graphs calibrated on the very prompts; of PSD where no prediction is
    likely enough to agree with. Graphs save forwards, and so does PSD where all predictions are,
    but for `sequential`, whose drafts are its own reveals."""
    options, rule = OPTIONS[target], rule_of(target, **OPTIONS[target])
    rng, by_graph, by_psd = random.Random(target), 0, 0
    for states, eos in ((2, []), (3, [7, 11]), (5, []), (8, list(range(1, 12)))):
        model, prompts, new = (
            make_model(states, block_size=8),
            random_prompts(rng, rng.choice((1, 4)), 19),
            rng.randint(8, 25),
        )
        asked = {**options, "decoding": target, "max_new_tokens": new, "eos_token_id": eos or None}
        alone = generate(model, prompts, **asked).stats.row_forwards.tolist()
        paths = recorded_paths(model, rule, prompts, new, eos)
        assert all(path == sorted(path, key=len) for path in paths)
        loops = [
            graph_drafts(rule, graph, states)
            for graph in (DraftGraph.calibrated(paths, 12), DraftGraph((), frozenset()))
        ]
        loops += [parallel_speculative(rule, states, 1.0)]
        loops += [Released(states, prefix) for prefix in (False, True) if target == "static"]
        graph, _, strict, *_ = made = [loop(model, prompts, new, eos) for loop in loops]
        expected = texts(model, prompts, **asked)
        assert all(one.ids == expected for one in made)
        assert all(own <= other for own, other in zip(graph.forwards, alone, strict=True))
        by_graph += sum(alone) - sum(graph.forwards)
        if not eos:
            eager = parallel_speculative(rule, states)(model, prompts, new, eos)
            assert list(map(len, eager.ids)) == [new] * len(prompts)
            by_psd += sum(strict.forwards) - sum(eager.forwards)
    assert by_graph > 0
    assert by_psd > 0 or target == "sequential"
