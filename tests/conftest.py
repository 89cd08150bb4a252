"""Random-weight models small enough for a laptop, and the embedded checkpoint."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoTokenizer

from modeling_mrp import MRPConfig, MRPForCausalLM

ROOT = Path(__file__).parent.parent
TINY = ROOT / "hub_configs" / "sdar-tiny-mrp"


def make_model(seed: int = 0, **overrides: Any) -> MRPForCausalLM:
    """A float64 model with random weights, wide enough to have opinions and a head that says something."""
    options: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "mask_token_id": 60,
        "num_nextn_predict_layers": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = MRPForCausalLM(MRPConfig(**{**options, **overrides}))
    if model.mrp_head is not None:
        torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    model = model.double().eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="session")
def random_model() -> MRPForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def tiny_model() -> MRPForCausalLM:
    return MRPForCausalLM.from_pretrained(TINY).eval()


@pytest.fixture(scope="session")
def tiny_model_float64() -> MRPForCausalLM:
    return MRPForCausalLM.from_pretrained(TINY).double().eval()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)
