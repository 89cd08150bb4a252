"""SDAR's own script as a loop: without departures it is this package's decoding; each departure by hand."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import left_padded
from mrp_trainer.decoded import NEW_TOKENS
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from benchmarks import departures, tables
from benchmarks.common import embedded_weights
from benchmarks.departures import SWITCHES, Quota, Script, Truncated, ways
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.sampling import Sampler
from modeling_mrp.rules.revealing import Candidates, logit

NO = -torch.inf


def alone(model: MRPForCausalLM, prompts: list[list[int]], new: int, eos: list[int], **options: Any) -> tuple[Any, Any]:
    """The tokens and forwards of each row by `generate`."""
    options |= {"max_new_tokens": new, "eos_token_id": eos or None, "return_dict_in_generate": True}
    out = model.generate(**left_padded(prompts), **options)
    generated = out.sequences[:, max(map(len, prompts)) :]
    ids = [row[steps >= 0].tolist() for row, steps in zip(generated, out.reveal_step, strict=True)]
    return ids, out.stats.row_forwards.tolist()


@pytest.mark.parametrize("threshold", [None, 0.05, 0.3])
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ({}, {}),
        ({"seed": 0, "top_k": 1}, {}),
        ({"seed": 5}, {"do_sample": True, "top_k": 0, "seed": 5}),
        ({"seed": 6, "top_p": 0.8}, {"do_sample": True, "top_k": 0, "top_p": 0.8, "seed": 6}),
        ({"seed": 7, "top_k": 9, "top_p": 0.8}, {"do_sample": True, "top_k": 9, "top_p": 0.8, "seed": 7}),
    ],
    ids=str,
)
def test_without_departures_it_is_generate(threshold: float | None, script: dict[str, Any], options: dict[str, Any]) -> None:
    """Token for token in float64, and forward for forward."""
    rng = random.Random(str(script))
    target: dict[str, Any] = {"decoding": "static"} if threshold is None else {"decoding": "dynamic"}
    for trial in range(5):
        model = make_model(trial, block_size=rng.choice((4, 8)))
        prompts = [[rng.randrange(1, 50) for _ in range(rng.randint(1, 19))] for _ in range(rng.choice((1, 4)))]
        eos = rng.choice(([], [7, 11], list(range(1, 12))))
        new = rng.randint(1, 25)
        steps = rng.choice((None, 2, 3, 4))
        also = {"denoising_steps": steps} if threshold is None else {"confidence_threshold": threshold}
        made = Script(threshold, steps, **script)(model, prompts, new, eos)
        assert (made.ids, made.forwards) == alone(model, prompts, new, eos, **target, **also, **options)


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_departure_changes_something(switch: str) -> None:
    """Sampled on random models, in blocks of two steps: texts, or what they cost."""
    differ = 0
    for trial in range(6):
        model = make_model(trial, block_size=8)
        with torch.no_grad():  # so that the mask is picked now and then, and what is likely is truncated away from
            model.lm_head.weight *= 2
        way: dict[str, Any] = {"threshold": 0.3, "denoising_steps": 2, "seed": trial, "top_p": 0.7}
        here: list[Any] = [[1, 2, 3], [4, 5, 6, 7, 8]], 20, list(range(1, 9))
        without = Script(**way)(model, *here)
        made = Script(**way, **{switch: True})(model, *here)
        differ += (made.ids, made.forwards) != (without.ids, without.forwards)
    assert differ


@pytest.mark.parametrize(
    ("confidence", "quota", "revealed"),
    [
        ([2.0, NO, 3.0, 0.5], 1, [0, 2]),  # two pass, one would do
        ([2.0, NO, 3.0, 0.5], 3, [0, 2, 3]),  # two pass, three are due
        ([0.2, NO, 0.3, 0.5], 2, [2, 3]),  # none passes
        ([0.2, NO, NO, NO], 2, [0]),  # one is left, and what is revealed stays as it is
    ],
)
def test_a_quota_by_hand(confidence: list[float], quota: int, revealed: list[int]) -> None:
    """Over log-odds of 1."""
    odds = torch.tensor([confidence])
    where, number = odds > NO, torch.tensor([quota])
    found = Quota(1.0)(Candidates(where, torch.zeros_like(where).long(), odds, None, where.long(), number, number))
    assert found[0].nonzero()[:, 0].tolist() == revealed


def test_a_quota_of_one_changes_nothing() -> None:
    """That of the default, as many denoising steps as a block has tokens: at least one is revealed anyhow."""
    for trial in range(3):
        model, here = make_model(trial, block_size=8), ([[1, 2, 3], [4, 5, 6, 7, 8]], 20, [7])
        quota, ours = (Script(0.3, quota=switch)(model, *here) for switch in (True, False))
        assert (quota.ids, quota.forwards) == (ours.ids, ours.forwards)


@pytest.mark.parametrize(
    ("truncation", "before", "after"),
    [
        (TopPLogitsWarper(0.85), 0.5, 0.5 / 0.9),  # 0.5 and 0.4 are left
        (TopKLogitsWarper(1), 0.5, 1.0),
    ],
)
def test_confidence_after_truncation_by_hand(truncation: Any, before: float, after: float) -> None:
    """Probabilities 0.5, 0.4 and 0.1 of the ids that are not the mask."""
    logits = torch.tensor([[0.5, 0.4, 0.1, 3.0]], dtype=torch.float64).log()
    sampler = Sampler(torch.eye(4, dtype=torch.float64), 3, truncation=LogitsProcessorList([truncation]))
    for kind, expected in ((Sampler, before), (Truncated, after)):
        picks = kind(**vars(sampler))(logits, torch.zeros(1, dtype=torch.long))
        assert picks.token.tolist() == [0]
        assert picks.logprob.exp().item() == pytest.approx(expected)
        assert picks.confidence.item() == pytest.approx(logit(expected))


def test_with_top_k_1_every_confidence_is_1(random_model: MRPForCausalLM) -> None:
    """`static` goes from the left, and `dynamic` reveals a block a forward, whatever tau is."""
    prompts, greedy = [[1, 2, 3, 4], [9, 8, 7, 6]], {"seed": 0, "top_k": 1, "truncated": True}
    from_left = alone(random_model, prompts, 12, [], decoding="sequential")
    static = Script(**greedy)(random_model, prompts, 12, [])
    assert (static.ids, static.forwards) == from_left
    assert Script(0.99999, **greedy)(random_model, prompts, 12, []).forwards == [3] * 2


def independent() -> Any:
    """A model whose positions do not look at each other, nor know where they are: all get the same token."""
    model = make_model()
    for layer in (*model.model.layers, *model.mrp_head.layers):
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return model


PROMPT = [[1, 2, 3, 4]]  # a block; the forward that stores it reveals already


@pytest.mark.parametrize(("new", "forwards"), [(12, 4), (3, 3)])
def test_a_block_goes_on_behind_its_eos(new: int, forwards: int) -> None:
    """A token a forward from the left, each of them an eos: the text is the first, and its block, or what was asked for, is
    revealed to the end."""
    model = independent()
    eos = Script()(model, PROMPT, 4, []).ids[0][:1]
    ours, theirs = (Script(behind_eos=switch)(model, PROMPT, new, eos) for switch in (False, True))
    assert ours.ids == theirs.ids == [eos]
    assert (ours.forwards, theirs.forwards) == ([1], [forwards])


def test_a_mask_inside_the_softmax_takes_its_share() -> None:
    """Of tau between both probabilities of the token: a block a forward without it, a token with it."""
    model = independent()
    logits = model(torch.tensor([[*PROMPT[0], 60, 60, 60, 60]])).logits[0, -1]
    with torch.no_grad():
        model.lm_head.weight[60] *= (logits[:60].max() - 1) / logits[60]  # e times less likely than the token
    logits = model(torch.tensor([[*PROMPT[0], 60, 60, 60, 60]])).logits[0, -1]
    best = logits[:60].argmax()
    among, inside = logits[torch.arange(64) != 60].softmax(0)[best].item(), logits.softmax(0)[best].item()
    assert inside < 0.95 * among
    ours, theirs = (Script((among + inside) / 2, mask_inside=switch)(model, PROMPT, 12, []) for switch in (False, True))
    assert ours.ids == theirs.ids
    assert (ours.forwards, theirs.forwards) == ([3], [12])
    with torch.no_grad():
        model.lm_head.weight[60] *= 1e3
    stuck = Script(mask_inside=True)
    made, ours = stuck(model, PROMPT, 12, []), Script()(model, PROMPT, 12, [])
    assert (made.ids, made.forwards, sum(stuck.stuck)) == (ours.ids, ours.forwards, 12), "nothing but masks is picked"


def test_its_lines_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems of 8 tokens: a line for each way and departure, without departures first, and no head takes part."""
    monkeypatch.setattr(departures, "ways", lambda *sizes: ways(*sizes)[2:4])
    for family in NEW_TOKENS:
        monkeypatch.setitem(NEW_TOKENS, family, 8)
    departures.main(["--count", "2", "--split", "tune"])
    header, *lines = map(json.loads, (printed := capsys.readouterr().out).splitlines())
    assert header["benchmark"] == "departures"
    expected = [list(each) for _, of in ways(16, 0.9)[2:4] for each in ((), *of)]
    assert [line["departures"] for line in lines] == 2 * expected
    assert all(line["texts_that_differ"] == 0 for line in lines if not line["departures"])
    assert {line["head_per_token"] for line in lines} == {0}
    written = [{**header, **embedded_weights(), "head": "0123456789ab"}, *lines]
    (tmp_path / "tiny_departures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    rows = tables.departures(tmp_path).splitlines()[2:]
    assert len(rows) == len(expected)
    assert rows[0].startswith("| `dynamic` 0.9, 8 steps, greedy | none | ")
    assert rows[-1].startswith("| `static`, top_p 0.9 | `mask_inside` | ")
    assert printed.count("\n") == 1 + len(lines)
