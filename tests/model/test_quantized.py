"""Quantized models: every line of the documents' table, whose drafted text is that of its target or
where it is said that it is not."""

import logging
import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.loading import describe_token_mixing
from tests.support.places import ROOT, TINY
from tests.support.random_cases import make_model

QUESTIONS = (
    "Sum the numbers of a list that are even, each plus 5.",
    "Bo has 8 pens. Ana gives Bo 2 more. How many pens does Bo have?",
)
LIBRARIES = {
    "BitsAndBytesConfig": "bitsandbytes",
    "TorchAoConfig": "torchao.quantization",
    "QuantoConfig": "optimum.quanto",
}
TABLE = re.findall(
    r"^\| [a-z-]+ \| `(.*?)`(?:, or `\"(int4)\"`)? \| (yes|no)",
    (ROOT / "docs/quantized.md").read_text(),
    re.M,
)
SAME = [line for line, _, answer in TABLE if answer == "yes"]
SAME += [line.replace("int8", other) for line, other, _ in TABLE if other]
INT8 = "TorchAoConfig(Int8WeightOnlyConfig())"
# The lines whose text may be another, and what their warning says.
MIXED = {
    "BitsAndBytesConfig(load_in_8bit=True)": "llm_int8_threshold=0.0) for the same text",
    "TorchAoConfig(Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()))": (
        "granularity=PerRow() for the same text"
    ),
}


def loaded(line: str, source: Path = TINY, **options: Any) -> MRPForCausalLM:
    """The model quantized as a line of Python says, with these options beside."""
    kind = line.partition("(")[0]
    library = pytest.importorskip(LIBRARIES[kind], reason="of another extra: make test-extras")
    # else a line for each product
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    config = eval(line, {**vars(library), "torch": torch, kind: getattr(transformers, kind)})
    for name, value in options.items():
        setattr(config, name, value)
    return MRPForCausalLM.from_pretrained(source, quantization_config=config).eval()


def asked(tokenizer: Any, *questions: str) -> dict[str, Tensor]:
    chats = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )


def new_tokens(model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any) -> list[list[int]]:
    """The generated tokens of every row, without padding."""
    out = model.generate(**inputs, max_new_tokens=20, return_dict_in_generate=True, **options)
    columns = inputs["input_ids"].shape[1]
    return [
        row[columns:][steps >= 0].tolist()
        for row, steps in zip(out.sequences, out.reveal_step, strict=True)
    ]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of `generate`, each as often as it is given."""
    heard: list[str] = []
    monkeypatch.setattr(
        "modeling_mrp.generate.generation.logger", SimpleNamespace(warning_once=heard.append)
    )
    return heard


@pytest.mark.parametrize("line", SAME)
def test_drafted_text_is_its_targets(line: str, tiny_tokenizer: Any, said: list[str]) -> None:
    model, inputs = loaded(line), asked(tiny_tokenizer, *QUESTIONS)
    changed = {
        type(layer.mlp.up_proj.weight) for layer in (*model.model.layers, *model.mrp_head.layers)
    }
    assert nn.Parameter not in changed, "nothing was quantized"
    target = new_tokens(model, inputs, decoding="static")
    assert new_tokens(model, inputs, decoding="mrp_spec", target="static") == target
    assert new_tokens(model, inputs, decoding="self_spec", target="static") == target
    assert new_tokens(model, asked(tiny_tokenizer, QUESTIONS[0]), decoding="static") == target[:1]
    assert said == []


@pytest.mark.parametrize("line", MIXED)
def test_where_tokens_change_each_others_results_it_is_said(
    line: str, tiny_tokenizer: Any, said: list[str]
) -> None:
    """One token decides how another is rounded: in drafting, and for the rows of a batch."""
    assert len(SAME) == len(TABLE) == 7, (
        "one of the table's lines may be another text, and one is for two"
    )
    model, inputs = loaded(line), asked(tiny_tokenizer, *QUESTIONS)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        small, beside_a_large_one = (
            layer(x)[0, 0],
            layer(x * torch.tensor([1.0, 20.0])[None, :, None])[0, 0],
        )
    assert (small - beside_a_large_one).abs().max() > 1e-3
    new_tokens(model, asked(tiny_tokenizer, QUESTIONS[0]), decoding="static")
    assert said == []
    new_tokens(model, asked(tiny_tokenizer, QUESTIONS[0]), decoding="mrp_spec")
    new_tokens(model, inputs, decoding="static")
    assert len(said) == 2
    assert said[0] == said[1]
    assert said[0].endswith(MIXED[line])


def test_scales_of_activations_and_of_weights_are_told_apart() -> None:
    """Of torchao's float8, which only GPUs run: of activations, and of weights behind; none are
    those that were calibrated."""
    for kind, scales in product(
        ("DynamicActivationConfig", "WeightOnlyConfig"), ("PerTensor", "PerRow", None)
    ):
        given = None if scales is None else type(scales, (), {})()
        for granularity in (given, [given, None]):
            scheme = SimpleNamespace(quant_type=type(kind, (), {"granularity": granularity})())
            assert (describe_token_mixing(scheme) is not None) == (
                (kind, scales) == ("DynamicActivationConfig", "PerTensor")
            )
    assert describe_token_mixing(None) is None


@pytest.mark.filterwarnings(
    "ignore:.*torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor"
)
def test_layers_of_quantize_dynamic(said: list[str], tmp_path: Path) -> None:
    """An lm_head of its is refused wherever rows of it are read, with the remedy, under which
    drafts are warned of."""
    quantize, prompt = torch.ao.quantization.quantize_dynamic, torch.tensor([[5, 6, 7]])
    model: Any = quantize(make_model().float(), {nn.Linear}, dtype=torch.qint8)
    calls = (
        lambda: model.generate(prompt, max_new_tokens=2),
        lambda: model.score(prompt),
        lambda: model.attach_head(head),
    )
    head = make_model().float().mrp_head
    for call in calls:
        with pytest.raises(
            ValueError,
            match=r"lm_head is a torch\.ao.*no tensor.*name what to quantize, \{'model\.layers'",
        ):
            call()
    assert said == []
    model = quantize(make_model().float(), {"model.layers", "mrp_head.layers"}, dtype=torch.qint8)
    for target in (model, quantize(make_model().float(), {nn.Linear}, dtype=torch.qint8)):
        with pytest.raises(
            ValueError,
            match="made by quantize_dynamic have no tensors to save: save the model, and quantize",
        ):
            target.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert model.generate(prompt, max_new_tokens=2, decoding="mrp_spec").shape == (1, 5)
    assert len(said) == 1
    assert said[0].endswith("in place of quantize_dynamic for the same text")
    assert model.score(prompt).scored.all()


def test_kernels_around_quantized_layers(tiny_tokenizer: Any) -> None:
    """The fused layers call what stands in the place of a matrix product."""
    model = loaded(INT8)
    inputs = {name: values[:, -12:] for name, values in asked(tiny_tokenizer, QUESTIONS[1]).items()}
    options: dict[str, Any] = {"decoding": "static", "max_new_tokens": 2}
    assert torch.equal(
        model.generate(**inputs, **options, kernels=True),
        model.generate(**inputs, **options, kernels=False),
    )


def test_a_packed_lm_head_is_refused() -> None:
    """Modules that a user lists take the place of those that transformers would leave alone."""
    model = loaded("BitsAndBytesConfig(load_in_4bit=True)", llm_int8_skip_modules=["mrp_head"])
    said = (
        "lm_head has packed weights, torch.u?int8: keep it as it was, with 'lm_head' in "
        "llm_int8_skip_modules"
    )
    with pytest.raises(ValueError, match=said):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)


def test_a_head_is_saved_alone_where_it_is_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save a quantized head with the whole model"):
        loaded(INT8).save_pretrained(tmp_path / "head", head_only=True)
    assert not (tmp_path / "head").exists()
    model = loaded(INT8, modules_to_not_convert=["lm_head", "mrp_head"])
    model.save_pretrained(tmp_path / "head", head_only=True)
    again = loaded(INT8, tmp_path / "head")
    assert torch.equal(again.mrp_head.eh_proj.weight, model.mrp_head.eh_proj.weight)
    assert type(again.model.layers[0].mlp.up_proj.weight) is not nn.Parameter


# Names of tensors in GGUF files, by those of transformers' Qwen2.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(source: Qwen2ForCausalLM, path: Path) -> None:
    """Write a Qwen2 model with tied embeddings as a GGUF file."""
    config = source.config
    writer = pytest.importorskip("gguf").GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in source.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module == "lm_head":
            continue
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{GGUF_NAMES[module]}.{kind}", tensor.numpy())
        else:
            writer.add_tensor(f"{GGUF_NAMES[module]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_of_an_autoregressive_model_opens_and_is_saved(tmp_path: Path) -> None:
    """In blocks of one token `sequential` is greedy decoding of the model that was written."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    source = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, initializer_range=0.5)).eval()
    write_gguf(source, tmp_path / "model.gguf")
    model = MRPForCausalLM.from_backbone(
        tmp_path, gguf_file="model.gguf", block_size=1, mask_token_id=63, dtype=torch.float64
    )
    model.save_pretrained(tmp_path / "saved")
    prompt = torch.tensor([[5, 9, 2, 7]])
    options = {"max_new_tokens": 12, "eos_token_id": None, "suppress_tokens": [63]}
    expected = source.double().generate(prompt, do_sample=False, pad_token_id=0, **options)
    for opened in (model, MRPForCausalLM.from_pretrained(tmp_path / "saved")):
        assert opened.generate(prompt, decoding="sequential", **options).equal(expected)
