"""Between the steps of a training run the model is the one that decodes: what callbacks compute
with it equals what it computes outside of training, whatever the passes of training attend with."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.train import attention
from mrp_trainer.train.attention import TRAINING_FLEX
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import TrainerCallback
from transformers.integrations.sdpa_attention import repeat_kv

from tests.support.helpers import random_ids
from tests.support.random_cases import make_model
from tests.support.training_runs import Rows, trainer_of

EVENTS = sorted(name for name in vars(TrainerCallback) if name.startswith("on_"))
# Nothing is pushed or predicted here, and the callback is added after the trainer is made.
HAPPEN = {*EVENTS} - {"on_init_end", "on_predict", "on_push_begin"}


def flex_as_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scale: float, enable_gqa: bool
) -> Tensor:
    """Attend as compiled flex attention does on CUDA: a `BlockMask` hides keys, and any other mask
    is added to the scores, whatever its dtype."""
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * scale
    if isinstance(block_mask, BlockMask):
        rows, _, queries, keys = block_mask.shape
        indices = [torch.arange(size) for size in (rows, queries, keys)]
        row, column, seen = torch.meshgrid(*indices, indexing="ij")
        visible = block_mask.mask_mod(row, None, column, seen)[:, None]
        scores = scores.masked_fill(~visible, -torch.inf)
    else:
        scores = scores + block_mask
    return scores.softmax(-1) @ value


def computed(model: Any) -> list[Tensor]:
    """Decode, score, and compute logits."""
    ids = random_ids(3, 2, 10)
    with torch.no_grad():
        return [
            model.generate(ids, decoding="mrp_spec", max_new_tokens=4, pad_token_id=0),
            model.score(ids).logprobs,
            model(ids).logits,
        ]


class Compares(TrainerCallback):
    """Notes the events at which a model computes something else than its copy outside."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.unequal: set[str] = set()
        for event in EVENTS:
            setattr(self, event, self._at(event))

    def _at(self, event: str) -> Any:
        def compare(args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            outside = copy.deepcopy(model).eval()
            outside.set_attn_implementation("sdpa")
            outside.model.embed_tokens._forward_hooks.clear()  # NEFTune's
            inside = computed(model)
            self.seen.add(event)
            if not all(map(torch.equal, inside, computed(outside))):
                self.unequal.add(event)

        return compare


CHECKPOINTING = {"objective": "block_diffusion", "gradient_checkpointing": True}
NEFTUNE = {"objective": "block_diffusion", "neftune_noise_alpha": 5.0}


@pytest.mark.parametrize(
    ("packed_attention", "options"),
    [
        ("auto", {"objective": "mrp"}),
        ("tiles", {"objective": "mrp"}),
        ("flex_attention", {"objective": "mrp"}),
        # which change what layers in training mode compute, and recompute in a backward pass
        ("tiles", CHECKPOINTING),
        ("flex_attention", CHECKPOINTING),
        ("sdpa", NEFTUNE),
    ],
)
def test_callbacks_compute_what_the_model_does_outside_of_training(
    packed_attention: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every event, also with dropout; and the passes of training attend as the option says."""
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: flex_as_on_cuda)
    model = make_model(attention_dropout=0.25)
    attended = set()
    model.model.layers[0].register_forward_pre_hook(
        lambda module, _: attended.add((module.training, model.config._attn_implementation))
    )
    watch = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 1}
    watch |= {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(
        tmp_path,
        model,
        Rows(8),
        Rows(2),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        packed_attention=packed_attention,
        **watch,
        **options,
    )
    compares = Compares()
    trainer.add_callback(compares)
    trainer.train()
    assert compares.seen == HAPPEN
    assert compares.unequal == set()
    used = {"auto": "sdpa", "flex_attention": TRAINING_FLEX}.get(packed_attention, packed_attention)
    trains = options["objective"] == "block_diffusion"  # else a frozen teacher, without dropout
    assert {name for training, name in attended if training} == ({used} if trains else set())
    assert {name for _, name in attended} == {used, "sdpa"}


def test_a_frozen_teacher_has_no_noise(tmp_path: Path) -> None:
    """Neither dropout, which would be in the head's target, nor NEFTune's."""
    losses = []
    for dropout in (0.0, 0.5):
        model = make_model(attention_dropout=dropout)
        for layer in model.mrp_head.layers:
            layer.self_attn.attention_dropout = 0.0
        trainer = trainer_of(tmp_path / str(dropout), model, Rows(8), objective="mrp", max_steps=1)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == losses[1]
    with pytest.raises(
        ValueError, match=r"neftune_noise_alpha is 5\.0, .*frozen backbone.* Leave it out"
    ):
        trainer_of(tmp_path, make_model(), objective="mrp", neftune_noise_alpha=5.0)
