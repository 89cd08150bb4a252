"""Wall clock of each target drafted with `num_draft_states="auto"`, and with fixed numbers, over the target alone.

``python -m benchmarks.auto_clock --output FILE`` measures cells: a model (the embedded checkpoint; 12 layers of random weights,
hidden size 1024, blocks of 4 and 16, float32 and bfloat16), a target and a batch size. All modes of a cell take turns in one
process. It prints one line a cell, with the speed of each mode over the target's, and of `auto` over the best fixed number.
Fixed numbers from the first on that takes `HOPELESS` times as long as the target are left out of the turns. What `auto` learns
in a cell stays for the next one of the same model and target, as it does between the calls of a user. Cells that the file
holds already are not measured again.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.demo import TARGETS
from mrp_trainer.evaluate.results import ResultsFile

from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.modeling import MRPForCausalLM

from .common import RESULTS, TINY, header, load
from .wallclock import DTYPES, Job, make_job, random_model, spread, take_turns

# Of a fixed number that takes so many times the target's time, no greater one is measured.
HOPELESS = 1.6
MODELS = {"tiny": (0, "float32")} | {
    f"random block {block} {dtype}": (block, dtype) for block in (4, 16) for dtype in ("float32", "bfloat16")
}


def random_config(block: int) -> MRPConfig:
    """12 layers of hidden size 1024, and a head of 3."""
    return MRPConfig(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        num_nextn_predict_layers=3,
        block_size=block,
        mask_token_id=32767,
        pad_token_id=0,
    )


def job_of(name: str, model: MRPForCausalLM, rows: int, options: argparse.Namespace) -> Job:
    """One batch of held-out math problems for the embedded checkpoint, of random prompts for the random models."""
    if name == "tiny":
        shape = {"shape": "tiny", "dtype": None, "count": rows, "batch_size": rows}
        return make_job(argparse.Namespace(**shape, device=options.device, new_tokens=options.new_tokens))
    ids = torch.randint(32767, (rows, options.prompt), generator=torch.Generator().manual_seed(0))
    return Job(model, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}], options.new_tokens or 32)


def modes_of(target: dict[str, Any], states: list[int]) -> dict[str, dict[str, Any]]:
    """The target, and itself drafted."""
    drafted = {**target, "decoding": "mrp_spec", "target": target["decoding"]}
    return {"target": target} | {
        f"K={number}" if number != "auto" else "auto": {**drafted, "num_draft_states": number} for number in ("auto", *states)
    }


def hopeful(job: Job, modes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Select the modes that are worth measuring: all up to the first fixed number that one decode shows to be hopeless."""
    job.decode(0, modes["target"])  # pays for what is made once
    limit = HOPELESS * job.decode(0, modes["target"])[1]
    fixed = [mode for mode in modes if mode.startswith("K=")]
    for place, mode in enumerate(fixed[1:], 1):
        if job.decode(0, modes[mode])[1] > limit:
            return {mode: options for mode, options in modes.items() if mode not in fixed[place:]}
    return modes


def measure(job: Job, target: dict[str, Any], states: list[int], repeats: int) -> dict[str, Any]:
    """Measure the speeds of a cell."""
    modes = hopeful(job, modes_of(target, states))
    speeds = take_turns(job, modes, repeats, warm_ups=2 if job.model.device.type == "cuda" else 0)
    base = speeds.pop("target")
    over = {mode: spread([mine / other for mine, other in zip(of, base, strict=True)]) for mode, of in speeds.items()}
    fixed = {mode: each["median"] for mode, each in over.items() if mode != "auto"}
    best = max(fixed, key=lambda mode: fixed[mode])
    over_best = spread([mine / other for mine, other in zip(speeds["auto"], speeds[best], strict=True)])
    return {"over_target": over, "best": best, "auto_over_best": over_best, "target_tokens_per_second": spread(base, 1)}


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_clock", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--states", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8], help="fixed numbers, from the least on")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a random prompt")
    parser.add_argument("--new-tokens", type=int, help="64 for tiny, 32 for the others by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "auto_clock.jsonl")
    options = parser.parse_args(arguments)
    results = ResultsFile(options.output, "model")
    results.begin(header("auto_clock", argparse.Namespace(**{**vars(options), "output": str(options.output)}), load(TINY)[0]))
    for name in options.models:
        block, dtype = MODELS[name]
        model = random_model(random_config(block), DTYPES[dtype], options.device) if block else load(TINY)[0]
        for rows in options.batch_sizes:
            job = job_of(name, model, rows, options)
            for target in options.targets:
                cell = {"model": name, "target": target, "batch_size": rows, "states": options.states}
                if (line := results.find(**cell)) is None:
                    results.add(line := {**cell, **measure(job, TARGETS[target], options.states, options.repeats)})
                print(line, flush=True)


if __name__ == "__main__":
    main()
