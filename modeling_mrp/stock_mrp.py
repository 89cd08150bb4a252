"""An MRP model around a loaded SDAR model of another class: the same parameters in memory, and a repository's head."""

import inspect
import json
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import cached_file

from .custom_generate_mrp import generate as custom_generate
from .folder_mrp import CUSTOM_GENERATE

# The MRP model around each stock model that is still in use, and where its head came from.
_AROUND: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]]" = weakref.WeakKeyDictionary()

# What changes a forward and shows in no parameter's shape.
_COMPARED = ("block_size", "mask_token_id", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act")


def write_custom_generate(folder: Path | str) -> None:
    """Makes a saved model's folder a `custom_generate` repository too."""
    target = Path(folder) / CUSTOM_GENERATE
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(str(inspect.getsourcefile(custom_generate)), target)


def head_tensors(repository: str, **download: Any) -> dict[str, Tensor]:
    """The head's tensors of a full or a head repository, without their prefix; only the files that hold them are read.

    Raises:
        ValueError: if there are none.
    """
    index = cached_file(repository, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False, **download)
    files = ["model.safetensors"]
    if index is not None:
        weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        files = sorted({file for name, file in weight_map.items() if name.startswith("mrp_head.")})
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(cached_file(repository, file, **download), framework="pt") as stream:
            names = [name for name in stream.keys() if name.startswith("mrp_head.")]  # noqa: SIM118  safe_open is no mapping
            tensors |= {name.removeprefix("mrp_head."): stream.get_tensor(name) for name in names}
    if not tensors:
        raise ValueError(f"{repository} has no MRP head: name a repository with one")
    return tensors


def _rope(config: Any) -> tuple[Any, Any]:
    """Kind and base of the rotary embedding, of a config of today or of transformers 4."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return parameters.get("rope_type", "default"), parameters.get("rope_theta", getattr(config, "rope_theta", None))


def _misfits(model: Any, stock: Any, parameters: dict[str, Tensor], head: dict[str, Tensor]) -> list[str]:
    """Why a stock model and a head do not make this model, with both values each."""
    wrong = []
    for name in _COMPARED:
        ours, theirs = getattr(model.config, name), getattr(stock.config, name, None)
        if theirs is not None and theirs != ours:
            wrong.append(f"{name} is {theirs} in the model, and {ours} in the head's config")
    if (theirs := _rope(stock.config)) != (ours := _rope(model.config)):
        wrong.append(f"the rotary embedding is {theirs} in the model, and {ours} in the head's config")
    given = parameters | {f"mrp_head.{name}": tensor for name, tensor in head.items()}
    expected = model.state_dict(keep_vars=True)
    for name, tensor in expected.items():
        if name not in given:
            wrong.append(f"{name} is missing")
        elif given[name].shape != tensor.shape:
            wrong.append(f"{name} is {list(given[name].shape)}, and the head's config says {list(tensor.shape)}")
    wrong += [f"{name} has no place" for name in given if name not in expected]
    devices = {str(tensor.device) for tensor in parameters.values()}
    if len(devices) != 1 or devices == {"meta"}:
        wrong.append(f"the model lies on {', '.join(sorted(devices))}: it must be on one device, loaded")
    return wrong


def _place(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor itself, not a copy, where a model keeps the parameter or buffer of that name."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    slots: Any = module._parameters if leaf in module._parameters else module._buffers
    slots[leaf] = tensor


class StockMixin:
    """What lets an MRP model's repository serve models of other classes."""

    @classmethod
    def around(cls: Any, stock: Any, repository: str, **download: Any) -> Any:
        """The MRP model of a stock model's own parameters and a repository's head. Made once, as long as the stock model lives.

        Args:
            stock: A model with a Qwen3 decoder's parameters under `model.` and `lm_head.`, such as SDAR's own class.
            repository: A full or a head repository, or a folder.
            download: `revision`, `token` and the like.

        Returns:
            A model of this class, in evaluation mode, with the repository's generation config. Its backbone shares memory with
            `stock`; the head has its dtype and device.

        Raises:
            ValueError: if they do not fit; everything that does not is listed with both values.
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
        config = cls.config_class.from_pretrained(repository, **download)
        with torch.device("meta"):
            model = cls(config)
        head = head_tensors(repository, **download)
        if wrong := _misfits(model, stock, parameters, head):
            raise ValueError(f"the head of {repository} does not fit this {type(stock).__name__}:\n  " + "\n  ".join(wrong))
        like = parameters["lm_head.weight"]
        for name, parameter in parameters.items():
            _place(model, name, parameter)
        for name, tensor in head.items():
            tensor = tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)
            is_buffer = f"mrp_head.{name}" in dict(model.named_buffers())
            _place(model, f"mrp_head.{name}", tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(like.device)  # no checkpoint holds its buffers
        with suppress(OSError):  # where there is none, it keeps the one that its config gives
            model.generation_config = GenerationConfig.from_pretrained(repository, **download)
        _AROUND[stock] = source, model.eval()
        return model

    def adjust_generation_fn(self, *args: Any, trust_remote_code: Any = None, **kwargs: Any) -> None:
        """Loads the generation config. The repository's `custom_generate` is for other models: it is not even asked for."""
        super().adjust_generation_fn(*args, trust_remote_code=None, **kwargs)  # type: ignore[misc]


def _still_around(model: Any, parameters: dict[str, Tensor]) -> bool:
    """Whether a model still has a stock model's parameters, wherever they were moved and whatever replaced them."""
    mine = dict(model.named_parameters(remove_duplicate=False))
    like = mine["lm_head.weight"]
    return all(mine.get(name) is parameter for name, parameter in parameters.items()) and all(
        (parameter.dtype, parameter.device) == (like.dtype, like.device) for parameter in model.mrp_head.parameters()
    )


__all__ = ["StockMixin", "head_tensors", "write_custom_generate"]
