"""The parts of serving on their own: what is borrowed, admission, who drafts how much, picks,
checkpoints."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mrp_serving.checkpoint import ARCHITECTURES, backbone_weights, head_weight, open_checkpoint
from mrp_serving.picker import CountPenalties, Sampling
from mrp_serving.room import fetch_fitting
from mrp_serving.scratch import borrow_slots
from safetensors.torch import load_file, save_file

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.kernels.dispatch import AUTOMATIC
from tests.support.fake_engine import FakeAllocator, FakePool, FakeRequest
from tests.support.places import TINY
from tests.support.published import as_published


@pytest.mark.parametrize(
    ("rows", "pages", "width"), [(8, 9, 3), (5, 9, 2), (8, 5, 2), (1, 9, 0), (8, 1, 0)]
)
def test_what_is_lent_is_what_is_there_and_comes_back(rows: int, pages: int, width: int) -> None:
    """From a round that fails, too."""
    pool, allocator, asked = FakePool(rows, 32), FakeAllocator(pages, 4), list[int]()
    with suppress(ZeroDivisionError), borrow_slots(pool, allocator, asked.append, 2, 3, 4) as lent:
        assert (lent.width, [len(rows) for rows in lent.rows], lent.slots.shape) == (
            width,
            [width] * 2,
            (2 * width, 4),
        )
        assert (len(pool.free_slots), len(allocator.free_pages)) == (
            rows - 2 * width,
            pages - 2 * width,
        )
        raise ZeroDivisionError
    assert (len(pool.free_slots), len(allocator.free_pages)) == (rows, pages)
    wanted = 2 * min(3, rows // 2) * 4
    # prefixes that nobody uses make room first
    assert asked == ([wanted] if pages * 4 < wanted else [])


@pytest.mark.parametrize(
    ("algorithm", "slots", "running", "taken", "limit"),
    [
        ("MRP", 83, 0, 2, 24),
        ("MRP", 38, 0, 1, 16),
        ("MRP", 17, 0, 1, 1),
        ("MRP", 75, 1, 0, 24),
        ("LowConfidence", 80, 1, 4, 24),
    ],
)
def test_requests_wait_for_room_in_their_order(
    algorithm: str, slots: int, running: int, taken: int, limit: int
) -> None:
    """In blocks of 4, three left over, each takes 32, until it ends. The first begins where nothing
    runs, with the limit that the pool has room for; another algorithm's are the engine's."""
    waiting = [FakeRequest([0] * 8, 24, rid=str(number)) for number in range(4)]
    begun = [FakeRequest([0] * 9, 22) for _ in range(running)]
    scheduler = SimpleNamespace(waiting_queue=list(waiting), max_total_num_tokens=slots)
    scheduler.dllm_config = SimpleNamespace(algorithm=algorithm, block_size=4)
    scheduler.model_config = SimpleNamespace(context_len=64)
    scheduler.dllm_manager = SimpleNamespace(waiting_queue=list(begun))

    def take_all(engine: Any) -> None:
        engine.dllm_manager.waiting_queue += engine.waiting_queue
        engine.waiting_queue = []

    fetch_fitting(take_all, scheduler)
    assert scheduler.dllm_manager.waiting_queue == begun + waiting[:taken]
    assert scheduler.waiting_queue == waiting[taken:]
    assert [req.sampling_params.max_new_tokens for req in waiting] == [limit, 24, 24, 24]


def picker(stock: bool, shortlist: int = 0) -> Any:
    fixed = {"lm_head_weight": torch.empty(11, 4), "mask_token_id": 3, "dispatch": AUTOMATIC}
    return Sampling(stock=stock, entropy=True).picker(torch.Tensor.clone, shortlist, **fixed)


def test_picks_are_those_of_the_engines_own_algorithm() -> None:
    """By probability, of which the mask id has a share though it is never picked; those that round
    to the same number tie. The shortlist is the likeliest tokens with their scores, and the sum of
    all others, the mask id among these."""
    logits = torch.randn(9, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3
    picks, p = picker(stock=True, shortlist=4)(logits), logits.softmax(-1)
    assert (logits.argmax(-1) == 3).any(), "the mask id has to be the likeliest somewhere"
    assert torch.equal(picks.token, logits.index_fill(1, torch.tensor(3), -torch.inf).argmax(-1))
    torch.testing.assert_close(picks.log_odds.sigmoid(), p.gather(1, picks.token[:, None])[:, 0])
    torch.testing.assert_close(
        picks.entropy, torch.distributions.Categorical(logits=logits).entropy()
    )
    scores, ids = logits.topk(4)
    assert torch.equal(picks.candidates[:, :4].long(), ids)
    assert torch.equal(picks.candidates[:, 4:8], scores.masked_fill(ids == 3, -torch.inf))
    others = [
        [token for token in range(11) if token == 3 or token not in row] for row in ids.tolist()
    ]
    rest = torch.stack([row[these].logsumexp(0) for row, these in zip(logits, others, strict=True)])
    torch.testing.assert_close(picks.candidates[:, 8], rest)
    sure = torch.zeros(2, 11)
    sure[0, 5], sure[1, 5] = 30.0, 40.0
    rounded, exact = picker(stock=True)(sure).log_odds, picker(stock=False)(sure).log_odds
    assert rounded[0] == rounded[1]
    assert exact[0] < exact[1]


def test_penalties_count_generated_tokens() -> None:
    """Of positions with the ids [1, 5 | 5, 6, 5] and [1, 5 | 6, 3, 3] before them, the prompt of
    two tokens not counted."""
    made = CountPenalties(2, 0.5, 0.25)(
        torch.tensor([[1, 5, 5, 6, 5], [1, 5, 6, 3, 3]]), torch.zeros(2, 8)
    )
    wanted = torch.zeros(2, 8)
    wanted[0, 5], wanted[0, 6], wanted[1, 6], wanted[1, 3] = -1.25, -0.75, -0.75, -1.25
    assert torch.equal(made, wanted)


def changed_config(folder: Path, **fields: Any) -> str:
    open_checkpoint.cache_clear()
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return str(folder)


def test_the_three_layouts_are_opened(tmp_path: Path) -> None:
    """A head repository has the head's tensors alone, and is served with the backbone that it
    names, quantized as both say."""
    shutil.copytree(TINY, tmp_path / "backbone")
    MRPForCausalLM.from_pretrained(tmp_path / "backbone").save_pretrained(
        tmp_path / "head", head_only=True
    )
    layouts = (TINY, tmp_path / "head", as_published(TINY, tmp_path / "published"))
    configs = [open_checkpoint(str(folder), None).config for folder in layouts]
    assert {(one.has_head, one.block_size, one.mask_token_id) for one in configs} == {(True, 16, 3)}
    assert open_checkpoint(str(TINY), None).defaults["num_draft_states"] == "auto"
    assert set(MRPConfig.from_pretrained(tmp_path / "published").architectures) <= set(
        ARCHITECTURES
    )
    assert all(head_weight(name) for name in load_file(tmp_path / "head" / "model.safetensors"))
    found = dict(
        backbone_weights(MRPConfig.from_pretrained(tmp_path / "head"), str(tmp_path / "head"))
    )
    wanted = {
        name: tensor
        for name, tensor in load_file(TINY / "model.safetensors").items()
        if head_weight(name) is None
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    quantized = {"quantization_config": {"quant_method": "w8a8_int8"}}
    changed_config(tmp_path / "backbone", **quantized)
    with pytest.raises(
        ValueError,
        match=r"has another quantization_config.*copy the backbone's into its config\.json",
    ):
        open_checkpoint(str(tmp_path / "head"), None)
    assert open_checkpoint(changed_config(tmp_path / "head", **quantized), None).config.has_head


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "no-head")
    tensors = {
        name: each
        for name, each in load_file(TINY / "model.safetensors").items()
        if head_weight(name) is None
    }
    save_file(tensors, tmp_path / "no-head" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"num_nextn_predict_layers is 3, and it holds 0 layers mrp_head\.layers"
    ):
        open_checkpoint(str(tmp_path / "no-head"), None)
    assert not open_checkpoint(
        changed_config(tmp_path / "no-head", num_nextn_predict_layers=0), None
    ).config.has_head
