"""The kernel that grows a lattice against its twin, on the lattices of real decodes and on odds that are no numbers."""

from typing import Any

import pytest
import torch
from conftest import make_model
from mrp_trainer.data import encode
from mrp_trainer.tasks import make_problem
from test_lattice import drafting_decoder, remember
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.decoding import Decoder
from modeling_mrp.generate.drafting import Lattice
from modeling_mrp.kernels.dispatch import triton

pytestmark = [
    pytest.mark.skipif(triton is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities, where a kernel is interpreted
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-5  # chances this close, relatively, are a tie to float32 sums in another order
M, A, B, C, D = 60, 10, 11, 12, 13


class Compared:
    """Grows every drafting lattice both ways; rows that differ had a tie in the twin. Decodes go on with the twin's states."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows = self.differing = self.states = self.found = 0
        twin = Lattice._grown_ref

        def both(lattice: Lattice, size: int) -> tuple[Tensor, Tensor]:
            ground = lattice._ground()
            slots, valid = ground.grown(size, lattice.decoder.width)
            with pytest.MonkeyPatch.context() as inner:
                margins = Margins(inner)
                expected = twin(lattice, size)
            differs = (slots != expected[0]).any(-1).any(-1) | (valid != expected[1]).any(-1)
            assert not (differs & (margins.least > NEAR)).any()
            self.rows, self.differing = self.rows + len(slots), self.differing + int(differs.sum())
            self.states += int(valid[:, 1:].sum())
            self.found += int((slots[..., lattice.source] > 0).sum())  # told by a remembered or re-read state
            return expected

        patch.setattr(Lattice, "_grown_ref", both)


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
    "chains of two": {"decoding": "self_spec", "num_draft_states": 2, "draft_branches": 1},
    "four states": {"decoding": "mrp_spec", "num_draft_states": 4, "draft_branches": 3},
    "eight states": {"decoding": "mrp_spec", "num_draft_states": 8, "draft_branches": 2, "max_new_tokens": 4},
    "a chain of eight": {"decoding": "self_spec", "num_draft_states": 8, "draft_branches": 1},
    "an end in the block": {"decoding": "self_spec", "eos_token_id": [12, 20, 65], "min_new_tokens": 2},
    "rows of other lengths": {"decoding": "self_spec", "eos_token_id": [97], "draft_branches": 3},
}


@pytest.mark.parametrize("name", DECODES)
def test_equals_its_twin_in_decodes(name: str, model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and validity of every lattice; at most one row in twenty was near a tie and differs."""
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


@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_equals_its_twin_in_a_trained_model(
    mode: str, tiny_model: MRPForCausalLM, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared(monkeypatch)
    ids = torch.tensor([encode(make_problem("math", "tune", 1), tiny_tokenizer)[0]])
    tiny_model.generate(ids, decoding=mode, num_draft_states=4, draft_branches=2, max_new_tokens=20, kernels=False)
    assert compared.states > 8
    assert compared.differing <= max(1, compared.rows // 20)


@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_decodes_cost_the_same(mode: str, model: MRPForCausalLM) -> None:
    """All kernels on or off: the same text from the same drafts."""
    options: dict[str, Any] = {"decoding": mode, "num_draft_states": 4, "draft_branches": 2, "max_new_tokens": 4}
    options |= {"eos_token_id": None, "return_dict_in_generate": True}
    on, off = (model.generate(PROMPTS[:1], kernels=kernels, **options) for kernels in (True, False))
    assert torch.equal(on.sequences, off.sequences)
    for name in ("row_forwards", "drafted", "accepted"):
        assert torch.equal(getattr(on.stats, name), getattr(off.stats, name))


# ------------------------------------------------------------------------------------------------ by hand


def both_ways(decoder: Decoder, size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    lattice = Lattice(decoder, size, drafting=True)
    return lattice._ground().grown(size, size), lattice._grown_ref(size)


@pytest.mark.skipif(DEVICE == "cuda", reason="made-up decoders are on the CPU, where the kernel is interpreted")
@pytest.mark.parametrize(
    ("odds", "states"),
    [
        ([0.9, 0.5, 0.2, 0.0], 5),
        ([0.5, 0.5, 0.5, 0.5], 5),
        ([float("inf"), 0.5, float("inf"), 0.0], 5),
        ([float("nan"), 0.5, 0.2, 0.0], 1),
        ([float("-inf")] * 4, 1),
        ([-1e37, -3e37, 0.0, float("-inf")], 4),  # the last position never comes
        ([2e4, 1e4, 0.0, 0.0], 5),
    ],
    ids=str,
)
def test_odds_of_all_kinds(odds: list[float], states: int) -> None:
    """Beside a row that has no seed."""
    table = ([A, B, C, D], odds)
    decoder = drafting_decoder([table, table], branches=2)
    decoder.has_seed[1] = False
    (slots, valid), (expected, expected_valid) = both_ways(decoder, 5)
    assert torch.equal(valid, expected_valid)
    assert torch.equal(slots[valid], expected[valid])
    assert valid[1].tolist() == [True, False, False, False, False]
    assert valid[0].sum() == states


@pytest.mark.skipif(DEVICE == "cuda", reason="made-up decoders are on the CPU, where the kernel is interpreted")
def test_remembered_twins_meet() -> None:
    """0.3 and 0.3 for two ways to one state: it comes before the one of 0.4."""
    decoder = drafting_decoder([([A, B, C], [-0.301, -0.301, -0.229])])
    said = ([A, B, C], [0.0, 0.0, 0.0])
    remember(decoder, [([A, M, M], [A, B, M], said), ([M, B, M], [A, B, M], said), ([M, M, 7], [A, M, 7], said)])
    (slots, valid), (expected, expected_valid) = both_ways(decoder, 5)
    assert slots[0, 1, :3].tolist() == [A, B, M]
    assert torch.equal(slots, expected)
    assert torch.equal(valid, expected_valid)


def test_a_table_that_registers_do_not_hold_is_left_to_the_twin(model: MRPForCausalLM) -> None:
    """A state of a block of four is 16 numbers: 2 ** 14 of them are 1,024 states, taken or not."""
    assert model.config.block_size == 4
    decoder = drafting_decoder([([A, B, C, D], [0.9, 0.5, 0.2, 0.0])], branches=3)
    ground = Lattice(decoder, 5, drafting=True)._ground()
    assert ground.fits(256)
    assert not ground.fits(257)
