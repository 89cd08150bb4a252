"""A release of transformers that renames a name of ours is noticed: the error names it, and the
versions that were tested.

`.ci/run` runs such decodes on the newest release: with
MRP_RENAMED=transformers.masking_utils.eager_mask it fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside import listed

from modeling_mrp.versions import TESTED
from tests.support.places import ROOT, TINY

STAND_IN = ROOT / "tests" / "versions" / "stand_in.py"
# What a decode of one's own weights does not reach, and modules, which are found under their name
# all the same.
UNREACHED = {"get_class_from_dynamic_module", "__version__"}
MODULES = {"initialization", "logging", "logits_process", "modeling_glm4_moe", "modeling_qwen3_moe"}
NAMES = sorted(
    name
    for name in listed("modeling_mrp")["import"]
    if name.startswith("transformers.") and name.split(".")[-1] not in UNREACHED | MODULES
)
# Transformers is imported once; a fork for each name renames it and decodes.
DECODE = """
import json, os, sys, traceback
import torch, transformers
import transformers.generation, transformers.masking_utils, transformers.models.qwen3.modeling_qwen3
import stand_in
ends = {}
for name in ["", *sys.argv[2:]]:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            sys.meta_path.insert(0, stand_in.Renaming([name] if name else []))
            from modeling_mrp import MRPForCausalLM
            from modeling_mrp.model.families.sdar import families
            families()
            model = MRPForCausalLM.from_pretrained(sys.argv[1])
            how = dict(decoding="mrp_spec", num_draft_states=2, max_new_tokens=4)
            text = model.generate(torch.tensor([[40, 41, 42]]), **how)
            end = "" if text.shape[1] > 3 else "no text"
        except BaseException:
            end = traceback.format_exc()
        os.write(theirs, end.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as file:
        ends[name] = file.read()
    os.waitpid(child, 0)
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends() -> dict[str, str]:
    """How a decode ends for each renamed name, and without: a traceback, or nothing."""
    path = os.pathsep.join([str(ROOT), str(STAND_IN.parent)])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DECODE, str(TINY), *NAMES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_decode_without_a_renamed_name_ends_well(ends: dict[str, str]) -> None:
    assert ends[""] == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_decode_with_a_renamed_name_fails_and_names_it(name: str, ends: dict[str, str]) -> None:
    assert "Error" in ends[name]
    assert name.split(".")[-1] in ends[name]
    assert (
        f"This code was tested with transformers {TESTED[0]} to {TESTED[1]}, and 99.0.0 is "
        "installed" in ends[name]
    )


def test_the_stand_in_renames_for_any_python_that_finds_it(tmp_path: Path) -> None:
    """As `MRP_RENAMED=... make versions` does it: sitecustomize on Python's path."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN.read_text())
    (tmp_path / "modeling_mrp.py").write_text("from string import capwords\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "MRP_RENAMED": "string.capwords"}
    done = subprocess.run(
        [sys.executable, "-c", "import modeling_mrp"],
        env=env,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "cannot import name 'capwords'" in done.stderr
