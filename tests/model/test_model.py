"""Forward, head and config: arguments and ways to one answer. What a model computes is compared to
slow twins, written from method.md alone, in `test_layouts.py` and `test_families.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.head import pad_rotary
from tests.support.helpers import BLOCK, MASK, close, random_ids
from tests.support.random_cases import make_model

pytestmark = pytest.mark.usefixtures("exact_norms")


def seen(positions: Tensor) -> Tensor:
    """Who sees whom, [rows, 1, length, length] bool: a token its own block and earlier ones."""
    return (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]


def block_by_block(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits of a text that is read with transformers' cache, two blocks and then one at a time."""
    cache, parts = DynamicCache(config=model.config), []
    for begin, end in ((0, 8), (8, 12), (12, 16)):
        out = model(
            ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
        )
        assert out.past_key_values is cache
        parts.append(out.logits)
    return torch.cat(parts, 1)


@torch.no_grad()
def test_ways_to_ask_for_the_logits_of_texts(random_model: MRPForCausalLM) -> None:
    """Alone, padded on either side, under a mask in 4D, boolean or additive, as embeddings, and
    block by block. Row 1 has a block of left padding, so that the rows' blocks end in the same
    columns."""
    ids, mask = random_ids(5, 2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[1, :BLOCK] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    sees = (seen(positions) & mask[:, None, None].bool()) | torch.eye(16, dtype=torch.bool)
    additive = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    wide = [
        torch.nn.functional.pad(one, (1, 2), value=value) for one, value in ((ids, 49), (mask, 0))
    ]
    found = {
        "padded": random_model(ids, attention_mask=mask).logits,
        "padded on both sides": random_model(wide[0], attention_mask=wide[1]).logits[:, 1:-2],
        "boolean": random_model(ids, attention_mask=sees, position_ids=positions).logits,
        "additive": random_model(ids, attention_mask=additive, position_ids=positions).logits,
        "embeddings": random_model(
            inputs_embeds=random_model.model.embed_tokens(ids), attention_mask=mask
        ).logits,
        "block by block": block_by_block(random_model, ids, mask),
    }
    alone = torch.cat([random_model(ids[:1]).logits[0], random_model(ids[1:, BLOCK:]).logits[0]])
    for way, logits in found.items():
        assert logits.isfinite().all(), way
        close(logits[mask.bool()], alone)
    causal = random_model(
        ids, attention_mask=sees.tril(), position_ids=positions
    ).logits  # another mask is another model
    assert (causal - found["boolean"])[0, 0].abs().max() > 1e-6


@torch.no_grad()
def test_position_ids_decide_the_blocks(random_model: MRPForCausalLM) -> None:
    """Positions 2..9 are the blocks {2, 3}, {4..7}, {8, 9}; one row of positions serves the batch.
    Rotation knows distances alone, so that it is what such a mask gives at 0..7, but for angles in
    float32."""
    ids, positions = random_ids(3, 2, 8), torch.arange(2, 10)[None]
    logits, default = random_model(ids, position_ids=positions).logits, random_model(ids).logits
    close(
        logits, random_model(ids, attention_mask=seen(positions).expand(2, -1, -1, -1)).logits, 1e-5
    )
    close(random_model(ids, position_ids=torch.arange(8)).logits, default, atol=0)
    assert (logits - default).abs().max() > 1e-3


@torch.no_grad()
def test_what_a_forward_gives(random_model: MRPForCausalLM) -> None:
    """Logits of some positions, and hidden states of which the last are h_A; of weights that are
    nowhere, shapes."""
    ids = random_ids(4, 2, 9)
    ids[:, 7] = MASK
    out = random_model(ids, output_hidden_states=True)
    close(random_model(ids, logits_to_keep=3).logits, out.logits[:, 6:])
    close(random_model(ids, logits_to_keep=torch.tensor([7, 1])).logits, out.logits[:, [7, 1]])
    assert len(out.hidden_states) == 3  # embeddings, after layer 0, h_A
    close(random_model.lm_head(out.hidden_states[-1]), out.logits, atol=0)
    positions = torch.arange(9).expand(2, 9)
    close(out.hidden_states[-1], random_model.backbone(ids, positions, seen(positions)))
    AttentionInterface.register("another eager", eager_attention_forward)
    AttentionMaskInterface.register("another eager", eager_mask)
    for name in ("eager", "another eager"):
        eager = make_model()
        eager.set_attn_implementation(name)
        # transformers' eager attention takes its softmax in float32
        close(eager(ids).logits, out.logits, atol=1e-5)
    nowhere = make_model().to("meta")
    assert nowhere(torch.tensor([[1, 2, 3]], device="meta")).logits.shape == (1, 3, 64)
    with pytest.raises(
        ValueError, match=r"is on the meta device.*load the model with from_pretrained"
    ):
        nowhere.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_frequencies_are_not_rounded_by_a_cast(dtype: torch.dtype, tmp_path: Path) -> None:
    """In every way to cast, also of what a model is a part of; position 1,000 has the logits of a
    model that was loaded so. Rounded, the frequencies changed them by more than the weights'
    rounding."""
    make_model(max_position_embeddings=2048).float().save_pretrained(tmp_path)
    ids, positions = random_ids(5, 1, 8), torch.arange(1000, 1008)[None]
    expected = MRPForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    logits = expected(ids, position_ids=positions).logits
    casts: dict[str, Any] = {
        "to": lambda model: model.to(dtype),
        "type": lambda model: model.type(dtype),
        "by name": lambda model: model.half() if dtype == torch.float16 else model.bfloat16(),
        "around": lambda model: torch.nn.ModuleList([model]).to(dtype)[0],
        "backbone": lambda model: (model.model.to(dtype), model.to(dtype))[1],
        "there and back": lambda model: model.double().to(dtype),
    }
    for name, cast in casts.items():
        model = cast(MRPForCausalLM.from_pretrained(tmp_path))
        assert model.dtype == dtype
        assert {buffer.dtype for buffer in model.model.rotary_emb.buffers()} == {torch.float32}, (
            name
        )
        assert torch.equal(model(ids, position_ids=positions).logits, logits), name
    for buffer in expected.model.rotary_emb.buffers():
        buffer.copy_(buffer.to(dtype))
    assert not torch.equal(expected(ids, position_ids=positions).logits, logits)


def test_rotary_frequencies_of_the_meta_device_are_computed_where_memory_is_given() -> None:
    """No checkpoint holds them."""
    model = make_model()
    empty = make_model().to("meta").to_empty(device="cpu")
    expected = dict(model.model.rotary_emb.named_buffers())
    assert expected
    for name, buffer in empty.model.rotary_emb.named_buffers():
        assert torch.equal(buffer, expected[name].to(buffer.dtype)), name


def test_a_head_turns_no_more_of_its_heads_than_the_backbone_does() -> None:
    """Rotations of 4 of 8 numbers, pairs (0, 2) and (1, 3), become those of pairs (0, 4) and (1,
    5); 2, 3, 6 and 7 stay."""
    cos, sin = torch.tensor([[[0.6, 0.8, 0.6, 0.8]]]), torch.tensor([[[0.8, 0.6, 0.8, 0.6]]])
    wide_cos, wide_sin = pad_rotary((cos, sin), 8)
    assert wide_cos.equal(torch.tensor([[[0.6, 0.8, 1.0, 1.0, 0.6, 0.8, 1.0, 1.0]]]))
    assert wide_sin.equal(torch.tensor([[[0.8, 0.6, 0.0, 0.0, 0.8, 0.6, 0.0, 0.0]]]))
    same_cos, same_sin = pad_rotary((cos, sin), 4)
    assert (same_cos is cos, same_sin is sin) == (True, True)


def test_the_base_model_is_the_backbone(random_model: MRPForCausalLM) -> None:
    """As transformers and peft find it."""
    assert random_model.base_model is random_model.model
