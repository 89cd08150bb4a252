"""Layers of a round with their small steps fused: each kernel (interpreted) against PyTorch, layers against their modules."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import PROMPTS, close, texts
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation
from modeling_mrp.kernels import dispatch, fused_layers
from modeling_mrp.kernels.dispatch import PYTORCH, Dispatch, triton
from modeling_mrp.kernels.fused_layers import ROTATED, SUM_AND_NORM
from modeling_mrp.kernels.round_attention import RoundMask
from modeling_mrp.model.head import MRPHead
from modeling_mrp.modeling import MRPBackbone
from modeling_mrp.networks import layers as layers_file
from modeling_mrp.networks.cache import BlockCache
from modeling_mrp.networks.layers import fused_forward, pack, packed_weight, round_attention_of

pytestmark = [
    pytest.mark.skipif(triton is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.usefixtures("new_memory_is_nan", "wide_programs"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORCED = Dispatch(True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on CPU tensors need triton's interpreter")


def alike(got: Tensor, wanted: Tensor) -> None:
    """Up to a last bit of 16; where a GPU rounds to bfloat16 the interpreter cuts off, a few times one after the other."""
    assert got.dtype == wanted.dtype
    cut = wanted.dtype == torch.bfloat16 and DEVICE == "cpu"
    relative = 2**-5 if cut else {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=relative, atol=relative * float(wanted.abs().nan_to_num().max()) / 8)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(size: int, dtype: torch.dtype, epsilon: float = 1e-5) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(size, eps=epsilon).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(1 + numbers(size, size) / 4)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(3, 40), (17, 127), (33, 1)])
def test_a_sum_and_its_norm(rows: int, size: int, adds: bool, dtype: torch.dtype) -> None:
    """Of strided numbers, too. Squares of 1e4 sum up in float32 also for float16, whose largest is 65,504."""
    norm, hidden = norm_of(size, dtype), (numbers(1, 1, size, rows, dtype=dtype) * 1e4).clamp(-3e4, 3e4).transpose(1, 2)
    hidden[0, 0] = 0
    added = numbers(2, 1, size, rows, dtype=dtype).transpose(1, 2) if adds else None
    got, wanted = SUM_AND_NORM.launch(hidden, added, norm), SUM_AND_NORM.twin(hidden, added, norm)
    for ours, theirs in zip(got, wanted, strict=True):
        alike(ours, theirs)
        assert ours.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 1, 2), (1, 16, 4, 2, 8), (2, 8, 8, 1, 32), (3, 5, 6, 3, 24), (2, 3, 9, 9, 16)],
)
def test_queries_keys_and_values(
    rows: int, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In programs of many heads, as interpreted, and of eight, as on a GPU; what is not the target of the cache stays."""
    norms = norm_of(head_dim, dtype), norm_of(head_dim, dtype)
    norms[1].weight.mul_(-1.5)
    parts = [
        numbers(seed, rows, tokens, many * head_dim, dtype=dtype) * 5 for seed, many in enumerate((heads, kv_heads, kv_heads))
    ]
    positions = torch.arange(rows * tokens, device=DEVICE).view(rows, tokens, 1) * 7 % 1000
    angles = (positions / 10 ** (torch.arange(head_dim // 2, device=DEVICE) * 8 / head_dim)).repeat(1, 1, 2)
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)

    def written(run: Any, given: Any) -> tuple[Tensor, Tensor]:
        """Queries, and three layers of a cache whose second layer's slots 3 to 3 + tokens are the target."""
        cache = BlockCache(rows, kv_heads, head_dim, [torch.device(DEVICE)] * 3, 6, tokens + 3, dtype)
        (buffer,) = cache._buffers.values()
        buffer.fill_(torch.nan)
        cache.target(3, tokens)
        return run(given, norms, rotary, cache.written[1])[0], buffer

    wanted, theirs = written(ROTATED.twin, parts)
    assert not theirs[:, 3 : 3 + tokens, 1].isnan().any()
    for tile, given in ((8, torch.cat(parts, -1)), (64, parts)):
        monkeypatch.setattr(fused_layers, "_HEADS", tile)
        got, ours = written(ROTATED.launch, given)
        alike(got, wanted)
        assert torch.equal(ours.isnan(), theirs.isnan())
        alike(ours.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(ours[:, 3 : 3 + tokens, 1, 1].flatten(2), parts[2]), "values as they are"


# ------------------------------------------------------------------------------------------------ whole layers


def a_round(model: MRPForCausalLM, rows: int = 2) -> tuple[Tensor, tuple[Tensor, Tensor], RoundMask, BlockCache]:
    """Arguments of `walked`: three states a row, the last one behind the first, over a prefix of 4 or 3 tokens."""
    config, device = model.config, torch.device(DEVICE)
    tokens = 3 * config.block_size
    cache = model.block_cache(rows, 8, tokens, with_head=True)
    for buffer in cache._buffers.values():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5)))
    cache.target(8, tokens)
    committed = torch.tensor([4, 3])[:rows].to(device)
    mask = RoundMask(committed, torch.tensor([[-1, -1, 0]] * rows, device=device), 3, config.block_size, FORCED)
    hidden = numbers(3, rows, tokens, config.hidden_size, dtype=model.dtype)
    positions = committed[:, None] + torch.arange(config.block_size, device=device).repeat(3)
    return hidden, model.model.rotary_emb(hidden, positions), mask, cache


def walked(owner: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: RoundMask, cache: BlockCache) -> Tensor:
    """A round through the fused layers."""
    walk = fused_forward(owner, owner.layers, mask, cache)
    assert walk is not None
    return walk(hidden, rotary)


@torch.inference_mode()
@pytest.mark.parametrize("which", ["backbone", "head"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_what_their_modules_are(dtype: torch.dtype, which: str) -> None:
    model = make_model(num_hidden_layers=3).to(DEVICE, dtype)
    for place, module in enumerate(model.modules()):
        if isinstance(module, Qwen3RMSNorm):
            module.weight.add_(numbers(place, len(module.weight), dtype=dtype) / 4)
    owner: Any = model.model if which == "backbone" else model.mrp_head
    hidden, rotary, mask, cache = a_round(model)
    got, kept = walked(owner, hidden, rotary, mask, cache), cache
    *_, cache = a_round(model)
    wanted = hidden
    for layer in owner.layers:
        wanted = layer(wanted, attention_mask=mask.dense(8), position_embeddings=rotary, past_key_values=cache)
    wanted = owner.norm(wanted)
    # Of 16 bits, what rounds otherwise is carried through three layers.
    loose = {torch.float32: 2e-6, torch.bfloat16: 0.06, torch.float16: 6e-3}[dtype]
    for ours, theirs in [(got, wanted), *zip(kept._buffers.values(), cache._buffers.values(), strict=True)]:
        close(ours, theirs, atol=loose * float(theirs.abs().max()))
    assert all(not torch.equal(a, b) for a, b in zip(kept._buffers.values(), a_round(model)[3]._buffers.values(), strict=True))


# ------------------------------------------------------------------------------------------------ packed weights


def groups(model: MRPForCausalLM) -> list[list[nn.Linear]]:
    """The layers with one input each, of backbone and head."""
    found = []
    for layer in (*model.model.layers, *model.mrp_head.layers):  # type: ignore[union-attr]
        attention, mlp = layer.self_attn, layer.mlp
        found += [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    return found


def held(model: nn.Module) -> int:
    """Bytes of all parameters' storages, each counted once."""
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    return sum(storages.values())


def packs(linears: Sequence[Any]) -> bool:
    """Tell if layers lie behind one another, and their weights as one are what they are one by one."""
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
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "theirs/model.safetensors").read_bytes()
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


@interpreted
def test_adapters_of_the_products_take_part() -> None:
    """Beside the weights, and merged into them; what carries none stays packed."""
    model, options = make_model().float(), {"decoding": "static", "max_new_tokens": 4}
    plain = texts(model, PROMPTS[:1], kernels=True, **options)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted: Any = get_peft_model(model, lora)
    adapted.requires_grad_(False)
    assert [packs(group) for group in groups(model)[:2]] == [False, True]
    found = texts(adapted, PROMPTS[:1], kernels=True, **options)
    assert found == texts(adapted, PROMPTS[:1], kernels=False, **options)
    assert found != plain
    merged = adapted.merge_and_unload()
    assert texts(merged, PROMPTS[:1], kernels=True, **options) == found
    assert all(map(packs, groups(merged)))


def test_weights_move_before_anything_refers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels can be used, whether or not they are: a call with them goes on from the cache of one without."""
    model, options = make_model(), {"max_new_tokens": 4, "eos_token_id": None, "return_dict_in_generate": True}
    monkeypatch.setattr(generation, "kernels_usable", lambda *_: True)
    first: Any = model.generate(torch.tensor(PROMPTS[:1]), kernels=False, **options)
    assert all(map(packs, groups(model)))
    again: Any = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    assert torch.equal(again.sequences, model.generate(first.sequences, **options).sequences)


# ------------------------------------------------------------------------------------------------ where it runs


def fuses(owner: Any, dispatch: Dispatch, kind: type[nn.Module] | None = None) -> bool:
    """Whether a round of an owner goes through the fused layers."""
    weight = owner.norm.weight
    cache = BlockCache(1, 1, 2, [weight.device], 4, 4, weight.dtype)
    committed, parent = torch.zeros(1, dtype=torch.long), torch.full((1, 1), -1)
    mask = RoundMask(committed, parent, 1, 4, dispatch).to(weight.device)
    return fused_forward(owner, owner.layers, mask, cache, kind) is not None


@torch.inference_mode()
def test_where_layers_fuse() -> None:
    model = make_model().float().to(DEVICE)
    for owner in (model.model, model.mrp_head):
        assert fuses(owner, FORCED)
        assert fuses(owner, PYTORCH), "by the twins"
        assert fuses(owner, Dispatch()) is (DEVICE == "cuda")
    _, _, mask, cache = a_round(model)
    assert fused_forward(model.model, model.model.layers, mask.dense(8), cache) is None, "only in a round"
    assert fused_forward(model.model, model.model.layers, mask, DynamicCache(config=model.config)) is None
    with pytest.raises(ValueError, match=r"there are no kernels for torch\.float64"):
        fuses(make_model().to(DEVICE).model, FORCED)


class Own(Qwen3MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Swapped(nn.Module):
    """What a library left in the place of a class of transformers, before this package was imported."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def hooked(path: str, method: str) -> Callable[[Any, pytest.MonkeyPatch], Any]:
    return lambda owner, patch: getattr(owner.get_submodule(path), method)(lambda *_: None)


def wrapped(path: str) -> Callable[[Any, pytest.MonkeyPatch], Any]:
    """As by accelerate, where layers are on several devices."""
    return lambda owner, patch: setattr(owner.get_submodule(path), "forward", owner.get_submodule(path).forward)


def swapped(owner: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layers_file, "Qwen3MLP", Swapped)
    owner.layers[0].mlp = Swapped()


PARTS = {"layers.1": "Qwen3DecoderLayer", "layers.1.self_attn": "Qwen3Attention", "layers.1.mlp": "Qwen3MLP"}
PARTS |= {"layers.1.self_attn.k_norm": "Qwen3RMSNorm", "norm": "Qwen3RMSNorm"}
MORE: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    **{
        f"hook {path}": (hooked(path, "register_forward_hook"), f"a {kind} carries hooks: remove")
        for path, kind in PARTS.items()
    },
    "hook of the backbone": (lambda owner, _: owner.register_forward_hook(print), "a MRPBackbone carries hooks: remove them"),
    "pre-hook": (hooked("layers.0", "register_forward_pre_hook"), "a Qwen3DecoderLayer carries hooks: remove them"),
    **{f"wrapped {path}": (wrapped(path), f"a {kind} is wrapped or no {kind}: use plain") for path, kind in PARTS.items()},
    "no layer": (lambda owner, _: owner.layers.append(nn.Linear(2, 2)), "a Linear is wrapped or no Qwen3DecoderLayer: use"),
    "a subclass": (lambda owner, _: setattr(owner.layers[0].mlp, "__class__", Own), "a Own is wrapped or no Qwen3MLP: use"),
    "a method": (
        lambda _, patch: patch.setattr(Qwen3MLP, "forward", lambda self, x: x),
        rf"the forward of a Qwen3MLP was replaced by one of {__name__}: leave it",
    ),
    "a class": (swapped, f"the forward of a Swapped was replaced by one of {__name__}: leave it as it was"),
}


@torch.inference_mode()
@pytest.mark.parametrize("what", MORE)
def test_modules_that_do_more_are_called(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels can be used; forced, each is an error that says what to do."""
    change, reason = MORE[what]
    backbone: Any = make_model().float().to(DEVICE).model
    monkeypatch.setattr(dispatch, "_obstacle", lambda *_, **__: None)
    assert fuses(backbone, Dispatch(), MRPBackbone)
    change(backbone, monkeypatch)
    assert not fuses(backbone, Dispatch(), MRPBackbone)
    with pytest.raises(ValueError, match=f"'fused_layers' cannot be used: {reason}.* or use kernels=None or kernels=False"):
        fuses(backbone, FORCED, MRPBackbone)


def read(model: MRPForCausalLM, dispatch: Dispatch) -> Tensor:
    """What the head says in a round."""
    hidden, _, mask, cache = a_round(model)
    ids = torch.arange(12, device=DEVICE)[None].expand(2, -1)
    with round_attention_of(model):
        return model.residual(ids, hidden, ids, replace(mask, dispatch=dispatch), cache)


@torch.inference_mode()
def test_a_heads_forward_is_what_runs_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed, or under a hook: seen with kernels as without, and the layers still fuse."""
    model = make_model().float().to(DEVICE)
    head, walks, walk, forward = model.mrp_head, [], layers_file._walk, MRPHead.forward
    assert head is not None
    monkeypatch.setattr(layers_file, "_walk", lambda *args: walks.append(1) or walk(*args))
    usual = read(model, FORCED)
    close(usual, read(model, PYTORCH), atol=1e-5)
    with monkeypatch.context() as patch:
        patch.setattr(MRPHead, "forward", lambda self, embeds, *others: 0.5 * forward(self, 0 * embeds, *others))
        changed = read(model, FORCED)
        close(changed, read(model, PYTORCH), atol=1e-5)
        assert not torch.allclose(changed, usual, atol=1e-2)
    head.register_forward_hook(lambda module, given, output: output + 1)
    assert torch.equal(read(model, FORCED), usual + 1)
    assert len(walks) == 5, "all reads, with kernels or their twins"


@interpreted
def test_hidden_states_that_were_asked_for_once_do_not_matter() -> None:
    """transformers leaves hooks behind that note them."""
    model = make_model().float()
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3, 4]]), output_hidden_states=True, output_attentions=True)
        assert model.model.layers[0]._forward_hooks
        assert fuses(model.model, FORCED)
