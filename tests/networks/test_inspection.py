"""What a call of `generate` looks at of a model: once, unless the model has changed; and every
change is seen."""

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation
from modeling_mrp.networks import inspection, layers, networks
from modeling_mrp.networks.inspection import decide, fingerprint, walk, weight_versions
from tests.support.helpers import SPEC
from tests.support.random_cases import make_model

IDS = torch.tensor([[1, 2, 3, 4, 5]])


class Calls:
    """Counts the calls of functions, by name."""

    def __init__(self, patch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> None:
        self.counts = Counter[str]()
        for owner, name in functions:
            patch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.counts[name] += 1
            return function(*given, **named)

        return counted

    def take(self) -> Counter[str]:
        """Return the counts since the last time."""
        counts, self.counts = self.counts, Counter[str]()
        return counts


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of all that looks at modules or weights one by one; packed as on a GPU."""
    monkeypatch.setattr(networks, "unusable", lambda *_: None)
    return Calls(
        monkeypatch,
        (generation, "fingerprint"),
        (networks, "fingerprint"),
        (generation, "check_weights"),
        (networks, "pack"),
        (layers, "packed_weight"),
        (layers, "deviation"),
        (inspection, "PassingReference"),
    )


def test_a_call_looks_at_modules_once(calls: Calls) -> None:
    """The first packs, which moves weights; the second finds that all is packed; later ones make
    one fingerprint and no other decision. Another model is looked at anew."""
    model = make_model()
    options: dict[str, Any] = {**SPEC, "kernels": False}
    first = model.generate(IDS, **options)
    counts = calls.take()
    assert counts["fingerprint"] == 2, "before and after packing"
    assert counts["pack"] == counts["check_weights"] == 1
    assert counts["deviation"] > 0 < counts["packed_weight"]
    model.generate(IDS, **options)
    assert calls.take()["pack"] == 1
    for _ in range(2):
        again = model.generate(IDS, **options)
        assert calls.take() == {"fingerprint": 1}
    assert again.sequences.equal(first.sequences)
    model.generate(IDS, past_key_values=again.past_key_values, **options)
    assert calls.take() == {"fingerprint": 1}, "the cache is compared with the weights"
    make_model(1).generate(IDS, **options)
    assert calls.take()["check_weights"] == 1


def add_hook(model: Any) -> Callable[[], None]:
    return model.model.layers[0].mlp.register_forward_hook(lambda *_: None).remove


def add_early_hook(model: Any) -> Callable[[], None]:
    return model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: None).remove


def wrap_forward(model: Any) -> Callable[[], None]:
    layer = model.model.layers[1].self_attn
    layer.forward = layer.forward
    return lambda: delattr(layer, "forward")


def replace_forward(model: Any) -> Callable[[], None]:
    real = Qwen3MLP.forward
    Qwen3MLP.forward = lambda self, hidden: real(self, hidden)
    return lambda: setattr(Qwen3MLP, "forward", real)


def replace_module(model: Any) -> Callable[[], None]:
    mlp = model.mrp_head.layers[0].mlp
    real = mlp.gate_proj
    mlp.gate_proj = copy.deepcopy(real)
    return lambda: setattr(mlp, "gate_proj", real)


def replace_weight(model: Any) -> Callable[[], None]:
    real = model.model.norm.weight
    model.model.norm.weight = nn.Parameter(real.detach().clone())
    return lambda: setattr(model.model.norm, "weight", real)


def move_weight(model: Any) -> Callable[[], None]:
    weight = model.lm_head.weight
    data = weight.data
    weight.data = data.clone()
    return lambda: setattr(weight, "data", data)


def compile_layer(model: Any) -> Callable[[], None]:
    layer = model.model.layers[0]
    layer._compiled_call_impl = lambda *_: None
    return lambda: delattr(layer, "_compiled_call_impl")


def change_attention(model: Any) -> Callable[[], None]:
    model.set_attn_implementation("eager")
    return lambda: model.set_attn_implementation("sdpa")


def register_attention(model: Any) -> Callable[[], None]:
    real = ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = lambda *_, **__: None
    return lambda: ALL_ATTENTION_FUNCTIONS.__setitem__("sdpa", real)


def switch(name: str, *values: Any) -> Callable[[Any], Callable[[], None]]:
    """Make a change of a module's attribute, as peft's layers have them; it is there before."""

    def change(model: Any) -> Callable[[], None]:
        layer = model.model.layers[0].self_attn.q_proj
        setattr(layer, name, values[1])
        return lambda: setattr(layer, name, values[0])

    change.before = lambda model: setattr(  # type: ignore[attr-defined]
        model.model.layers[0].self_attn.q_proj, name, values[0]
    )
    return change


CHANGES: dict[str, Any] = {
    change.__name__: change
    for change in (
        add_hook,
        add_early_hook,
        wrap_forward,
        replace_forward,
        replace_module,
        replace_weight,
        move_weight,
        compile_layer,
        change_attention,
        register_attention,
    )
}
CHANGES |= {
    "an active adapter": switch("_active_adapter", ["a"], ["b"]),
    "adapters switched off": switch("_disable_adapters", False, True),
    "a scaling": switch("scaling", {"a": 1.0}, {"a": 2.0}),
    "training": switch("training", False, True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    """And undone it is not: but for hooks the same decisions hold again."""
    model = make_model()
    change = CHANGES[name]
    getattr(change, "before", lambda _: None)(model)
    known = fingerprint(model)
    assert fingerprint(model) == known
    assert decide(model, known, "name", lambda: 1) == 1
    undo = change(model)
    try:
        changed = fingerprint(model)
        assert changed != known
        assert decide(model, changed, "name", lambda: 2) == 2
        assert decide(model, changed, "name", lambda: 3) == 2
    finally:
        undo()
    assert fingerprint(model) == known


def test_a_list_that_is_written_to_is_seen() -> None:
    """As peft's `merged_adapters` are."""
    model = make_model()
    layer: Any = model.model.layers[0].self_attn.q_proj
    layer.merged_adapters = []
    known = fingerprint(model)
    layer.merged_adapters.append("a")
    assert fingerprint(model) != known


def test_a_hook_runs_from_the_next_call_on() -> None:
    """Fused layers would pass by it."""
    model = make_model()
    options: dict[str, Any] = {**SPEC, "kernels": False}
    for _ in range(2):
        model.generate(IDS, **options)
    seen = []
    mlp: Any = model.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda *_: seen.append(1))
    out: Any = model.generate(IDS, **options)
    assert len(seen) == sum(out.stats.forwards[name] for name in ("prefill", "denoise", "verify"))
    handle.remove()
    model.generate(IDS, **options)
    assert len(seen) == sum(out.stats.forwards[name] for name in ("prefill", "denoise", "verify"))


def test_what_is_refused_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is no decision that is kept; nor is one kept of an adapter that learns prompts."""
    model: Any = make_model()
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    checks = iter([ValueError("no"), ValueError("no"), None])

    def check(_: Any) -> None:
        if (error := next(checks)) is not None:
            raise error

    monkeypatch.setattr(generation, "check_weights", check)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            model.generate(IDS, max_new_tokens=1)
    for _ in range(2):
        model.generate(IDS, max_new_tokens=1)


def versions_of(model: MRPForCausalLM) -> list[Any]:
    return weight_versions(model.model, fingerprint(model))


def test_writes_are_seen_though_nothing_moved() -> None:
    """A write in place, and a parameter replaced by another one over the same memory: both leave
    the fingerprint as it was, so that recordings go on, and tell caches apart."""
    model = make_model()
    known, record = fingerprint(model), versions_of(model)
    assert record == versions_of(model) == weight_versions(model.model)
    assert copy.deepcopy(record) == record
    assert pickle.loads(pickle.dumps(record)) != record, "of another process"
    norm: Any = model.model.norm
    with torch.no_grad():
        norm.weight.add_(0)
    written = versions_of(model)
    assert written != record
    norm.weight = nn.Parameter(norm.weight.data)
    assert fingerprint(model) == known
    assert versions_of(model) not in (written, record)


def test_a_walk_meets_every_module() -> None:
    model = make_model()
    assert set(walk(model)) == set(model.modules())


def test_decisions_end_with_their_model() -> None:
    model = make_model()
    model.generate(IDS, max_new_tokens=1)
    assert model in inspection._DECISIONS
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_peft_hooks_of_each_call_are_the_same() -> None:
    """With the same names; `adapter_names` are registered anew for each call."""
    model: Any = make_model()
    keys = []
    for names in (["a", "b"], ["a", "b"], ["b", "a"]):
        hook = partial(lambda *_, adapter_names: None, adapter_names=names)
        handle = model.lm_head.register_forward_pre_hook(hook)
        keys.append(fingerprint(model))
        handle.remove()
    assert keys[0] == keys[1] != keys[2]
