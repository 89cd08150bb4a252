"""Quantized models: whose drafted text is that of its target, and what is said where it is not."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from mrp_trainer.heads import with_new_head
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.generation import mixed_tokens
from modeling_mrp.kernels.pick import Unembedding

QUESTIONS = (
    "Sum the numbers of a list that are even, each plus 5.",
    "Bo has 8 pens. Ana gives Bo 2 more. How many pens does Bo have?",
)
PLAIN_HEAD = ["lm_head", "mrp_head"]  # kept as they are


def bitsandbytes(**options: Any) -> BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # else a line for each product
    return BitsAndBytesConfig(**options)


def torchao(scheme: str, granularity: str | None = None, **options: Any) -> TorchAoConfig:
    schemes = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    given = {} if granularity is None else {"granularity": getattr(schemes, granularity)()}
    return TorchAoConfig(getattr(schemes, scheme)(**given), **options)


def torchao_int4() -> TorchAoConfig:
    """On a CPU in place of Int4WeightOnlyConfig, which needs a GPU."""
    schemes = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return TorchAoConfig(schemes.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=schemes.PerGroup(32)))


def quanto(**options: Any) -> QuantoConfig:
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    return QuantoConfig(**options)


SAME: dict[str, Callable[[], Any]] = {
    "LLM.int8 without outliers": lambda: bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao int4": torchao_int4,
    "quanto int8": lambda: quanto(weights="int8"),
    "quanto int4": lambda: quanto(weights="int4"),
}
MIXED: dict[str, tuple[Callable[[], Any], str]] = {
    "LLM.int8": (lambda: bitsandbytes(load_in_8bit=True), "llm_int8_threshold=0.0) for the same text"),
    "torchao PerTensor": (
        lambda: torchao("Int8DynamicActivationInt8WeightConfig", "PerTensor"),
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
    changed = {type(layer.mlp.up_proj.weight) for layer in model.model.layers} | {
        type(layer.mlp.up_proj.weight) for layer in model.mrp_head.layers
    }
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


@pytest.mark.parametrize(
    ("kind", "scales", "mixes"),
    [
        ("DynamicActivationConfig", "PerTensor", True),
        ("DynamicActivationConfig", "PerRow", False),
        ("DynamicActivationConfig", None, False),
        ("WeightOnlyConfig", "PerTensor", False),  # nor activations that were calibrated
    ],
)
def test_scales_of_activations_and_of_weights_are_told_apart(kind: str, scales: str | None, mixes: bool) -> None:
    """Of torchao's float8, which only GPUs run."""
    for several in (False, True):  # of activations, and of weights behind
        given = None if scales is None else type(scales, (), {})()
        scheme = type(kind, (), {"granularity": [given, None] if several else given})()
        assert (mixed_tokens(SimpleNamespace(quant_type=scheme)) is not None) == mixes
    assert mixed_tokens(None) is None


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "torchao int8 dynamic"])
def test_forward_and_the_packed_pass(name: str, tiny_tokenizer: Any, tiny_model: MRPForCausalLM) -> None:
    """The loss of a text that the model would write is near that of the model as it was trained."""
    inputs = asked(tiny_tokenizer, QUESTIONS[1])
    ids = tiny_model.generate(**inputs, decoding="static", max_new_tokens=32)
    learned = torch.arange(ids.shape[1]) >= inputs["input_ids"].shape[1]
    labels = torch.where(learned, ids, -100)
    noise = {"noise_level": torch.tensor([0.5]), "noise_mask": learned[None] & (torch.arange(ids.shape[1]) % 2 == 0)}
    with torch.no_grad():
        usual = tiny_model(ids, labels=labels, **noise).loss
        model = loaded(SAME[name]())
        assert model(ids, labels=labels, **noise).loss == pytest.approx(usual, abs=1)
        scores = model(ids).logits
    assert (scores.argmax(-1) == tiny_model(ids).logits.argmax(-1))[learned[None]].float().mean() > 0.7


def test_kernels_around_quantized_layers(tiny_tokenizer: Any) -> None:
    """The fused layers call what stands in the place of a matrix product."""
    model = loaded(SAME["torchao int8"]())
    inputs = {name: values[:, -12:] for name, values in asked(tiny_tokenizer, QUESTIONS[1]).items()}
    options: dict[str, Any] = {"decoding": "static", "max_new_tokens": 2}
    assert torch.equal(model.generate(**inputs, **options, kernels=True), model.generate(**inputs, **options, kernels=False))


def test_an_unembedding_whose_numbers_lie_elsewhere_is_called() -> None:
    """The address of such a tensor is null: no kernel is given it."""
    quantize = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    linear = nn.Sequential(nn.Linear(64, 96, bias=False).bfloat16())
    quantize.quantize_(linear, quantize.Int8WeightOnlyConfig())
    weight = linear[0].weight.detach()
    assert weight.data_ptr() == 0
    with torch.no_grad():
        assert Unembedding(weight, 3).logits(torch.randn(3, 64).bfloat16()).shape == (3, 96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_8bit": True}, "lm_head is a Linear8bitLt with weights in torch.int8, which generate cannot read"),
        ({"load_in_4bit": True}, "lm_head is a Linear4bit with weights in torch.uint8, which generate cannot read"),
    ],
)
def test_a_packed_lm_head_is_refused(options: dict[str, bool], message: str) -> None:
    """Modules that a user lists take the place of those that transformers would leave alone."""
    model = loaded(bitsandbytes(**options, llm_int8_skip_modules=["mrp_head"]))
    with pytest.raises(ValueError, match=message + r": keep it as it was, with 'lm_head' in llm_int8_skip_modules"):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)


QUANTIZED_HEADS: dict[str, Callable[[], Any]] = {
    "bitsandbytes": lambda: bitsandbytes(load_in_8bit=True),
    "torchao": lambda: torchao("Int8WeightOnlyConfig"),
    "quanto": lambda: quanto(weights="int8"),
}
PLAIN_HEADS: dict[str, Callable[[], Any]] = {
    "bitsandbytes": lambda: bitsandbytes(load_in_8bit=True, llm_int8_skip_modules=PLAIN_HEAD),
    "torchao": lambda: torchao("Int8WeightOnlyConfig", modules_to_not_convert=PLAIN_HEAD),
    "quanto": lambda: quanto(weights="int8", modules_to_not_convert=PLAIN_HEAD),
}


@pytest.mark.parametrize("library", QUANTIZED_HEADS)
def test_a_head_is_saved_alone_where_it_is_not_quantized(library: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save a quantized head with the whole model"):
        loaded(QUANTIZED_HEADS[library]()).save_pretrained(tmp_path / "head", head_only=True)
    assert not (tmp_path / "head").exists()
    model = loaded(PLAIN_HEADS[library]())
    model.save_pretrained(tmp_path / "head", head_only=True)
    again = MRPForCausalLM.from_pretrained(tmp_path / "head", quantization_config=QUANTIZED_HEADS[library]())
    assert torch.equal(again.mrp_head.eh_proj.weight, model.mrp_head.eh_proj.weight)
    assert type(again.model.layers[0].mlp.up_proj.weight) is not nn.Parameter


@pytest.mark.parametrize("library", ["torchao"])
def test_a_new_head_does_not_start_as_a_copy_of_quantized_layers(library: str) -> None:
    quantization = QUANTIZED_HEADS[library]
    with pytest.raises(ValueError, match=r"its last layers are offloaded or quantized: .*'identity'"):
        with_new_head(MRPForCausalLM.from_pretrained(TINY, quantization_config=quantization()), 1, "backbone")
    assert with_new_head(MRPForCausalLM.from_pretrained(TINY, quantization_config=quantization()), 1).config.has_head
