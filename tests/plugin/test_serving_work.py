"""The work of a round on an engine beside its networks: launches, copies to the device, and reads
that make the host wait."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from mrp_serving.picker import EnginePicker
from mrp_serving.rounds import Rounds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from modeling_mrp import MRPForCausalLM
from tests.support.fake_engine import FakeEngine, FakeRequest, FakeScheduler, rounds_of
from tests.support.places import TINY

LAUNCHES, COPIES, READS, FORWARDS, SHORTLISTS, OTHERS = (
    "launches",
    "copies",
    "reads",
    "forwards",
    "shortlists",
    "others",
)
# They make room, and start nothing.
_NO_LAUNCH = ("empty", "new_empty", "empty_like", "lift_fresh")


class Work(TorchDispatchMode):
    """Counts operations, but for those of the networks with their picks and of the engine's
    pools."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.counts = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = not schema.is_mutable and any(
            one.alias_info is not None for one in schema.returns
        )
        name = schema.name.removeprefix("aten::")
        given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        if name in ("_local_scalar_dense", "nonzero") or any(
            isinstance(one, Tensor) and one.dtype == torch.bool for one in given
        ):
            # of a mask a device does not know how many it holds
            self.counts[READS] += not self.inside
        elif not is_view and name not in _NO_LAUNCH:
            self.counts[LAUNCHES] += not self.inside
        return func(*args, **(kwargs or {}))

    def watched(
        self, function: Callable[..., Any], kind: str, on_host: Tensor | None
    ) -> Callable[..., Any]:
        """Make a function that counts as one of a kind; nothing that it does counts besides.

        Args:
            function: The function.
            kind: What a call counts as.
            on_host: A tensor that lies on the host whatever the device, so that its numbers are
                there; None for a function that runs on the device.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            home = None if on_host is None else on_host.untyped_storage().data_ptr()
            at_home = isinstance(args[0], Tensor) and args[0].untyped_storage().data_ptr() == home
            self.counts[kind] += not (self.inside or at_home)
            self.inside += 1
            try:
                with nullcontext() if on_host is None else _disable_current_modes():
                    return function(*args, **kwargs)
            finally:
                self.inside -= 1

        return run


@contextmanager
def counting(engine: FakeEngine) -> Iterator[Work]:
    """Count on an engine; each tensor that is made of numbers stands for a copy to its device."""
    work, allocator, on_host = (
        Work(),
        engine.token_to_kv_pool_allocator,
        engine.req_to_token_pool.req_generation,
    )
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, kind, host in (
            *((engine, "forward", FORWARDS, None), (engine.model, "run_head", FORWARDS, None)),
            *((EnginePicker, "__call__", OTHERS, None), (EnginePicker, "among", SHORTLISTS, None)),
            *((allocator, "alloc", OTHERS, None), (allocator, "free_segment", OTHERS, None)),
            *(
                (torch, name, COPIES, on_host)
                for name in ("tensor", "as_tensor", "from_numpy", "frombuffer")
            ),
            *(
                (Tensor, name, READS, on_host)
                for name in ("tolist", "item", "numpy", "__bool__", "__int__")
            ),
        ):
            patch.setattr(owner, name, work.watched(getattr(owner, name), kind, host))
        with work:
            yield work


class CountedRounds(Rounds):
    """Counts the rounds of requests whose prompts are done."""

    found: list[Counter[str]]

    def __call__(self, engine: Any, batch: Any, requests: Any, *others: Any) -> Any:
        starts = zip(batch.extend_prefix_lens_cpu, requests, strict=True)
        if any(start + self.block <= len(req.origin_input_ids) for start, req in starts):
            return super().__call__(engine, batch, requests, *others)
        with counting(engine) as work:
            made = super().__call__(engine, batch, requests, *others)
        self.found.append(work.counts)
        return made


CASES: dict[str, dict[str, Any]] = {
    "drafts": {
        "decoding": "mrp_spec",
        "target": "dynamic",
        "confidence_threshold": 0.9,
        "num_draft_states": 4,
    },
    "shortlist": {
        "decoding": "mrp_spec",
        "target": "static",
        "num_draft_states": 4,
        "draft_shortlist": 16,
    },
    "stale": {"decoding": "self_spec", "target": "static", "num_draft_states": 4},
    "none": {"decoding": "dynamic", "confidence_threshold": 0.9},
}


@pytest.mark.parametrize("case", CASES)
def test_a_round_does_little_beside_its_networks(case: str) -> None:
    """One copy of numbers to the device for each network, one read behind each pick, and few
    launches."""
    model = MRPForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    engine, rounds = FakeEngine(model, 64, 128), rounds_of(model, CASES[case], CountedRounds)
    found = rounds.found = list[Counter[str]]()  # type: ignore[attr-defined]
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 200, (35,), generator=draw).tolist() for _ in range(2)]
    scheduler = FakeScheduler(engine, rounds)
    scheduler.add(*(FakeRequest(prompt, 20, rid=str(at)) for at, prompt in enumerate(prompts)))
    scheduler.run()
    most = {
        kind: max(counts[kind] for counts in found) for kind in (LAUNCHES, COPIES, READS, FORWARDS)
    }
    assert (most[LAUNCHES], most[COPIES], most[READS]) <= (
        (12, 1, 1) if case == "none" else (30, 4, 2)
    )
    for counts in found:
        # for a block that is kept
        assert counts[COPIES] <= counts[FORWARDS] + counts[SHORTLISTS] + (case == "stale")
        assert counts[READS] <= counts[FORWARDS]
    assert (most[FORWARDS] > 1) == (case in ("drafts", "shortlist"))
