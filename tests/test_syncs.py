"""What a device would make the host wait for, buffers that stay where they are, and a compiled backbone in a whole decode."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import LIVELY, every_mode
from tape import waits
from test_decoding import dampened
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_mrp.generate import generation, loop
from modeling_mrp.generate.decode_state import DecodeState, RoundPlan
from modeling_mrp.generate.loop import Task
from modeling_mrp.runner.cache import BlockCache
from modeling_mrp.runner.runner import Runner

PROMPTS = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8], [0, 9, 10, 11, 12]])
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {**LIVELY, "seed": 3},
    # transformers' top-k and top-p are not left out: they do not wait either.
    "truncated": {**LIVELY, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "seed": 4},
    "minimum": {**LIVELY, "eos_token_id": [3, 9], "min_new_tokens": 7, "seed": 5},
}


class Waits(TorchDispatchMode):
    """Notes every operation for which the host would wait."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        moved = name.startswith("_to_copy") and kwargs is not None and kwargs.get("device") not in (None, args[0].device)
        if moved or waits(name, args):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Watched:
    """For what the host waits in each call of a function, while it is installed."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.calls: list[list[str]] = []
        self.inside = False
        patch.setattr(generation, name, self.watched(getattr(generation, name)))
        # Lists of numbers, to the host and from it, need no operation that is dispatched.
        for owner, way in ((Tensor, "tolist"), (Tensor, "item"), (Tensor, "numpy"), (torch, "tensor"), (torch, "as_tensor")):
            patch.setattr(owner, way, self.noted(getattr(owner, way), way))

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.calls.append([])
            self.inside = True
            with Waits(self.calls[-1]):
                result = function(*args)
            self.inside = False
            return result

        return run

    def noted(self, function: Callable[..., Any], way: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                self.calls[-1].append(way)
            return function(*args, **kwargs)

        return run


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked positions are not sought out."""
    made = generation._reader
    monkeypatch.setattr(generation, "_reader", lambda *args: replace(made(*args), seeks=False))


@every_mode
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_host_waits_once_a_round(
    sampling: str, mode: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """And once before the first, three times for prefill; what is done on a device to that end gives the same text.

    The remasking rule `reread` goes on until nothing is doubted, and asks once a pass whether there is.
    """
    options: dict[str, Any] = {"decoding": mode, "max_new_tokens": 13, "mrp_steps": 2, "num_draft_states": 5}
    options |= {"draft_passes": 2, "return_dict_in_generate": True} | SAMPLINGS[sampling]
    inputs = {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long()}
    vocabulary = {"draft_vocab_size": 30} if mode == "mrp_spec" else {}
    model = dampened(make_model(4, **vocabulary), 0.3)
    usual = model.generate(**inputs, **options)
    request.getfixturevalue("as_on_a_device")
    with monkeypatch.context() as patch:
        prefill, rounds = Watched(patch, "begin"), Watched(patch, "decode")
        dense = model.generate(**inputs, **options)
    passes = dense.stats.forwards["head"] if mode == "mrp_remask" else 0
    count = dense.stats.forwards["denoise"] + dense.stats.forwards["verify"]
    (before,), (found,) = prefill.calls, rounds.calls
    asked = [way for way in found if way != "tolist"]
    halvings = asked.count("tensor")  # which rows stay goes to the device
    asked = [way for way in asked if way != "tensor"]
    assert count > 2
    assert halvings <= 2
    assert found.count("tolist") == 1 + count
    assert {*before, *asked} <= {"_local_scalar_dense.default"}
    if passes:
        assert len(before) - 3 + len(asked) <= passes + 2 * (count + 1)
    else:
        assert (len(before), asked) == (3, [])
    assert torch.equal(dense.sequences, usual.sequences)
    assert torch.equal(dense.reveal_step, usual.reveal_step)
    torch.testing.assert_close(dense.token_logprobs, usual.token_logprobs)
    counts = ("row_forwards", "row_head_forwards", "drafted", "accepted", "revoked")
    for name in (*counts, "offered_at_depth", "accepted_at_depth", "revocations"):
        assert torch.equal(getattr(dense.stats, name), getattr(usual.stats, name))


def test_waits_are_seen() -> None:
    """Each of the ways to wait, while watched."""
    found: list[str] = []
    x = torch.arange(4)
    ways: list[Callable[[], Any]] = [
        lambda: x[0].item(),
        lambda: bool(x.any()),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.clone().__setitem__(x > 1, x[:2]),
        lambda: x.unique(),
        lambda: x.masked_select(x > 1),
        lambda: torch.equal(x, x + 1),
        lambda: x.to("meta"),
        lambda: x.repeat_interleave(x),
    ]
    for count, way in enumerate(ways):
        before = len(found)
        with Waits(found):
            way()
        assert len(found) > before, count


# ------------------------------------------------------------------------------------------------ memory


@every_mode
def test_the_cache_stays_where_it_is(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds allocate no keys and values: (scratch + capacity) slots of 2 KV heads of 8 numbers in float64 for each row in each
    of 2 + 2 layers, from the first round to the last; rows that have ended are the last of them."""
    held: list[list[int]] = []
    built: list[BlockCache] = []
    decode_round, init = loop.decode_round, BlockCache.__init__

    def ran(task: Task, runner: Runner, state: DecodeState, plan: RoundPlan) -> tuple[DecodeState, Tensor]:
        after = decode_round(task, runner, state, plan)
        cache = runner.cache
        held.append([buffer.data_ptr() for buffer in cache._buffers.values()])
        width = 5 if task.mode.drafting else 2
        layers = 2 + 2 * task.mode.uses_head
        hidden = 32 * task.mode.uses_head  # what the head may read later
        rows = len(state.has_seed)
        assert cache.nbytes == rows * (2 * layers * 2 * 8 + hidden) * (width * 4 + state.text.capacity) * 8
        return after

    def counted(self: BlockCache, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(loop, "decode_round", ran)
    monkeypatch.setattr(BlockCache, "__init__", counted)
    options = {"num_draft_states": 5, "max_new_tokens": 30, "eos_token_id": None, "confidence_threshold": 0.5}
    out = make_model().generate(PROMPTS + 1, decoding=mode, return_dict_in_generate=True, **options)
    assert len(held) > 3
    assert held == held[:1] * len(held)
    assert len(built) == 1
    assert out.past_key_values is built[0]


# ------------------------------------------------------------------------------------------------ torch.compile


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec", "static"])
def test_a_decode_with_a_compiled_backbone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for each number of rows, of states and of committed slots that are read, which come in buckets; a second
    decode of the same size needs no more than its own. Prefill is not compiled."""
    model = dampened(make_model(5, block_size=8), 0.3)
    options: dict[str, Any] = {"num_draft_states": 4, "max_new_tokens": 40, "decoding": mode, "eos_token_id": None}
    options |= {"do_sample": True, "top_k": 0}
    most = 2 if mode == "static" else 4
    usual = [model.generate(PROMPTS + 1, seed=seed, **options) for seed in range(2)]
    graphs: list[torch.fx.GraphModule] = []
    shapes: set[tuple[int, int, int]] = set()

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # as backend="eager" does

    backbone, compiled_backbone = model.backbone, torch.compile(model.backbone, fullgraph=True, dynamic=False, backend=counted)

    def called(ids: Tensor, positions: Tensor, mask: Tensor, cache: BlockCache, compiled: bool = True) -> Tensor:
        assert compiled == (cache._write.start < cache.scratch)
        if not compiled:
            return backbone(ids, positions, mask, cache, compiled=False)
        shapes.add((len(ids), ids.shape[1], mask.shape[-1]))
        return compiled_backbone(ids, positions, mask, cache)

    monkeypatch.setattr(model, "backbone", called)
    for seed in range(2):
        assert torch.equal(model.generate(PROMPTS + 1, seed=seed, **options), usual[seed])
        assert len(graphs) == len(shapes)
        rounds = {(rows, tokens // 8, keys - tokens) for rows, tokens, keys in shapes}
        assert {rows for rows, _, _ in rounds} <= {3, 2, 1}
        assert {states for _, states, _ in rounds} <= set(range(1, 1 + most))
        assert {read for _, _, read in rounds} <= {0, 48}  # 48 slots there are, less than READ_BUCKET
    assert len(shapes) == len(rounds) <= 3 * 2 * most
