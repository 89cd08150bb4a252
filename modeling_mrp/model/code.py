"""The remote code of a model's repository: the Python files that are saved beside the weights."""

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from .families.sdar import DENSE

MODELING = "modeling_mrp.py"
PACKAGE = "package_mrp.py"
CUSTOM_GENERATE = "custom_generate/generate.py"
AUTO_MAP = {
    "AutoConfig": "modeling_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForCausalLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForCausalLM",
}
_CUSTOM = (
    "MRP for block-diffusion language models: decoding of a stock SDAR model with this "
    "repository's head.",
    f"""Contents: `generate`, which transformers calls with the model and the arguments of
`sdar.generate`.

Imports: Python's standard library and transformers. With an MRP model it calls that model's own
`generate`. With a stock model it loads and EXECUTES this repository's {MODELING} and {PACKAGE}, at
the commit of this file, and reads the repository's config, generation config and head
(safetensors): by huggingface_hub from its cache on disk or, where they are not there yet, from the
Hub into that cache. transformers copies code that it runs to its cache of modules. Nothing else is
written. The MRP model made of both shares the stock model's parameters, and lives as long as that
one; on an NVIDIA GPU decoding moves these parameters to new storage. What decoding does is told at
the top of {PACKAGE}.""",
)


def code_files(family: str = DENSE) -> dict[str, str]:
    """Return the remote code of a repository as a dict that maps the path of each file to its text.

    Args:
        family: The family of backbones (`MRPConfig.family`) for which the installed package
            generates the code. If this function itself runs as remote code, `family` is ignored,
            and the code is that of the folder from which the function was loaded.
    """
    this_file = Path(__file__)
    if this_file.name == PACKAGE:
        files = {
            name: this_file.with_name(name).read_text(encoding="utf-8")
            for name in (MODELING, PACKAGE)
        }
    else:
        files = import_module(f"{__name__.partition('.')[0]}.bundle").bundled(family)
    origin = files[PACKAGE].split("\n\n")[1]
    header = f'"""{_CUSTOM[0]}\n\n{origin}\n\n{_CUSTOM[1]}\n"""\n\nfrom typing import Any'
    source = inspect.getsource(generate_on_stock).replace(
        f"def {generate_on_stock.__name__}(", "def generate(", 1
    )
    return {**files, CUSTOM_GENERATE: f"{header}\n\n\n{source}"}


def write_code(folder: Path, family: str = DENSE) -> None:
    """Write the remote code for a family of backbones (`code_files`) into the folder of a
    checkpoint. Files of these names are overwritten."""
    for name, text in code_files(family).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def model_tags(family: str) -> list[str]:
    """List the tags that the repository of a model should have on the Hub. One of them is `family`,
    the name of the family of its backbone."""
    return ["dllm", "diffusion-lm", "block-diffusion", "speculative-decoding", family, "mrp"]


def generate_on_stock(inputs: Any = None, *, model: Any, **kwargs: Any) -> Any:
    """Decode with a stock SDAR model and the head of the Hub repository that holds this file.

    transformers calls this function for the call `sdar.generate(custom_generate="org/head",
    trust_remote_code=True)`. It is then the only content of `custom_generate/generate.py`, under
    the name `generate`, so it imports everything that it needs. The path at which transformers
    caches that file gives the repository and the commit of the head.

    Args:
        inputs: The prompts, as for `generate` of an MRP model.
        model: The stock model. An MRP model decodes with its own head instead.
        kwargs: Further arguments of `generate` of an MRP model. They may also have options for
            fetching the head, such as `token`.

    Returns:
        What `generate` of an MRP model returns.

    Raises:
        ValueError: if the head does not fit the model, or if `custom_generate` is a local folder.
    """
    import re
    from pathlib import Path

    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    option_names = (
        "token",
        "cache_dir",
        "local_files_only",
        "force_download",
        "proxies",
        "revision",
    )
    download_options = {name: kwargs.pop(name) for name in option_names if name in kwargs}
    if not hasattr(model, "mrp_head"):
        owner, name, commit = Path(__file__).parts[-5:-2]
        if owner == "transformers_modules":
            raise ValueError(
                "custom_generate is a local folder, whose head is not found: push it and name the "
                "repository, or load both by MRPForCausalLM.from_backbone(backbone, head=folder)"
            )
        # as transformers changes folder names into names of Python modules
        owner, name = (re.sub("^_(?=[0-9])", "", folder) for folder in (owner, name))
        repository = f"{owner}/{name}".replace("_hyphen_", "-").replace("_dot_", ".")
        # code is cached by commit: load the weights of the same commit
        download_options["revision"] = commit
        model_class = get_class_from_dynamic_module(
            "modeling_mrp.MRPForCausalLM", repository, **download_options
        )
        model = model_class.from_stock_model(model, repository, **download_options)
    return type(model).generate(model, inputs, **kwargs)
