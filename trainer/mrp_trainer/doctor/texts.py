"""Texts beside those that they should equal: replayed beside run, with kernels beside without, drafted beside their target."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.option_table import TARGETS
from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.kernels.dispatch import failed_kernels
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.graphs import obstacle, recording_report

from ..evaluate.decoded import pad_left, padding_id
from .report import Check
from .roofline import PUBLISHED

QUESTIONS = (
    "Sum the numbers of a list that are even, each plus 5.",
    "How many seconds are in a day?",
    "Write a Python function that reverses a list.",
)
# New tokens of the texts that are compared, and calls before one counts, so that its rounds are replayed.
TOKENS, WARM_UPS = 64, 2
# By how much the log-probabilities of two texts may differ where they part: a near-tie that sums in another order decide.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.05}
INIT_STD = 0.02


@torch.no_grad()
def random_model(config: MRPConfig, dtype: torch.dtype, device: torch.device) -> MRPForCausalLM:
    """Make a model with random matrices and norms of one, which never ends a text by itself; every tensor is written once."""
    with torch.device("meta"):
        model = MRPForCausalLM(config)
    model = model.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, INIT_STD, generator=generator)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)  # its buffers are no parameters, and came out empty
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 1
    return model


def published_config(size: str) -> MRPConfig:
    """Make the config of a published shape, with a head.

    Raises:
        ValueError: for another size.
    """
    if (shape := PUBLISHED.get(size.upper())) is None:
        raise ValueError(f"--random {size}: choose one of {', '.join(PUBLISHED)}")
    sizes = {name: value for name, value in vars(shape).items() if name not in ("name", "head_layers")}
    positions = {"max_position_embeddings": 32768, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    return MRPConfig(**sizes, **positions, num_nextn_predict_layers=shape.head_layers, pad_token_id=1, eos_token_id=None)


def inputs_of(model: MRPForCausalLM, tokenizer: PreTrainedTokenizerBase | None, rows: int, length: int) -> dict[str, Tensor]:
    """Make the inputs of `generate` for some rows: the questions in turn, or without a tokenizer random tokens."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(2, min(model.config.mask_token_id, model.config.vocab_size), (rows, length), generator=generator)
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        asked = []
        for row in range(rows):
            question = QUESTIONS[row % len(QUESTIONS)]
            if tokenizer.chat_template:
                chat = [{"role": "user", "content": question}]
                asked.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
            else:
                asked.append(tokenizer(question)["input_ids"])
        made = pad_left(asked, padding_id(tokenizer))
    return {name: tensor.to(model.device) for name, tensor in made.items()}


def decode(model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any) -> MRPGenerateOutput:
    """Decode greedily, and drop the cache from the output to free its memory."""
    asked: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, **inputs, **options}
    out = model.generate(**asked, return_dict_in_generate=True)
    assert isinstance(out, MRPGenerateOutput)
    out.past_key_values = None
    return out


def drafters(model: MRPForCausalLM) -> tuple[str, ...]:
    """List the modes that draft with this model, the best first."""
    return ("mrp_spec", "self_spec") if model.config.has_head else ("self_spec",)


def compared(name: str, ours: MRPGenerateOutput, right: MRPGenerateOutput, dtype: torch.dtype) -> Check:
    """Compare two texts that should be equal: they may part at near-ties, which rounding decides, but nowhere else."""
    found = gaps(ours, right)
    parted = [gap for gap in found if gap is not None]
    ok = max(parted, default=0.0) <= NEAR_TIE[dtype]
    if not parted:
        assert ours.token_logprobs is not None
        assert right.token_logprobs is not None
        difference = float((ours.token_logprobs - right.token_logprobs).abs().max())
        return Check(name, True, difference, f"{len(found)} texts equal")
    why = "at near-ties, which rounding decides" if ok else "not at near-ties alone"
    return Check(name, ok, max(parted), f"{len(parted)} of {len(found)} texts differ, {why}")


def check_drafts(model: MRPForCausalLM, inputs: dict[str, Tensor], states: int) -> Iterator[Check]:
    """Compare drafted texts with their targets'."""
    plain: dict[str, Any] = {"graphs": False, "kernels": False} if model.device.type == "cpu" else {}
    alone = cache(lambda target: decode(model, inputs, decoding=target, **plain))
    for target in TARGETS:
        for mode in drafters(model):
            name = f"drafts of {target} by {mode}"
            try:
                right = alone(target)
                ours = decode(model, inputs, decoding=mode, target=target, num_draft_states=states, **plain)
                yield compared(name, ours, right, model.dtype)
            except Exception as error:  # the others are checked all the same
                yield Check.raised(name, error)


def check_ways(model: MRPForCausalLM, inputs: dict[str, Tensor], states: int) -> Iterator[Check]:
    """Compare texts with graphs, and with kernels, with those without; and name what fell back to PyTorch.

    The kernels' texts are compared on a GPU alone: interpreted, each kernel is compared by itself.
    """
    mode: dict[str, Any] = {"decoding": drafters(model)[0], "num_draft_states": states}
    for name in ("graphs", "kernels") if model.device.type == "cuda" else ("graphs",):
        title = f"{name} in generate"
        why = obstacle(model)
        if name == "graphs" and why is not None:
            yield Check(title, None, None, why)
            continue
        try:
            for _ in range(WARM_UPS + 1):
                ours = decode(model, inputs, **mode)
            ran = recording_report(model)
            found = compared(title, ours, decode(model, inputs, **mode, **{name: False}), model.dtype)
            lost = failed_kernels() if name == "kernels" else ["a recording"] * bool(ran["failed"] or not ran["replays"])
            yield found if not lost else Check(title, False, found.difference, f"not used: {', '.join(lost)}")
        except Exception as error:
            yield Check.raised(title, error)
    model.release_graphs()


def gaps(ours: MRPGenerateOutput, theirs: MRPGenerateOutput) -> list[float | None]:
    """Give by row how far two texts are apart where they part; None if they are equal.

    Kernels round other sums than PyTorch does, and a near-tie can fall either way; what follows it differs rightly. So the mean
    log-probabilities are compared of what rows revealed in the first step in which they differ. Up to that step both saw the
    same, so they are close where both are right; the gap is infinite where only one goes on.
    """
    found: list[float | None] = []
    for mine, other in zip(_steps(ours), _steps(theirs), strict=True):
        for step in sorted(mine.keys() | other.keys()):
            one, two = (steps.get(step, []) for steps in (mine, other))
            if [each[:2] for each in one] != [each[:2] for each in two]:
                means = [sum(each[2] for each in part) / len(part) if part else math.inf for part in (one, two)]
                found.append(abs(means[0] - means[1]))
                break
        else:
            found.append(None)
    return found


def _steps(out: MRPGenerateOutput) -> list[dict[int, list[tuple[int, int, float]]]]:
    """List by row and step the places, tokens and log-probabilities that it revealed."""
    assert out.sequences is not None
    assert out.token_logprobs is not None
    assert out.reveal_step is not None
    rows = []
    for ids, logprobs, steps in zip(out.sequences, out.token_logprobs.tolist(), out.reveal_step.tolist(), strict=True):
        by_step: dict[int, list[tuple[int, int, float]]] = {}
        for place, (token, logprob, step) in enumerate(zip(ids[-len(steps) :].tolist(), logprobs, steps, strict=True)):
            if step >= 0:
                by_step.setdefault(step, []).append((place, token, logprob))
        rows.append(by_step)
    return rows
