"""The kernels as a compiler for a GPU takes them, which interpreting them does not show."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

triton = pytest.importorskip("triton")


def test_every_kernel_compiles_for_hopper() -> None:
    """At sizes of the 4B shape, with the arguments that the package launches them with; nothing is kept in local memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.compiled", "--least", "--dtype", "bfloat16"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    head, *lines = map(json.loads, done.stdout.splitlines())
    assert head["options"]["capability"] == 90
    kernels = {line["kernel"]: line for line in lines}
    layers = {"attend", "merge", "sum_and_norm", "rotate", "gate"}
    assert kernels.keys() == {"score_slices", "merge_slices", *layers, "grow"}
    for line in lines:
        assert line["stack_bytes"] == 0
        assert 0 < line["registers"] <= 255
        assert line["shared_bytes"] <= 99 * 1024  # what an Ampere or Ada multiprocessor has, and two programs of a Hopper
    for name in ("gate", "sum_and_norm"):
        assert kernels[name]["narrow_accesses"] == 0, "all they do is move numbers"
    for name in ("score_slices", "attend"):
        assert kernels[name]["matrix_instructions"] > 0
        assert kernels[name]["asynchronous_copies"] > 0


def test_an_interpreter_compiles_nothing() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "benchmarks.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set, under which nothing is compiled: unset it" in done.stderr
