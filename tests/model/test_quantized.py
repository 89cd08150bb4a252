"""Quantized models: whose drafted text is that of its target, and what is said where it is not."""

import logging
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.generation import mixed_tokens

QUESTIONS = (
    "Sum the numbers of a list that are even, each plus 5.",
    "Bo has 8 pens. Ana gives Bo 2 more. How many pens does Bo have?",
)
PLAIN_HEAD = ["lm_head", "mrp_head"]  # kept as they are


def bitsandbytes(**options: Any) -> BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # else a line for each product
    return BitsAndBytesConfig(**options)


def torchao(scheme: str, granularity: tuple[Any, ...] = (), left: Any = None, **options: Any) -> TorchAoConfig:
    schemes = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    if granularity:
        options["granularity"] = getattr(schemes, granularity[0])(*granularity[1:])
    return TorchAoConfig(getattr(schemes, scheme)(**options), modules_to_not_convert=left)


def quanto(**options: Any) -> QuantoConfig:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    return QuantoConfig(**options)


SAME: dict[str, Callable[[], Any]] = {
    "LLM.int8 without outliers": lambda: bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    # On a CPU in place of Int4WeightOnlyConfig, which needs a GPU.
    "torchao int4": lambda: torchao("IntxWeightOnlyConfig", ("PerGroup", 32), weight_dtype=torch.int4),
    "quanto int8": lambda: quanto(weights="int8"),
    "quanto int4": lambda: quanto(weights="int4"),
}
MIXED: dict[str, tuple[Callable[[], Any], str]] = {
    "LLM.int8": (lambda: bitsandbytes(load_in_8bit=True), "llm_int8_threshold=0.0) for the same text"),
    "torchao PerTensor": (
        lambda: torchao("Int8DynamicActivationInt8WeightConfig", ("PerTensor",)),
        "granularity=PerRow() for the same text",
    ),
}


def loaded(quantization: Any, **options: Any) -> MRPForCausalLM:
    return MRPForCausalLM.from_pretrained(TINY, quantization_config=quantization, **options).eval()


def asked(tokenizer: Any, *questions: str) -> dict[str, Tensor]:
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True)


def new_tokens(model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any) -> list[list[int]]:
    """The generated tokens of every row, without padding."""
    out = model.generate(**inputs, max_new_tokens=20, return_dict_in_generate=True, **options)
    columns = inputs["input_ids"].shape[1]
    return [row[columns:][steps >= 0].tolist() for row, steps in zip(out.sequences, out.reveal_step, strict=True)]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of `generate`, each as often as it is given."""
    heard: list[str] = []
    monkeypatch.setattr("modeling_mrp.generate.generation.logger", SimpleNamespace(warning_once=heard.append))
    return heard


@pytest.mark.parametrize("name", SAME)
def test_drafted_text_is_its_targets(name: str, tiny_tokenizer: Any, said: list[str]) -> None:
    model, inputs = loaded(SAME[name]()), asked(tiny_tokenizer, *QUESTIONS)
    changed = {type(layer.mlp.up_proj.weight) for layer in (*model.model.layers, *model.mrp_head.layers)}
    assert nn.Parameter not in changed, "nothing was quantized"
    target = new_tokens(model, inputs, decoding="static")
    assert new_tokens(model, inputs, decoding="mrp_spec", target="static") == target
    assert new_tokens(model, inputs, decoding="self_spec", target="static") == target
    assert new_tokens(model, asked(tiny_tokenizer, QUESTIONS[0]), decoding="static") == target[:1]
    assert said == []


def test_the_documents_lines_are_those_that_are_tested() -> None:
    """Each of their table, in the order above, and as many."""
    schemes = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    names = {**vars(schemes), "torch": torch, "TorchAoConfig": TorchAoConfig, "QuantoConfig": quanto}
    text = (ROOT / "docs/quantized.md").read_text()
    rows = re.findall(r"^\| [a-z-]+ \| `(.*?)`(, or `\"int4\"`)? \| (yes|no)", text, re.MULTILINE)
    told = [
        (line, answer) for line, other, answer in rows for line in (line, *([line.replace("int8", "int4")] if other else []))
    ]
    kept = [eval(line, {**names, "BitsAndBytesConfig": bitsandbytes}) for line, answer in told if answer == "yes"]
    assert sorted(repr(one.to_dict()) for one in kept) == sorted(repr(make().to_dict()) for make in SAME.values())
    assert [line for line, answer in told if answer == "no"] == ["BitsAndBytesConfig(load_in_8bit=True)"]


@pytest.mark.parametrize("name", MIXED)
def test_where_tokens_change_each_others_results_it_is_said(name: str, tiny_tokenizer: Any, said: list[str]) -> None:
    """One token decides how another is rounded: in drafting, and for the rows of a batch."""
    quantization, remedy = MIXED[name]
    model, inputs = loaded(quantization()), asked(tiny_tokenizer, *QUESTIONS)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        small, beside_a_large_one = layer(x)[0, 0], layer(x * torch.tensor([1.0, 20.0])[None, :, None])[0, 0]
    assert (small - beside_a_large_one).abs().max() > 1e-3
    new_tokens(model, asked(tiny_tokenizer, QUESTIONS[0]), decoding="static")
    assert said == []
    new_tokens(model, asked(tiny_tokenizer, QUESTIONS[0]), decoding="mrp_spec")
    new_tokens(model, inputs, decoding="static")
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].endswith(remedy)


def test_scales_of_activations_and_of_weights_are_told_apart() -> None:
    """Of torchao's float8, which only GPUs run: of activations, and of weights behind; none are those that were calibrated."""
    for kind, scales in product(("DynamicActivationConfig", "WeightOnlyConfig"), ("PerTensor", "PerRow", None)):
        given = None if scales is None else type(scales, (), {})()
        for granularity in (given, [given, None]):
            scheme = SimpleNamespace(quant_type=type(kind, (), {"granularity": granularity})())
            assert (mixed_tokens(scheme) is not None) == ((kind, scales) == ("DynamicActivationConfig", "PerTensor"))
    assert mixed_tokens(None) is None


def test_kernels_around_quantized_layers(tiny_tokenizer: Any) -> None:
    """The fused layers call what stands in the place of a matrix product."""
    model = loaded(SAME["torchao int8"]())
    inputs = {name: values[:, -12:] for name, values in asked(tiny_tokenizer, QUESTIONS[1]).items()}
    options: dict[str, Any] = {"decoding": "static", "max_new_tokens": 2}
    assert torch.equal(model.generate(**inputs, **options, kernels=True), model.generate(**inputs, **options, kernels=False))


@pytest.mark.parametrize("kind", ["load_in_8bit", "load_in_4bit"])
def test_a_packed_lm_head_is_refused(kind: str) -> None:
    """Modules that a user lists take the place of those that transformers would leave alone."""
    model = loaded(bitsandbytes(**{kind: True}, llm_int8_skip_modules=["mrp_head"]))
    said = "lm_head is a Linear.* with weights in torch.u?int8, .* keep it as it was, with 'lm_head' in llm_int8_skip_modules"
    with pytest.raises(ValueError, match=said):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)


HEADS: dict[str, Callable[[Any], Any]] = {  # given what is left as it is
    "bitsandbytes": lambda left: bitsandbytes(load_in_8bit=True, llm_int8_skip_modules=left),
    "torchao": lambda left: torchao("Int8WeightOnlyConfig", left=left),
    "quanto": lambda left: quanto(weights="int8", modules_to_not_convert=left),
}


@pytest.mark.parametrize("library", HEADS)
def test_a_head_is_saved_alone_where_it_is_not_quantized(library: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save a quantized head with the whole model"):
        loaded(HEADS[library](None)).save_pretrained(tmp_path / "head", head_only=True)
    assert not (tmp_path / "head").exists()
    model = loaded(HEADS[library](PLAIN_HEAD))
    model.save_pretrained(tmp_path / "head", head_only=True)
    again = MRPForCausalLM.from_pretrained(tmp_path / "head", quantization_config=HEADS[library](None))
    assert torch.equal(again.mrp_head.eh_proj.weight, model.mrp_head.eh_proj.weight)
    assert type(again.model.layers[0].mlp.up_proj.weight) is not nn.Parameter
