"""Speculation on the embedded checkpoint gives exactly the tokens of its target: 90 held-out prompts, float64."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import TINY
from mrp_trainer.data import encode
from mrp_trainer.tasks import FAMILIES, problems
from test_decoding import decode
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation
from modeling_mrp.generate.decode_state import Text
from modeling_mrp.generate.option_table import TARGETS
from modeling_mrp.rules.states import Reveal, States

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")

PROMPTS_PER_FAMILY = 30
NEW_TOKENS = 32
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 11},
    "T0.7 top-k top-p": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 12},
    "T1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 13},
    "T1, other seed": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1 << 40},
    "T1 top-k top-p": {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 14},
}


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: Any) -> list[list[int]]:
    asked = [problem for family in FAMILIES for problem in problems(family, "heldout", PROMPTS_PER_FAMILY)]
    return [encode(problem, tiny_tokenizer)[0] for problem in asked]


def in_batches(
    model: MRPForCausalLM, prompts: list[list[int]], seeds: list[int], size: int, side: str, **options: Any
) -> list[tuple[list[int], list[int]]]:
    rows = []
    for begin in range(0, len(prompts), size):
        part = slice(begin, begin + size)
        rows += decode(model, prompts[part], side, max_new_tokens=NEW_TOKENS, seed=seeds[part], **options)
    return [(tokens, steps) for tokens, steps, *_ in rows]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=list(SAMPLINGS))
def test_mrp_spec_equals_its_target(sampling: str, prompts: list[list[int]], tiny_model_float64: MRPForCausalLM) -> None:
    """Every batch size, padding side and K from 2 to 6 sees every sampling; each prompt is decoded speculatively once. The
    targets take turns."""
    options = dict(SAMPLINGS[sampling])
    first_seed = options.pop("seed", 0)
    seeds = [first_seed + i for i in range(len(prompts))]
    targets, read = itertools.cycle(TARGETS), 0
    # 40 prompts over 20 variants, a batch each: 30 and 10 of them.
    begin = 0
    for size, side, width in itertools.product((3, 1), ("left", "right"), (2, 3, 4, 5, 6)):
        chosen = list(range(begin, begin + size))
        begin += size
        target = next(targets)
        asked, their_seeds = prompts[chosen[0] : begin], seeds[chosen[0] : begin]
        alone = in_batches(tiny_model_float64, asked, their_seeds, size, "left", decoding=target, **options)
        drafting = {"decoding": "mrp_spec", "target": target, "num_draft_states": width}
        drafted = in_batches(tiny_model_float64, asked, their_seeds, size, side, **drafting, **options)
        for i, row, expected in zip(chosen, drafted, alone, strict=True):
            assert row == expected, f"prompt {i}, {target}, batch {size}, {side} padding, K = {width}"
        read += sum(len(tokens) for tokens, _ in alone)
    assert begin == 40
    assert read > 20 * begin  # the test has seen real text


def test_row_results_do_not_depend_on_the_batch(prompts: list[list[int]], tiny_model_float64: MRPForCausalLM) -> None:
    """Every mode on the trained weights: alone, among seven others, and in another order."""
    chosen = prompts[::11][:8]
    seeds = list(range(len(chosen)))
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    for mode in ("static", "dynamic", "sequential", "entropy_bound", "self_spec", "mrp_direct", "mrp_spec", "mrp_remask"):
        options = {"decoding": mode, "confidence_threshold": 0.5, "do_sample": mode != "static", "top_k": 0}
        together = in_batches(tiny_model_float64, chosen, seeds, 8, "left", **options)
        alone = in_batches(tiny_model_float64, chosen, seeds, 1, "left", **options)
        assert together == alone, mode
        shuffled = in_batches(tiny_model_float64, [chosen[i] for i in order], [seeds[i] for i in order], 8, "right", **options)
        assert shuffled == [together[i] for i in order], mode


SLACK = {torch.float32: 2e-4, torch.bfloat16: 0.5}  # a few units in the last place of a logit of size 16, in nats


@pytest.mark.parametrize("dtype", SLACK)
def test_low_precision_differs_only_from_near_ties(
    dtype: torch.dtype, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 and bf16 the first difference, if any, is a choice between two reveals that rounding cannot tell apart."""
    model = MRPForCausalLM.from_pretrained(TINY, dtype=dtype).eval()
    chosen = prompts[::3]
    seeds = [0] * len(chosen)
    with Reveals.noted(monkeypatch) as in_static:
        static = in_batches(model, chosen, seeds, 12, "left", decoding="static")
    with Reveals.noted(monkeypatch) as in_drafted:
        drafted = in_batches(model, chosen, seeds, 12, "left", decoding="mrp_spec")
    differing = [i for i, (a, b) in enumerate(zip(static, drafted, strict=True)) if a != b]
    for i in differing:
        assert near_tie(model, chosen[i], in_static[i], in_drafted[i], SLACK[dtype]), f"prompt {i}"
    assert len(differing) <= {torch.float32: 2, torch.bfloat16: len(chosen) // 2}[dtype]


@pytest.mark.parametrize("mode", ["static", "mrp_spec"])
@pytest.mark.parametrize("dtype", SLACK)
def test_low_precision_batches_differ_only_from_near_ties(
    dtype: torch.dtype, mode: str, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, for a row alone against the row among seven others."""
    model = MRPForCausalLM.from_pretrained(TINY, dtype=dtype).eval()
    chosen = prompts[::9]
    texts, reveals = [], []
    for size in (8, 1):
        with Reveals.noted(monkeypatch) as noted:
            texts.append(in_batches(model, chosen, [0] * len(chosen), size, "left", decoding=mode))
        reveals.append(noted)
    differing = [i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b]
    for i in differing:
        assert near_tie(model, chosen[i], reveals[0][i], reveals[1][i], SLACK[dtype]), f"prompt {i}"
    assert len(differing) <= {torch.float32: 1, torch.bfloat16: len(chosen) // 2}[dtype]


class Reveals:
    """What decodes reveal: position and token by step, also behind the end of the text that they give."""

    def __init__(self) -> None:
        self.of: dict[int, list[dict[int, tuple[int, int]]]] = {}  # by the tokens that a decode writes to
        self.tokens: list[Tensor] = []  # alive, so that no two have the same id

    @classmethod
    @contextmanager
    def noted(cls, patch: pytest.MonkeyPatch) -> Iterator["Reveals"]:
        """Of every decode in the body; `[i]` is its i-th row, of all batches."""
        reveals, write = cls(), Text.write

        def noted(text: Text, states: States, reveal: Reveal, which: Tensor, step: Tensor) -> None:
            if id(text.tokens) not in reveals.of:
                reveals.tokens.append(text.tokens)
            rows = reveals.of.setdefault(id(text.tokens), [{} for _ in text.tokens])
            for row, slot, column in (reveal.where & which[..., None]).nonzero().tolist():
                place = int(states.start[row, slot]) + column
                rows[row][int(step[row, slot])] = place, int(reveal.token[row, slot, column])
            write(text, states, reveal, which, step)

        with patch.context() as inner:
            inner.setattr(Text, "write", noted)
            inner.setattr(generation, "fewest_rows", lambda model, recorded, rows: rows)  # every row keeps its place
            yield reveals

    def __getitem__(self, index: int) -> dict[int, tuple[int, int]]:
        return list(itertools.chain(*self.of.values()))[index]


@torch.inference_mode()
def near_tie(
    model: MRPForCausalLM, prompt: list[int], a: dict[int, tuple[int, int]], b: dict[int, tuple[int, int]], slack: float
) -> bool:
    """Whether the first step at which two decodes part reveals (position, token) pairs of nearly equal log-odds."""
    step = next(s for s in itertools.count() if a.get(s) != b.get(s))
    if step not in a or step not in b:
        return False  # one had come to its end
    size, mask_id = model.config.block_size, model.config.mask_token_id
    known = {place: token for s, (place, token) in a.items() if s < step}
    end = (min(a[step][0], b[step][0]) // size + 1) * size
    ids = prompt + [known.get(place, mask_id) for place in range(len(prompt), end)]
    logits = model(torch.tensor([ids])).logits[0].double()
    logits[:, mask_id] = -torch.inf
    odds = []
    for place, token in (a[step], b[step]):
        others = logits[place].clone()
        others[token] = -torch.inf
        odds.append(float(logits[place, token] - others.logsumexp(-1)))
    return abs(odds[0] - odds[1]) <= slack
