"""Random-weight models small enough for a laptop, the embedded checkpoint, and tokenizers of whole
words.

What takes seconds to import is imported where it is used: the process that hands tests out to
others needs none of it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh import Fresh
from tests.support.places import TINY

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# transformers copies a repository's code once for each commit, and the tests have one commit for
# all that they make.
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()


def pytest_collectstart() -> None:
    """Let kernels that a test forces be interpreted where there is no GPU; triton reads this where
    they are defined."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture
def hub(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A Hub on loopback, which this process uses as Alice. What is pushed is tried in a fresh
    process only with the mark `real_trial`, as that takes seconds."""
    from tests.support.hub_server import HubServer, using

    if request.node.get_closest_marker("real_trial") is None:
        monkeypatch.setattr("mrp_trainer.publish.command.try_out", lambda *_: "")
    with HubServer() as server, using(server, tmp_path):
        yield server


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fresh]:
    """A runner of scripts that know nothing of this checkout."""
    runner = Fresh(tmp_path_factory.mktemp("fresh"))
    yield runner
    runner.close()


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sampled drafts choose among four tokens of a position, since the interpreter of kernels
    takes them one by one."""
    monkeypatch.setattr("modeling_mrp.networks.picker.LIKELIEST", 4)


@pytest.fixture
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program of `rotated` take many heads, since the interpreter runs programs one after the
    other."""
    monkeypatch.setattr("modeling_mrp.kernels.round_layers._HEADS", 1024)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that a test fails if a kernel leaves out numbers that it should
    write."""
    import torch

    # cuBLAS is deterministic only if configured
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def embedded() -> Any:
    """Load the embedded checkpoint with a fixed number of drafts, so that counts are the same in
    every run."""
    from modeling_mrp import MRPForCausalLM

    model = MRPForCausalLM.from_pretrained(TINY).eval()
    model.generation_config.num_draft_states = 4
    return model


@pytest.fixture(scope="session")
def random_model() -> Any:
    from tests.support.random_cases import make_model

    return make_model()


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return embedded()


@pytest.fixture(scope="session")
def tiny_model_float64() -> Any:
    return embedded().double()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY, trust_remote_code=True)


@pytest.fixture(scope="session")
def word_tokenizer() -> Any:
    """A tokenizer of the whole words in 300 problems; other words are unknown."""
    from mrp_trainer.data.tasks import make_problem
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    splitter = Whitespace()
    words = {"user", "assistant", ":"}
    for index in range(150):
        for family in ("math", "code"):
            problem = make_problem(family, "train", index)
            words |= {
                word
                for text in (problem.prompt, problem.answer)
                for word, _ in splitter.pre_tokenize_str(text)
            }
    vocab = {
        word: i for i, word in enumerate(["<pad>", "<end>", "<mask>", "<unk>", *sorted(words)])
    }
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
def id_tokenizer() -> Any:
    from tests.support.random_cases import word_tokenizer

    return word_tokenizer()


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute Qwen3's RMSNorm in the precision of its input. Its own code rounds to float32, which
    would hide the package's arithmetic from tests that ask for 1e-10."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from tests.support.helpers import naive_norm

    monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda norm, x: naive_norm(norm, x))
