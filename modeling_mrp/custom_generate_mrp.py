"""`sdar.generate(custom_generate="org/head", trust_remote_code=True)`: a stock SDAR model decodes with a repository's head.

`save_pretrained` copies this file to `custom_generate/generate.py`, where transformers looks for it. There it has no siblings,
so the model's class comes from the repository by name.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_class_from_dynamic_module

_FOR_DOWNLOADS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")


def generate(inputs: Any = None, *, model: Any, **kwargs: Any) -> Any:
    """What `model.generate` calls instead of its own loop.

    Args:
        inputs: [rows, length] long, the prompts (or `input_ids` among the others).
        model: The stock model, with a Qwen3 decoder's parameters; or an MRP model, whose own head then decodes.
        kwargs: What MRP's `generate` takes; `revision`, `token` and the like are for finding the repository.

    Returns:
        What MRP's `generate` returns.

    Raises:
        ValueError: if the head does not fit the model; both are named.
    """
    download = {name: kwargs.pop(name) for name in _FOR_DOWNLOADS if name in kwargs}
    if not hasattr(model, "mrp_head"):
        repository = _repository()
        commit = Path(__file__).parent.parent.name
        if re.fullmatch("[0-9a-f]{40}", commit):  # code is kept by commit: the weights are of the same
            download["revision"] = commit
        mrp = get_class_from_dynamic_module("modeling_mrp.MRPForCausalLM", repository, **download)
        model = mrp.around(model, repository, **download)
    return type(model).generate(model, inputs, **kwargs)


def _repository() -> str:
    """The repository that `generate` was asked to take this function from. transformers tells it only its own frame."""
    frame = inspect.currentframe()
    while frame is not None:
        asked = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(asked, str):
            return asked
        frame = frame.f_back
    raise ValueError("which repository this is cannot be told: call model.generate(custom_generate='org/name', ...)")


__all__ = ["generate"]
