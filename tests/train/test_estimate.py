"""What a dry run predicts of a step: products by hand, and memory beside what a pass really
saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.estimate import COUNTED, estimate_step
from mrp_trainer.train.objectives import HeadObjective
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from modeling_mrp import MRPForCausalLM
from tests.support.helpers import collate, sample
from tests.support.random_cases import make_model

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "vocab_size": 64,
}


def on_meta(head: bool = True) -> Any:
    config = make_model(**SIZES).config
    if not head:
        config.num_nextn_predict_layers = 0
    with torch.device("meta"):
        model: Any = MRPForCausalLM(config)
    if head:
        model.requires_grad_(False)
        model.get_submodule("mrp_head").requires_grad_(True)
    return model


def arguments_of(folder: Path, **options: Any) -> MRPTrainingArguments:
    return MRPTrainingArguments(
        str(folder), use_cpu=True, **{"objective": "mrp", "max_length": 16, **options}
    )


# A layer's matrices: q and o of 32 x 32, k and v of 32 x 16, three of 32 x 48.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
# FLOPs of attention for a column: heads times head_dim, and half of the row with its own block.
ATTENTION = 4 * 32 * (16 // 2 + 4)


def test_products_by_hand(tmp_path: Path) -> None:
    """One copy, one reveal, no order: of two backbone layers all 32 columns and then the 16 noisy
    ones; of the head all columns, forwards, by inputs (which trained norms made) and by
    weights."""
    plain = {"noisy_copies": 1, "unroll": 1, "order_weight": 0.0, "reread_weight": 0.0}
    step = estimate_step(on_meta(), arguments_of(tmp_path, **plain), torch.float32)
    backbone = 2 * 48 * 2 * LAYER
    head = 3 * 2 * 32 * (LAYER + 2 * 32 * 32)
    attention = ATTENTION * (2 * 48 + 3 * 32)
    vocabulary = 2 * 64 * 32 * 8 * 3
    assert step.columns == (16, 16)
    # transformers before 5.20 has products in its rotary embeddings
    assert step.flops == pytest.approx(backbone + head + attention + vocabulary, rel=1e-3)
    # ten float32 tensors of a chunk, which here is all of the noisy columns' logits
    assert step.logits == 10 * 4 * 64 * 16
    # keys and values of two layers' clean columns, and all columns of a layer's widest tensors
    assert step.transient == 4 * (2 * 2 * 16 * 16 + 32 * (2 * 48 + 4 * 32))


def test_more_passes_take_more(tmp_path: Path) -> None:
    plain = {"noisy_copies": 1, "unroll": 1, "order_weight": 0.0, "reread_weight": 0.0}
    first = estimate_step(on_meta(), arguments_of(tmp_path, **plain), torch.float32)
    unrolled = estimate_step(
        on_meta(), arguments_of(tmp_path, **plain | {"unroll": 2}), torch.float32
    )
    reread = estimate_step(
        on_meta(), arguments_of(tmp_path, **plain | {"reread_weight": 1.0}), torch.float32
    )
    # the second reveal reads the noisy half alone
    assert 1.3 < unrolled.saved / first.saved < 1.6
    assert reread.saved == first.saved
    more = 2 * 16 * 2 * LAYER + ATTENTION * 2 * 16 + 2 * 64 * 32 * 8 * 3
    assert reread.flops - first.flops == pytest.approx(more, rel=1e-3)
    half = estimate_step(on_meta(), arguments_of(tmp_path, **plain), torch.bfloat16)
    assert 0.5 <= half.saved / first.saved < 0.7, "norms are float32"


def test_a_backbone(tmp_path: Path) -> None:
    """All weights train: forwards, by inputs and by weights, but for the inputs of the first
    layer, which are embeddings and get a gradient, too."""
    options = {"objective": "block_diffusion", "noisy_copies": 2}
    step = estimate_step(on_meta(head=False), arguments_of(tmp_path, **options), torch.float32)
    assert step.columns == (32, 16)
    products = 3 * 2 * 48 * 2 * LAYER + 3 * 2 * ATTENTION * 48 + 4 * 2 * 64 * 32 * 16
    assert step.flops == pytest.approx(products, rel=1e-3)


@pytest.mark.parametrize("unroll", [1, 2])
def test_what_is_saved_is_what_a_pass_saves(unroll: int, tmp_path: Path) -> None:
    """On a CPU, attention computed under gradients apart, as what saves what a fused one does; the
    loss itself keeps little."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            group = query.shape[1] // key.shape[1]
            scores = query @ repeat_kv(key, group).transpose(2, 3)
            output = scores.softmax(-1) @ repeat_kv(value, group)
            ctx.save_for_backward(query, key, value, output, scores.logsumexp(-1))
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            query, key, value, *_ = ctx.saved_tensors
            return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        output: Any = Attention.apply(query, key, value)
        return output.transpose(1, 2).contiguous(), None

    options = {"noisy_copies": 1, "unroll": unroll, "order_weight": 0.0, "reread_weight": 0.0}
    arguments = arguments_of(tmp_path, **options, max_length=256)
    step = estimate_step(on_meta(), arguments, torch.float32)

    model: Any = make_model(**SIZES).float().requires_grad_(False)
    model.mrp_head.requires_grad_(True)
    AttentionInterface.register(COUNTED, attend)
    model.set_attn_implementation(COUNTED)
    weights = {StorageWeakRef(each.untyped_storage()) for each in model.parameters()}
    saved: dict[Any, int] = {}
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference not in weights:
            saved[reference] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
        return tensor

    objective: HeadObjective = arguments.head_objective()
    batch = collate([sample(0, 256, 0)], copies=1)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        loss, _ = objective(model, batch)
    loss.backward()
    assert step.saved == pytest.approx(sum(saved.values()), rel=0.12)
