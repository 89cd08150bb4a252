"""A process that uses a loopback Hub: started with its environment (`HF_ENDPOINT` is read at import), then given code."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

LOOP = """
import contextlib, io, json, sys
for line in sys.stdin:
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(json.loads(line), {})
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
    print(json.dumps([printed.getvalue(), error]), flush=True)
"""


@dataclass(frozen=True)
class Done:
    """What code printed, and "Type: message" of the exception that ended it."""

    printed: str
    error: str | None


class HubClient:
    """An interpreter in `folder` with an environment; a context manager.

    Args:
        folder: Where it runs.
        environment: Its environment, such as `HubServer.environment` gives.
        path: Folders that it imports from.
    """

    def __init__(self, folder: Path, environment: dict[str, str], *path: Path) -> None:
        self.log = folder / "client.log"
        environment = environment | {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
        )

    def __enter__(self) -> "HubClient":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, code: str) -> Done:
        """Runs code in a fresh namespace."""
        self._process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.log.read_text()[-3000:]
        return Done(*json.loads(answer))
