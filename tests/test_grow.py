"""The kernel that grows drafts against its twin, in real decodes and on odds that are no numbers."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from conftest import make_model
from draft_tables import A, B, C, D, M, draft_table, memory_of
from mrp_trainer.data import encode
from mrp_trainer.tasks import make_problem
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import loop
from modeling_mrp.kernels.dispatch import Dispatch, triton
from modeling_mrp.kernels.grow import DraftTable, grow_kernel
from modeling_mrp.rules.drafting import SOURCE, Draft, grow, grow_ref
from modeling_mrp.rules.revealing import Dynamic, EntropyBound, RevealRule

pytestmark = [
    pytest.mark.skipif(triton is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.usefixtures("few_candidates"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-5  # chances this close, relatively, are a tie to float32 sums in another order


class Compared:
    """Grows every draft of a decode both ways; rows that differ had a tie in the twin. Decodes go on with the twin's states."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows = self.differing = self.states = self.found = 0

        def both(table: DraftTable, size: int, most: int, dispatch: Dispatch) -> Draft:
            slots, valid = grow_kernel(table, size, most)
            with pytest.MonkeyPatch.context() as inner:
                margins = Margins(inner)
                expected = Draft(*grow_ref(table, size))
            differs = (slots != expected.slots).any(-1).any(-1) | (valid != expected.valid).any(-1)
            assert not (differs & (margins.least > NEAR)).any()
            self.rows, self.differing = self.rows + len(slots), self.differing + int(differs.sum())
            self.states += int(valid[:, 1:].sum())
            self.found += int((slots[..., SOURCE] > 0).sum())  # told by a remembered or re-read state
            return expected

        patch.setattr(loop, "grow", both)


class Margins:
    """[rows] `least`: how close, relatively, the two best chances ever came to each other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.least: Tensor = torch.tensor(1.0)
        largest = Tensor.max

        def noted(chance: Tensor, *dim: int) -> Any:
            if chance.is_floating_point():
                best, second = chance.topk(2).values.unbind(-1)
                self.least = self.least.minimum(torch.where(best > 0, (best - second) / best, 1.0))
            return largest(chance, *dim)

        patch.setattr(Tensor, "max", noted)


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    return make_model(3, vocab_size=99).float().to(DEVICE)


PROMPTS = torch.tensor([[1, 2, 3, 4, 5, 6], [0, 0, 13, 14, 15, 16]], device=DEVICE)
DECODES: dict[str, dict[str, Any]] = {
    "four states": {"decoding": "mrp_spec", "draft_branches": 3, "max_new_tokens": 4},
    "eight states": {"decoding": "mrp_spec", "num_draft_states": 8, "max_new_tokens": 3},
    "a chain of eight": {"decoding": "self_spec", "num_draft_states": 8, "draft_branches": 1},
    "an end in the block": {"decoding": "self_spec", "eos_token_id": [12, 20, 65], "min_new_tokens": 2},
    "dynamic": {"decoding": "mrp_spec", "target": "dynamic", "confidence_threshold": 0.15, "draft_branches": 4},
    "entropy_bound": {"decoding": "self_spec", "target": "entropy_bound", "entropy_threshold": 9.0, "draft_branches": 3},
    "entropy_bound, room for few": {"decoding": "self_spec", "target": "entropy_bound", "entropy_threshold": 3.0},
    "sequential": {"decoding": "mrp_spec", "target": "sequential", "denoising_steps": 3},
    "several a step": {"decoding": "self_spec", "denoising_steps": 3, "draft_branches": 3},
    "samples": {"decoding": "mrp_spec", "do_sample": True, "temperature": 0.5, "seed": 3},
    "truncated samples": {"decoding": "self_spec", "target": "dynamic", "do_sample": True, "top_k": 5, "seed": 3},
    "rows of other lengths": {"decoding": "self_spec", "eos_token_id": [97], "draft_branches": 3},
}


@pytest.mark.parametrize("name", DECODES)
def test_equals_its_twin_in_decodes(name: str, model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and validity of every draft; at most one row in twenty was near a tie and differs."""
    compared = Compared(monkeypatch)
    options = {"num_draft_states": 4, "draft_branches": 2, "max_new_tokens": 6, "eos_token_id": None} | DECODES[name]
    model.generate(PROMPTS, attention_mask=(PROMPTS > 0).long(), kernels=False, **options)
    assert compared.states > 4
    assert compared.found > 0 or "states" not in name
    print(f"{name}: {compared.differing} of {compared.rows} rows differ")
    assert compared.differing <= max(1, compared.rows // 20)


def test_equals_its_twin_where_text_is_filled_in(model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Compared(monkeypatch)
    given = torch.tensor([[M, 5, M, M, 7, M, M, 8, 9], [M, M, M, 6, M, 7, 8, M, M]], device=DEVICE)
    model.generate(PROMPTS, infill_ids=given, decoding="self_spec", num_draft_states=4, eos_token_id=[20], kernels=False)
    assert compared.states > 8
    assert compared.differing <= 1


def test_equals_its_twin_in_a_trained_model(
    tiny_model: MRPForCausalLM, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared(monkeypatch)
    ids = torch.tensor([encode(make_problem("math", "tune", 1), tiny_tokenizer)[0]], device=DEVICE)
    options: dict[str, Any] = {"num_draft_states": 4, "draft_branches": 2, "max_new_tokens": 12, "kernels": False}
    copy.deepcopy(tiny_model).to(DEVICE).generate(ids, decoding="mrp_spec", **options)
    assert compared.states > 8
    assert compared.differing <= max(1, compared.rows // 20)


def test_decodes_cost_the_same(model: MRPForCausalLM) -> None:
    """All kernels on or off: the same text from the same drafts."""
    options: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 4, "draft_branches": 2, "max_new_tokens": 4}
    options |= {"eos_token_id": None, "return_dict_in_generate": True}
    on, off = (model.generate(PROMPTS[:1], kernels=kernels, **options) for kernels in (True, False))
    assert torch.equal(on.sequences, off.sequences)
    for name in ("row_forwards", "drafted", "accepted"):
        assert torch.equal(getattr(on.stats, name), getattr(off.stats, name))


def both_ways(table: DraftTable, size: int) -> tuple[Draft, Draft]:
    on_device = {f.name: getattr(table, f.name).to(DEVICE) for f in fields(table) if f.type is Tensor}
    table = replace(table, **on_device)
    return Draft(*grow_kernel(table, size, size)), Draft(*grow_ref(table, size))


@pytest.mark.parametrize(
    "rule", [Dynamic(0.3), Dynamic(0.7), EntropyBound(1.0), EntropyBound(5.0), EntropyBound(9.0)], ids=repr
)
@pytest.mark.parametrize("branches", [1, 2, 4])
def test_several_reveals(rule: RevealRule, branches: int) -> None:
    """Thresholds and bounds with room for one reveal, some or all: rows of other odds, so that branches are of all kinds."""
    rows = [
        [0.9, 0.5, 0.2, 0.0],
        [0.9, 0.8, 0.6, 0.4],
        [0.1, -0.2, 0.25, -0.4],
        [3.0, 2.0, 1.0, 0.35],
        [float("nan"), 4.0, 0.65, 0.1],
    ]
    draft, expected = both_ways(draft_table(*(([A, B, C, D], odds) for odds in rows), branches=branches, rule=rule), 8)
    assert torch.equal(draft.valid, expected.valid)
    assert torch.equal(draft.slots[draft.valid], expected.slots[draft.valid])


@pytest.mark.parametrize(
    ("odds", "states"),
    [
        ([0.9, 0.5, 0.2, 0.0], 5),
        ([0.5, 0.5, 0.5, 0.5], 5),
        ([float("inf"), 0.5, float("inf"), 0.0], 5),
        ([float("nan"), 0.5, 0.2, 0.0], 5),  # nor one that is no number
        ([float("-inf")] * 4, 1),
        ([-1e37, -3e37, 0.0, float("-inf")], 4),  # the last position never comes
        ([2e4, 1e4, 0.0, 0.0], 5),
    ],
    ids=str,
)
def test_odds_of_all_kinds(odds: list[float], states: int) -> None:
    """Beside a row of which nothing tells."""
    table = draft_table(*[([A, B, C, D], odds)] * 2, branches=2)
    table.first[1, SOURCE] = -1
    draft, expected = both_ways(table, 5)
    assert torch.equal(draft.valid, expected.valid)
    assert torch.equal(draft.slots[draft.valid], expected.slots[draft.valid])
    assert draft.valid[1].tolist() == [True, False, False, False, False]
    assert draft.valid[0].sum() == states


def test_remembered_twins_meet() -> None:
    """0.3 and 0.3 for two ways to one state: it comes before the one of 0.4."""
    said = ([A, B, C], [0.0, 0.0, 0.0])
    entries = [([A, M, M], [A, B, M], said), ([M, B, M], [A, B, M], said), ([M, M, 7], [A, M, 7], said)]
    table = draft_table(([A, B, C], [-0.301, -0.301, -0.229]), memory=memory_of(*entries, start=3))
    draft, expected = both_ways(table, 5)
    assert draft.slots[0, 1, :3].tolist() == [A, B, M]
    assert torch.equal(draft.slots, expected.slots)
    assert torch.equal(draft.valid, expected.valid)


def test_a_table_that_registers_do_not_hold_is_left_to_the_twin() -> None:
    """A state of a block of four is 16 numbers: 2 ** 14 of them are 1,024 states, taken or not."""
    table = draft_table(([A, B, C, D], [0.9, 0.5, 0.2, 0.0]), branches=3)
    assert table.fits(256)
    assert not table.fits(257)
    assert grow(table, 257, 257, Dispatch(True)).valid.sum() > 5
