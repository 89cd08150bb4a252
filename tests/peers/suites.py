"""Tests of transformers and PEFT as packages to import: `make peers` unpacks them from the source
distributions, into build/peers if MRP_PEERS names no other folder."""

import os
import sys
import types
from pathlib import Path

SUITES = Path(os.environ.get("MRP_PEERS") or Path(__file__).parents[2] / "build" / "peers")
# What they import and their distributions lack, tests of generating and exporting, or what nothing
# here needs.
_LACKING = {
    "peers_transformers.exporters.test_export": "ExportTesterMixin",
    "peers_transformers.generation.test_utils": "GenerationTesterMixin",
    "diffusers": "StableDiffusionPipeline",
}


def _make_module(name: str, **fields: object) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(fields)


for _project in ("transformers", "peft"):
    _make_module(f"peers_{_project}", __path__=[str(SUITES / _project / "tests")])
for _name, _class in _LACKING.items():
    _make_module(_name, **{_class: type(_class, (), {})})
