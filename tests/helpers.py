"""What several test files share: prompts, ways to call `generate`, comparisons, a chi-square test and training samples."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mrp_trainer.data.samples import Sample
from mrp_trainer.train.collator import DiffusionCollator
from mrp_trainer.train.packed import PackedBatch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, set_seed

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS, PUBLISHED
from tests.random_cases import batch_of

BLOCK, MASK, PAD, VOCAB = 4, 60, 0, 64  # of make_model
ALPHA = 1e-4  # false-alarm rate of each chi-square test; seeds are fixed
LOSSLESS = ("static", "self_spec", "mrp_spec")
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]
# Random weights repeat themselves when greedy; sampled texts vary, and the thresholds let every mode do what it is for.
LIVELY: dict[str, Any] = {
    **{"do_sample": True, "top_k": 0, "confidence_threshold": 0.04, "low_threshold": 0.03, "entropy_threshold": 5.0}
}

left_padded = batch_of
# Of the rules from papers one without a memory and one with: what they differ in is tested without a model.
MODES = [mode for mode in DECODINGS if mode not in {*PUBLISHED} - {"hierarchy", "credit"}]
every_mode = pytest.mark.parametrize("mode", MODES)


def random_ids(seed: int, *shape: int) -> Tensor:
    """Token ids of make_model: neither padding nor the mask."""
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    """Asserts that two tensors differ by at most `atol`."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def naive_norm(norm: Any, x: Tensor) -> Tensor:
    """RMSNorm in the precision of its input; Qwen3's computes in float32."""
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Upper tail of Pearson's statistic; the rarest cells are taken together until they expect at least 5."""
    assert probabilities.sum().item() == pytest.approx(1)
    expected, order = (counts.sum() * probabilities.double()).sort()
    counts = counts[order]
    together = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    counts, expected = (torch.cat([t[:together].sum()[None], t[together:]]) for t in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def generate(model: MRPForCausalLM, prompts: Sequence[list[int]], **options: Any) -> Any:
    """Everything `generate` returns for left-padded prompts."""
    return model.generate(**left_padded(prompts), return_dict_in_generate=True, **options)


def texts(model: MRPForCausalLM, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """The generated tokens of every row, without padding."""
    out = generate(model, prompts, **options)
    width = max(map(len, prompts))
    return [row[width:][steps >= 0].tolist() for row, steps in zip(out.sequences, out.reveal_step, strict=True)]


def text(model: MRPForCausalLM, prompt: list[int], **options: Any) -> list[int]:
    """The generated tokens of one prompt, decoded alone."""
    return texts(model, [prompt], **options)[0]


def inside_a_block(prompt: list[int], tokens: list[int]) -> int:
    """The index of a token that is new to the text and neither first nor last in its block."""
    return next(
        i for i in range(1, len(tokens)) if tokens[i] not in tokens[:i] and (len(prompt) + i) % BLOCK in range(1, BLOCK - 1)
    )


class StopAfter(StoppingCriteria):
    """Stops behind a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


def sample(index: int, length: int, response_start: int) -> Sample:
    """A sample of random ids, the same for the same index."""
    rng = np.random.default_rng(index)
    return Sample(index, rng.integers(1, 50, length), np.arange(length) >= response_start)


def collate(samples: list[Sample], **options: Any) -> PackedBatch:
    """The batch that a collator for make_model packs."""
    return PackedBatch(**DiffusionCollator(BLOCK, MASK, PAD, **options)(samples))


def python_function(source: str) -> Callable[[Any], Any]:
    """What Python itself makes of the one function in a text."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return next(value for name, value in namespace.items() if name != "__builtins__")


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder, by path."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def word_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, head_layers: int = 1) -> MRPForCausalLM:
    """One layer of random weights for a tokenizer, blocks of 8."""
    set_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    ids = {name: getattr(tokenizer, name) for name in ("mask_token_id", "pad_token_id", "eos_token_id")}
    return MRPForCausalLM(
        MRPConfig(
            **shape,
            **ids,
            vocab_size=len(tokenizer),
            num_key_value_heads=1,
            block_size=8,
            max_position_embeddings=256,
            initializer_range=0.1,
            num_nextn_predict_layers=head_layers,
        )
    )
