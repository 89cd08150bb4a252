"""The layers of a round: fused ones against their modules, weights packed without a copy, and what
keeps layers from fusing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import PYTORCH, Dispatch, triton
from modeling_mrp.kernels.round_layers import RoundMask, run_fused
from modeling_mrp.model.compat import CACHE_NAME
from modeling_mrp.networks import layers as layers_file
from modeling_mrp.networks import networks
from modeling_mrp.networks.cache import BlockCache
from modeling_mrp.networks.layers import pack, packed_weight, plan_layers
from tests.support.helpers import PROMPTS, close, generate, texts
from tests.support.random_cases import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton is None, reason="needs triton"),
    # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.usefixtures("new_memory_is_nan", "wide_programs"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORCED = Dispatch(True)


def numbers(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def a_round(
    model: MRPForCausalLM, dispatch: Dispatch
) -> tuple[Tensor, Tensor, RoundMask, BlockCache]:
    """Hidden states, positions, mask and cache of three states a row, the last one behind the
    first, over 4 or 3 tokens."""
    config, device = model.config, torch.device(DEVICE)
    tokens = 3 * config.block_size
    cache = model.block_cache(2, 8, tokens, with_head=True)
    for buffer in cache._buffers.values():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5)))
    cache.target(8, tokens)
    committed = torch.tensor([4, 3], device=device)
    parent = torch.tensor([[-1, -1, 0]] * 2, device=device)
    mask = RoundMask(committed[:, None].repeat(1, 3), parent, config.block_size, dispatch)
    positions = committed[:, None] + torch.arange(config.block_size, device=device).repeat(3)
    return numbers(3, 2, tokens, config.hidden_size, dtype=model.dtype), positions, mask, cache


@torch.inference_mode()
@pytest.mark.parametrize("which", ["backbone", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_are_what_their_modules_are(dtype: torch.dtype, which: str) -> None:
    model = make_model(num_hidden_layers=3).to(DEVICE, dtype)
    for place, module in enumerate(model.modules()):
        if isinstance(module, Qwen3RMSNorm):
            module.weight.add_(numbers(place, len(module.weight), dtype=dtype) / 4)
    owner: Any = model.model if which == "backbone" else model.mrp_head
    hidden, positions, mask, kept = a_round(model, FORCED)
    cos, sin = rotary = model.model.rotary_emb(hidden, positions)
    plans = plan_layers(model, True, FORCED)
    assert plans is not None
    signs = torch.ones_like(sin)
    signs[..., : sin.shape[-1] // 2] = -1
    got = run_fused(plans[owner], hidden.clone(), (cos, sin * signs), mask, kept)
    *_, cache = a_round(model, FORCED)
    wanted = hidden
    for layer in owner.layers:
        wanted = layer(
            wanted, attention_mask=mask.dense(8), position_embeddings=rotary, **{CACHE_NAME: cache}
        )
    # Of 16 bits, what rounds otherwise is carried through three layers.
    loose = {torch.float32: 2e-6, torch.bfloat16: 0.06, torch.float16: 6e-3}[dtype]
    pairs = zip(kept._buffers.values(), cache._buffers.values(), strict=True)
    for ours, theirs in [(got, owner.norm(wanted)), *pairs]:
        close(ours, theirs, atol=loose * float(theirs.abs().max()))
    untouched = a_round(model, FORCED)[3]._buffers.values()
    assert all(
        not torch.equal(a, b) for a, b in zip(kept._buffers.values(), untouched, strict=True)
    )


def groups(model: MRPForCausalLM) -> list[list[nn.Linear]]:
    """The layers with one input each, of backbone and head."""
    found = []
    for layer in (*model.model.layers, *model.mrp_head.layers):  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp
        found += [
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [mlp.gate_proj, mlp.up_proj],
        ]
    return found


def held(model: nn.Module) -> int:
    """Bytes of all parameters' storages, each counted once."""
    storages = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in model.parameters()
    }
    return sum(storages.values())


def packs(linears: Sequence[Any]) -> bool:
    """Tell if layers lie behind one another, and their weights as one are what they are one by
    one."""
    found = packed_weight(linears)
    assert found is None or torch.equal(found, torch.cat([linear.weight for linear in linears]))
    return found is not None


def test_weights_are_packed_without_a_copy(tmp_path: Path) -> None:
    """Once; they stay what they are, also in a file, and another dtype has to be packed anew."""
    model, plain = make_model().float(), make_model().float()
    pack(model)
    places = [weight.data_ptr() for weight in model.parameters()]
    assert held(model) == held(plain)
    assert all(map(packs, groups(model)))
    pack(model)
    assert places == [weight.data_ptr() for weight in model.parameters()]
    mlp: Any = model.model.layers[0].mlp
    for in_order in (False, True):
        mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight
        assert packs(groups(model)[1]) is in_order
    for which, saved in (("ours", model), ("theirs", plain)):
        saved.save_pretrained(tmp_path / which)
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (
        tmp_path / "theirs/model.safetensors"
    ).read_bytes()
    assert not any(map(packs, groups(model.double())))
    pack(model)
    assert all(map(packs, groups(model)))
    assert held(model) == 2 * held(plain)


def test_what_is_no_plain_linear_is_not_packed() -> None:
    model = make_model()
    (first, second, *others) = groups(model)
    first[1].register_forward_hook(lambda *_: None)
    second[0].forward = second[0].forward
    third, fourth, *rest = others
    third[2].bias = nn.Parameter(torch.zeros(third[2].out_features))
    fourth[1].weight = nn.Parameter(fourth[1].weight.detach().T.contiguous().T)
    pack(model)
    assert not any(map(packs, (first, second, third, fourth)))
    assert all(map(packs, rest))
    other = make_model()
    with torch.inference_mode():
        pack(other)
    assert not any(weight.data.is_inference() for weight in other.parameters())
    assert all(map(packs, groups(other)))


def test_weights_move_before_anything_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels can be used, whether or not they are: a call with them goes on from the cache
    of one without."""
    model, options = (
        make_model(),
        {"max_new_tokens": 4, "eos_token_id": None, "return_dict_in_generate": True},
    )
    monkeypatch.setattr(networks, "unusable", lambda *_: None)
    first: Any = model.generate(torch.tensor(PROMPTS[:1]), kernels=False, **options)
    assert all(map(packs, groups(model)))
    again: Any = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    assert torch.equal(again.sequences, model.generate(first.sequences, **options).sequences)


def fuses(model: MRPForCausalLM, dispatch: Dispatch, with_head: bool = True) -> bool:
    return plan_layers(model, with_head, dispatch) is not None


def test_where_layers_fuse() -> None:
    """By the twins, too, and where transformers left hooks behind that note hidden states; what is
    wrong with the head does not matter where it takes no part."""
    model = make_model().float().to(DEVICE).requires_grad_(False)
    with torch.inference_mode():
        model(
            torch.tensor([[1, 2, 3, 4]], device=DEVICE),
            output_hidden_states=True,
            output_attentions=True,
        )
    assert model.model.layers[0]._forward_hooks
    assert fuses(model, FORCED)
    assert fuses(model, PYTORCH)
    assert fuses(model, Dispatch()) is (DEVICE == "cuda")
    model.mrp_head.norm.register_forward_hook(print)  # type: ignore[union-attr]
    assert not fuses(model, PYTORCH)
    assert fuses(model, PYTORCH, with_head=False)
    with pytest.raises(ValueError, match=r"there are no kernels for torch\.float64"):
        fuses(make_model().to(DEVICE).requires_grad_(False), FORCED)


class Own(Qwen3MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Swapped(nn.Module):
    """What a library left in the place of a class of transformers, before this package was
    imported."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def swap(model: Any) -> None:
    for layer in (*model.model.layers, *model.mrp_head.layers):
        layer.mlp = Swapped()


def wrap(module: Any) -> None:
    """As by accelerate, where layers are on several devices."""
    module.forward = module.forward


MORE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook model": (
        lambda model: model.model.register_forward_hook(print),
        "a MRPBackbone carries hooks: remove",
    ),
    "hook head": (
        lambda model: model.mrp_head.register_forward_hook(print),
        "a MRPHead carries hooks: remove",
    ),
    "hook in a layer": (
        lambda model: model.model.layers[1].mlp.register_forward_hook(print),
        "a Qwen3MLP carries hooks",
    ),
    "pre-hook": (
        lambda model: model.mrp_head.layers[0].register_forward_pre_hook(print),
        "a Qwen3DecoderLayer carries hooks",
    ),
    "wrapped": (
        lambda model: wrap(model.model.layers[1].self_attn.k_norm),
        "a Qwen3RMSNorm is wrapped or no Qwen3RMSNorm: use",
    ),
    "a subclass": (
        lambda model: setattr(model.model.layers[0].mlp, "__class__", Own),
        "a Own is wrapped or no Qwen3MLP: use",
    ),
    "a class": (
        swap,
        f"the forward of a Swapped was replaced by one of {__name__}: leave it as it was",
    ),
    "another attention": (
        lambda model: model.set_attn_implementation("eager"),
        "the model attends by 'eager': use attn_impl",
    ),
    "compiled": (
        lambda model: model.model.layers[0].compile(backend="eager"),
        "the model has parts that were compiled: leave",
    ),
}


@pytest.mark.parametrize("what", MORE)
def test_modules_that_do_more_are_called(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels can be used; forced, each is an error that says what to do."""
    change, reason = MORE[what]
    model = make_model().float().to(DEVICE)
    monkeypatch.setattr(dispatch, "_obstacle", lambda *_, **__: None)
    assert fuses(model, Dispatch())
    if what == "a class":
        monkeypatch.setattr(layers_file, "Qwen3MLP", Swapped)
    change(model)
    assert not fuses(model, Dispatch())
    assert not fuses(model, PYTORCH)
    with pytest.raises(
        ValueError,
        match=f"the kernels of its layers cannot be used: {reason}.* or use kernels=None",
    ):
        fuses(model, FORCED)


def refused(graph: Any, _: Any) -> Any:
    pytest.fail("compiled")


def test_layers_that_are_called_decode_the_same() -> None:
    """Under a dense mask: fused ones by the twins, called, by another attention, and what was
    compiled, as it is."""
    model, options = (
        make_model(),
        {"decoding": "mrp_spec", "max_new_tokens": 9, "num_draft_states": 3},
    )
    expected = texts(model, PROMPTS, kernels=False, **options)
    assert texts(model, PROMPTS, **options) == expected
    for part in (model.model, model.mrp_head):
        part.compile(backend=refused)  # type: ignore[union-attr]
    assert texts(model, PROMPTS, **options) == expected
    model.set_attn_implementation("eager")
    assert texts(model, PROMPTS, kernels=False, **options) == expected


LONG = {"max_new_tokens": 40, "eos_token_id": None, "decoding": "self_spec", "num_draft_states": 3}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_kept_angles_are_those_of_the_rotary_embedding(
    rope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In texts that leave the kept angles behind, of prompts of several lengths. Angles that
    depend on the longest text are not kept."""
    parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    model: Any = make_model(rope_parameters=parameters, max_position_embeddings=64).to(DEVICE)
    assert model.config.head_dim == 8
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [1, 2]]
    monkeypatch.setattr(networks, "ANGLES_AHEAD", 2)
    asked: list[int] = []
    rotate = model.model.rotary_emb.forward

    def noted(embeds: Tensor, positions: Tensor) -> Any:
        asked.append(positions.numel())
        return rotate(embeds, positions)

    monkeypatch.setattr(model.model.rotary_emb, "forward", noted)
    fused = generate(model, prompts, kernels=False, **LONG)
    rounds = int(fused.stats.forwards["verify"] + fused.stats.forwards["denoise"])
    if rope in ("dynamic", "longrope"):
        assert len(asked) > rounds
    else:
        assert 3 < len(asked) < rounds
    model.set_attn_implementation("eager")
    assert generate(model, prompts, **LONG).sequences.equal(fused.sequences)


@pytest.mark.parametrize(
    "name", ["self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
)
def test_a_linear_layer_that_does_more_is_called(name: str) -> None:
    """By its module, where the others of its layer are computed from their weights."""
    model: Any = make_model(num_hidden_layers=2).to(DEVICE)
    prompts = [[1, 2, 3, 4, 5, 6]]
    options = {**LONG, "kernels": False}
    before = generate(model, prompts, **options)
    for layer in model.model.layers:
        layer.get_submodule(name).register_forward_hook(lambda _, given, output: 3 * output)
    assert fuses(model, PYTORCH)
    fused = generate(model, prompts, **options)
    assert not fused.token_logprobs.equal(before.token_logprobs)
    model.set_attn_implementation("eager")
    called = generate(model, prompts, **LONG)
    assert called.sequences.equal(fused.sequences)
    close(called.token_logprobs, fused.token_logprobs, atol=1e-6)


def test_another_activation_than_silu_is_called() -> None:
    """In fused layers, as the kernel is for SiLU only."""
    model: Any = make_model(hidden_act="gelu", num_hidden_layers=2).to(DEVICE)
    prompts = [[1, 2, 3, 4, 5, 6]]
    assert fuses(model, PYTORCH)
    fused = generate(model, prompts, kernels=False, **LONG)
    model.set_attn_implementation("eager")
    called = generate(model, prompts, **LONG)
    assert called.sequences.equal(fused.sequences)
    close(called.token_logprobs, fused.token_logprobs, atol=1e-6)
