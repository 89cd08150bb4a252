"""What `static` decoding did, step by step: the states a head meets when it is used, to train it on.

Randomly masked text has the wrong states for a head. Decoding goes from the surest positions to the least sure, so that what is
still masked is what the backbone cannot know yet, and it writes the backbone's own words.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from .data import TaskDataset, encode
from .evaluate import NEW_TOKENS, pad_left
from .samples import Sample, make_sample


def record_trajectories(
    model: Any, problems: TaskDataset, path: Path, batch_size: int = 64, state: PartialState | None = None
) -> None:
    """Decodes the problems with `static` and writes ids and the step that revealed each, a JSON line a problem.

    Until it is complete it is called `.part`; a call that finds one goes on behind it. A complete file is left alone. Several
    processes each decode a share, in parts of their own, and make the same file of them.

    Args:
        model: An `MRPForCausalLM`.
        problems: What to decode.
        path: A `.jsonl` file, which all processes see.
        batch_size: Problems per `generate`.
        state: The processes that share the work; None for this one alone.
    """
    if path.exists():
        return
    process, processes = (state.process_index, state.num_processes) if state is not None else (0, 1)
    window = 8 * batch_size
    parts = [path.with_suffix(f".{i}of{processes}.part" if processes > 1 else ".part") for i in range(processes)]
    begins = range(process * window, len(problems), processes * window)
    done = _whole_windows(parts[process], window)
    with parts[process].open("a") as file, tqdm(total=len(begins) * window, initial=done * window, desc="decoding") as progress:
        for begin in begins[done:]:
            asked = [problems.problem(i) for i in range(begin, min(begin + window, len(problems)))]
            asked.sort(key=lambda problem: (problem.family, len(problem.answer)))  # rows that end together share a batch
            for first in range(0, len(asked), batch_size):
                part = asked[first : first + batch_size]
                prompts = [encode(problem, problems.tokenizer)[0] for problem in part]
                inputs = pad_left(prompts, problems.tokenizer.pad_token_id)
                with torch.inference_mode():
                    out = model.generate(
                        **{name: value.to(model.device) for name, value in inputs.items()},
                        decoding="static",
                        max_new_tokens=max(NEW_TOKENS[problem.family] for problem in part),
                        return_dict_in_generate=True,
                    )
                new = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
                for prompt, ids, steps in zip(prompts, new, out.reveal_step.tolist(), strict=True):
                    length = sum(step >= 0 for step in steps)
                    line = {"ids": prompt + ids[:length], "response_start": len(prompt), "reveal_step": steps[:length]}
                    file.write(json.dumps(line) + "\n")
                progress.update(len(part))
            file.flush()
    if state is not None:
        state.wait_for_everyone()
    if process == 0:
        _put_together(parts, path, window)
    if state is not None:
        state.wait_for_everyone()


def _whole_windows(part: Path, window: int) -> int:
    """How many whole windows a part holds; what was begun behind them is cut off."""
    part.touch()
    lines = part.read_bytes().splitlines(keepends=True)
    done = sum(line.endswith(b"\n") for line in lines) // window
    with part.open("r+b") as held:
        held.truncate(sum(map(len, lines[: done * window])))
    return done


def _put_together(parts: list[Path], path: Path, window: int) -> None:
    """One file of the processes' parts, whose windows take turns."""
    if len(parts) > 1:
        shares = [part.read_text().splitlines(keepends=True) for part in parts]
        longest = max(map(len, shares))
        turns = (share[begin : begin + window] for begin in range(0, longest, window) for share in shares)
        whole = path.with_suffix(".part")
        whole.write_text("".join(chain.from_iterable(turns)))
        os.replace(whole, path)
        for part in parts:
            part.unlink()
    else:
        os.replace(parts[0], path)


class TrajectoryDataset(Dataset[Sample]):
    """Recorded decodings as samples, each epoch in another order and with its own noise.

    Args:
        path: What `record_trajectories` wrote.
        size: How many samples there are: any number of epochs.
        block_size: Samples are padded to whole blocks; one that did not reach its eos is cut to them.
        eos_token_id: Ends a text.
        pad_token_id: Fills its last block.
        seed: Chooses the order.
    """

    def __init__(self, path: Path, size: int, block_size: int, eos_token_id: int, pad_token_id: int, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        self.recorded: list[Sample] = []
        for line in path.read_text().splitlines():
            record = json.loads(line)
            ids, start = record["ids"], record["response_start"]
            steps = [-1] * start + record["reveal_step"]
            length = len(ids) if ids[-1] == eos_token_id else len(ids) // block_size * block_size
            if length <= start:
                continue
            response = [place >= start for place in range(length)]
            self.recorded.append(make_sample(0, ids[:length], response, block_size, pad_token_id, steps[:length]))
        if not self.recorded:
            raise ValueError(f"{path} holds no decoded text: record trajectories first")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, visit: int) -> Sample:
        if visit < 0:
            raise IndexError(f"visit {visit}: they count from 0")
        epoch, place = divmod(visit, len(self.recorded))
        return replace(self.recorded[_order(self.seed, epoch, len(self.recorded))[place]], index=visit)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(self.size))


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)
