"""Import of a file that another process may still be copying. The module `bundle` generates a
repository's entry file from this code."""

import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


class WholeFile(SourceFileLoader):
    """A loader that waits until a module's file is complete before it runs the file.

    Args:
        end: The last line of a complete file.
        seconds: The longest time to wait for a complete file.
    """

    def __init__(self, name: str, path: str, end: str, seconds: float) -> None:
        super().__init__(name, path)
        self.end = end.encode()
        self.seconds = seconds

    def get_data(self, path: str) -> bytes:
        """Read the module's file once it is complete; raise `ImportError` if it stays incomplete.
        Read other files (byte code) as they are."""
        if path != self.path:
            return super().get_data(path)
        deadline = time.monotonic() + self.seconds
        while True:
            text = b""
            if Path(path).is_file():
                text = Path(path).read_bytes()
            # on some file systems the parts of a file arrive in any order
            if text.rstrip().endswith(self.end) and b"\0" not in text:
                return text
            if time.monotonic() > deadline:
                raise ImportError(
                    f"{path} is not whole: for {self.seconds:g} s it did not end with "
                    f"{self.end.decode()!r}. A process that copied it may have been killed: delete "
                    f"the folder {Path(path).parent}, and load again"
                )
            time.sleep(0.02)


def import_whole(name: str, path: Path, end: str, seconds: float = 60.0) -> ModuleType:
    """Import a file as the module `name` once the file ends with `end`. Raise `ImportError` if it
    stays incomplete for `seconds`."""
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path, loader=WholeFile(name, str(path), end, seconds))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
