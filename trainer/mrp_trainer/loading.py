"""Loading of models and tokenizers for the commands, without running any code from a repository."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, find_adapter_config_file

from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.layouts import is_hub_id, json_object, stored_json
from modeling_mrp.modeling import MRPForCausalLM

from .embedded import resolve_source


def load_tokenizer(
    source: str, revision: str | None = None, local_files_only: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder, or in a revision of a Hub repository; `ValueError` if it
    cannot be loaded."""
    source = resolve_source(source)
    # otherwise transformers would read the checkpoint's config, whose type it may not know
    config = MRPConfig()
    hub_options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    try:
        return AutoTokenizer.from_pretrained(
            source, config=config, trust_remote_code=False, **hub_options
        )
    except Exception as error:  # libraries that check little may raise any error for damaged files
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "check the name, save one in the folder, or name another with --tokenizer"
        raise ValueError(
            f"the tokenizer of {source!r} cannot be loaded: {remedy} ({first_line})"
        ) from error


def tokenizer_of(options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a command's options name, by default the model's.

    Args:
        options: An object with the attributes `model`, `tokenizer` and `revision`.

    Raises:
        OSError: if the model does not exist. This is checked first, since otherwise the error would
            seem to be one of the tokenizer.
        ValueError: if the tokenizer cannot be loaded.
    """
    base, revision, _ = _base_and_adapter(options.model, options.revision)
    stored_json(base, revision=revision)
    return load_tokenizer(
        options.tokenizer or options.model, None if options.tokenizer else options.revision
    )


def load_config(source: str, revision: str | None = None) -> MRPConfig:
    """Load only the config of the model that `load_model` would load from `source`. For a peft
    adapter, this is the config of its base.

    Args:
        source: A folder or a Hub id of a checkpoint or a peft adapter.
        revision: Commit, branch or tag of a Hub id.

    Raises:
        ValueError: if the config is damaged or of another kind, or if an adapter names no base that
            can be loaded.
        OSError: if the folder or repository does not exist.
    """
    base, revision, _ = _base_and_adapter(source, revision)
    stored_json(base, revision=revision)  # transformers' own error does not name the missing file
    return MRPConfig.from_pretrained(base, revision=revision or "main")


def load_generation_fields(source: str, revision: str | None = None) -> dict[str, Any]:
    """Read the generation config of the model that `load_model` would load from `source`; return it
    as a dict, which is empty if the model has no generation config."""
    with suppress(OSError):
        base, revision, _ = _base_and_adapter(source, revision)
        return stored_json(base, GENERATION_CONFIG_NAME, revision=revision)[0]
    return {}


def load_model(
    source: str,
    dtype: str | None = None,
    device: str | None = "cpu",
    revision: str | None = None,
    backbone: str | None = None,
) -> Any:
    """Load an `MRPForCausalLM` in evaluation mode.

    Args:
        source: A folder or a Hub id of any checkpoint that `MRPForCausalLM.from_pretrained` takes,
            or of a peft adapter, which is loaded together with its base.
        dtype: Dtype of the weights; None selects the checkpoint's dtype.
        device: The device; None selects the first GPU of any maker, or else the CPU.
        revision: Commit, branch or tag of a Hub id.
        backbone: A folder or a Hub id of the backbone to load, in place of the backbone that a head
            or an adapter names.

    Raises:
        ValueError: if the checkpoint or the adapter is damaged or of another kind, if an adapter on
            the Hub names a base that is not on the Hub, if the device does not exist, or if the
            dtype is float64 on an Apple GPU, which does not support it.
        OSError: if the folder or repository does not exist.
    """
    if (
        dtype == "float64"
        and (default_device().type if device is None else device.partition(":")[0]) == "mps"
    ):
        raise ValueError(
            "dtype is float64, which an Apple GPU (mps) has not: use float32, or the device cpu"
        )
    checked = checked_device(device)
    base, of_base, adapter = _base_and_adapter(source, revision, backbone)
    weights: dict[str, Any] = {}
    if dtype is not None:
        weights["dtype"] = dtype
    pinned: dict[str, Any] = {}
    if of_base is not None:
        pinned["revision"] = of_base
    if backbone is None or adapter is not None:
        model = MRPForCausalLM.from_pretrained(base, **pinned, **weights)
    else:
        model = MRPForCausalLM.from_backbone(resolve_source(backbone), **weights)
        model.attach_head(base, **pinned)
        if fields := load_generation_fields(base, of_base):
            model.generation_config = MRPGenerationConfig.from_dict(fields)
    if adapter is not None:
        model.load_adapter(
            adapter, adapter_kwargs={} if revision is None else {"revision": revision}
        )
    return model.eval().to(checked)


def default_device() -> torch.device:
    """Return the first available GPU, of the maker that torch was built for, or else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def checked_device(name: str | None) -> torch.device:
    """Return a device after checking that it exists; None selects the first GPU of any maker, or
    else the CPU. `ValueError` for a device that does not exist."""
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
        # nothing can be read from the device meta, so it fails here
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"device is {name!r}, which is not here: use cpu, or leave it out ({reason})"
        ) from error
    return device


def _base_and_adapter(
    source: str, revision: str | None = None, backbone: str | None = None
) -> tuple[str, str | None, str | None]:
    """Return the source of the model, the revision of the model, and the source of the adapter to
    load onto it. The last is None if `source` is not an adapter; a folder with both a model and an
    adapter counts as a model. `backbone` replaces the model that an adapter names."""
    source = resolve_source(source)
    adapter_config = None
    if not (Path(source) / "config.json").is_file():
        # if the model's config is missing too, loading it raises the error
        with suppress(OSError, ValueError):
            adapter_config = find_adapter_config_file(source, revision=revision)
    if adapter_config is None:
        return source, revision, None
    if backbone is not None:
        return resolve_source(backbone), None, source
    named = json_object(Path(adapter_config)).get("base_model_name_or_path")
    if not isinstance(named, str):
        raise ValueError(
            f"the adapter in {source} names no base_model_name_or_path: write the model's into "
            f"{adapter_config}"
        )
    if not os.path.isdir(source) and (not is_hub_id(named) or os.path.exists(named)):
        raise ValueError(
            f"the adapter {source} on the Hub names the model {named!r}, which is not followed: it "
            "must be an id on the Hub, and no path here. Download the adapter, and correct its "
            "adapter_config.json, or name the model with --backbone"
        )
    if os.path.isabs(named) and not os.path.isdir(named):
        raise ValueError(
            f"the folder {named} of the model of the adapter {source} is gone: name its new place "
            "with --backbone"
        )
    return named, None, source
