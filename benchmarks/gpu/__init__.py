"""The parts of `python -m benchmarks.gpu_session`: what is checked and timed on a GPU."""
