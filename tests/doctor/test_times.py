"""The times of `mrp doctor`: what is timed computes the right thing, and floors by hand."""

from collections import Counter
from itertools import count
from typing import Any

import pytest
import torch
from mrp_trainer.doctor import baselines, replays, rounds
from mrp_trainer.doctor.baselines import baseline_steps
from mrp_trainer.doctor.replays import PARTS, Part, Replayed, floors_of, replay_rounds
from mrp_trainer.evaluate.roofline import Device, Shape

from modeling_mrp.networks.networks import Networks
from tests.support.random_cases import make_model
from tests.support.tape import TapeRecorder, tapes

__all__ = ["tapes"]  # a fixture


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (replays, baselines):
        monkeypatch.setattr(module, "CALLS", 1)
    monkeypatch.setattr(replays, "COPIED", {"cpu": 1024})
    monkeypatch.setattr(replays, "SIDE", {"cpu": 16})


def test_replays_run_one_width(tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each width is recorded once for the backbone and once for the head, and all later calls are
    replays; nothing is written to the text."""
    model = make_model(num_hidden_layers=1, num_nextn_predict_layers=1).float()
    verbs: list[tuple[str, int]] = []
    for name in ("score", "head", "commit"):
        real = getattr(Networks, name)

        def counted(
            self: Any, rows: Any, batch: Any, *rest: Any, n: str = name, r: Any = real
        ) -> Any:
            verbs.append((n, len(batch[0])))
            return r(self, rows, batch, *rest)

        monkeypatch.setattr(Networks, name, counted)
    replayed = list(replay_rounds(model, Device("by hand", 1e9, 1e9, 1.0), 2, 21, [1, 3]))
    assert [(each.rows, each.prefix, each.states) for each in replayed] == [(2, 20, 1), (2, 20, 3)]
    assert [part.name for part in replayed[0].parts] == list(PARTS[:2])
    assert [part.name for part in replayed[1].parts] == list(PARTS)
    assert len(tapes.tapes) == 3
    calls = replays.WARM_UPS + 2  # the first, warm-ups, and one that is timed
    assert verbs == [("score", 1)] * calls + [("score", 3)] * calls + [("head", 2)] * calls
    assert tapes.replays == 3 * (calls - 1)
    assert all(part.busy is None for each in replayed for part in each.parts), "on a CPU"


def test_a_round_is_the_sum_of_its_parts() -> None:
    parts = [Part("forward", 3.0, 2.0, 1.0), Part("pick", 0.5, 0.25, 0.125)]
    replayed = Replayed(1, 16, 2, [*parts, Part("head's pick", 0.25, 0.25)])
    assert (replayed.wall, replayed.busy, replayed.floor) == (3.75, 2.5, 1.125)
    assert Replayed(1, 16, 2, [Part("pick", 0.5)]).busy is None


def test_floors_by_hand() -> None:
    """A layer of 2 x 2 matrices q, k, v, o and 3 of 2 x 4 has 40 parameters, and 4 + 2 * 2 in
    norms. One row, one state of a block of 2, behind 4 tokens: 2 tokens in and out, and 6 + 2 slots
    of keys and values of 2 numbers each."""
    shape = Shape("by hand", 2, 4, 1, 1, 1, 2, 8, 2, 0)
    slow_memory = Device("slow memory", 1.0, 1e12, 1.0)
    layer = (4 * 2 * 2 + 3 * 2 * 4) + 2 * 2 + 2 * 2
    attention = (6 + 2) * 2 * 2
    floors = floors_of(shape, slow_memory, 1, 1, 4, masks=2)
    assert floors == {
        "forward": 2 * ((2 * 2 * 2 + 2) + layer + attention),
        "pick": 2 * (8 + 2) * 2,
    }
    with_head = Shape("by hand", 2, 4, 1, 1, 1, 2, 8, 2, 1)
    assert set(floors_of(with_head, slow_memory, 1, 2, 4, masks=3)) == {"forward", "pick", "head"}


def test_baselines_pick_what_a_round_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches, called twice: the block's own keys are overwritten each time. The compiled step
    is the same code."""
    modes = []

    def compiled(function: Any, mode: str) -> Any:
        modes.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    model = make_model(2, num_hidden_layers=2)
    prefix, block, mask = 8, 4, model.config.mask_token_id
    with torch.inference_mode():
        ids = baselines.inputs_of(model, None, 2, prefix)["input_ids"]
        masks = torch.full((2, block), mask)
        logits = model(torch.cat([ids, masks], 1)).logits[:, prefix:]
        logits[..., mask] = -torch.inf
        for step in baseline_steps(model, 2, prefix).values():
            for _ in range(2):
                assert torch.equal(step(), logits.argmax(-1))
    assert modes == ["reduce-overhead"]


def test_the_host_has_what_networks_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by one at each look: a verb of the networks takes one, what is
    between two of them, too. The text is that of `generate`."""
    clock = count()
    monkeypatch.setattr(rounds, "now", lambda _: float(next(clock)))
    monkeypatch.setattr(rounds, "TOKENS", 8)
    calls = Counter[str]()
    for verb in ("prefill", "score", "commit", "restore_batch", "shrink_batch"):
        real = getattr(Networks, verb)

        def counted(*given: Any, verb: str = verb, run: Any = real) -> Any:
            calls[verb] += 1
            return run(*given)

        monkeypatch.setattr(Networks, verb, counted)
    model = make_model(2).float()
    inputs = baselines.inputs_of(model, None, 1, 8)
    host = rounds.time_host(model, inputs, decoding="static")
    assert calls["prefill"] == 1
    assert host * calls["score"] == pytest.approx(sum(calls.values()) + 1)
    scored = calls["score"]
    out: Any = model.generate(
        **inputs,
        decoding="static",
        max_new_tokens=8,
        return_dict_in_generate=True,
        eos_token_id=None,
    )
    assert out.stats.forwards["denoise"] == scored
