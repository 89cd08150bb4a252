"""MRP for SDAR block-diffusion models: everything a Hub repository carries as remote code."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generate.options import MRPGenerationConfig
    from .generate.output import MRPGenerateOutput
    from .generate.score import MRPScoreOutput
    from .model.configuration import MRPConfig
    from .modeling import MRPForCausalLM, MRPHead
    from .networks.cache import BlockCache

__version__ = "0.1.0"
_HOMES = {"MRPGenerateOutput": "generate.output", "MRPGenerationConfig": "generate.options"}
_HOMES |= {"MRPScoreOutput": "generate.score"}
_HOMES |= {"MRPConfig": "model.configuration", "BlockCache": "networks.cache"}
_HOMES |= {"MRPForCausalLM": "modeling", "MRPHead": "modeling"}


def __getattr__(name: str) -> Any:
    """Import an exported name on first use: torch takes seconds, and `mrp --help` needs only the table of options."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


__all__ = [
    "BlockCache",
    "MRPConfig",
    "MRPForCausalLM",
    "MRPGenerateOutput",
    "MRPGenerationConfig",
    "MRPHead",
    "MRPScoreOutput",
    "__version__",
]
