"""MRP in SGLang: an installable plugin of the stock engine, found by its entry point in the group `sglang.srt.plugins`.

The engine owns requests, batches, memory, attention and the web server. What is drafted, accepted and revealed is decided by
the rounds of `modeling_mrp`, which are called here on the engine's batches.
"""

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# The hooks, and what a forward batch consists of, were read in these versions; they are no public interface.
SUPPORTED_SGLANG = SpecifierSet(">=0.5.22,<0.5.24")
ALGORITHM = "MRP"

log = logging.getLogger(__name__)


def version_obstacle() -> str | None:
    """Say why the installed engine cannot be extended, and the remedy; None if it can."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed: pip install 'modeling-mrp[sglang]'"
    return None if SUPPORTED_SGLANG.contains(found, prereleases=True) else _misfit(f"{found} is installed")


def _misfit(found: str) -> str:
    wanted = f"sglang{SUPPORTED_SGLANG}"
    return f"this version of modeling-mrp serves with {wanted}, and {found}: pip install '{wanted}'"


def register() -> None:
    """Register algorithm, model and hooks with the engine; called by it in each of its processes.

    A plugin that raises is passed over by the engine. So with a version that is not supported, or lacks an interface, the
    algorithm's name is taken by one that refuses to start, and servers of other models start as ever.
    """
    from sglang.srt.dllm.algorithm import algo_name_to_cls

    if (obstacle := version_obstacle()) is None:
        try:
            from .plugin import register_parts
        except ImportError as error:
            obstacle = _misfit(f"{version('sglang')} is installed, which lacks what is extended ({error})")
        else:
            return register_parts()
    log.error("%s is not served: %s", ALGORITHM, obstacle)
    algo_name_to_cls[ALGORITHM] = refusing(obstacle)


def refusing(obstacle: str) -> type:
    """Make an algorithm that raises `RuntimeError` with the obstacle, whatever is asked of it."""

    class Refusal(type):
        def __getattr__(cls, name: str) -> object:
            raise RuntimeError(f"{ALGORITHM} is not served: {obstacle}")

        def __call__(cls, *args: object, **kwargs: object) -> object:
            raise RuntimeError(f"{ALGORITHM} is not served: {obstacle}")

    return Refusal(ALGORITHM, (), {})
