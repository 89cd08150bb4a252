"""MRP in SGLang: an installable plugin of the stock engine, found by its entry point in the group
`sglang.srt.plugins`.

The engine owns requests, batches, memory, attention and the web server. The rounds of
`modeling_mrp`, called here on the engine's batches, decide what is drafted, accepted and revealed.
"""

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

# The engine's hooks and the fields of its forward batch are no public interface; only these
# versions were checked.
SUPPORTED_SGLANG = SpecifierSet(">=0.5.22,<0.5.24")
ALGORITHM = "MRP"

log = logging.getLogger(__name__)


def version_obstacle() -> str | None:
    """Return the reason why the installed engine cannot be extended, with its remedy; None if it
    can be extended."""
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed: pip install 'modeling-mrp[sglang]'"
    if SUPPORTED_SGLANG.contains(installed, prereleases=True):
        return None
    return _misfit(f"{installed} is installed")


def _misfit(problem: str) -> str:
    requirement = f"sglang{SUPPORTED_SGLANG}"
    return (
        f"this version of modeling-mrp serves with {requirement}, and {problem}: "
        f"pip install '{requirement}'"
    )


def register() -> None:
    """Register the algorithm, the model and the hooks with the engine. The engine calls this
    function in each of its processes.

    The engine skips a plugin that raises an error, so this function never raises one. If the
    version of the engine is unsupported or lacks an interface, the name of the algorithm gets a
    class that refuses to start (`refusing`), and servers of other models start as usual.
    """
    from sglang.srt.dllm.algorithm import algo_name_to_cls

    if (obstacle := version_obstacle()) is None:
        try:
            from .plugin import register_parts
        except ImportError as error:
            obstacle = _misfit(
                f"{version('sglang')} is installed, which lacks what is extended ({error})"
            )
        else:
            return register_parts()
    log.error("%s is not served: %s", ALGORITHM, obstacle)
    algo_name_to_cls[ALGORITHM] = refusing(obstacle)


def refusing(obstacle: str) -> type:
    """Make a class to stand in for the algorithm. Every use of this class raises a `RuntimeError`
    that names the obstacle."""

    class Refusal(type):
        def __getattr__(cls, name: str) -> object:
            raise RuntimeError(f"{ALGORITHM} is not served: {obstacle}")

        def __call__(cls, *args: object, **kwargs: object) -> object:
            raise RuntimeError(f"{ALGORITHM} is not served: {obstacle}")

    return Refusal(ALGORITHM, (), {})
