"""What the tests of families share: a slow decoder of logits, drafted modes beside their targets, a training step, checkpoints.

A *family test* gives a tiny twin of the published config, its tensors by published names, and `logits(tensors, ids)`: the model
written anew, or transformers' own class for such layers, over the whole text under a dense block-causal mask.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import left_padded
from mrp_trainer.data.samples import Sample
from mrp_trainer.heads import new_head
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.trainer import MRPTrainer
from published import backbone_config, random_tensors, write
from torch import Tensor

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.model.layouts import StoredTensor

Shape = tuple[int, ...]
Logits = Callable[[list[int]], Tensor]

PROMPTS = [
    [15, 17, 80, 3, 44, 9],
    [8],
    [7, 7, 21, 90],
    [33, 2, 60, 61, 62, 63, 64, 65],
    [12, 13, 14],
    [70, 71, 72, 73, 74],
    [4, 6],
    [50],
]
MODES = [
    {"decoding": decoding, "target": target, "num_draft_states": 4}
    for decoding in ("self_spec", "mrp_spec")
    for target in ("static", "sequential", "dynamic", "entropy_bound")
]
LIVELY = {"confidence_threshold": 0.05, "entropy_threshold": 5.0}


def twin_config(**changes: Any) -> dict[str, Any]:
    """A published config of another family at a small size: what it shares with SDAR's, and what differs."""
    return {**backbone_config(), **changes}


def block_causal(length: int, block: int) -> Tensor:
    """Who sees whom, [1, 1, length, length] bool."""
    of = torch.arange(length) // block
    return (of <= of[:, None])[None, None]


def slow_decode(logits: Logits, prompt: Sequence[int], new: int, block: int, mask: int, rule: str) -> list[int]:
    """`static` (one token a step) or `sequential`, each step over the whole text; the mask itself is never picked."""
    ids = list(prompt)
    while len(ids) < len(prompt) + new:
        ids += [mask] * (block - len(ids) % block)
        while mask in ids:
            scores = logits(ids)
            scores[:, mask] = -torch.inf
            confidence, token = scores.softmax(-1).max(-1)
            where = [i for i in range(len(ids)) if ids[i] == mask]
            at = where[0] if rule == "sequential" else max(where, key=lambda i: confidence[i].item())
            ids[at] = int(token[at])
    return ids[len(prompt) : len(prompt) + new]


def loaded(
    folder: Path, config: dict[str, Any], shapes: dict[str, Shape], head_layers: int = 0
) -> tuple[Any, dict[str, Tensor]]:
    """A model in float64 of random tensors by published names, which lie in two shards, with a random head or none."""
    tensors = random_tensors(shapes)
    model = MRPForCausalLM.from_pretrained(write(folder, config, tensors, shards=2), dtype=torch.float64).eval()
    if head_layers:
        torch.manual_seed(0)
        head = new_head(model, head_layers, "published")
        with torch.no_grad():
            head.norm.weight.fill_(0.05)
        model.attach_head(head)
    return model, {name: tensor.double() for name, tensor in tensors.items()}


def assert_decodes(model: Any, logits: Logits, new: int = 14) -> None:
    """Undrafted text is that of the slow decoder."""
    block, mask = model.config.block_size, model.config.mask_token_id
    for rule in ("static", "sequential"):
        for prompt in PROMPTS[:2]:
            ids = model.generate(torch.tensor([prompt]), decoding=rule, max_new_tokens=new, eos_token_id=None)
            assert ids[0, len(prompt) :].tolist() == slow_decode(logits, prompt, new, block, mask, rule), (rule, prompt)


def assert_drafts_are_lossless(model: Any, new: int = 14) -> None:
    """Each drafted mode gives its target's text in fewer forwards, alone and in a ragged batch of 8 padded on either side; and
    a row's text is the one that it has alone, also where the head changes it."""
    left = left_padded(PROMPTS)
    real = left["attention_mask"].bool()
    right = {
        name: torch.stack([torch.cat([row[here], row[~here]]) for row, here in zip(part, real, strict=True)])
        for name, part in left.items()
    }
    options = {"max_new_tokens": new, "eos_token_id": None, "return_dict_in_generate": True, **LIVELY}
    few = model.config.block_size > 4  # of long blocks the modes in which most can go wrong
    for mode in (MODES[2], MODES[5]) if few else MODES:
        for inputs in (left,) if few else ({"input_ids": torch.tensor(PROMPTS[:1])}, left, right):
            target = model.generate(**inputs, decoding=mode["target"], **options)
            drafted = model.generate(**inputs, **mode, **options)
            width = inputs["input_ids"].shape[1]
            assert drafted.sequences[:, width:].equal(target.sequences[:, width:]), mode
            assert drafted.stats.row_forwards.sum() <= target.stats.row_forwards.sum(), mode
    for decoding in ("sequential", "mrp_direct", "mrp_remask"):
        whole = model.generate(**left, decoding=decoding, **options).sequences[:, left["input_ids"].shape[1] :]
        for row, prompt in list(zip(whole, PROMPTS, strict=True))[: 1 if few else 3]:
            alone = model.generate(torch.tensor([prompt]), decoding=decoding, **options).sequences[0, len(prompt) :]
            assert row.equal(alone), decoding


def assert_saved_and_loaded(model: Any, folder: Path) -> None:
    """A model is saved in our layout, its head by itself, and both are loaded again as they were."""
    ids = torch.tensor(PROMPTS[:1])
    options = {"decoding": "mrp_spec", "target": "static", "max_new_tokens": 12, "num_draft_states": 4}
    text = model.generate(ids, **options)
    model.save_pretrained(folder / "whole")
    whole = MRPForCausalLM.from_pretrained(folder / "whole", dtype=torch.float64)
    assert whole.config.family == model.config.family
    assert whole.state_dict().keys() == model.state_dict().keys()
    assert all(tensor.equal(whole.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert whole.generate(ids, **options).equal(text)
    model.save_pretrained(folder / "head", head_only=True)
    of_head = MRPForCausalLM.from_pretrained(folder / "head", dtype=torch.float64)
    assert of_head.generate(ids, **options).equal(text)


def assert_has_published_tensors(config: dict[str, Any], shapes: dict[str, Shape]) -> int:
    """On the meta device, the model of a published config takes exactly these tensors; returns how many numbers they are."""
    found = {name: StoredTensor(name, Path("meta"), shape, "BF16") for name, shape in shapes.items()}
    ours = MRPConfig.from_dict(config)
    MRPForCausalLM.check_tensors(ours, found)
    with torch.device("meta"):
        model = MRPForCausalLM(ours)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    state = {name: tensor for name, tensor in model.state_dict().items() if name in shapes or name != "lm_head.weight"}
    assert sum(tensor.numel() for tensor in state.values()) == count
    return count


def config_of(folder: Path) -> dict[str, Any]:
    """The config of a checkpoint, as it was written."""
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


def assert_trains(model: Any, folder: Path) -> None:
    """Two steps of the head's objective change the head alone, and its drafts stay lossless."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(6, 90, (20,), generator=generator).numpy() for _ in range(4)]
    rows = [Sample(index, row, np.arange(len(row)) >= 6) for index, row in enumerate(ids)]
    options: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    arguments = MRPTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, objective="mrp", learning_rate=1e-3, **options
    )
    MRPTrainer(model=model, args=arguments, train_dataset=rows).train()
    changed = {name for name, tensor in model.state_dict().items() if not tensor.double().equal(before[name])}
    assert changed
    assert all(name.startswith("mrp_head.") for name in changed)
    model.eval()
