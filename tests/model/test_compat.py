"""What transformers calls differently from version to version, and its Auto classes once the
package is imported."""

import logging
import sys
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Trainer,
    TrainingArguments,
    pipeline,
)

from modeling_mrp import MRPConfig, MRPForCausalLM, versions
from modeling_mrp.model.compat import CACHE_NAME
from tests.support.fresh import Fresh
from tests.support.places import TINY

PROMPT = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
OPTIONS = {"max_new_tokens": 8, "return_dict_in_generate": True}
NAMES = ("cache", "past_key_values")


@pytest.mark.parametrize("name", NAMES)
def test_forward_takes_a_cache_by_either_name(random_model: MRPForCausalLM, name: str) -> None:
    whole = random_model(PROMPT).logits
    cache = DynamicCache()
    random_model(PROMPT[:, :4], use_cache=True, **{name: cache})
    outputs = random_model(PROMPT[:, 4:], use_cache=True, **{name: cache})
    assert outputs[CACHE_NAME] is cache
    assert torch.allclose(outputs.logits, whole[:, 4:])


@pytest.mark.parametrize("name", NAMES)
def test_generate_takes_and_returns_a_cache_by_either_name(
    random_model: MRPForCausalLM, name: str
) -> None:
    first = random_model.generate(PROMPT, **OPTIONS)
    cache = first.cache
    assert cache is not None
    for same in (
        first.past_key_values,
        first["cache"],
        first["past_key_values"],
        first.get("past_key_values"),
    ):
        assert same is cache
    assert [key for key in ("cache", "past_key_values", "other") if key in first] == [
        "cache",
        "past_key_values",
    ]
    again = random_model.generate(PROMPT, **{name: cache}, **OPTIONS)
    assert again.sequences.equal(first.sequences)
    assert again.cache is cache
    first.past_key_values = None
    assert first.cache is None
    first["past_key_values"] = cache
    assert first.cache is cache


def test_two_names_of_one_cache_are_refused(random_model: MRPForCausalLM) -> None:
    cache = random_model.generate(PROMPT, **OPTIONS).cache
    both: dict[str, Any] = dict.fromkeys(NAMES, cache)
    for call in (random_model.generate, random_model):
        with pytest.raises(ValueError, match="cache and past_key_values are two names"):
            call(PROMPT, **both)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Two texts to learn."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": PROMPT[0] + index, "labels": PROMPT[0] + index}


def test_our_own_calls_cause_no_warning_of_deprecation(
    random_model: MRPForCausalLM,
    tmp_path: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of decoding, scoring, loading, saving and training, in warnings and in transformers' log."""
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "propagate", True)
    transformers.utils.logging.warning_once.cache_clear()  # what an earlier test caused
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings(
                "error", category=kind, message=".*(past_key_values|cache|deprecated)"
            )
        for decoding in ("static", "mrp_spec", "mrp_direct", "mrp_remask"):
            out = random_model.generate(PROMPT, decoding=decoding, **OPTIONS)
            random_model.generate(out.sequences, cache=out.cache, **OPTIONS)
        random_model.score(PROMPT)
        random_model.save_pretrained(tmp_path / "saved")
        model = MRPForCausalLM.from_pretrained(tmp_path / "saved")
        model(PROMPT, use_cache=True, **{CACHE_NAME: DynamicCache()})
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no"
        )
        Trainer(model, arguments, train_dataset=Texts()).train()
    assert [record.message for record in caplog.records if "deprecated" in record.message] == []


# The Auto classes


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": False}, {"trust_remote_code": True}])
def test_the_auto_classes_know_the_package_once_it_is_imported(trust: dict[str, bool]) -> None:
    """Without a question, of which the answer would be awaited, and with this package's own
    classes."""
    assert isinstance(AutoConfig.from_pretrained(TINY, **trust), MRPConfig)
    for auto in (AutoModel, AutoModelForCausalLM):
        assert isinstance(auto.from_pretrained(TINY, **trust), MRPForCausalLM)
    assert AutoTokenizer.from_pretrained(TINY, **trust).mask_token is not None


def test_a_pipeline_needs_no_trust_once_the_package_is_imported() -> None:
    pipe = pipeline("text-generation", model=TINY)
    assert isinstance(pipe.model, MRPForCausalLM)
    assert pipe("def change", max_new_tokens=4, return_full_text=False)[0]["generated_text"]


def test_a_repositorys_code_registers_nothing(fresh: Fresh) -> None:
    printed = fresh(
        f"""
        from transformers import AutoModel, CONFIG_MAPPING
        model = AutoModel.from_pretrained({str(TINY)!r}, trust_remote_code=True)
        print(model.config.model_type, model.config.model_type in CONFIG_MAPPING)
        """
    )
    assert printed.strip() == "sdar_mrp False"


# The versions that were tested


@pytest.mark.parametrize(
    ("installed", "noted"),
    [
        ("5.17.0", False),
        ("5.23.1", False),
        ("5.24.3", False),
        ("5.16.1", True),
        ("5.25.0.dev0", True),
        ("6.0.0", True),
    ],
)
def test_an_error_names_the_versions_that_were_tested(
    random_model: MRPForCausalLM, installed: str, noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the installed version of transformers is none of them."""
    monkeypatch.setattr(versions, "TESTED", ("5.17.0", "5.24.0"))
    monkeypatch.setattr(sys.modules["transformers"], "__version__", installed)

    def notes(error: BaseException) -> list[str]:
        return [
            note
            for note in getattr(error, "__notes__", [])
            if f"and {installed} is installed" in note
        ]

    with pytest.raises(ValueError, match="block_size") as of_generate:
        random_model.generate(PROMPT, block_size=3)
    with pytest.raises(OSError, match="no-folder") as of_loading:
        MRPForCausalLM.from_pretrained("./no-folder")
    assert len(notes(of_generate.value)) == len(notes(of_loading.value)) == noted
