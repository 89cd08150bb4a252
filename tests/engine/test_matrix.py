"""Weights, devices, memory and schedules, each on an engine of its own: texts are those of the
embedded checkpoint.

So they are after a restart, too, as each engine is one. `make test-serving TESTS=test_matrix`
prints the table, with ENGINE=0.5.22 for that version.
"""

import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from asking import (
    BLOCK,
    CONCURRENCY,
    ENVIRONMENT,
    STATES,
    Asked,
    Measure,
    Report,
    explained,
    target_of,
    up_to_eos,
)
from mrp_trainer.evaluate.decoded import decode_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import TINY
from benchmarks.server import CPU_FLAGS, Server, ServerDied, backbone_for_stock
from modeling_mrp import MRPForCausalLM
from tests.support.published import as_published

sglang = pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
# The engine wants a core named for each device.
CORES = "|".join(map(str, (sorted(os.sched_getaffinity(0)) * 2)[:2]))


def full(folder: Path) -> Path:
    return TINY


def published(folder: Path) -> Path:
    """A head in the published layout with its backbone, and with code that ends whoever runs it."""
    as_published(TINY, folder / "published")
    (folder / "published" / "modeling_sdar.py").write_text(
        "raise SystemExit('code of a repository was run')\n"
    )
    config = json.loads((folder / "published" / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_sdar.SDARConfig",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    }
    (folder / "published" / "config.json").write_text(json.dumps(config))
    return folder / "published"


def head_alone(folder: Path) -> Path:
    """A head repository that names a backbone in the layout of SDAR."""
    model: Any = MRPForCausalLM.from_pretrained(TINY)
    model.backbone_source = (str(bare(folder)), None)
    model.save_pretrained(folder / "head", head_only=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "head" / name).write_bytes((TINY / name).read_bytes())
    return folder / "head"


def bare(folder: Path) -> Path:
    """The backbone in the layout of SDAR."""
    model: Any = MRPForCausalLM.from_pretrained(TINY)
    model.detach_head()
    model.save_pretrained(folder / "bare")
    return as_published(folder / "bare", folder / "backbone")


def int8(folder: Path) -> Path:
    """The embedded checkpoint with its backbone's projections as int8, a scale a row; head and
    lm_head are as they were."""
    shutil.copytree(TINY, folder / "int8")
    stored = load_file(TINY / "model.safetensors")
    for name, weight in list(stored.items()):
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            stored[f"{name}_scale"] = weight.float().abs().amax(1, keepdim=True) / 127
            stored[name] = (weight.float() / stored[f"{name}_scale"]).round().to(torch.int8)
    save_file(stored, folder / "int8" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "int8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "w8a8_int8"}
    (folder / "int8" / "config.json").write_text(json.dumps(config))
    return folder / "int8"


def meant_by(folder: Path) -> dict[str, Tensor]:
    """The weights that int8 stands for."""
    stored = load_file(folder / "model.safetensors")
    names = [name for name in stored if not name.endswith("_scale")]
    return {
        name: stored[name] * stored[f"{name}_scale"] if f"{name}_scale" in stored else stored[name]
        for name in names
    }


class Case(NamedTuple):
    """An engine: how its checkpoint is made, flags beside those of a CPU, requests at once,
    devices, and K."""

    make: Callable[[Path], Path]
    flags: tuple[str, ...] = ()
    requests: int = 64
    devices: int = 1
    states: int | str = STATES


CASES = {
    "published head, two devices": Case(published, ("--tp-size", "2"), requests=16, devices=2),
    "head repository, prompts in chunks": Case(head_alone, ("--chunked-prefill-size", "64")),
    "1,024 slots": Case(full, ("--max-total-tokens", "1024")),
    "no radix cache, drafts by the clock": Case(full, ("--disable-radix-cache",), states="auto"),
    "int8 backbone": Case(int8, requests=10),
    "4 requests at once": Case(full, ("--max-running-requests", "4")),
}


@pytest.mark.parametrize("name", CASES)
def test_texts_stay_and_no_slot_is_lost(
    name: str,
    asked: Asked,
    measured: Measure,
    tiny_model_float64: MRPForCausalLM,
    tiny_tokenizer: Any,
    tmp_path: Path,
    report: Report,
) -> None:
    """Those of an int8 backbone are the texts of `generate` with the weights that int8 stands
    for."""
    make, flags, requests, devices, states = CASES[name]
    places = range(0, len(asked.prompts), len(asked.prompts) // requests)[:requests]
    some = Asked(
        *(
            [each[place] for place in places]
            for each in (asked.problems, asked.prompts, asked.budgets)
        )
    )
    options = {"decoding": "mrp_spec", "num_draft_states": states, **target_of(0.9)}
    environment = (
        {**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": CORES} if devices > 1 else ENVIRONMENT
    )
    folder, model = make(tmp_path), tiny_model_float64
    with Server(
        folder, tmp_path / "server", "MRP", options, (*CPU_FLAGS, *flags), environment
    ) as server:
        served = server.measure(some.prompts, some.budgets, requests, BLOCK)
        again = server.measure(some.prompts[:8], some.budgets[:8], 8, BLOCK)
        # idle: the engine counts its rows and slots, and ends itself where one is missing or free
        # twice
        time.sleep(2)
        pool = server.metrics()
    if make is int8:
        model = copy.deepcopy(model)
        model.load_state_dict(meant_by(folder))
        (budget,) = {*some.budgets}
        expected = decode_prompts(
            model, tiny_tokenizer, some.prompts, None, budget, CONCURRENCY, **options
        ).ids
    else:
        expected = [measured("MRP", 0.9).ids[place] for place in places]
    eos = model.generation_config.eos_token_id
    told = explained(
        model,
        some,
        0.9,
        *([up_to_eos(ids, eos) for ids in each] for each in (served.ids, expected)),
        eos,
    )
    free, slots = (
        pool["kv_available_tokens"] + pool["kv_evictable_tokens"],
        pool["max_total_num_tokens"] / devices,
    )
    report(
        f"sglang {sglang.__version__} | {name}: {told}; {free:.0f} of {slots:.0f} slots free; "
        f"{served.tokens_per_forward:.3f} tokens a forward"
    )
    if name == "4 requests at once":  # each has rows for its drafts, however many others wait
        roomy = [measured("MRP", 0.9).replies[place] for place in places]
        drafted = [
            sum(reply["meta_info"]["mrp"]["drafted"] for reply in replies)
            for replies in (served.replies, roomy)
        ]
        assert drafted[0] == pytest.approx(drafted[1], rel=0.02)
    assert again.ids == served.ids[:8]
    assert (pool["kv_used_tokens"], free) == (0, slots)


@pytest.mark.parametrize(
    ("has_head", "options", "reason"),
    [
        (
            True,
            {"num_draft_state": 4},
            "num_draft_state is no option of MRP (did you mean num_draft_states?)",
        ),
        (False, {}, "--dllm-algorithm MRP serves checkpoints with an MRP head"),
    ],
)
def test_a_server_that_cannot_serve_says_why(
    has_head: bool, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = TINY if has_head else backbone_for_stock(TINY, tmp_path / "model")
    server = Server(model, tmp_path / "server", "MRP", options, environment=ENVIRONMENT)
    with pytest.raises(ServerDied), server:
        pass
    assert reason in server.log.read_text()


@pytest.mark.parametrize(("first", "then"), [(1, STATES), (STATES, 1)])
def test_requests_share_prefixes_whatever_they_draft(
    first: int, then: int, server: Server, asked: Asked
) -> None:
    """Answers continue where another request, drafted otherwise, left keys and values of backbone
    and head."""
    server.open("/flush_cache?timeout=30", {}).close()
    for prompt in asked.prompts[first::60]:

        def answer(ids: list[int], limit: int, states: int) -> dict[str, Any]:
            sampling = {"max_new_tokens": limit, "temperature": 0, "ignore_eos": True}
            sampling["custom_params"] = {"num_draft_states": states}
            return server.ask("/generate", {"input_ids": ids, "sampling_params": sampling})

        text = answer(prompt, 64, first)["output_ids"]
        cut = 2 * BLOCK - len(prompt) % BLOCK
        rest = answer([*prompt, *text[:cut]], 64 - cut, then)
        assert rest["output_ids"] == text[cut:]
        if version("sglang") != "0.5.22":  # whose own count goes below 0
            assert rest["meta_info"]["cached_tokens"] >= len(prompt) + cut - BLOCK
        assert bool(rest["meta_info"]["mrp"]["drafted"]) == (then > 1)
