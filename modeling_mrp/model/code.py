"""The remote code that a repository carries."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from .families.registry import DENSE

CONFIGURATION, MODELING = "configuration_mrp.py", "modeling_mrp.py"
CUSTOM_GENERATE = "custom_generate/generate.py"
AUTO_MAP = {
    "AutoConfig": "configuration_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForCausalLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForCausalLM",
}


def code_files(family: str = DENSE) -> dict[str, str]:
    """Collect the remote code that a repository carries, by path.

    It is this code itself if that is already a bundle with the family, else what `bundle` generates for the family.
    """
    own = Path(__file__)
    if own.name == MODELING:
        files = {name: own.with_name(name).read_text(encoding="utf-8") for name in (CONFIGURATION, MODELING)}
    else:
        files = import_module(f"{__name__.partition('.')[0]}.bundle").files(family)
    return {**files, CUSTOM_GENERATE: f"from typing import Any\n\n\n{inspect.getsource(generate)}"}


def write_code(folder: Path, family: str = DENSE) -> None:
    """Put the remote code beside a checkpoint of that family."""
    for name, text in code_files(family).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def model_tags(family: str) -> list[str]:
    """List the tags of a model's repository, by its family."""
    return ["dllm", "diffusion-lm", "block-diffusion", "speculative-decoding", family, "mrp"]


def generate(inputs: Any = None, *, model: Any, **kwargs: Any) -> Any:
    """Decode a stock SDAR model's prompts with the head of the Hub repository that this file lies in, as
    `sdar.generate(custom_generate="org/head", trust_remote_code=True)` does.

    The source of this function is all of `custom_generate/generate.py`, so what it needs is imported inside. It finds the
    repository and its commit by where transformers keeps the file.

    Args:
        inputs: [rows, length] long, the prompts (or `input_ids` among the others).
        model: The stock model, with a Qwen3 decoder's parameters; or an MRP model, whose own head then decodes.
        kwargs: What MRP's `generate` takes; `token`, `cache_dir` and the like are for finding the repository.

    Raises:
        ValueError: if the head does not fit the model; or the repository is a local folder.
    """
    import re
    from pathlib import Path

    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for_downloads = ("token", "cache_dir", "local_files_only", "force_download", "proxies")
    download = {name: kwargs.pop(name) for name in (*for_downloads, "revision") if name in kwargs}
    if not hasattr(model, "mrp_head"):
        owner, name, commit = Path(__file__).parts[-5:-2]
        if owner == "transformers_modules":
            raise ValueError(
                "custom_generate is a local folder, which cannot tell where its head lies: push it and name the repository, "
                "or load both with MRPForCausalLM.from_backbone(backbone, head=folder)"
            )
        owner, name = (re.sub("^_(?=[0-9])", "", part) for part in (owner, name))  # as Python modules can be called
        repository = f"{owner}/{name}".replace("_hyphen_", "-").replace("_dot_", ".")
        download["revision"] = commit  # code is kept by commit: the weights are of the same
        mrp = get_class_from_dynamic_module("modeling_mrp.MRPForCausalLM", repository, **download)
        model = mrp.from_stock_model(model, repository, **download)
    return type(model).generate(model, inputs, **kwargs)
