"""The work of a round on an engine beside its networks: launches, copies to the device, and reads that make the host wait."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import TINY
from fake_engine import FakeEngine, FakeRequest, FakeScheduler, abort
from mrp_serving.options import settings_of
from mrp_serving.picker import EnginePicker
from mrp_serving.rounds import Rounds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.cost_model import ALONE, DRAFTED
from modeling_mrp import MRPForCausalLM

LAUNCHES, COPIES, READS, FORWARDS, SHORTLISTS = "launches", "copies", "reads", "forwards", "shortlists"
# They make room, and start nothing.
_NO_LAUNCH = ("empty", "new_empty", "empty_like", "lift_fresh")


class Work(TorchDispatchMode):
    """Counts operations, but for those of the networks with their picks and of the engine's pools.

    Args:
        on_host: Tensors that lie on the host whatever the device.
    """

    def __init__(self, on_host: list[Tensor]) -> None:
        super().__init__()
        self.on_host, self.inside = [tensor.untyped_storage().data_ptr() for tensor in on_host], 0
        self.counts: Counter[str] = Counter()

    def note(self, kind: str) -> None:
        self.counts[kind] += not self.inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = not schema.is_mutable and any(one.alias_info is not None for one in schema.returns)
        name = schema.name.removeprefix("aten::")
        given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        if name in ("_local_scalar_dense", "nonzero") or any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in given
        ):
            self.note(READS)  # of a mask a device does not know how many it holds
        elif not is_view and name not in _NO_LAUNCH:
            self.note(LAUNCHES)
        return func(*args, **(kwargs or {}))

    def within(self, function: Callable[..., Any], kind: str | None) -> Callable[..., Any]:
        """Make a function whose operations are not counted; it may be."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.counts[kind or "others"] += 1
            self.inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.inside -= 1

        return run

    def crossing(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Make a function that counts as numbers that go from host to device, or back."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not (isinstance(args[0], Tensor) and args[0].untyped_storage().data_ptr() in self.on_host):
                self.note(kind)
            with _disable_current_modes():
                return function(*args, **kwargs)

        return run


@contextmanager
def counting(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Count on an engine; each tensor that is made of numbers stands for a copy to its device."""
    work, allocator = Work([engine.req_to_token_pool.req_generation]), engine.token_to_kv_pool_allocator
    with monkeypatch.context() as patch:
        for owner, name, kind in (
            *((engine, "forward", FORWARDS), (engine.model, "run_head", FORWARDS)),
            *((EnginePicker, "__call__", None), (EnginePicker, "among", SHORTLISTS)),
            *((allocator, "alloc", None), (allocator, "free_segment", None)),
        ):
            patch.setattr(owner, name, work.within(getattr(owner, name), kind))
        for owner, name, kind in (
            *((torch, name, COPIES) for name in ("tensor", "as_tensor", "from_numpy", "frombuffer")),
            *((Tensor, name, READS) for name in ("tolist", "item", "numpy", "__bool__", "__int__")),
        ):
            patch.setattr(owner, name, work.crossing(getattr(owner, name), kind))
        with work:
            yield work


@pytest.fixture(scope="module")
def model() -> Any:
    return MRPForCausalLM.from_pretrained(TINY, dtype=torch.float64)


class CountedRounds(Rounds):
    """Counts the rounds of requests whose prompts are done."""

    def __init__(self, model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        config = model.config
        super().__init__(settings_of(options, {}, config.block_size, True), config.block_size, config.mask_token_id, abort)
        self.monkeypatch, self.found = monkeypatch, list[Counter[str]]()

    def __call__(self, engine: Any, batch: Any, requests: Any, *others: Any) -> Any:
        starts = zip(batch.extend_prefix_lens_cpu, requests, strict=True)
        if any(start + self.block <= len(req.origin_input_ids) for start, req in starts):
            return super().__call__(engine, batch, requests, *others)
        with counting(engine, self.monkeypatch) as work:
            made = super().__call__(engine, batch, requests, *others)
        self.found.append(work.counts)
        return made


CASES: dict[str, dict[str, Any]] = {
    "drafts": {"decoding": "mrp_spec", "target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4},
    "shortlist": {"decoding": "mrp_spec", "target": "static", "num_draft_states": 4, "draft_shortlist": 16},
    "stale": {"decoding": "self_spec", "target": "static", "num_draft_states": 4},
    "none": {"decoding": "dynamic", "confidence_threshold": 0.9},
}


@pytest.mark.parametrize("case", CASES)
def test_a_round_does_little_beside_its_networks(model: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One copy of numbers to the device for each network, one read behind each pick, and few launches."""
    engine, rounds = FakeEngine(model, 64, 128), CountedRounds(model, CASES[case], monkeypatch)
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 200, (35,), generator=draw).tolist() for _ in range(2)]
    scheduler = FakeScheduler(engine, rounds)
    scheduler.add(*(FakeRequest(prompt, 20, rid=str(at)) for at, prompt in enumerate(prompts)))
    scheduler.run()
    most = {kind: max(counts[kind] for counts in rounds.found) for kind in (LAUNCHES, COPIES, READS, FORWARDS)}
    least = ALONE if case == "none" else DRAFTED  # what predictions are made from
    assert (most[LAUNCHES], most[COPIES], most[READS]) <= (least.launches, least.copies, least.reads)
    for counts in rounds.found:
        assert counts[COPIES] <= counts[FORWARDS] + counts[SHORTLISTS] + (case == "stale")  # for a block that is kept
        assert counts[READS] <= counts[FORWARDS]
    assert (most[FORWARDS] > 1) == (case in ("drafts", "shortlist"))
