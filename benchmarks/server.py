"""An SGLang server in a process of its own, on loopback, and its clients."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import psutil
import yaml
from safetensors.torch import load_file, save_file

START_SECONDS, ANSWER_SECONDS = 300, 300
# The engine's flags and environment on a machine without a GPU.
CPU_FLAGS = (
    *(
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--disable-cuda-graph",
    ),
    *("--max-total-tokens", "65536", "--dtype", "float32"),
)
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
HEAD_FIELDS = ("auto_map", "num_mrp_heads", "num_nextn_predict_layers", "head_predicts")
_GAUGE = re.compile(r"^(?:sglang:)?(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def stock_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a checkpoint's backbone alone, for the engine's own SDAR class.

    The layers are Qwen3's; the model type `sdar` would need code from the checkpoint.
    """
    backbone = {name: value for name, value in config.items() if name not in HEAD_FIELDS}
    return {**backbone, "architectures": ["SDARForCausalLM"], "model_type": "qwen3"}


def backbone_for_stock(source: Path, target: Path) -> Path:
    """Write the backbone of a single-file checkpoint, without code, for the engine's own SDAR
    class; return `target`."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if not name.startswith("mrp_head.")},
        target / "model.safetensors",
    )
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(stock_config(config)))
    generation_config = json.loads((source / "generation_config.json").read_text())
    ends = {"eos_token_id": generation_config["eos_token_id"]}
    (target / "generation_config.json").write_text(json.dumps(ends))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


class ServerDied(RuntimeError):
    """The engine ended before it served; the message ends with its log."""


@dataclass(frozen=True)
class Measured:
    """The answers to a list of prompts.

    Attributes:
        replies: The response of the engine's endpoint `/generate` to each prompt.
        seconds: From the first request to the last answer.
        cpu_seconds: CPU time of the engine's processes in these seconds.
        forwards: Backbone forwards in which a request took part, summed over requests; those of
            whole prompt blocks excluded.
    """

    replies: list[dict[str, Any]]
    seconds: float
    forwards: int
    cpu_seconds: float = 0.0

    @property
    def ids(self) -> list[list[int]]:
        """Generated ids, by prompt."""
        return [reply["output_ids"] for reply in self.replies]

    @property
    def tokens(self) -> int:
        """Count the generated tokens of all prompts."""
        return sum(map(len, self.ids))

    @property
    def tokens_per_forward(self) -> float:
        """Divide tokens by forwards, of all prompts together."""
        return self.tokens / self.forwards


class Server:
    """An SGLang engine that serves while the `with` block lasts.

    Args:
        model: A checkpoint.
        folder: An empty or missing folder, for the engine's options and log.
        algorithm: `--dllm-algorithm`.
        options: Content of the file of `--dllm-algorithm-config`.
        flags: Further flags.
        environment: Variables added to this process's own.
        max_running_requests: `--max-running-requests`.
        module: The module that starts the engine.
    """

    def __init__(
        self,
        model: str | Path,
        folder: Path,
        algorithm: str,
        options: Mapping[str, Any],
        flags: Sequence[str] = CPU_FLAGS,
        environment: Mapping[str, str] = CPU_ENVIRONMENT,
        max_running_requests: int = 64,
        module: str = "sglang.launch_server",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        (folder / "options.yaml").write_text(yaml.safe_dump(dict(options)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._command = [sys.executable, "-m", module, "--model-path", str(model)]
        self._command += [
            "--host",
            "127.0.0.1",
            "--port",
            self.url.rpartition(":")[2],
            "--enable-metrics",
            "--sleep-on-idle",
        ]
        self._command += [
            "--max-running-requests",
            str(max_running_requests),
            "--dllm-algorithm",
            algorithm,
        ]
        self._command += ["--dllm-algorithm-config", str(folder / "options.yaml"), *flags]
        self._environment = {"HF_HUB_OFFLINE": "1", **os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._opener = build_opener(ProxyHandler({}))

    def __enter__(self) -> "Server":
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise self._died(f"the engine ended with {self._process.returncode}")
            try:
                self.open("/health").close()
                return self
            except OSError:
                time.sleep(0.5)
        self.close()
        raise self._died(f"no engine within {START_SECONDS} s")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _died(self, reason: str) -> ServerDied:
        self.close()
        return ServerDied(f"{reason}:\n{self.log.read_text(errors='replace')[-8000:]}")

    def close(self) -> None:
        """End the engine and all its processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def open(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, a POST if it has a body; return the response, a file of bytes.

        Raises:
            HTTPError: if the server refuses the request.
        """
        data = None if body is None else json.dumps(body).encode()
        return self._opener.open(
            Request(self.url + path, data, {"Content-Type": "application/json"}),
            timeout=ANSWER_SECONDS,
        )

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a request; return the JSON object of the response."""
        with self.open(path, body) as response:
            return dict(json.load(response))

    def generate(
        self, prompt: Sequence[int], max_new_tokens: int, **custom_params: Any
    ) -> dict[str, Any]:
        """Request one text, greedily; return the response, with `output_ids`, `text` and
        `meta_info`."""
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": 0,
            "custom_params": custom_params or None,
        }
        return self.ask("/generate", {"input_ids": list(prompt), "sampling_params": options})

    def measure(
        self,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        concurrency: int,
        block: int,
        **custom_params: Any,
    ) -> "Measured":
        """Request a text for each prompt from `concurrency` clients; return answers and costs. The
        prefix cache begins empty.

        Args:
            prompts: The ids of each prompt.
            budgets: Limit of new tokens for each prompt.
            concurrency: Number of clients.
            block: The model's block size.
            custom_params: The `custom_params` of all requests.
        """
        self.open("/flush_cache?timeout=30", {}).close()
        earlier = self.metrics()
        start_time = time.perf_counter()
        start_cpu = self.cpu_seconds()
        with ThreadPoolExecutor(concurrency) as clients:
            replies = list(clients.map(partial(self.generate, **custom_params), prompts, budgets))
        seconds = time.perf_counter() - start_time
        cpu_seconds = self.cpu_seconds() - start_cpu
        time.sleep(0.5)  # the engine counts the last batch only after answering it
        later = self.metrics()
        blocks = sum(len(prompt) // block for prompt in prompts)
        cached = (
            later["realtime_tokens_total/prefill_cache"]
            - earlier["realtime_tokens_total/prefill_cache"]
        ) / block
        # The engine's own algorithms take one forward whenever a row is scheduled; MRP counts its
        # forwards itself.
        if "mrp_forwards_total" in later:
            forwards = later["mrp_forwards_total"] - earlier["mrp_forwards_total"]
        else:
            name = "realtime_tokens_total/prefill_compute"
            forwards = (later[name] - earlier[name]) / block
        return Measured(replies, seconds, round(forwards + cached) - blocks, cpu_seconds)

    def processes(self) -> list[psutil.Process]:
        """List the engine's processes."""
        assert self._process is not None
        engine = psutil.Process(self._process.pid)
        return [engine, *engine.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Sum the CPU time of the engine's processes since they started."""
        return sum(sum(process.cpu_times()[:2]) for process in self.processes())

    def metrics(self) -> defaultdict[str, float]:
        """Read counters and gauges, summed over all labels but `mode`; return them by "name" or
        "name/mode"."""
        totals: defaultdict[str, float] = defaultdict(float)
        with self.open("/metrics") as response:
            lines = response.read().decode()
        for name, labels, value in _GAUGE.findall(lines):
            mode = re.search(r'\bmode="(\w+)"', labels)
            totals[f"{name}/{mode[1]}" if mode else name] += float(value)
        return totals

    def resident_bytes(self) -> int:
        """Sum the memory of the engine's processes that is not shared with other processes."""
        return sum(process.memory_full_info().uss for process in self.processes())

    def load(self) -> dict[str, Any]:
        """Read the engine's load: `num_running_reqs`, `num_waiting_reqs`, `num_used_tokens` and
        more."""
        with self.open("/v1/loads?include=core") as response:
            return dict(json.load(response)["loads"][0])
