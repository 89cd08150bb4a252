"""What a device would make the host wait for, a cache that stays where it is, and a compiled backbone in a whole decode."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from helpers import LIVELY, every_mode
from tape import waits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.random_cases import dampened, make_model
from modeling_mrp.networks.cache import BlockCache
from modeling_mrp.networks.networks import Networks

PROMPTS = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8], [0, 9, 10, 11, 12]])
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    # transformers' top-k and top-p are not left out: they do not wait either.
    "sampled": {
        **LIVELY,
        "top_k": 20,
        "top_p": 0.9,
        "temperature": 0.8,
        "eos_token_id": [3, 9],
        "min_new_tokens": 7,
        "seed": 4,
    },
}


class Waits(TorchDispatchMode):
    """Notes every operation for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        if waits(name, args):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@every_mode
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_host_waits_for_what_was_picked_alone(sampling: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each network once; no operation of a round needs a result on the host, nor has a size that depends on one."""
    reads = 0
    read, spread = Networks._on_host, Networks._spread

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return function(*args)

        return run

    monkeypatch.setattr(Networks, "_on_host", counted(read))
    monkeypatch.setattr(Networks, "_spread", counted(spread))
    options: dict[str, Any] = {"decoding": mode, "max_new_tokens": 13, "mrp_steps": 2, "num_draft_states": 5, "draft_passes": 2}
    model, found = dampened(make_model(4), 0.3), Waits()
    decode = Networks.score

    def watched(self: Networks, *args: Any) -> Any:
        with found:
            return decode(self, *args)

    monkeypatch.setattr(Networks, "score", watched)
    mask = (PROMPTS > 0).long()
    out = model.generate(PROMPTS, attention_mask=mask, return_dict_in_generate=True, **options, **SAMPLINGS[sampling])
    assert found.found == []
    assert 3 < reads <= sum(out.stats.forwards.values())


@every_mode
def test_the_cache_stays_where_it_is(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds allocate no keys and values: (scratch + capacity) slots of 2 KV heads of 8 numbers in float64 for each row in each
    of 2 + 2 layers, from the first round to the last."""
    held: list[list[int]] = []
    built: list[BlockCache] = []
    score, init = Networks.score, BlockCache.__init__

    def scored(self: Networks, *args: Any) -> Any:
        held.append([buffer.data_ptr() for buffer in self.cache._buffers.values()])
        return score(self, *args)

    def counted(self: BlockCache, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Networks, "score", scored)
    monkeypatch.setattr(BlockCache, "__init__", counted)
    options = {"num_draft_states": 5, "max_new_tokens": 30, "eos_token_id": None, "confidence_threshold": 0.5}
    out = make_model().generate(PROMPTS + 1, decoding=mode, return_dict_in_generate=True, **options)
    assert len(held) > 3
    assert held == held[:1] * len(held)
    assert len(built) == 1
    assert out.past_key_values is built[0]
    with_head, states = mode.startswith("mrp_"), 5 if mode.endswith("spec") else 2
    per_slot = (2 + 2 * with_head) * 2 * 2 * 8
    assert built[0].nbytes == 3 * 8 * (per_slot * (states * 4 + 36) + 32 * with_head * 36)


# ------------------------------------------------------------------------------------------------ torch.compile


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec", "static"])
def test_a_decode_with_a_compiled_backbone(mode: str) -> None:
    """The same texts. One graph for each number of states and each power of two of slots that are read: a second decode of
    the same size needs no other, and prefill is not compiled."""
    model = dampened(make_model(5, block_size=8), 0.3)
    options: dict[str, Any] = {"num_draft_states": 4, "max_new_tokens": 40, "decoding": mode, "eos_token_id": None}
    options |= {"do_sample": True, "top_k": 0}
    usual = [model.generate(PROMPTS + 1, seed=seed, **options) for seed in (0, 0, 1)]
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # as backend="eager" does

    model.model.compile(fullgraph=True, dynamic=False, backend=counted)
    counts = []
    for seed, expected in zip((0, 0, 1), usual, strict=True):
        assert torch.equal(model.generate(PROMPTS + 1, seed=seed, **options), expected)
        counts.append(len(graphs))
    assert 0 < counts[0] == counts[1] <= counts[2] <= (2 if mode == "static" else 4)
