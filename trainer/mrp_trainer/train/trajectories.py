"""What decoding did, step by step: the states a head meets when it is used, to train it on.

Randomly masked text has the wrong states for a head. Decoding goes from the surest positions to the least sure, so that what is
still masked is what the backbone cannot know yet, and it writes the backbone's own words.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from tqdm.auto import tqdm

from ..evaluate.decoded import pad_left

_DIGESTED = 256  # of each tensor's values


def decoded_lines(
    model: Any, prompts: Sequence[list[int]], pad_token_id: int, decoded_by: Mapping[str, Any], **options: Any
) -> list[str]:
    """What decoding makes of prompts, as lines that training reads (see `mrp_trainer.data.records`).

    Args:
        model: An `MRPForCausalLM`.
        prompts: Ids of each.
        pad_token_id: Fills up shorter ones; it is masked.
        decoded_by: Put into every line.
        options: For `generate`.
    """
    inputs = pad_left(prompts, pad_token_id)
    with torch.inference_mode():
        out = model.generate(
            **{name: value.to(model.device) for name, value in inputs.items()},
            return_dict_in_generate=True,
            **{"decoding": "static", **options},
        )
    new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    lines = []
    for prompt, ids, steps in zip(prompts, new, out.reveal_step.tolist(), strict=True):
        length = sum(step >= 0 for step in steps)
        line: dict[str, Any] = {"ids": prompt + ids[:length], "response_start": len(prompt), "reveal_step": steps[:length]}
        lines.append(json.dumps({**line, "decoded_by": decoded_by}))
    return lines


def write_lines(path: Path, key: str, decode: Callable[[range], list[str]], count: int, turn: int, state: PartialState) -> None:
    """Write a file of generated lines in *turns*, chunks of them, shared among processes; a call that was cut off is resumed.

    Every process makes each of its turns in a file of its own, `PATH.part/KEY-BEGIN.jsonl`; a call that finds some makes the
    others, with any number of processes. The first process puts them together.

    Args:
        path: The file, which all processes see.
        key: Tells these lines from those of another call for the same path.
        decode: Makes the lines of a turn.
        count: How many lines there are.
        turn: How many of them one call of `decode` makes; the last turn may have fewer.
        state: The processes that share the work.
    """
    folder = path.with_suffix(".part")
    folder.mkdir(parents=True, exist_ok=True)
    begins = range(0, count, turn)
    turns = [folder / f"{key}-{begin}.jsonl" for begin in begins]
    mine = list(zip(begins, turns, strict=True))[state.process_index :: state.num_processes]
    for begin, made in tqdm(mine, "decoding"):
        if not made.exists():
            partial = made.with_suffix(".partial")
            partial.write_text("".join(f"{line}\n" for line in decode(range(begin, min(begin + turn, count)))))
            partial.replace(made)
    state.wait_for_everyone()
    if state.is_main_process:
        with (folder / "whole").open("wb") as whole:
            for made in turns:
                with made.open("rb") as part:
                    shutil.copyfileobj(part, whole)
        (folder / "whole").replace(path)
        shutil.rmtree(folder)
    state.wait_for_everyone()


def digest(model: Any) -> str | None:
    """Changes with a backbone's weights, and not with the type they were loaded in; None where there are none.

    It reads the first values of every tensor, rounded to bfloat16, without those of adapters.
    """
    weights = [weight for name, weight in model.model.named_parameters() if "lora_" not in name]
    if any(weight.is_meta for weight in weights):
        return None
    firsts = [weight.detach().flatten()[:_DIGESTED].to("cpu", torch.bfloat16) for weight in weights]
    return hashlib.sha256(torch.cat(firsts).view(torch.int16).numpy().tobytes()).hexdigest()[:16]
