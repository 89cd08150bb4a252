"""The remote code that a repository carries."""

import inspect
from importlib import import_module
from pathlib import Path

from .custom_generate import generate
from .families.registry import DENSE

CONFIGURATION, MODELING = "configuration_mrp.py", "modeling_mrp.py"
CUSTOM_GENERATE = "custom_generate/generate.py"
AUTO_MAP = {
    "AutoConfig": "configuration_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForCausalLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForCausalLM",
}


def code_files(family: str = DENSE) -> dict[str, str]:
    """Collect the remote code that a repository carries, by path: these files, if they are it, or what `bundle` generates for a
    model of that family."""
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
