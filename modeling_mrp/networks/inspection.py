"""Inspection of a model's modules and weights, for a call of `generate`.

A model may change between two calls: adapters are switched, hooks added, modules replaced, weights
moved or written to. `fingerprint` collects in one pass everything on which decisions about a model
depend. `decide` repeats a decision only if the fingerprint has changed.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator
from operator import is_, itemgetter
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..model.loading import check_lm_head, device_of

Decision = TypeVar("Decision")

# Attributes that every module has; those of them that count are read by name.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
# By the names of all attributes of a module, a function that reads those that not every module has.
_SETTINGS_READERS: dict[tuple[str, ...], Callable[[dict[str, Any]], Any]] = {}
_PLAIN_VALUES = frozenset({bool, int, float, str, type(None)})
_PRINTED = (bool, int, float, str, list, tuple)
_PLAIN_TENSORS = frozenset({Tensor, nn.Parameter, nn.Buffer})
# By model, the fingerprint for which decisions were made, and the decisions by name.
_DECISIONS: "weakref.WeakKeyDictionary[nn.Module, tuple[Hashable, dict[Hashable, Any]]]" = (
    weakref.WeakKeyDictionary()
)


class PassingReference(weakref.ref[Any]):
    """A weak reference, for attributes of objects that are copied and pickled. If such an object is
    deep-copied, the reference in the copy refers to the same target. If the object is unpickled,
    the reference refers to nothing.

    Two such references are equal if both refer to the same target and the target still exists. A
    reference whose target is gone is not equal to any reference, not even to itself.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # nothing else refers to this set, so an unpickled reference is dead
        return type(self), (set(),)

    def __deepcopy__(self, memo: Any) -> "PassingReference":
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PassingReference) and self() is not None and self() is other()


def decide(
    model: nn.Module, model_key: Hashable, name: Hashable, compute: Callable[[], Decision]
) -> Decision:
    """Return `compute()`, or its earlier result for the same model, `model_key` (the model's
    `fingerprint`) and `name`.

    The result must depend on nothing else, and must not hold tensors.
    """
    fingerprint_of_decisions, decisions = _DECISIONS.get(model, (None, {}))
    if fingerprint_of_decisions != model_key:
        decisions = {}
        _DECISIONS[model] = (model_key, decisions)
    if name not in decisions:
        decisions[name] = compute()
    decision: Decision = decisions[name]
    return decision


def fingerprint(model: Any) -> Hashable:
    """Collect, as one value to compare, everything on which CUDA graphs of a model and decisions
    about it (`decide`) depend: the addresses of its weights, the classes, settings and hooks of its
    modules, and the implementation of its attention."""
    weights: list[Hashable] = []
    settings: list[Hashable] = []
    classes: dict[type, Any] = {}
    for module in walk(model):
        classes[type(module)] = type(module).forward
        settings.append(_settings_of(module))
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    weights.append(_place_of(tensor))
    attention = model.config._attn_implementation
    return (
        tuple(weights),
        tuple(settings),
        tuple(classes.items()),
        attention,
        ALL_ATTENTION_FUNCTIONS.get(attention),
    )


def _place_of(tensor: Tensor) -> Hashable:
    """Return a value that identifies the memory of a weight. For an offloaded weight, it says only
    that the weight is offloaded."""
    if tensor.is_meta:
        return tensor.device
    address = tensor.data_ptr() if type(tensor) in _PLAIN_TENSORS else id(tensor)
    return address, type(tensor), tensor.dtype, tensor.shape, tensor.device


def walk(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all modules in it. A shared module is yielded once for each occurrence.
    This is many times faster than `modules`."""
    pending = [module]
    while pending:
        module = pending.pop()
        yield module
        for child in module._modules.values():
            if child is not None:
                pending.append(child)


def _settings_of(module: nn.Module) -> Hashable:
    """Return the class of a module, the names of its attributes, its plain values (bool, int,
    float, str or None) and the keys of its hooks."""
    attributes = module.__dict__
    names = tuple(attributes)
    read = _SETTINGS_READERS.get(names)
    if read is None:
        own_names = [name for name in names if name not in _OF_EVERY_MODULE]
        read = _SETTINGS_READERS[names] = itemgetter(*own_names, "training", "training")
    values: tuple[Any, ...] = read(attributes)
    if not _PLAIN_VALUES.issuperset(map(type, values)):
        values = tuple(_plain_values(attributes))
    hooks = attributes["_forward_hooks"]
    pre_hooks = attributes["_forward_pre_hooks"]
    if hooks or pre_hooks:
        values += (*map(_hook_key, hooks.items()), None, *map(_hook_key, pre_hooks.items()))
    return type(module), names, values


def _plain_values(attributes: dict[str, Any]) -> Iterator[Hashable]:
    """Yield a module's own plain values (bool, int, float, str or None), among them those that
    switch adapters. For its lists and dicts, yield their texts."""
    for name, value in attributes.items():
        if name in _OF_EVERY_MODULE:
            continue
        if type(value) in _PLAIN_VALUES:
            yield value
        # of the type itself: configs answer slowly when they are asked for their class
        elif issubclass(type(value), _PRINTED) or (type(value) is dict and name[0] != "_"):
            yield repr(value)


def _hook_key(item: tuple[int, Any]) -> Hashable:
    """Return a key that identifies a hook: the number under which it was registered.

    peft registers hooks with adapter names in each call with `adapter_names`. The key of such a
    hook is these names.
    """
    number, hook = item
    adapter_names = getattr(hook, "keywords", {}).get("adapter_names")
    return number if adapter_names is None else tuple(adapter_names)


def weight_versions(module: nn.Module, model_key: Hashable = None) -> list[Any]:
    """Return a record of a module's parameters and active adapters, which serves only to be
    compared with a later one.

    Two records are equal if, between them, no parameter was replaced, moved or written to, and the
    active adapters stayed the same. Writes through `.data` are not noticed, because autograd does
    not count them. If the model's `fingerprint` is given as `model_key`, references to the
    parameters are made only if the fingerprint has changed since the last call.
    """
    weights: list[Tensor] = []
    # adapters of peft
    adapters = []
    layer: Any
    for layer in walk(module):
        for weight in layer._parameters.values():
            if weight is not None and not weight.is_meta:
                weights.append(weight)  # offloaded weights are loaded again each time, and left out
        if not hasattr(layer, "merged_adapters"):
            continue
        scaling = dict(getattr(layer, "scaling", {}))
        adapters.append(
            (
                list(layer.active_adapters),
                layer.disable_adapters,
                layer.merged_adapters[:],
                scaling,
            )
        )

    def refer() -> list[PassingReference]:
        return list(map(PassingReference, weights))

    references = refer() if model_key is None else decide(module, model_key, "references", refer)
    referred = [reference() for reference in references]
    if len(referred) != len(weights) or not all(map(is_, referred, weights)):
        references = refer()
    return [references, list(map(_version_of, weights)), adapters, adapters_of_rows(module)]


def _version_of(weight: Any) -> tuple[int, int]:
    """Return the address of a weight, and how many times it was written to."""
    address = weight.data_ptr() if type(weight) in _PLAIN_TENSORS else 0
    # the version counter has no public name
    return address, 0 if weight.is_inference() else weight._version


def adapters_of_rows(module: nn.Module) -> list[str] | None:
    """Return peft's `adapter_names`, one for each row of a batch; None if there are none. They are
    read from the newest hooks, because failed calls leave hooks behind."""
    for submodule in walk(module):
        hooks = submodule._forward_pre_hooks
        for hook in reversed(hooks.values()) if hooks else ():
            adapter_names = getattr(hook, "keywords", {}).get("adapter_names")
            if adapter_names is not None:
                return list(adapter_names)
    return None


def prompt_adapter(model: Any) -> Any:
    """Return the config of peft's active adapter if that adapter learns prompts; otherwise return
    None."""
    # a peft model replaces this method by its own
    wrapper: Any = getattr(model.prepare_inputs_for_generation, "__self__", None)
    config: Any = getattr(wrapper, "active_peft_config", None)
    return config if getattr(config, "is_prompt_learning", False) else None


def check_weights(model: Any) -> None:
    """Raise `ValueError` if `generate` cannot decode with the model's adapters or its `lm_head`.

    An active adapter must not do more than change weights of layers. The weight of `lm_head` must
    be readable directly: not divided among processes, packed, adapted, or without a device.
    """
    of_rows = adapters_of_rows(model) or ()
    layers = [
        one
        for one in model.modules()
        if hasattr(one, "merged_adapters") and not one.disable_adapters
    ]
    on = {name for layer in layers for name in (*layer.active_adapters, *of_rows)}
    configs = [
        config for name, config in (getattr(model, "peft_config", None) or {}).items() if name in on
    ]
    refused = [
        one
        for one in configs
        if getattr(one, "alora_invocation_tokens", None) or one.peft_type == "SHADOW"
    ]
    if (prompts := prompt_adapter(model)) is not None:
        refused.append(prompts)
    for config in refused:
        kind = (
            "aLoRA (alora_invocation_tokens)"
            if config.peft_type.value == "LORA"
            else config.peft_type.value
        )
        raise ValueError(
            f"an adapter of type {kind} has no effect on generate, which decodes from ids alone, "
            "and not from the left. Train an adapter of the weights instead, such as LoRA, or "
            "decode without it under model.disable_adapter()"
        )
    lm_head, weight, reason = model.lm_head, model.lm_head.weight, None
    check_lm_head(lm_head)
    device_of(lm_head)
    if hasattr(weight, "to_local"):
        reason = (
            "is divided among processes: leave it, and embed_tokens if these are tied, out of "
            "tp_plan"
        )
    elif not weight.is_floating_point():
        reason = (
            f"has packed weights, {weight.dtype}: keep it as it was, with 'lm_head' in "
            "llm_int8_skip_modules if that is given"
        )
    elif hasattr(lm_head, "base_layer") and not (lm_head.merged or lm_head.disable_adapters):
        reason = (
            f"has an adapter ({', '.join(lm_head.active_adapters)}): merge_and_unload() it, or "
            "leave it out of target_modules"
        )
    # peft's copy of the weight, or an adapter's own rows
    elif of_rows and hasattr(lm_head, "original_module"):
        reason = (
            "differs from adapter to adapter (modules_to_save or trainable_token_indices): decode "
            "the rows of one adapter at a time, after set_adapter and without adapter_names"
        )
    if reason is not None:
        raise ValueError(f"rows of lm_head's own weight are read, and lm_head {reason}")
