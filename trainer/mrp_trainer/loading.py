"""Loading of models and tokenizers for the commands, without running any code of a repository."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, find_adapter_config_file

from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.layouts import is_hub_id, json_object, stored_json
from modeling_mrp.modeling import MRPForCausalLM

from .embedded import located


def load_tokenizer(source: str, revision: str | None = None, local_files_only: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, or of a Hub id and its revision; `ValueError` if it cannot be loaded."""
    source = located(source)
    config = MRPConfig()  # else transformers would read the checkpoint's, which it may not know
    where: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    try:
        return AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=False, **where)
    except Exception as error:  # libraries that check little raise anything for damaged files
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "check the name, save one in the folder, or name another with --tokenizer"
        raise ValueError(f"the tokenizer of {source!r} cannot be loaded: {remedy} ({first_line})") from error


def load_config(source: str) -> MRPConfig:
    """Load only the config of the model that `load_model` loads from `source`; errors are those of `load_model`."""
    base, _ = _base_and_adapter(source)
    stored_json(base)  # transformers' own error does not say what it looked for
    return MRPConfig.from_pretrained(base)


def load_generation_fields(source: str) -> dict[str, Any]:
    """Read the generation config of the model that `load_model` loads from `source`, as a mapping; empty if there is none."""
    with suppress(OSError):
        return stored_json(_base_and_adapter(source)[0], GENERATION_CONFIG_NAME)[0]
    return {}


def load_model(source: str, dtype: str | None = None, device: str | None = "cpu") -> Any:
    """Load an `MRPForCausalLM` in evaluation mode.

    Args:
        source: A folder or a Hub id, of any kind that `MRPForCausalLM.from_pretrained` takes, or of a peft adapter, which is
            loaded with its base.
        dtype: Dtype of the weights; that of the checkpoint if None.
        device: None stands for `default_device()`.

    Raises:
        ValueError: if checkpoint or adapter is damaged or of another kind, an adapter on the Hub has its base elsewhere, or the
            dtype is float64 on an Apple GPU, which has none.
        OSError: if there is no such folder or repository.
    """
    place = default_device() if device is None else torch.device(device)
    if place.type == "mps" and dtype == "float64":
        raise ValueError("dtype is float64, which an Apple GPU (mps) has not: use float32, or the device cpu")
    base, adapter = _base_and_adapter(source)
    model = MRPForCausalLM.from_pretrained(base, **({} if dtype is None else {"dtype": dtype}))
    if adapter is not None:
        model.load_adapter(adapter)
    return model.eval().to(place)


def default_device() -> torch.device:
    """Return the first GPU of any maker that torch was built for and finds, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _base_and_adapter(source: str) -> tuple[str, str | None]:
    """Return the source of the model, and of the adapter on it or None; a folder that holds both is loaded as a model."""
    source, found = located(source), None
    if not (Path(source) / "config.json").is_file():
        with suppress(OSError, ValueError):  # the error is raised when the model's config is not found either
            found = find_adapter_config_file(source)
    if found is None:
        return source, None
    named = json_object(Path(found)).get("base_model_name_or_path")
    if not isinstance(named, str):
        raise ValueError(f"the adapter in {source} names no base_model_name_or_path: write the model's into {found}")
    if not os.path.isdir(source) and (not is_hub_id(named) or os.path.exists(named)):
        raise ValueError(
            f"the adapter {source} on the Hub names the model {named!r}, which is not followed: it must be an id on the Hub, "
            "and no path here. Download the adapter, and correct its adapter_config.json"
        )
    return named, source
