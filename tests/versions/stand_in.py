"""A stand-in for a release of a library to come: a name that this project rests on is called
otherwise there.

As `sitecustomize.py` on Python's path it renames what MRP_RENAMED names, such as
`transformers.masking_utils.eager_mask`, just before this project's code is first imported, from the
package or from a repository; the library says to be version 99.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

OURS = ("modeling_mrp", "mrp_trainer", "transformers_modules")


def rename(path: str) -> None:
    """Rename a function or class where it is defined and where the path finds it; `AttributeError`
    if there is none such."""
    *parents, name = path.split(".")
    library = owner = importlib.import_module(parents[0])
    for position, parent in enumerate(parents[1:], start=2):
        try:
            owner = importlib.import_module(".".join(parents[:position]))
        except ModuleNotFoundError:
            owner = getattr(owner, parent)
    value = getattr(owner, name)
    # a package loads a name from there when it is first asked
    home = sys.modules.get(getattr(value, "__module__", ""), owner)
    for place in (owner, home):
        if name in vars(place):
            delattr(place, name)
            setattr(place, f"{name}_of_the_next_release", value)
    library.__version__ = "99.0.0"


class Renaming:
    """A finder that renames once, when code of this project is looked for, and finds nothing
    itself."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def find_spec(
        self, name: str, _: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Rename before the first import of ours."""
        if name.split(".")[0] in OURS:
            while self.paths:
                rename(self.paths.pop())
        return None


if renamed := os.environ.get("MRP_RENAMED"):
    sys.meta_path.insert(0, Renaming(renamed.split()))
