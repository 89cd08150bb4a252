"""MRP for SDAR block-diffusion models: everything that a Hub repository carries as remote code."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .versions import tested_versions

if TYPE_CHECKING:
    from .generate.decide import MRPDecideOutput as MRPDecideOutput
    from .generate.options import MRPGenerationConfig as MRPGenerationConfig
    from .generate.output import MRPGenerateOutput as MRPGenerateOutput
    from .generate.score import MRPScoreOutput as MRPScoreOutput
    from .model.configuration import MRPConfig as MRPConfig
    from .modeling import MRPForCausalLM as MRPForCausalLM
    from .modeling import MRPHead as MRPHead
    from .networks.cache import BlockCache as BlockCache

__version__ = "0.1.0"
_HOMES = {
    "MRPDecideOutput": "generate.decide",
    "MRPGenerateOutput": "generate.output",
    "MRPGenerationConfig": "generate.options",
    "MRPScoreOutput": "generate.score",
    "BlockCache": "networks.cache",
    "MRPConfig": "model.configuration",
    "MRPForCausalLM": "modeling",
    "MRPHead": "modeling",
}
__all__ = [
    "BlockCache",
    "MRPConfig",
    "MRPDecideOutput",
    "MRPForCausalLM",
    "MRPGenerateOutput",
    "MRPGenerationConfig",
    "MRPHead",
    "MRPScoreOutput",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import an exported name when it is first used. Importing torch takes seconds, and `mrp
    --help` needs only the table of options."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    """List the exported names, also before they are imported."""
    return sorted({*globals(), *__all__})


def register() -> None:
    """Make transformers' Auto classes load this package's models without `trust_remote_code`. It
    may be called repeatedly.

    It is called when this package is imported, except in the command `mrp`. There, it is called at
    the first use of a name that this package exports, so that `mrp --help` does not wait for torch.
    """
    with tested_versions():
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

        from .model.configuration import MRPConfig
        from .modeling import MRPForCausalLM

        AutoConfig.register(MRPConfig.model_type, MRPConfig, exist_ok=True)
        for auto in (AutoModel, AutoModelForCausalLM):
            auto.register(MRPConfig, MRPForCausalLM, exist_ok=True)


if "mrp_trainer.cli" not in sys.modules:
    register()
