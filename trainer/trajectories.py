"""What `static` decoding did, step by step: the states a head meets when it is used, to train it on.

Randomly masked text has the wrong states for a head. Decoding goes from the surest positions to the least sure, so that what is
still masked is what the backbone cannot know yet, and it writes the backbone's own words.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from .data import TaskDataset, encode
from .evaluate import NEW_TOKENS, pad_left
from .samples import Sample, make_sample


def record_trajectories(model: Any, problems: TaskDataset, path: Path, batch_size: int = 64) -> None:
    """Decodes the problems with `static` and writes ids and the step that revealed each, a JSON line a problem.

    Until it is complete it is called `.part`; a call that finds one goes on behind it. A complete file is left alone.

    Args:
        model: An `MRPForCausalLM`.
        problems: What to decode.
        path: A `.jsonl` file.
        batch_size: Problems per `generate`.
    """
    if path.exists():
        return
    window = 8 * batch_size
    part_file = path.with_suffix(".part")
    part_file.touch()
    whole = part_file.read_bytes().splitlines(keepends=True)
    done = sum(line.endswith(b"\n") for line in whole) // window * window
    with part_file.open("r+b") as held:
        held.truncate(sum(map(len, whole[:done])))
    with part_file.open("a") as file, tqdm(total=len(problems), initial=done, desc="decoding") as progress:
        for begin in range(done, len(problems), window):
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
    os.replace(part_file, path)


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
