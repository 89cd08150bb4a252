"""Logits processors: those that are a function of ids and scores are right, drafted and not; any
other is called under `sequential` as in an autoregressive model, and elsewhere refused before a
forward, never taken silently."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation import logits_process as kinds

from modeling_mrp import MRPForCausalLM
from tests.support.random_cases import MASK, make_model

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


BY_CALLS: list[tuple[Callable[[], Any], str]] = [
    (CountingPenalty, "CountingPenalty answers the same ids and scores differently"),
    (RowMask, "RowMask answers the same ids and scores differently, by row"),
    (OwnBatch, "OwnBatch failed when it was called again.*another number of rows"),
    (Random, "Random answers the same ids and scores differently"),
]
REFUSED: list[tuple[Callable[[], Any], str]] = [
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
# What `generate` is asked for where a processor cannot be called as in an autoregressive model.
ELSEWHERE: list[dict[str, Any]] = [
    {"decoding": "static"},
    {"decoding": "sequential", "denoising_steps": 2},
    {"decoding": "self_spec", "target": "dynamic"},
    {"decoding": "mrp_remask"},
    {"decoding": "sequential", "max_batch_size": 1},
    {"decoding": "sequential", "infill_ids": torch.tensor([[MASK, 5], [MASK, 5]])},
    {"decoding": "sequential", "output_scores": True, "return_dict_in_generate": True},
    {"decoding": "sequential", "output_logits": True, "return_dict_in_generate": True},
]
IN_ORDER: list[dict[str, Any]] = [
    {"decoding": "sequential"},
    {"decoding": "mrp_spec", "target": "sequential", "num_draft_states": 4},
    {"decoding": "self_spec", "target": "sequential", "do_sample": True, "seed": 4},
]


def refused(make: Callable[[], Any], message: str, mode: dict[str, Any]) -> None:
    """Check that `generate` refuses a processor before any forward."""
    model = make_model()
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("the backbone ran"))
    with pytest.raises(ValueError, match=f"(?s)the logits processor {message}"):
        model.generate(PAIR, logits_processor=[make()], max_new_tokens=6, **mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_processor_of_which_texts_would_be_wrong(
    make: Callable[[], Any], message: str, mode: dict[str, Any]
) -> None:
    refused(make, message, mode)


@pytest.mark.parametrize("mode", ELSEWHERE)
@pytest.mark.parametrize(("make", "message"), BY_CALLS)
def test_a_processor_that_goes_by_its_calls_is_refused_elsewhere(
    make: Callable[[], Any], message: str, mode: dict[str, Any]
) -> None:
    refused(make, f"{message}.*the target 'sequential'", mode)


def test_a_request_is_refused_one_that_goes_by_its_calls(random_model: MRPForCausalLM) -> None:
    manager = random_model.init_continuous_batching({"decoding": "sequential"})
    with pytest.raises(ValueError, match="goes by earlier calls"):
        manager.add_request([1, 2, 3], logits_processor=[CountingPenalty()])


class Recorded(LogitsProcessor):
    """Keeps the ids of each call of another processor, in which scores that are not a row's own are
    left out."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        self.ids: list[list[list[int]]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.ids.append(input_ids.tolist())
        return self.processor(input_ids, scores)


class Ends(LogitsProcessor):
    """Lets row i end behind 2 + 3 i tokens, by the number of its calls, and adds what goes by calls
    and rows."""

    def __init__(self, eos: int) -> None:
        self.calls = 0
        self.eos = eos

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores = scores + torch.linspace(0, 1, scores.shape[1]).to(scores) * self.calls
        for row in range(len(scores)):
            scores[row, self.eos] = 1e4 if self.calls == 2 + 3 * row else -torch.inf
            scores[row, (7 * row + self.calls) % 60] += 3
        return scores


def autoregressive(
    model: MRPForCausalLM, ids: Tensor, mask: Tensor, processor: Any, new: int, eos: int
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Write greedily from left to right, a token of each row at a time, from the scores of a row
    alone; return the texts and the ids of each call."""
    block, mask_id = model.config.block_size, model.config.mask_token_id
    texts = [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]
    columns = ids.tolist()
    ended = [False] * len(texts)
    calls = []
    for _ in range(new):
        scores = []
        for text in texts:
            masks = block - len(text) % block
            out: Any = model(torch.tensor([text + masks * [mask_id]]))
            scores.append(out.logits[0, len(text)])
        calls.append([list(row) for row in columns])
        answered = processor(torch.tensor(columns), torch.stack(scores))
        answered[:, mask_id] = -torch.inf
        for row, token in enumerate(answered.argmax(-1).tolist()):
            token = 0 if ended[row] else token
            columns[row].append(token)
            if not ended[row]:
                texts[row].append(token)
                ended[row] = token == eos
        if all(ended):
            break
    return [row[ids.shape[1] :] for row in columns], calls


@pytest.mark.parametrize("mode", IN_ORDER[:2])
def test_what_goes_by_calls_is_called_as_in_an_autoregressive_model(mode: dict[str, Any]) -> None:
    """Rows of different length, at block ends too, that end one after another; the same ids in each
    call and the same text, drafts asked for or not."""
    model = make_model()
    block = model.config.block_size
    eos = 61
    lengths = [block - 1, block, 2 * block + 1, 3]
    ids = torch.arange(1, 1 + 4 * max(lengths)).view(4, -1) % 50 + 1
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    ids = ids * mask
    ours, reference = Recorded(Ends(eos)), Recorded(Ends(eos))
    expected, _ = autoregressive(model, ids, mask, reference, 3 * block, eos)
    out: Any = model.generate(
        ids,
        attention_mask=mask,
        logits_processor=[ours],
        max_new_tokens=3 * block,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        **mode,
    )
    assert out.sequences[:, ids.shape[1] :].tolist() == expected
    assert ours.ids == reference.ids
    assert [row.index(eos) for row in expected] == [1, 4, 7, 10]
    assert out.stats.drafted.sum() == 0


@pytest.mark.parametrize("mode", IN_ORDER)
@pytest.mark.parametrize("make", [CountingPenalty, RowMask, OwnBatch])
def test_what_goes_by_calls_acts_under_sequential(
    make: Callable[[], Any], mode: dict[str, Any]
) -> None:
    """The object itself has the calls of the text alone, and a second call gives the same."""
    model = make_model()
    outs = []
    for _ in range(2):
        counted = Recorded(make())
        outs.append(model.generate(PAIR, logits_processor=[counted], max_new_tokens=9, **mode))
        assert [len(ids) for ids in counted.ids] == [2] * 9
        assert [len(ids[0]) for ids in counted.ids] == list(range(3, 12))
        assert counted.ids[-1] == outs[-1][:, :-1].tolist()
    assert outs[0].equal(outs[1])
    if make is RowMask:
        assert (outs[0][:, 3:] // 20).tolist() == [[0] * 9, [1] * 9]


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


def test_xgrammars_own_processor_is_right_from_left_to_right() -> None:
    """It follows the texts of the rows of its first call."""
    xgrammar = pytest.importorskip("xgrammar")
    model = make_model().float()  # xgrammar takes no float64
    vocabulary = [f"{index:02d}" for index in range(64)]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=64, stop_token_ids=[0])
    grammar = xgrammar.GrammarCompiler(info).compile_regex("(01|02|03){4,6}")
    for mode in IN_ORDER:
        processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
        out: Any = model.generate(
            PAIR,
            logits_processor=[processor],
            max_new_tokens=12,
            eos_token_id=0,
            pad_token_id=0,
            **mode,
        )
        for row in out[:, 3:].tolist():
            text = row[: row.index(0)]
            assert 4 <= len(text) <= 6
            assert set(text) <= {1, 2, 3}
    one_each = [grammar, xgrammar.GrammarCompiler(info).compile_regex("(07|08)+")]
    out = model.generate(
        PAIR,
        logits_processor=[xgrammar.contrib.hf.LogitsProcessor(one_each)],
        max_new_tokens=12,
        eos_token_id=0,
        **IN_ORDER[0],
    )
    assert set(out[0, 3:].tolist()) <= {0, 1, 2, 3}
    assert set(out[1, 3:].tolist()) <= {0, 7, 8}
    processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
    with pytest.raises(ValueError, match="LogitsProcessor failed when it was called again"):
        model.generate(PAIR, logits_processor=[processor], max_new_tokens=6, decoding="static")
