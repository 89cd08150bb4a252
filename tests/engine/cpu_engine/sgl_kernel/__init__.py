"""A stand-in for the engine's compiled kernels: every name can be imported, and raises when it is
called."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.10"
__path__: list[str] = []


class _Absent:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(f"{self._name}.{name}")
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a compiled kernel, which a CPU does without")


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return (
            ModuleSpec(fullname, self, is_package=True)
            if fullname.startswith(__name__ + ".")
            else None
        )

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = _Absent(module.__name__).__getattr__


__getattr__ = _Absent(__name__).__getattr__
sys.meta_path.append(_Submodules())
