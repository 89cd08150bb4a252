"""Import of a file that another process may still be copying. The module `bundle` generates a
repository's entry file from this code."""

import sys
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


class WholeFile(SourceFileLoader):
    """A loader that waits, before it runs a module's file, until the file ends with a certain line.
    Another process may still be copying the file.

    Args:
        name: The name of the module.
        path: The path of the file.
        end: The last line of the file. The file is complete if it ends with this line and has no
            zero bytes.
        seconds: The longest time to wait until the file is complete.
    """

    def __init__(self, name: str, path: str, end: str, seconds: float) -> None:
        super().__init__(name, path)
        self.end = end.encode()
        self.seconds = seconds

    def get_data(self, path: str) -> bytes:
        """Return the bytes of the module's file, once the file is complete (see `end` of this
        class). Raise `ImportError` if it is not within `seconds`. For any other path, such as that
        of the module's byte code, return the bytes at once."""
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
