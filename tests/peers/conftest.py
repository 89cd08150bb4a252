"""The model as transformers' own, for suites that load it by the auto classes; which of their tests
are expected to fail."""

from fnmatch import fnmatch

import pytest
import suites  # noqa: F401  # makes packages
from expected import EXPECTED
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_mrp import MRPConfig, MRPForCausalLM

AutoConfig.register(MRPConfig.model_type, MRPConfig)
AutoModelForCausalLM.register(MRPConfig, MRPForCausalLM)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for reason, patterns in EXPECTED.items():
            if any(fnmatch(item.name, pattern) for pattern in patterns):
                item.add_marker(pytest.mark.xfail(reason=reason))
