"""What the compiler makes of the kernels for GPUs, which interpreting them does not show."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.places import ROOT

triton = pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_every_kernel_compiles_for_what_is_shipped(capability: int) -> None:
    """SDAR-4B in blocks of 16, plain and with K = 4 and 8, greedy and sampled, with the arguments
    that the package launches the kernels with. Nothing is kept in local memory, but for two
    registers where that makes room for one more program."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "tests/support/compiled_kernels.py", str(capability)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    layers = {"attend", "sum_and_norm", "rotate", "gate"}
    picks = {"score_slices", "merge_slices", "list_slices", "merge_lists"}
    assert {line["kernel"] for line in lines} == {*picks, *layers}
    for line in lines:
        assert line["stack_bytes"] <= (8 if line["programs"] > 1 else 0), line
        assert 0 < line["registers"] <= 255
        assert line["programs"] >= 1, (
            "it fits the registers and the shared memory of a multiprocessor"
        )
        # what an Ada or small Blackwell multiprocessor has
        assert line["shared_bytes"] <= 99 * 1024
        if line["kernel"] in ("sum_and_norm", "gate", "score_slices", "list_slices"):
            assert line["narrow_accesses"] == 0, "all they do is move numbers"
        if line["kernel"] == "attend":
            assert line["matrix_instructions"] > 0
            assert line["asynchronous_copies"] > 0
            assert line["programs"] >= 2, "two of them read while one computes"
            assert line["tells_behind_a_barrier"], (
                "what a program stored is there before it says so"
            )
