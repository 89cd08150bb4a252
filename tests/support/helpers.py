"""Parts that several test files share: prompts, calls of `generate`, comparisons, a chi-square test
and training samples."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from mrp_trainer.data.samples import Sample
from mrp_trainer.train.collator import DiffusionCollator
from mrp_trainer.train.packed import PackedBatch
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedTokenizerFast, set_seed

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS, PUBLISHED
from tests.support.random_cases import batch_of

BLOCK, MASK, PAD, VOCAB = 4, 60, 0, 64  # of make_model
ALPHA = 1e-4  # false-alarm rate of each chi-square test; seeds are fixed
PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]
# Greedy texts of random weights repeat themselves, so these are sampled; with these thresholds
# every mode uses all its rules.
LIVELY: dict[str, Any] = {
    "do_sample": True,
    "top_k": 0,
    "confidence_threshold": 0.04,
    "low_threshold": 0.03,
}
LIVELY |= {"entropy_threshold": 5.0}

left_padded = batch_of
# Only two of the rules from papers, one without a memo and one with: their differences are tested
# without a model.
MODES = [mode for mode in DECODINGS if mode not in {*PUBLISHED} - {"hierarchy", "credit"}]


def random_ids(seed: int, *shape: int) -> Tensor:
    """Draw token ids of make_model's vocabulary, without padding and mask."""
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    """Assert that two tensors differ by at most `atol`."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def naive_norm(norm: Any, x: Tensor) -> Tensor:
    """Compute RMSNorm in the precision of its input; Qwen3's own computes in float32."""
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """Compute the p-value of Pearson's chi-square test; the rarest cells are merged into one that
    expects at least 5."""
    assert probabilities.sum().item() == pytest.approx(1)
    expected, order = (counts.sum() * probabilities.double()).sort()
    counts = counts[order]
    together = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    counts, expected = (
        torch.cat([t[:together].sum()[None], t[together:]]) for t in (counts, expected)
    )
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(
        torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2
    ).item()


def older_than(release: str) -> bool:
    """Tell if the installed transformers is older than a release."""
    return Version(transformers.__version__) < Version(release)


def generate(model: MRPForCausalLM, prompts: Sequence[list[int]], **options: Any) -> Any:
    """Decode left-padded prompts; return the whole output of `generate`."""
    device = "cpu" if model.device.type == "meta" else model.device  # meta: it lies on disk
    inputs = {name: tensor.to(device) for name, tensor in left_padded(prompts).items()}
    return model.generate(**inputs, return_dict_in_generate=True, **options)


_TABLES = (
    "row_forwards",
    "row_head_forwards",
    "drafted",
    "accepted",
    "revoked",
    "accepted_lengths",
    "revocations",
)


def same_output(got: Any, expected: Any) -> None:
    """Assert that two outputs have the same text, steps, log-probabilities and counts."""
    assert torch.equal(got.sequences, expected.sequences)
    assert torch.equal(got.reveal_step, expected.reveal_step)
    torch.testing.assert_close(got.token_logprobs, expected.token_logprobs)
    assert got.stats.forwards == expected.stats.forwards
    for name in _TABLES:
        assert torch.equal(getattr(got.stats, name), getattr(expected.stats, name)), name


def texts(model: MRPForCausalLM, prompts: Sequence[list[int]], **options: Any) -> list[list[int]]:
    """Decode prompts; return the generated tokens of every row, without padding."""
    out = generate(model, prompts, **options)
    width = max(map(len, prompts))
    return [
        row[width:][steps >= 0].tolist()
        for row, steps in zip(out.sequences, out.reveal_step, strict=True)
    ]


def text(model: MRPForCausalLM, prompt: list[int], **options: Any) -> list[int]:
    """Decode one prompt alone; return the generated tokens."""
    return texts(model, [prompt], **options)[0]


def says_all(number: float, committed: int = 0) -> dict[str, Any]:
    """Return options under which every score is `number` as soon as `committed` tokens are
    known."""

    def says(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, number) if input_ids.shape[1] >= committed else scores

    return {"logits_processor": [says]}


SHA = "89abcdef0123456789abcdef0123456789abcdef"


def in_hub_cache(folder: Path, cache: Path, name: str, sha: str = SHA) -> None:
    """Copy a folder to the place in the Hub's cache where a download would put it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / sha)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(sha)


def same_tensors(a: Any, b: Any) -> bool:
    """Tell if two modules have the same tensors under the same names."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


SPEC: dict[str, Any] = {
    "decoding": "mrp_spec",
    "num_draft_states": 4,
    "max_new_tokens": 12,
    "eos_token_id": None,
}
SPEC |= {"pad_token_id": 0, "return_dict_in_generate": True}


def speculate(model: MRPForCausalLM, prompt: Tensor) -> tuple[list[int], list[int], list[int]]:
    """Decode a prompt; return its tokens, and counts of drafted and of accepted states, which
    depend on the head."""
    out: Any = model.generate(prompt, **SPEC)
    return out.sequences[0].tolist(), out.stats.drafted.tolist(), out.stats.accepted.tolist()


def sample(index: int, length: int, response_start: int) -> Sample:
    """Make a sample of random ids, the same for the same index."""
    rng = np.random.default_rng(index)
    return Sample(index, rng.integers(1, 50, length), np.arange(length) >= response_start)


def collate(samples: list[Sample], **options: Any) -> PackedBatch:
    """Pack samples into a batch by a collator for make_model."""
    return PackedBatch(**DiffusionCollator(BLOCK, MASK, PAD, **options)(samples))


def python_function(source: str) -> Callable[[Any], Any]:
    """Return the one function that a text defines, compiled by Python."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return next(value for name, value in namespace.items() if name != "__builtins__")


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file under a folder, by path."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


def word_model(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, head_layers: int = 1
) -> MRPForCausalLM:
    """Make a model of one layer with random weights for a tokenizer, in blocks of 8."""
    set_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    shape |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": head_layers,
    }
    sizes = {
        "block_size": 8,
        "max_position_embeddings": 256,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.1,
    }
    ids = {
        name: getattr(tokenizer, name) for name in ("mask_token_id", "pad_token_id", "eos_token_id")
    }
    return MRPForCausalLM(MRPConfig(**shape, **sizes, **ids))
