"""A slice of the fuzz of pairs (`python -m benchmarks.pairs`), and faults put in by hand, each of
which it finds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.pairs import added, summary_of
from modeling_mrp.generate import generation
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.generate.output import Streams
from modeling_mrp.networks.cache import BlockCache
from modeling_mrp.rules.bans import Bans
from tests.support import capabilities
from tests.support.capabilities import REGISTRY, pair_named
from tests.support.faults import Stale
from tests.support.pairs import drawn, tried

SLOW = {"kernels interpreted", "a small device", "two devices", "bitsandbytes nf4", "torchao int8"}
QUICK = [capability for capability in REGISTRY if capability.name not in SLOW]


@pytest.mark.parametrize("part", range(4))
def test_some_pairs(part: int) -> None:
    """None of those that take a second."""
    for name, pair in drawn(QUICK, 7, 15 * part, 15):
        tried(name, pair)


def right_padding_is_text(patch: pytest.MonkeyPatch) -> None:
    check_ids = generation.check_ids

    def checked(*given: Any) -> torch.Tensor:
        real = check_ids(*given)
        return real | real.cumsum(1).bool()

    patch.setattr(generation, "check_ids", checked)


def an_edit_goes_unseen(patch: pytest.MonkeyPatch) -> None:
    cut = BlockCache.cut

    def blind(self: BlockCache, texts: list[list[int]], *others: Any) -> list[int]:
        self.ids = texts if all(map(len, self.ids)) else self.ids
        return cut(self, texts, *others)

    patch.setattr(BlockCache, "cut", blind)


def all_rows_have_one_seed(patch: pytest.MonkeyPatch) -> None:
    seeds = MRPGenerationConfig.seeds
    patch.setattr(MRPGenerationConfig, "seeds", lambda self, rows: seeds(self, rows)[:1] * rows)


def a_ban_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bans, "barred", lambda *_: set())


def rows_leave_their_adapters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generation, "adapters_of_rows", lambda _: None)


def a_stream_never_ends(patch: pytest.MonkeyPatch) -> None:
    send = Streams.__call__

    def late(self: Streams, rows: Any) -> None:
        send(self, [row for row in rows if row.stop is None])

    patch.setattr(Streams, "__call__", late)


def a_recording_is_stale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(capabilities, "TapeRecorder", Stale)


def a_head_is_no_obstacle(patch: pytest.MonkeyPatch) -> None:
    check = MRPGenerationConfig.check
    patch.setattr(
        MRPGenerationConfig, "check", lambda self, block, has_head: check(self, block, True)
    )


# By fault, a pair that meets it.
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, str]]] = [
    (right_padding_is_text, ("padding on the right", "a batch of 6")),
    (an_edit_goes_unseen, ("many new tokens", "cache edited")),
    (all_rows_have_one_seed, ("num_return_sequences", "temperature")),
    (a_ban_is_dropped, ("bad_words_ids", "mrp_spec")),
    (rows_leave_their_adapters, ("many eos", "a LoRA for each row")),
    (a_stream_never_ends, ("streamer: Blocks", "self_spec")),
    (a_recording_is_stale, ("graphs taped", "many new tokens")),
    (a_head_is_no_obstacle, ("no head", "mrp_spec")),
]


@pytest.mark.parametrize(
    ("fault", "names"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_faults_are_found(
    fault: Any, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within thirty cases of a pair; without the fault the first ones pass."""
    pair = pair_named(*names)
    for number in range(2):
        tried(f"fault/{number}", pair)
    fault(monkeypatch)

    def until_found() -> None:
        for number in range(30):
            tried(f"fault/{number}", pair)

    with pytest.raises((AssertionError, ValueError, AttributeError, RuntimeError, TypeError)):
        until_found()


def test_results_add_up() -> None:
    """Of runs whose cases follow each other, and of one seed and registry alone."""
    lines = []
    for number in range(5):
        pair = ["a", "bc"[number % 2]]
        lines.append({"case": number, "pair": pair, "refused": number == 1, "tokens": number})
    lines[3]["error"] = "ValueError: x"

    def result(first: int, end: int) -> dict[str, Any]:
        run = {"commit": "c", "first": first, "cases": end - first}
        head = {"options": {"seed": 1}, "registry": 3, "seconds": 2, "runs": [run]}
        return {**head, **summary_of(lines[first:end])}

    together = added(result(0, 3), result(3, 5))
    runs = [{"commit": "c", "first": 0, "cases": 3}, {"commit": "c", "first": 3, "cases": 2}]
    assert together == {**result(0, 5), "seconds": 4, "runs": runs}
    for other in ({"registry": 4}, {"options": {"seed": 2}}):
        with pytest.raises(ValueError, match=r"and is .*: begin again, without --add"):
            added(result(0, 3), result(3, 5) | other)
