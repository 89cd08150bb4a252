"""The engine's attention backends: under which of them the algorithm runs."""

from collections.abc import Mapping

# Those that write a layer's keys and values to the pool and then read all of them from there.
WRITES_FIRST = ("torch_native", "triton", "fa3", "fa4")
# Those that the engine leaves as they are. Where CUDA graphs are recorded it takes flashinfer in
# place of all others, as it does for its own algorithms: fa3, its choice on Hopper, and fa4 have no
# metadata for recorded steps of a diffusion model, and the server would end while it starts.
SUPPORTED = ("torch_native", "triton", "flashinfer")


def backend_obstacle(backends: Mapping[str, str | None], records: bool) -> str | None:
    """Explain why steps cannot be recorded as CUDA graphs under attention backends, given by the
    name of their argument, with the remedy; return None if they can, or if none are (`records`)."""
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
