"""Logits processors: those that are a function of ids and scores are right, drafted and not; any
other is refused before a forward, never taken silently."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as kinds

from modeling_mrp import MRPForCausalLM
from tests.random_cases import make_model

PAIR = torch.tensor([[1, 2, 3], [4, 5, 6]])
MODES: list[dict[str, Any]] = [
    {"decoding": "sequential"},
    {"decoding": "static"},
    {"decoding": "mrp_spec", "target": "sequential"},
    {"decoding": "self_spec", "target": "dynamic"},
]


class CountingPenalty(LogitsProcessor):
    """Lowers the last token of each of its calls, whatever the row."""

    def __init__(self) -> None:
        self.counts = torch.zeros(64)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.counts[input_ids[:, -1]] += 1
        return scores - self.counts.to(scores)


class RowMask(LogitsProcessor):
    """Forbids other tokens in each row of the batch."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        allowed = torch.zeros_like(scores, dtype=torch.bool)
        for row in range(len(scores)):
            allowed[row, row * 20 : row * 20 + 20] = True
        return scores.masked_fill(~allowed, -torch.inf)


class OwnBatch(LogitsProcessor):
    """Has a matcher for each row of its first call, and follows their texts."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not self.texts:
            self.texts = [[] for _ in input_ids]
        if len(input_ids) != len(self.texts):
            raise RuntimeError("another number of rows")
        for text, ids in zip(self.texts, input_ids, strict=True):
            text.append(int(ids[-1]))
        return scores


class Random(LogitsProcessor):
    """Adds noise."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + torch.rand_like(scores)


class NoDouble(LogitsProcessor):
    """Forbids the token that stands on the left: a function of the ids."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls.append(len(input_ids))
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (CountingPenalty, "CountingPenalty answers the same ids and scores differently"),
    (RowMask, "RowMask answers the same ids and scores differently, by row"),
    (OwnBatch, "OwnBatch failed when it was called again.*another number of rows"),
    (Random, "Random answers the same ids and scores differently"),
    (
        lambda: kinds.SynthIDTextWatermarkLogitsProcessor(5, [3, 4, 5], 1024, 0, 1024, "cpu"),
        "SynthIDTextWatermarkLogitsProcessor does what watermarking_config does, which is not",
    ),
    (
        lambda: kinds.WatermarkLogitsProcessor(64, "cpu"),
        "WatermarkLogitsProcessor does what watermarking_config does, which is not supported",
    ),
    (
        lambda: kinds.PrefixConstrainedLogitsProcessor(lambda *_: [3], 1),
        "PrefixConstrainedLogitsProcessor does what prefix_allowed_tokens_fn does",
    ),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_processor_of_which_texts_would_be_wrong(
    make: Callable[[], Any], message: str, mode: dict[str, Any]
) -> None:
    model = make_model()
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the backbone ran"))
    with pytest.raises(ValueError, match=f"(?s)the logits processor {message}"):
        model.generate(PAIR, logits_processor=[make()], max_new_tokens=6, **mode)


def test_a_function_of_the_ids_is_right(random_model: MRPForCausalLM) -> None:
    """Drafted as not; the object is not called by the probe."""
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "seed": 3}
    for target in ("sequential", "dynamic"):
        alone, drafted = NoDouble(), NoDouble()
        expected = random_model.generate(PAIR, decoding=target, logits_processor=[alone], **options)
        out = random_model.generate(
            PAIR, decoding="mrp_spec", target=target, logits_processor=[drafted], **options
        )
        assert out.equal(expected)
        assert alone.calls[0] == 2 * (1 if target == "sequential" else 4) or alone.calls[0] % 2 == 0
        if target == "sequential":
            rows: Tensor = expected[:, 3:]
            assert not rows[:, 1:].eq(rows[:, :-1]).any()


def test_xgrammars_own_processor_is_refused(random_model: MRPForCausalLM) -> None:
    """It follows the texts of the rows of its first call."""
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [f"{index:02d}" for index in range(64)]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=64, stop_token_ids=[0])
    grammar = xgrammar.GrammarCompiler(info).compile_regex("(01|02|03)+")
    for mode in MODES:
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
        with pytest.raises(ValueError, match="LogitsProcessor failed when it was called again"):
            random_model.generate(PAIR, logits_processor=[processor], max_new_tokens=6, **mode)
