"""The parts of serving on their own: what is borrowed, how states are laid out, picks, rows between rounds, checkpoints."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TINY
from fake_engine import FakeAllocator, FakePool, FakeRequest
from mrp_serving.checkpoint import ARCHITECTURES, backbone_weights, head_weight, open_checkpoint
from mrp_serving.picker import CountPenalties, Sampling
from mrp_serving.room import fetch_what_fits, whole_blocks
from mrp_serving.scratch import borrowed
from published import as_published
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.kernels.dispatch import AUTOMATIC

# ------------------------------------------------------------------------------------------------- what is borrowed


@pytest.mark.parametrize(
    ("rows", "pages", "width"),
    [(8, 9, 3), (5, 9, 2), (8, 5, 2), (1, 9, 0), (8, 1, 0)],
    ids=["all", "rows", "pages", "no row", "no page"],
)
def test_what_is_lent_is_what_is_there_and_comes_back(rows: int, pages: int, width: int) -> None:
    pool, allocator, asked = FakePool(rows, 32), FakeAllocator(pages, 4), []
    with borrowed(pool, allocator, asked.append, 2, 3, 4) as lent:
        assert (lent.width, [len(rows) for rows in lent.rows], lent.slots.shape) == (width, [width] * 2, (2 * width, 4))
        assert (len(pool.free_slots), len(allocator.free_pages)) == (rows - 2 * width, pages - 2 * width)
    assert (len(pool.free_slots), len(allocator.free_pages)) == (rows, pages)
    wanted = 2 * min(3, rows // 2) * 4
    assert asked == ([wanted] if pages * 4 < wanted else [])  # prefixes that nobody uses make room first


def test_what_is_lent_comes_back_from_a_round_that_fails() -> None:
    pool, allocator = FakePool(8, 32), FakeAllocator(8, 4)
    with pytest.raises(ZeroDivisionError), borrowed(pool, allocator, len, 2, 3, 4):  # type: ignore[arg-type]
        1 / 0  # noqa: B018
    assert (len(pool.free_slots), len(allocator.free_pages)) == (8, 8)


# ------------------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("algorithm", "slots", "running", "taken", "limit"),
    [
        *(("MRP", 83, 0, 2, 24), ("MRP", 38, 0, 1, 16), ("MRP", 17, 0, 1, 1), ("MRP", 76, 1, 1, 24), ("MRP", 75, 1, 0, 24)),
        ("LowConfidence", 80, 1, 4, 24),
    ],
)
def test_requests_wait_for_room_in_their_order(algorithm: str, slots: int, running: int, taken: int, limit: int) -> None:
    """In blocks of 4, three left over, each takes 32, until it ends. The first begins where nothing runs, with the limit
    that the pool has room for; another algorithm's are the engine's."""
    waiting = [FakeRequest([0] * 8, 24, rid=str(number)) for number in range(4)]
    begun = [FakeRequest([0] * 9, 22) for _ in range(running)]
    scheduler = SimpleNamespace(waiting_queue=list(waiting), max_total_num_tokens=slots)
    scheduler.dllm_config = SimpleNamespace(algorithm=algorithm, block_size=4)
    scheduler.model_config = SimpleNamespace(context_len=64)
    scheduler.dllm_manager = SimpleNamespace(waiting_queue=list(begun))

    def take_all(engine: Any) -> None:
        engine.dllm_manager.waiting_queue += engine.waiting_queue
        engine.waiting_queue = []

    fetch_what_fits(take_all, scheduler)
    assert scheduler.dllm_manager.waiting_queue == begun + waiting[:taken]
    assert scheduler.waiting_queue == waiting[taken:]
    assert [req.sampling_params.max_new_tokens for req in waiting] == [limit, 24, 24, 24]


@pytest.mark.parametrize(("algorithm", "length"), [("MRP", 4), ("LowConfidence", 2)])
def test_a_row_is_scheduled_by_whole_blocks(algorithm: str, length: int) -> None:
    adder = SimpleNamespace(dllm_config=SimpleNamespace(algorithm=algorithm, block_size=4), rem_dllm_tokens=12)
    assert whole_blocks(lambda adder, req: 2, adder) == length


# ------------------------------------------------------------------------------------------------- picks


def picker(stock: bool, shortlist: int = 0) -> Any:
    fixed = {"lm_head_weight": torch.empty(11, 4), "mask_token_id": 3, "dispatch": AUTOMATIC}
    return Sampling(stock=stock, entropy=True).picker(torch.Tensor.clone, shortlist, **fixed)


def test_picks_are_those_of_the_engines_own_algorithm() -> None:
    logits = torch.randn(9, 11, generator=torch.Generator().manual_seed(0)) * 3
    picks = picker(stock=True)(logits)
    probability = logits.softmax(-1)
    other = logits.argmax(-1) != 3
    assert torch.equal(picks.token[other], logits.argmax(-1)[other])
    assert torch.allclose(picks.odds[other].sigmoid().float(), probability.amax(-1)[other])
    assert (picks.token != 3).all()
    assert not other.all(), "the mask id has to be the likeliest somewhere"
    assert torch.allclose(picks.entropy, torch.distributions.Categorical(logits=logits).entropy())


def test_probabilities_that_round_to_the_same_number_tie() -> None:
    logits = torch.zeros(2, 11)
    logits[0, 5], logits[1, 5] = 30.0, 40.0
    rounded, exact = picker(stock=True)(logits).odds, picker(stock=False)(logits).odds
    assert rounded[0] == rounded[1]
    assert exact[0] < exact[1]


def test_the_shortlist_is_what_the_other_tokens_leave() -> None:
    """The likeliest tokens with their scores, and the sum of all others, the mask id among these."""
    logits = torch.randn(9, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    found = picker(stock=True, shortlist=4)(logits.clone()).shortlist
    scores, ids = logits.topk(4)
    assert (ids == 3).any(), "the mask id has to be among the likeliest somewhere"
    assert torch.equal(found[:, :4].long(), ids)
    assert torch.equal(found[:, 4:8], scores.masked_fill(ids == 3, -torch.inf))
    others = [[token for token in range(11) if token == 3 or token not in row] for row in ids.tolist()]
    rest = torch.stack([row[these].logsumexp(0) for row, these in zip(logits, others, strict=True)])
    assert torch.allclose(found[:, 8], rest)


def test_penalties_count_generated_tokens() -> None:
    """Of positions with the ids [1, 5 | 5, 6, 5] and [1, 5 | 6, 3, 3] before them, the prompt of two tokens not counted."""
    made = CountPenalties(2, 0.5, 0.25)(torch.tensor([[1, 5, 5, 6, 5], [1, 5, 6, 3, 3]]), torch.zeros(2, 8))
    wanted = torch.zeros(2, 8)
    wanted[0, 5], wanted[0, 6], wanted[1, 6], wanted[1, 3] = -1.25, -0.75, -0.75, -1.25
    assert torch.equal(made, wanted)


# ------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(autouse=True)
def anew() -> None:
    open_checkpoint.cache_clear()


@pytest.fixture
def head_folder(tmp_path: Path, tiny_model: MRPForCausalLM) -> Path:
    shutil.copytree(TINY, tmp_path / "backbone")
    model = MRPForCausalLM.from_pretrained(tmp_path / "backbone")
    model.save_pretrained(tmp_path / "head", head_only=True)
    return tmp_path / "head"


def test_the_three_layouts_are_opened(head_folder: Path, tmp_path: Path) -> None:
    whole, head, published = (
        open_checkpoint(str(at), None) for at in (TINY, head_folder, as_published(TINY, tmp_path / "published"))
    )
    assert all(
        each.config.has_head and each.config.block_size == 16 and each.config.mask_token_id == 3
        for each in (whole, head, published)
    )
    assert whole.defaults["num_draft_states"] == "auto"
    assert set(MRPConfig.from_pretrained(tmp_path / "published").architectures) <= set(ARCHITECTURES)


def test_a_head_repository_is_served_with_the_backbone_that_it_names(head_folder: Path) -> None:
    with safe_open(head_folder / "model.safetensors", framework="pt") as tensors:
        assert all(head_weight(name) for name in tensors.keys())  # noqa: SIM118
    config = MRPConfig.from_pretrained(head_folder)
    found = dict(backbone_weights(config, str(head_folder)))
    wanted = {name: tensor for name, tensor in load_file(TINY / "model.safetensors").items() if head_weight(name) is None}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def changed_config(folder: Path, **fields: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(folder)


def test_a_head_says_how_its_backbone_is_quantized(head_folder: Path) -> None:
    quantized = {"quantization_config": {"quant_method": "w8a8_int8"}}
    changed_config(head_folder.parent / "backbone", **quantized)
    with pytest.raises(ValueError, match=r"has another quantization_config.*copy the backbone's into its config\.json"):
        open_checkpoint(str(head_folder), None)
    assert open_checkpoint(changed_config(head_folder, **quantized), None).config.has_head


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "no-head")
    tensors = {name: each for name, each in load_file(TINY / "model.safetensors").items() if head_weight(name) is None}
    save_file(tensors, tmp_path / "no-head" / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: mrp_head\.eh_proj\.weight"):
        open_checkpoint(str(tmp_path / "no-head"), None)
    assert not open_checkpoint(changed_config(tmp_path / "no-head", num_nextn_predict_layers=0), None).config.has_head
