"""Provenance of measurements: headers of result files, and digests of the weights and the code that
results depend on."""

import ast
import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import modeling_mrp

ROOT = Path(__file__).parents[3]
_DIGITS = 12
# Files of `modeling_mrp` that compute and decide which tokens are revealed, drafted and accepted,
# and so all counts.
_DECIDING = (
    *("rules/*.py", "generate/*.py", "networks/*.py", "kernels/*.py", "model/**/*.py"),
    "modeling.py",
)


def digests(model: nn.Module) -> dict[str, str | None]:
    """Return the digests of a model's two parts, `backbone` and `head`, in hexadecimal; None for a
    missing head.

    A digest covers the names, shapes and values of tensors, in the order of names. Floating values
    are taken as float32, so that weights have the same digest after a cast to float64.
    """
    hashes = {"backbone": hashlib.sha256()}
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue
        values = (
            tensor.detach()
            .to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)
            .contiguous()
        )
        component = "head" if name.startswith("mrp_head.") else "backbone"
        component_hash = hashes.setdefault(component, hashlib.sha256())
        component_hash.update(f"{name} {tuple(tensor.shape)}\n".encode())
        component_hash.update(values.numpy().tobytes())
    digests: dict[str, str | None] = {"backbone": None, "head": None}
    for component, component_hash in hashes.items():
        digests[component] = component_hash.hexdigest()[:_DIGITS]
    return digests


@cache
def deciding(package: Path = Path(modeling_mrp.__file__).parent) -> str:
    """Return a hexadecimal digest of the code in `package` that computes and decides which tokens
    are revealed, drafted and accepted, and so determines all counts in results. The digest covers
    syntax trees without docstrings, so that it does not depend on layout, comments or
    docstrings."""
    digest = hashlib.sha256()
    for pattern in _DECIDING:
        for path in sorted(package.glob(pattern)):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            digest.update(repr(_syntax(tree)).encode())
    return digest.hexdigest()[:_DIGITS]


def _syntax(node: object) -> object:
    """Return a syntax tree as nested lists, without docstrings or empty fields."""
    # `ast.dump` and `ast.unparse` are not the same in all versions of Python: a version may add
    # fields, which are empty here, or write f-strings with other quotes.
    if isinstance(node, ast.AST):
        syntax: list[object] = [type(node).__name__]
        for name, value in ast.iter_fields(node):
            field = _syntax(value)
            if field not in (None, []):
                syntax.append((name, field))
        return syntax
    if isinstance(node, list):
        return [_syntax(item) for item in node if not _is_docstring(item)]
    return node


def _is_docstring(node: object) -> bool:
    """Return whether a statement consists only of a string, as a docstring does."""
    text = node.value if isinstance(node, ast.Expr) else None
    return isinstance(text, ast.Constant) and isinstance(text.value, str)


def commit() -> str | None:
    """Return the short hash of the commit that is checked out; None if there is no checkout or no
    git. If files in git differ from the commit, the words "with changes" follow the hash. Changed
    results (in `benchmarks/results`) and changed Markdown pages do not count."""
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    changed = subprocess.run(
        [*git, "diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results", ":!*.md"], check=False
    )
    return f"{name} with changes" if changed.returncode else name


def header(benchmark: str, options: object, model: nn.Module | None = None) -> dict[str, Any]:
    """Make a header, the first line of a command's output. It has the command (in the field
    `benchmark`, which no other line has), versions, the device, the date, the attributes of
    `options`, and digests of the code and of the measured weights, if any."""
    option_values = {}
    for name, value in vars(options).items():
        if isinstance(value, str | Path):
            value = str(value).replace(f"{ROOT}/", "")
        option_values[name] = value
    return {
        "benchmark": benchmark,
        "commit": commit(),
        **(digests(model) if model is not None else {"backbone": None, "head": None}),
        "deciding": deciding(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        "options": option_values,
    }
