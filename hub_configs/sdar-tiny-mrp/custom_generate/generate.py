from typing import Any


def generate(inputs: Any = None, *, model: Any, **kwargs: Any) -> Any:
    """Decode with a stock SDAR model and the head of the Hub repository that holds this file, called as
    `sdar.generate(custom_generate="org/head", trust_remote_code=True)`; an MRP model decodes with its own head.

    `custom_generate/generate.py` holds this function alone, which so imports all it needs. The path at which transformers
    caches the file gives the repository and commit. `ValueError` if the head does not fit, or the repository is a folder.
    """
    import re
    from pathlib import Path

    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for_downloads = ("token", "cache_dir", "local_files_only", "force_download", "proxies", "revision")
    download = {name: kwargs.pop(name) for name in for_downloads if name in kwargs}
    if not hasattr(model, "mrp_head"):
        owner, name, commit = Path(__file__).parts[-5:-2]
        if owner == "transformers_modules":
            raise ValueError(
                "custom_generate is a local folder, whose head is not found: push it and name the repository, or load both by "
                "MRPForCausalLM.from_backbone(backbone, head=folder)"
            )
        owner, name = (re.sub("^_(?=[0-9])", "", part) for part in (owner, name))  # as Python modules can be called
        repository = f"{owner}/{name}".replace("_hyphen_", "-").replace("_dot_", ".")
        download["revision"] = commit  # code is kept by commit: the weights are of the same
        mrp = get_class_from_dynamic_module("modeling_mrp.MRPForCausalLM", repository, **download)
        model = mrp.from_stock_model(model, repository, **download)
    return type(model).generate(model, inputs, **kwargs)
