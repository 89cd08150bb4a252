"""Random-weight models small enough for a laptop, the embedded checkpoint, and tokenizers of whole words."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

if not torch.cuda.is_available():  # kernels that a test forces are interpreted; triton reads this where they are defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

from fresh import Fresh
from helpers import naive_norm
from hub_server import HubServer, using
from mrp_trainer.data.tasks import make_problem
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels import round_layers
from modeling_mrp.networks import picker
from tests.random_cases import make_model
from tests.random_cases import word_tokenizer as word_ids

ROOT = Path(__file__).parent.parent
TINY = ROOT / "hub_configs" / "sdar-tiny-mrp"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub on loopback, where Alice (token hf_alice) writes to alice/ and org/."""
    with HubServer() as server:
        server.add_user("alice", token="hf_alice", organizations=["org"])
        yield server


@pytest.fixture
def as_alice(hub: HubServer, tmp_path: Path) -> Iterator[HubServer]:
    """The Hub on loopback, which this process uses as Alice."""
    with using(hub, tmp_path, "hf_alice"):
        yield hub


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """What runs scripts that know nothing of this checkout."""
    runner = Fresh(tmp_path_factory.mktemp("fresh"))
    yield runner
    runner.close()


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled drafts choose among four tokens of a position: the interpreter of kernels takes them one by one."""
    monkeypatch.setattr(picker, "LIKELIEST", 4)


@pytest.fixture
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of `rotated` takes many heads: the interpreter runs programs one after the other."""
    monkeypatch.setattr(round_layers, "_HEADS", 1024)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """What a kernel does not write, of its output or of what it hands to the next, shows."""
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())  # cuBLAS has some only where it is told to
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def embedded() -> MRPForCausalLM:
    """The embedded checkpoint, whose counts are the same in every run: with a number of drafts."""
    model = MRPForCausalLM.from_pretrained(TINY).eval()
    model.generation_config.num_draft_states = 4
    return model


@pytest.fixture(scope="session")
def random_model() -> MRPForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def tiny_model() -> MRPForCausalLM:
    return embedded()


@pytest.fixture(scope="session")
def tiny_model_float64() -> MRPForCausalLM:
    return embedded().double()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY, trust_remote_code=True)


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words of 300 problems; other words are unknown."""
    splitter = Whitespace()
    words = {"user", "assistant", ":"}
    for index in range(150):
        for family in ("math", "code"):
            problem = make_problem(family, "train", index)
            words |= {word for text in (problem.prompt, problem.answer) for word, _ in splitter.pre_tokenize_str(text)}
    vocab = {word: i for i, word in enumerate(["<pad>", "<end>", "<mask>", "<unk>", *sorted(words)])}
    words_only = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    words_only.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        pad_token="<pad>",
        eos_token="<end>",
        mask_token="<mask>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}",
    )


@pytest.fixture(scope="session")
def id_tokenizer() -> PreTrainedTokenizerFast:
    return word_ids()


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3's RMSNorm computes in float32 whatever its input. The tests that ask for 1e-10 use this, so that what they measure
    is the package's arithmetic and not that rounding."""
    monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda norm, x: naive_norm(norm, x))
