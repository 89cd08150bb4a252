"""`sdar.generate(custom_generate="org/head", trust_remote_code=True)`: a stock SDAR model decodes with a repository's head."""

from typing import Any


def generate(inputs: Any = None, *, model: Any, **kwargs: Any) -> Any:
    """Decode a stock SDAR model's prompts with the head of the repository that this file lies in.

    The source of this function is all of `custom_generate/generate.py`, where transformers looks for it, so what it needs is
    imported inside; the model's class comes from the repository by name.

    Args:
        inputs: [rows, length] long, the prompts (or `input_ids` among the others).
        model: The stock model, with a Qwen3 decoder's parameters; or an MRP model, whose own head then decodes.
        kwargs: What MRP's `generate` takes; `revision`, `token` and the like are for finding the repository.

    Returns:
        What MRP's `generate` returns.

    Raises:
        ValueError: if the head does not fit the model; both are named.
    """
    import inspect
    import re
    from pathlib import Path

    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for_downloads = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
    download = {name: kwargs.pop(name) for name in for_downloads if name in kwargs}
    if not hasattr(model, "mrp_head"):
        # transformers tells the repository to its own frame only.
        frame, repository = inspect.currentframe(), None
        while frame is not None and repository is None:
            asked = frame.f_locals.get("custom_generate") if frame.f_code.co_name == "generate" else None
            frame, repository = frame.f_back, asked if isinstance(asked, str) else None
        if repository is None:
            raise ValueError("which repository this is cannot be told: call model.generate(custom_generate='org/name', ...)")
        commit = Path(__file__).parent.parent.name
        if re.fullmatch("[0-9a-f]{40}", commit):  # code is kept by commit: the weights are of the same
            download["revision"] = commit
        mrp = get_class_from_dynamic_module("modeling_mrp.MRPForCausalLM", repository, **download)
        model = mrp.around(model, repository, **download)
    return type(model).generate(model, inputs, **kwargs)


__all__ = ["generate"]
