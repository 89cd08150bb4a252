"""Peak memory of loading a checkpoint from disk, in a fresh process.

``python -m benchmarks.load_memory`` writes a checkpoint of a published shape in bf16 into a temporary folder, and
prints what loading it takes beyond the interpreter and its imports, over the checkpoint's size:

- `peak_ratio`: the peak resident set, anonymous memory and mapped file pages together, while the model loads and then while
  every weight is read once. Weights are mapped from their files and become resident when first read, so that a peak
  without that reading would say too little, and a peak of anonymous memory alone would leave out the weights themselves.
- `anonymous_ratio`: the peak of anonymous memory alone: what no page of a file backs. A second copy would be here.
- `whole_process_ratio`: the peak resident set with interpreter and imports.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.convert import published_fields
from safetensors.torch import save_file

from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.layouts import HEAD, published_name
from modeling_mrp.model.saving import AUTO_MAP
from modeling_mrp.modeling import MRPForCausalLM

from .common import HUB_CONFIGS, ROOT, emit, header

SHAPES = ("1.7b", "4b", "8b")
LAYOUTS = ("mrp", "heavyball", "head")
_SHARD = 1 << 30


def write_checkpoint(folder: Path, config: MRPConfig, layout: str, shard_bytes: int = _SHARD) -> Path:
    """A checkpoint in bf16 of one value throughout, made shard by shard.

    Args:
        folder: Where to.
        config: Of a model with a head.
        layout: `mrp`, `heavyball`, or `head`: a backbone, and a head repository that names it.
        shard_bytes: Most bytes in a shard.

    Returns:
        The folder to load.
    """
    shapes = MRPForCausalLM.tensor_shapes(config)
    if layout == "head":
        head = {name: shape for name, shape in shapes.items() if name.startswith(HEAD)}
        backbone = MRPConfig.from_dict({**config.to_dict(), "num_nextn_predict_layers": 0, "architectures": None})
        _write(folder / "backbone", backbone, {name: s for name, s in shapes.items() if name not in head}, shard_bytes)
        alone = MRPConfig.from_dict({**config.to_dict(), "base_model_name_or_path": str(folder / "backbone")})
        return _write(folder / "head", alone, head, shard_bytes)
    if layout == "mrp":
        return _write(folder, config, shapes, shard_bytes)
    _write(folder, config, {published_name(name): shape for name, shape in shapes.items()}, shard_bytes)
    (folder / "config.json").write_text(json.dumps(published_fields(config)))
    return folder


def _write(folder: Path, config: MRPConfig, shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config.auto_map = dict(AUTO_MAP)
    config.save_pretrained(folder)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = shard_bytes
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if size > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _status(field: str) -> int:
    """A size in bytes from /proc/self/status (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no field {field!r}")


@contextmanager
def _anonymous_peak(peak: list[int]) -> Iterator[None]:
    """Watches anonymous memory every 2 ms, for want of a counter of its peak."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _status("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peak[0] = max(peak[0], _status("RssAnon"))


def load_and_read(folder: str, dtype: str) -> dict[str, Any]:
    """Loads a checkpoint in this process, reads every weight once, and says what it took; call it in a fresh process."""
    torch.set_num_threads(1)
    before, anonymous_before = _status("VmRSS"), _status("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    anonymous = [anonymous_before]
    begin = time.perf_counter()
    with _anonymous_peak(anonymous):
        model = MRPForCausalLM.from_pretrained(folder, dtype=dtype)
        seconds = time.perf_counter() - begin
        loaded = 0
        for parameter in model.parameters():
            parameter.detach().view(torch.uint8).flatten()[::4096].sum()  # one byte of every page
            loaded += parameter.nbytes
    return {
        "loaded_bytes": loaded,
        "load_s": round(seconds, 2),
        "peak_bytes": _status("VmHWM") - before,
        "anonymous_bytes": anonymous[0] - anonymous_before,
        "whole_process_bytes": _status("VmHWM"),
    }


def measure(folder: Path, dtype: str = "auto") -> dict[str, Any]:
    """`load_and_read` in a fresh process, with the peaks over the size of what was loaded."""
    code = "import json, sys; from benchmarks.load_memory import load_and_read; print(json.dumps(load_and_read(*sys.argv[1:])))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), dtype], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"loading {folder} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    ratios = {
        name.replace("_bytes", "_ratio"): round(found[name] / found["loaded_bytes"], 3)
        for name in ("peak_bytes", "anonymous_bytes", "whole_process_bytes")
    }
    return found | ratios


def main(arguments: list[str] | None = None) -> None:
    """Command line of the measurement."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_memory", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="1.7b")
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--dtype", default="auto", help="the type to load in; the files hold bf16")
    options = parser.parse_args(arguments)
    emit(header("load_memory", options))
    for layout in options.layouts:
        with tempfile.TemporaryDirectory() as folder:
            config = MRPConfig.from_pretrained(HUB_CONFIGS / f"sdar-{options.shape}-mrp")
            source = write_checkpoint(Path(folder), config, layout)
            emit({"shape": options.shape, "layout": layout, "dtype": options.dtype, **measure(source, options.dtype)})


if __name__ == "__main__":
    main()
