"""Training, evaluation and publishing of SDAR backbones and MRP heads."""

from typing import TYPE_CHECKING, Any

from .embedded import TINY, embedded_checkpoint

if TYPE_CHECKING:
    from modeling_mrp import __version__ as __version__

    from .train.arguments import MRPTrainingArguments
    from .train.traces import trace_logprobs
    from .train.trainer import MRPTrainer

_HOMES = {
    "MRPTrainer": ".train.trainer",
    "MRPTrainingArguments": ".train.arguments",
    "trace_logprobs": ".train.traces",
    "__version__": "modeling_mrp",
}


def __getattr__(name: str) -> Any:
    """Import an exported name on first use: torch and transformers take seconds to import, and `mrp
    --help` needs neither."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    """List all names of the module, including exported names that have not been imported yet."""
    return sorted({*globals(), *__all__})


__all__ = [
    "TINY",
    "MRPTrainer",
    "MRPTrainingArguments",
    "embedded_checkpoint",
    "trace_logprobs",
    "__version__",
]
