"""The remote code that a repository carries."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from .families.sdar import DENSE

MODELING, CUSTOM_GENERATE = "modeling_mrp.py", "custom_generate/generate.py"
AUTO_MAP = {
    "AutoConfig": "modeling_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForCausalLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForCausalLM",
}


def code_files(family: str = DENSE) -> dict[str, str]:
    """Return the remote code of a repository, text by path: this file if it is a bundle, else a bundle made for a family."""
    own = Path(__file__)
    if own.name == MODELING:
        text = own.read_text(encoding="utf-8")
    else:
        text = import_module(f"{__name__.partition('.')[0]}.bundle").bundled(family)
    return {MODELING: text, CUSTOM_GENERATE: f"from typing import Any\n\n\n{inspect.getsource(generate)}"}


def write_code(folder: Path, family: str = DENSE) -> None:
    """Write a family's remote code into a checkpoint's folder."""
    for name, text in code_files(family).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def model_tags(family: str) -> list[str]:
    """List the tags of a model's repository, by its family."""
    return ["dllm", "diffusion-lm", "block-diffusion", "speculative-decoding", family, "mrp"]


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
