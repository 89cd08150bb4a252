"""Part 4: quantized weights, by the lines that the README gives."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from habits import QUESTIONS, asked, habit, new_model, same
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from modeling_mrp.generate import generation


def _int4() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def _int8(name: str) -> Any:
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, name)())


KEEP: dict[str, Callable[[], Any]] = {
    "LLM.int8 with llm_int8_threshold=0.0": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes 4-bit": lambda: BitsAndBytesConfig(load_in_4bit=True),
    "torchao int8": lambda: _int8("Int8WeightOnlyConfig"),
    "torchao int8 with dynamic activations": lambda: _int8("Int8DynamicActivationInt8WeightConfig"),
    "torchao int4": _int4,
    "quanto int8": lambda: QuantoConfig(weights="int8"),
    "quanto int4": lambda: QuantoConfig(weights="int4"),
}


def _keeps(quantization: Callable[[], Any]) -> Callable[[], None]:
    def texts_are_equal() -> None:
        model, inputs = new_model(quantization_config=quantization()), asked(*QUESTIONS)
        target = model.generate(**inputs, decoding="sequential", max_new_tokens=16)  # the checkpoint's own target
        assert same(model.generate(**inputs, decoding="mrp_spec", max_new_tokens=16), target)

    return texts_are_equal


for _name, _quantization in KEEP.items():
    habit(4, f"{_name}: drafted text is its target's")(_keeps(_quantization))


@habit(4, "LLM.int8 as it comes is warned of where it drafts, with the remedy")
def outliers() -> None:
    heard: list[str] = []
    model, usual = new_model(quantization_config=BitsAndBytesConfig(load_in_8bit=True)), generation.logger
    generation.logger = SimpleNamespace(warning_once=heard.append)  # transformers says it once in a process, to stderr
    try:
        model.generate(**asked(QUESTIONS[0]), decoding="mrp_spec", max_new_tokens=4)
    finally:
        generation.logger = usual
    assert len(heard) == 1, heard
    assert "llm_int8_threshold=0.0" in heard[0]
