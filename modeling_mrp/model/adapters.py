"""peft's adapters: which are on, and which `generate` cannot follow."""

from typing import Any

from torch import nn


def adapters_of_rows(module: nn.Module) -> list[str] | None:
    """Read peft's `adapter_names`, an adapter for each row of a batch, which hooks hand to its layers during a call.

    A call that failed leaves its hooks behind; the last one counts.
    """
    hooks = (hook for part in module.modules() for hook in reversed(part._forward_pre_hooks.values()))
    names = (getattr(hook, "keywords", {}).get("adapter_names") for hook in hooks)
    return next((list(of_rows) for of_rows in names if of_rows is not None), None)


def adapters_on(module: nn.Module) -> list[Any]:
    """List the adapters that are on in each of peft's layers, with their scales, and those of rows."""
    layers = [
        (list(layer.active_adapters), layer.disable_adapters, layer.merged_adapters[:], dict(getattr(layer, "scaling", {})))
        for layer in _layers(module)
    ]
    return [adapters_of_rows(module), *layers]


def check_adapters(model: Any, rows: int) -> None:
    """Check the adapters that are on, for a batch of so many rows.

    Raises:
        ValueError: for an adapter that needs a prompt read token by token, vectors before it, or a network beside the layers;
            for `adapter_names` of another number of rows.
    """
    of_rows = adapters_of_rows(model)
    if of_rows is not None and len(of_rows) != rows:
        raise ValueError(
            f"adapter_names holds {len(of_rows)} names for {rows} rows: give one for each row (after num_return_sequences)"
        )
    wrapper: Any = getattr(model.prepare_inputs_for_generation, "__self__", None)  # a peft model puts its own there
    config: Any = getattr(wrapper, "active_peft_config", None)
    found = None
    if getattr(config, "is_prompt_learning", False):
        found = config.peft_type.value, "an adapter of the prompt, and generate decodes from ids alone"
    on = {name for layer in _layers(model) if not layer.disable_adapters for name in (*layer.active_adapters, *(of_rows or ()))}
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if name in on and getattr(config, "alora_invocation_tokens", None):
            why = "it starts behind the last invocation of a text that grows from the left"
            found = "aLoRA (alora_invocation_tokens)", why
        elif name in on and config.peft_type == "SHADOW":
            found = "SHADOW", "its network beside the layers begins where the model is called, and sees a causal text"
    if found is not None:
        raise ValueError(
            f"an adapter of type {found[0]} has no effect on generate: {found[1]}. Train an adapter of the weights instead, "
            "such as LoRA, or decode without it under model.disable_adapter()"
        )


def _layers(module: nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if hasattr(layer, "merged_adapters")]
