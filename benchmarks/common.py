"""What the benchmark commands share: reading what was measured with the embedded weights, and decodes of their own."""

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.provenance import digests
from mrp_trainer.provenance import header as header
from mrp_trainer.results import measuring_command, other_weights, with_headers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from modeling_mrp.generate.decode_state import Request, Text, laid_out
from modeling_mrp.generate.loop import Task
from modeling_mrp.generate.modes import Mode
from modeling_mrp.generate.sampling import Sampler
from modeling_mrp.generate.scoring import Reader
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.revealing import reveal_schedule
from modeling_mrp.rules.states import States
from modeling_mrp.runner.runner import Runner

ROOT = Path(__file__).parent.parent
HUB_CONFIGS = ROOT / "hub_configs"
TINY = HUB_CONFIGS / "sdar-tiny-mrp"
RESULTS = Path(__file__).parent / "results"


def emit(line: dict[str, Any]) -> None:
    """Prints one measurement at once, so that a run that is cut short leaves what it had."""
    print(json.dumps(line), flush=True)


@cache
def embedded_weights() -> dict[str, str | None]:
    """The digests of the embedded checkpoint."""
    return digests(load(TINY)[0])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the measurements that a command left, without their headers.

    Lines of other weights than the embedded ones are left out where these have been measured behind them.

    Raises:
        ValueError: The file holds lines of other weights and ends with them.
    """
    weights = embedded_weights()
    measured = list(with_headers(map(json.loads, path.read_text().splitlines())))
    others = {place: other_weights(header, line, weights) for place, (header, line) in enumerate(measured)}
    stale = [place for place, part in others.items() if part is not None]
    if stale and other_weights(measured[-1][0], {}, weights):
        first, part = measured[stale[0]][0], str(others[stale[0]])
        again = f": measure again with `{measuring_command(first, path)}`" if "options" in first else ""
        raise ValueError(
            f"{path}: measured with the {part} {first.get(part, 'unknown')}, and that of {TINY.name} is {weights[part]}{again}"
        )
    return [line for place, (_, line) in enumerate(measured) if others[place] is None]


def now(device: torch.device) -> float:
    """Seconds on a host clock, read when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def load(folder: str | Path) -> tuple[MRPForCausalLM, PreTrainedTokenizerFast]:
    """A checkpoint in evaluation mode, and its tokenizer."""
    return MRPForCausalLM.from_pretrained(folder).eval(), PreTrainedTokenizerFast.from_pretrained(folder)


def greedy_decode(
    model: MRPForCausalLM, mode: Mode, prompts: list[list[int]], new_tokens: int, eos: list[int], scratch_states: int
) -> tuple[Task, Runner, Text, States]:
    """Set up a greedy decode of a batch on a CPU, for `decode` or for a loop of one's own; schedules reveal one a step.

    Args:
        model: In evaluation mode.
        mode: What is revealed and drafted.
        prompts: Ids by row.
        new_tokens: At most.
        eos: Ids that end a text.
        scratch_states: States of a row that a forward has room for.
    """
    config, rows = model.config, len(prompts)
    text, ends, current = laid_out(
        [torch.tensor(prompt) for prompt in prompts], None, new_tokens, config.block_size, config.mask_token_id, model.device
    )
    request = Request(
        **ends,
        no_eos_before=ends["prompt_length"],
        seed=torch.zeros(rows, dtype=torch.long),
        schedule=reveal_schedule(config.block_size, None),
        eos=torch.tensor(eos, dtype=torch.long),
    )
    sampler = Sampler(model.lm_head.weight, config.mask_token_id, entropy=mode.rule.needs_entropy)
    reader = Reader(mode.rule, sampler, sampler, request, config.mask_token_id, seeks=True, bars_eos=False)
    cache = model.block_cache(rows, text.capacity, scratch_states * config.block_size, with_head=mode.uses_head)
    runner = Runner(model, cache, mode.uses_head, sampler.dispatch, False, model.device)
    return Task(mode, reader, config.block_size, config.mask_token_id), runner, text, current


def tokens_of(text: Text, prompts: list[list[int]]) -> list[list[int]]:
    """What follows each prompt, to the end of its text."""
    stops: Tensor = text.stop
    return [text.tokens[row, len(prompt) : int(stops[row])].tolist() for row, prompt in enumerate(prompts)]
