"""The engine's attention backends, and the check that the algorithm runs under them."""

from collections.abc import Mapping

# Backends that write a layer's keys and values to the pool before they read any from it.
WRITES_FIRST = ("torch_native", "triton", "fa3", "fa4")
# Backends that the engine uses as they are. If CUDA graphs are recorded, flashinfer replaces all
# others, as for the engine's own algorithms: fa3, its choice on Hopper, and fa4 have no metadata
# for recorded steps of a diffusion model, and the server would end while it starts.
SUPPORTED = ("torch_native", "triton", "flashinfer")


def backend_obstacle(backends: Mapping[str, str | None], records: bool) -> str | None:
    """Return the reason why steps cannot be recorded as CUDA graphs under the given attention
    backends, with its remedy. Return None if steps can be recorded, or if no graphs are to be
    recorded.

    Args:
        backends: Maps the name of each server argument for a backend to its value.
        records: Whether graphs are to be recorded.
    """
    if not records:
        return None
    for name, backend in backends.items():
        if backend is not None and backend not in SUPPORTED:
            return (
                f"--{name.replace('_', '-')} is {backend}, which records no CUDA graphs of "
                f"diffusion steps: leave it out, choose {' or '.join(SUPPORTED[1:])}, or add "
                "--disable-cuda-graph"
            )
    return None
