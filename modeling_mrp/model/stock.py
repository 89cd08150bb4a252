"""An MRP model around a loaded SDAR model of another class: the same parameters in memory, and a repository's head."""

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import GenerationConfig

# The MRP model around each stock model that is still in use, and where its head came from.
_AROUND: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]]" = weakref.WeakKeyDictionary()


def _config_of(stock: Any, head_config: Any) -> Any:
    """Translate the stock model's config to one of this package, without a head; what it does not say is as in the head's."""
    assumed = {name: getattr(head_config, name) for name in ("block_size", "mask_token_id")}
    return type(head_config).from_dict(
        {**assumed, **stock.config.to_dict(), "model_type": "sdar", "num_nextn_predict_layers": 0, "draft_vocab_size": 0}
    )


def _misfits(parameters: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """List what of a stock model's parameters is not as in a Qwen3 decoder of its config, loaded, on one device."""
    wrong = [f"missing: {name}" for name in expected if name not in parameters]
    wrong += [f"unexpected: {name}" for name in parameters if name not in expected]
    wrong += [
        f"wrong shape: {name} is {list(parameters[name].shape)}, needs {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in parameters and parameters[name].shape != tensor.shape
    ]
    wrong += [
        f"wrong type: {name} holds {tensor.dtype}" for name, tensor in parameters.items() if not tensor.is_floating_point()
    ]
    devices = {str(tensor.device) for tensor in parameters.values()}
    if len(devices) > 1 or "meta" in devices:
        wrong.append(f"it lies on {', '.join(sorted(devices))}: it must be loaded, on one device")
    return wrong


class StockMixin:
    """The part of an MRP model by which its repository serves models of other classes."""

    @classmethod
    def around(cls: Any, stock: Any, repository: str, **download: Any) -> Any:
        """Make the MRP model of a stock model's own parameters and a repository's head, once as long as the stock model lives.

        Args:
            stock: A model with a Qwen3 decoder's parameters under `model.` and `lm_head.`, such as SDAR's own class.
            repository: A repository with a head, or its folder, of any kind that `attach_head` takes.
            download: `revision`, `token` and the like.

        Returns:
            A model of this class, in evaluation mode, with the repository's generation config. Its backbone shares memory with
            `stock`; the head has its dtype and device.

        Raises:
            ValueError: if the stock model is not what this class can be put around, or the head was made for another backbone;
                everything that does not fit is listed with both values.
        """
        parameters = {
            name: parameter
            for name, parameter in stock.named_parameters(remove_duplicate=False)
            if name.startswith(("model.", "lm_head."))
        }
        source = (repository, tuple(sorted((name, str(value)) for name, value in download.items())))
        known, model = _AROUND.get(stock, (None, None))
        if known == source and _still_around(model, parameters):
            return model
        config = _config_of(stock, cls.config_class.from_pretrained(repository, **download))
        with torch.device("meta"):
            model = cls(config).eval()
        if wrong := _misfits(parameters, dict(model.named_parameters(remove_duplicate=False))):
            raise ValueError(
                f"this {type(stock).__name__} is no Qwen3 decoder that a head can be put on:\n  " + "\n  ".join(wrong) + "\n"
                "Load the checkpoint with MRPForCausalLM.from_backbone instead"
            )
        for name, parameter in parameters.items():
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = parameter
        rotary = type(model.model.rotary_emb)(config)  # no checkpoint holds its buffers
        model.model.rotary_emb = rotary.to(parameters["lm_head.weight"].device)
        model.attach_head(repository, **download)
        model.mrp_head.requires_grad_(False)
        with suppress(OSError):  # where there is none, it keeps the one that its config gives
            model.generation_config = GenerationConfig.from_pretrained(repository, **download)
        _AROUND[stock] = source, model
        return model


def _still_around(model: Any, parameters: dict[str, Tensor]) -> bool:
    """Tell if a model still has a stock model's parameters, wherever they were moved and whatever replaced them."""
    mine = dict(model.named_parameters(remove_duplicate=False))
    like = mine["lm_head.weight"]
    return all(mine.get(name) is parameter for name, parameter in parameters.items()) and all(
        (parameter.dtype, parameter.device) == (like.dtype, like.device) for parameter in model.mrp_head.parameters()
    )


__all__ = ["StockMixin"]
