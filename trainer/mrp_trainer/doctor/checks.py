"""Checks that weights are finite, that kernels agree with their PyTorch twins, and that texts are
equal where they must be."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.option_table import TARGETS
from modeling_mrp.kernels.dispatch import (
    KERNEL_DTYPES,
    Kernel,
    check_close,
    failed_kernels,
    relative_error,
    unusable,
)
from modeling_mrp.kernels.pick import LIST, PICK, gumbel_noise
from modeling_mrp.kernels.round_layers import GATED, ROTATED, ROUND_ATTENTION, SUM_AND_NORM
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.graphs import obstacle, recording_report
from modeling_mrp.rules.draft import gumbel, noise_key

from ..evaluate.decoded import pad_left, padding_id
from .kernels import run_both, samples_of

KERNELS = (PICK, LIST, ROUND_ATTENTION, SUM_AND_NORM, ROTATED, GATED)
QUESTIONS = (
    "Sum the numbers of a list that are even, each plus 5.",
    "How many seconds are in a day?",
    "Write a Python function that reverses a list.",
)
# New tokens per compared text, and the number of calls before the compared one, which record its
# CUDA graphs.
TOKENS, WARM_UPS = 64, 2
# The most by which log-probabilities of two texts may differ where the texts diverge: rounding
# decides such near-ties.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.05}
# Hidden and intermediate size, layers and heads of the published backbones.
PUBLISHED = {"1.7B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32), "8B": (4096, 12288, 36, 32)}


@dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: The name of the check.
        ok: Whether the check passed; None if it could not run.
        difference: The largest deviation from the correct values, if it was measured.
        note: Details, or the reason why the check did not run or failed.
    """

    name: str
    ok: bool | None
    difference: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """The value of `ok` as Markdown: "ok", "**failed**", or "left out" for None."""
        if self.ok is None:
            return "left out"
        return "ok" if self.ok else "**failed**"


def checked(name: str, check: Callable[[], Check]) -> Check:
    """Run the function `check` and return its result. If it raises an exception, return a failed
    check with the name `name` instead, so that other checks still run."""
    try:
        return check()
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return Check(name, False, None, f"{type(error).__name__}: {first}")


@torch.no_grad()
def random_model(config: MRPConfig, dtype: torch.dtype, device: torch.device) -> MRPForCausalLM:
    """Make a model whose matrices are random and whose norms have weights of 1. It has no eos
    token, so it decodes every text to its limit."""
    with torch.device("meta"):
        model = MRPForCausalLM(config)
    model = model.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, config.initializer_range, generator=generator)
    # The buffers of rotary_emb are no parameters, and were left empty.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 1
    return model


def published_config(size: str) -> MRPConfig:
    """Make the config of a model of a published size, such as 4B, with a head of three layers;
    `ValueError` for an unknown size."""
    if (shape := PUBLISHED.get(size.upper())) is None:
        raise ValueError(f"--random {size}: choose one of {', '.join(PUBLISHED)}")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shared: dict[str, Any] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "block_size": 16,
    }
    shared |= {
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }
    ids = {"pad_token_id": 1, "eos_token_id": None}
    return MRPConfig(
        **dict(zip(names, shape, strict=True)), **shared, **ids, num_nextn_predict_layers=3
    )


def inputs_of(
    model: MRPForCausalLM, tokenizer: PreTrainedTokenizerBase | None, rows: int, length: int
) -> dict[str, Tensor]:
    """Make the inputs `input_ids` and `attention_mask` of `generate`, int64 [rows, tokens] each.

    Args:
        model: The model. It gives the device, and the vocabulary of random tokens.
        tokenizer: If given, each row is one of the short texts `QUESTIONS`, which repeat in turn,
            in the chat template if the tokenizer has one. If None, each row has random tokens.
        rows: The number of rows.
        length: The number of random tokens in each row. Not used with a tokenizer.
    """
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(
            2,
            min(model.config.mask_token_id, model.config.vocab_size),
            (rows, length),
            generator=generator,
        )
        padded = pad_left(ids.tolist(), 0)
    else:
        prompts = [QUESTIONS[row % len(QUESTIONS)] for row in range(rows)]
        if tokenizer.chat_template:
            chats = [[{"role": "user", "content": question}] for question in prompts]
            prompts = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, tokenize=False
            )
        ids = tokenizer(prompts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        padded = pad_left(ids, padding_id(tokenizer))
    return {name: tensor.to(model.device) for name, tensor in padded.items()}


def decode(model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any) -> Any:
    """Decode `inputs` greedily with further `options` of `generate`; return the output without its
    cache, to free memory."""
    arguments: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, **inputs, **options}
    out: Any = model.generate(**arguments, return_dict_in_generate=True)
    out.past_key_values = None
    return out


def drafters(model: MRPForCausalLM) -> tuple[str, ...]:
    """Return the drafting modes that a model can use, the preferred one first: `mrp_spec` and
    `self_spec` if it has a head, otherwise only `self_spec`."""
    return ("mrp_spec", "self_spec") if model.config.has_head else ("self_spec",)


def check_weights(model: MRPForCausalLM) -> Iterator[Check]:
    """Yield a check for the backbone, and one for the head if the model has one: whether all
    weights are finite."""
    for component in ("backbone", *["head"] * model.config.has_head):
        weights = {}
        for name, weight in model.named_parameters():
            if name.startswith("mrp_head.") == (component == "head"):
                weights[name] = weight
        not_finite = [name for name, weight in weights.items() if not weight.isfinite().all()]
        note = f"{sum(weight.numel() for weight in weights.values()):,} numbers"
        if not_finite:
            note = f"not finite: {', '.join(not_finite[:3])}"
        yield Check(f"weights of the {component}", not not_finite, None, note)


def check_noise(device: torch.device) -> Iterator[Check]:
    """Yield one check: whether a device makes the same noise for sampling as the host makes for
    drafts. The noise keys, which are integers, must be exactly equal; the noise made from them must
    be equal up to rounding."""
    seeds = (0, 1, (1 << 31) + 1, (1 << 62) - 1)
    table = [(seed, 9999 * index, index + 1) for index, seed in enumerate(seeds)]

    def agrees() -> Check:
        keys = noise_key(*torch.tensor(table, device=device).unbind(1))
        host_keys = [noise_key(*row) for row in table]
        if keys.tolist() != host_keys:
            raise ArithmeticError(
                "its integers of 64 bits differ from the host's: texts sampled here are of other "
                "seeds"
            )
        noise = gumbel_noise(keys, 4096, torch.float32).cpu()
        vocab = np.arange(4096)[None].repeat(len(table), 0)
        expected = torch.from_numpy(gumbel(host_keys, vocab)).float()
        check_close("its noise differs from the host's", noise, expected)
        return Check("noise of sampling", True, relative_error(noise, expected))

    yield checked("noise of sampling", agrees)


def check_kernels(model: MRPForCausalLM) -> Iterator[Check]:
    """Yield a check for each kernel: whether it agrees with its PyTorch twin on sample arguments
    that have the sizes of the model."""
    weight = model.lm_head.weight.detach()
    template = weight if weight.dtype in KERNEL_DTYPES else weight.float()
    if unusable(template.device, template.dtype, interpreted=True) is not None:
        reason = (
            "an NVIDIA GPU, triton and 16 or 32 bits are needed, or on a CPU TRITON_INTERPRET=1"
        )
        for kernel in KERNELS:
            yield Check(f"kernel {kernel.name}", None, None, reason)
        return

    def agrees(kernel: Kernel, samples: list[tuple[Any, ...]]) -> Check:
        errors = []
        for arguments in samples:
            for result, expected in run_both(kernel, arguments):
                check_close("its results differ from PyTorch's", result, expected)
                errors.append(relative_error(result, expected))
        return Check(f"kernel {kernel.name}", True, max(errors))

    for kernel, samples in samples_of(model.config, template).items():
        yield checked(f"kernel {kernel.name}", partial(agrees, kernel, samples))


def check_drafts(model: MRPForCausalLM, inputs: dict[str, Tensor], states: int) -> Iterator[Check]:
    """Yield a check for each target and each drafting mode: whether the texts that the mode decodes
    agree (`compare_texts`) with the texts that its target decodes without drafts. `inputs` are
    those of `generate`, and `states` is the option `num_draft_states`."""
    plain: dict[str, Any] = {}
    if model.device.type == "cpu":
        plain = {"graphs": False, "kernels": False}
    decode_target = cache(lambda target: decode(model, inputs, decoding=target, **plain))

    def agrees(name: str, target: str, mode: str) -> Check:
        output = decode(
            model, inputs, decoding=mode, target=target, num_draft_states=states, **plain
        )
        return compare_texts(name, output, decode_target(target), model.dtype)

    for target in TARGETS:
        for mode in drafters(model):
            name = f"drafts of {target} by {mode}"
            yield checked(name, partial(agrees, name, target, mode))


def check_fast_paths(
    model: MRPForCausalLM, inputs: dict[str, Tensor], states: int
) -> Iterator[Check]:
    """Yield a check for CUDA graphs and, on a CUDA device, one for Triton kernels: whether texts
    decoded with them agree with texts decoded without them, as judged by `compare_texts`.

    The check of graphs is left out (its `ok` is None) where graphs are impossible, as on a CPU. It
    also fails if a graph could not be recorded, or if none was replayed. The check of kernels also
    fails if a kernel has failed in this process, so that its PyTorch twin replaced it.

    Args:
        model: The model.
        inputs: The inputs `input_ids` and `attention_mask` of `generate`.
        states: The option `num_draft_states`.
    """
    mode: dict[str, Any] = {"decoding": drafters(model)[0], "num_draft_states": states}

    def agrees(name: str, title: str) -> Check:
        for _ in range(WARM_UPS + 1):
            output = decode(model, inputs, **mode)
        recorded = recording_report(model)
        expected = decode(model, inputs, **mode, **{name: False})
        check = compare_texts(title, output, expected, model.dtype)
        if name == "kernels":
            fallbacks = failed_kernels()
        else:
            fallbacks = ["a recording"] * bool(recorded["failed"] or not recorded["replays"])
        if not fallbacks:
            return check
        return Check(title, False, check.difference, f"not used: {', '.join(fallbacks)}")

    for name in ("graphs", "kernels") if model.device.type == "cuda" else ("graphs",):
        title = f"{name} in generate"
        reason = obstacle(model) if name == "graphs" else None
        if reason is None:
            yield checked(title, partial(agrees, name, title))
        else:
            yield Check(title, None, None, reason)
    model.release_graphs()


def compare_texts(name: str, output: Any, expected: Any, dtype: torch.dtype) -> Check:
    """Check that the texts of two `generate` outputs agree. They may differ only where two choices
    are nearly tied, so that rounding decides between them.

    The check passes if all texts are equal. Otherwise `gaps` measures, for each row whose texts
    differ, how far the log-probabilities are apart where the texts diverge. The check then passes
    if no row exceeds the limit of the dtype: 0.25 in bfloat16, 0.05 in float16, 0.01 in float32,
    and 1e-9 in float64.

    Args:
        name: The name of the check.
        output: The output to check.
        expected: The output to compare it with.
        dtype: The dtype of the model.
    """
    row_gaps = gaps(output, expected)
    differing = [gap for gap in row_gaps if gap is not None]
    if not differing:
        difference = float((output.token_logprobs - expected.token_logprobs).abs().max())
        return Check(name, True, difference, f"{len(row_gaps)} texts equal")
    ok = max(differing) <= NEAR_TIE[dtype]
    cause = "at near-ties, which rounding decides" if ok else "not at near-ties alone"
    return Check(
        name, ok, max(differing), f"{len(differing)} of {len(row_gaps)} texts differ, {cause}"
    )


def gaps(output: Any, expected: Any) -> list[float | None]:
    """Measure, for each row, how much the log-probabilities of two `generate` outputs differ at the
    point where their texts diverge; None for a row whose texts are equal.

    Kernels round sums differently from PyTorch, so a near-tie can fall either way, and all later
    tokens may differ. So the gap is measured at the first step in which the reveals differ: it is
    the difference between the mean log-probabilities of the tokens that the two texts reveal in
    this step. Before this step the texts are equal, so the means are close if both texts are
    correct. The gap is infinite if only one of the texts reveals tokens in this step.
    """
    row_gaps: list[float | None] = []
    for row in range(len(output.sequences)):
        reveals = _revealed(output, row)
        expected_reveals = _revealed(expected, row)
        steps = []
        for position in reveals.keys() | expected_reveals.keys():
            reveal = reveals.get(position)
            expected_reveal = expected_reveals.get(position)
            if reveal is None or expected_reveal is None or reveal[:2] != expected_reveal[:2]:
                steps += [pair[0] for pair in (reveal, expected_reveal) if pair is not None]
        if steps:
            first = min(steps)
            gap = _mean_logprob(reveals, first) - _mean_logprob(expected_reveals, first)
            row_gaps.append(abs(gap))
        else:
            row_gaps.append(None)
    return row_gaps


def _mean_logprob(reveals: dict[int, tuple[int, int, float]], step: int) -> float:
    """Return the mean log-probability of the tokens that a step reveals; infinity if it reveals
    none. `reveals` is a result of `_revealed`."""
    logprobs = [logprob for reveal_step, _, logprob in reveals.values() if reveal_step == step]
    return sum(logprobs) / len(logprobs) if logprobs else math.inf


def _revealed(out: Any, row: int) -> dict[int, tuple[int, int, float]]:
    """Map each revealed position of a row to its step, token id and log-probability."""
    steps = out.reveal_step[row].tolist()
    columns = zip(
        steps,
        out.sequences[row, -len(steps) :].tolist(),
        out.token_logprobs[row].tolist(),
        strict=True,
    )
    return {position: reveal for position, reveal in enumerate(columns) if reveal[0] >= 0}
