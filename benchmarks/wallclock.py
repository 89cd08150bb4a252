"""Wall clock of `self_spec` and `mrp_spec` over `static`, and what a round's time goes into.

``python -m benchmarks.wallclock`` decodes the same prompts in every mode, taking turns batch by batch in one process, several
times over, and prints one line per mode: the median and spread of its speed over that of `static`, and on a CPU from further
runs the shares of backbone, head, vocabulary step, cache commits and bookkeeping (all else) in a round. `--shape tiny` decodes
held-out problems with the embedded checkpoint; the published shapes get random weights and random prompts, so that only the
time of a round and its shares mean anything there.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS, pad_left

from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.modeling import MRPForCausalLM

from .common import HUB_CONFIGS, TINY, emit, header, load, now
from .meter import Meter, seconds_by_part
from .targets import drafted

SHAPES = ("tiny", "1.7b", "4b", "8b")
MODES = ("static", "self_spec", "mrp_spec")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INIT_STD = 0.02


def published_config(size: str, layers: int | None) -> MRPConfig:
    """The config of `1.7b`, `4b` or `8b`, with so many backbone layers (None: its own)."""
    changed = {} if layers is None else {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    return MRPConfig.from_pretrained(HUB_CONFIGS / f"sdar-{size}-mrp", **changed)


@torch.no_grad()
def random_model(config: MRPConfig, dtype: torch.dtype, device: str, seed: int = 0) -> MRPForCausalLM:
    """A model with random matrices and norms of one, which never ends a text by itself; every tensor is written once."""
    with torch.device("meta"):
        model = MRPForCausalLM(config)
    model = model.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, INIT_STD, generator=generator)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)  # its buffers are no parameters, and came out empty
    model.generation_config.eos_token_id = None
    return model


@dataclass(frozen=True)
class Job:
    """What is decoded: batches of `generate`'s inputs, and how many tokens each row gets at most."""

    model: MRPForCausalLM
    batches: list[dict[str, torch.Tensor]]
    new_tokens: int

    def decode(self, batch: int, options: dict[str, Any], meter: Meter | None = None) -> tuple[int, float]:
        """Decode one batch, through a meter if there is one; tokens and seconds."""
        inputs: dict[str, Any] = {name: value.to(self.model.device) for name, value in self.batches[batch].items()}
        began = now(self.model.device)
        out = (meter or self.model).generate(**inputs, max_new_tokens=self.new_tokens, return_dict_in_generate=True, **options)
        seconds = now(self.model.device) - began
        assert isinstance(out, MRPGenerateOutput)
        assert out.reveal_step is not None
        return int((out.reveal_step >= 0).sum()), seconds


def make_job(options: argparse.Namespace) -> Job:
    """Held-out math problems for the embedded checkpoint, random prompts for the published shapes."""
    if options.shape == "tiny":
        model, tokenizer = load(TINY)
        model = model.to(DTYPES[options.dtype or "float32"]).to(options.device)
        prompts = [encode(problem, tokenizer)[0] for problem in problems("math", "heldout", options.count)]
        new_tokens, pad = NEW_TOKENS["math"], tokenizer.pad_token_id
    else:
        model = random_model(
            published_config(options.shape, options.layers), DTYPES[options.dtype or "bfloat16"], options.device
        )
        generator = torch.Generator().manual_seed(0)
        shape = (options.count, options.prompt)
        prompts = torch.randint(model.config.mask_token_id, shape, generator=generator).tolist()
        new_tokens, pad = 32, model.config.pad_token_id
    size = options.batch_size
    batches = [pad_left(prompts[begin : begin + size], pad) for begin in range(0, len(prompts), size)]
    return Job(model, batches, options.new_tokens or new_tokens)


@torch.inference_mode()
def take_turns(job: Job, modes: dict[str, dict[str, Any]], repeats: int, warm_ups: int = 0) -> dict[str, list[float]]:
    """Tokens a second of each mode, one number a repeat over all batches.

    Within a batch the modes follow one another, and every time another one begins.

    Args:
        job: What is decoded.
        modes: Options of `generate` by name.
        repeats: How often.
        warm_ups: Passes of all modes over all batches before. Where rounds are recorded it takes 2 of them: what comes once in
            a call is recorded in the next.
    """
    for options in modes.values():
        job.decode(0, options)  # the first call of each pays for what is made once
    for batch in list(range(len(job.batches))) * warm_ups:
        for options in modes.values():
            job.decode(batch, options)
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    names = list(modes)
    for repeat in range(repeats):
        spent = {mode: np.zeros(2) for mode in modes}
        for batch in range(len(job.batches)):
            first = (repeat + batch) % len(names)
            for mode in names[first:] + names[:first]:
                spent[mode] += job.decode(batch, modes[mode])
        for mode, (tokens, seconds) in spent.items():
            speeds[mode].append(float(tokens / seconds))
    return speeds


@torch.inference_mode()
def breakdown(job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a round of one mode, the shares of its parts in percent, and what it computes.

    What rounds take is what calls take beyond calls for one token, which read the prompt too.
    """
    one, options = replace(job, new_tokens=1), {**options, "graphs": False}
    batches = range(len(job.batches))

    def decode(which: Job, meter: Meter | None = None) -> float:
        return sum(which.decode(batch, options, meter)[1] for batch in batches)

    first, meter = Meter(job.model), Meter(job.model)
    seconds = decode(one, first), decode(job, meter)
    before, spent = seconds_by_part(lambda: decode(one)), seconds_by_part(lambda: decode(job))
    rounds = {part: max(0.0, taken - before[part]) for part, taken in spent.items()}
    total = rounds.pop("whole")
    shares = {part: 100 * taken / total for part, taken in rounds.items()}
    shares["bookkeeping"] = 100 - sum(shares.values())
    milliseconds = 1e3 * (seconds[1] - seconds[0]) / max(1, meter.rounds - first.rounds)
    share = {part: round(value, 1) for part, value in shares.items()}
    return {"ms_per_round": round(milliseconds, 3), "share": share, **meter.per_round()}


def spread(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median, least and most, and quartiles."""
    low, first, median, third, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).round(digits).tolist()
    return {"median": median, "range": [low, high], "quartiles": [first, third]}


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line per mode and K."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wallclock", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="backbone layers of a published shape; all by default")
    parser.add_argument("--dtype", choices=list(DTYPES), help="float32 for tiny, bfloat16 for the others by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--states", nargs="+", type=int, default=[4])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a random prompt")
    parser.add_argument("--new-tokens", type=int, help="64 for tiny, 32 for the others by default")
    options = parser.parse_args(arguments)
    if options.layers is not None and options.shape == "tiny":
        parser.error("--layers is for the published shapes: the embedded checkpoint has its own")
    job = make_job(options)
    emit(header("wallclock", options, load(TINY)[0] if options.shape == "tiny" else None))
    modes: dict[str, dict[str, Any]] = {"static": {"decoding": "static"}}
    for states in options.states:
        for mode in MODES[1:]:
            modes[f"{mode} K={states}"] = drafted(mode, "static", states)
    speeds = take_turns(job, modes, options.repeats, warm_ups=2 if job.model.device.type == "cuda" else 0)
    for mode, settings in modes.items():
        line = {"shape": options.shape, "layers": job.model.config.num_hidden_layers, "dtype": str(job.model.dtype)[6:]}
        over_static = [mine / base for mine, base in zip(speeds[mode], speeds["static"], strict=True)]
        emit(
            {
                **line,
                "batch_size": options.batch_size,
                "mode": mode,
                "over_static": spread(over_static),
                "tokens_per_second": spread(speeds[mode], 1),
                **(breakdown(job, settings) if job.model.device.type == "cpu" else {}),
            }
        )


if __name__ == "__main__":
    main()
