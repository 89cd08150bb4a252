"""Scripts in processes that know nothing of this checkout: forks of one interpreter that has
imported transformers, but no remote code of a repository."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

# Runs before a script: connections to other machines are refused, and their hosts are written to
# the file "elsewhere".
ALONE = """
import sys
def listen(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = event == "socket.connect" and isinstance(arguments[1], tuple)
        host = arguments[1][0] if address else arguments[0]
        if isinstance(host, str) and host not in ("127.0.0.1", "::1", "localhost", "0.0.0.0"):
            open("elsewhere", "a").write(f"{host}\\n")
            raise OSError(f"{host} is elsewhere")
sys.addaudithook(listen)
"""
# A machine without optional packages: these names cannot be imported. A script that takes five
# minutes is ended.
LOOP = """
import contextlib, io, json, os, pathlib, signal, sys, traceback
for name in ("triton", "flash_attn", "modeling_mrp", "mrp_trainer"):
    sys.modules[name] = None
import torch
torch.set_num_threads(1)
import transformers.generation, transformers.models.qwen3.modeling_qwen3
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast, dynamic_module_utils
for number, line in enumerate(sys.stdin):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps(["", f"ended with status {status}"]), flush=True)
        continue
    signal.alarm(300)
    dynamic_module_utils.HF_MODULES_CACHE = str(pathlib.Path(f"modules-of-{number}").resolve())
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(json.loads(line), {"torch": torch, "sys": sys})
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), flush=True)
    os._exit(0)
"""


class Fresh:
    """Runs scripts offline, each with an empty cache of remote code; a script that tries to connect
    fails.

    Args:
        folder: The scripts' working folder.

    Attributes:
        hub_cache: The Hub's cache that the scripts read.
    """

    def __init__(self, folder: Path) -> None:
        self.hub_cache, self._log, self._elsewhere = (
            folder / "hf" / "hub",
            folder / "fresh.log",
            folder / "elsewhere",
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", ALONE + LOOP],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def __call__(self, script: str) -> str:
        """Run a script, for which `torch` and `sys` are imported; return what it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(textwrap.dedent(script)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._log.read_text()[-3000:]
        printed, error = json.loads(answer)
        assert error is None, error
        assert not self._elsewhere.exists(), self._elsewhere.read_text()
        return printed

    def close(self) -> None:
        """End the interpreter."""
        self._process.kill()
        self._process.communicate()
