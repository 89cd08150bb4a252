"""What decoding did, step by step: the states a head meets when it is used, to train it on.

Randomly masked text has the wrong states for a head. Decoding goes from the surest positions to the least sure, so that what is
still masked is what the backbone cannot know yet, and it writes the backbone's own words.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..data.problems import TaskDataset, encode
from ..data.samples import Sample, decoded_sample
from ..evaluate.decoded import NEW_TOKENS, pad_left

_DIGESTED = 256  # of each tensor's values


def record_trajectories(
    model: Any,
    problems: TaskDataset,
    path: Path,
    batch_size: int = 64,
    state: PartialState | None = None,
    decodings: Sequence[Mapping[str, Any]] = ({"decoding": "static"},),
) -> None:
    """Decodes the problems and writes ids and the step that revealed each, a JSON line a problem.

    Args:
        model: An `MRPForCausalLM`.
        problems: What to decode.
        path: A `.jsonl` file, written as `write_lines` does.
        batch_size: Problems per `generate`.
        state: The processes that share the work; None for this one alone.
        decodings: Options of `generate`, the targets that the head is to draft for: batches take turns.
    """

    def decode(numbers: range) -> Iterator[list[str]]:
        asked = [problems.problem(i) for i in numbers]
        asked.sort(key=lambda problem: (problem.family, len(problem.answer)))  # rows that end together share a batch
        for turn, first in enumerate(range(0, len(asked), batch_size), numbers.start // (8 * batch_size)):
            part = asked[first : first + batch_size]
            prompts = [encode(problem, problems.tokenizer)[0] for problem in part]
            limit = max(NEW_TOKENS[problem.family] for problem in part)
            yield decoded_lines(
                model, prompts, problems.tokenizer.pad_token_id, max_new_tokens=limit, **decodings[turn % len(decodings)]
            )

    write_lines(path, decode, len(problems), 8 * batch_size, state)


def decoded_lines(
    model: Any, prompts: Sequence[list[int]], pad_token_id: int, decoded_by: Mapping[str, Any] | None = None, **options: Any
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
        lines.append(json.dumps(line if decoded_by is None else {**line, "decoded_by": decoded_by}))
    return lines


def write_lines(
    path: Path,
    decode: Callable[[range], Iterator[list[str]]],
    count: int,
    turn: int,
    state: PartialState | None = None,
    check: Callable[[int, str], None] | None = None,
) -> None:
    """Writes lines that take long to make, a turn of them after the other.

    Until the file is complete it is called `.part`; a call that finds one goes on behind its last whole turn. A complete file
    is left alone. Several processes each make a share, in parts of their own, and put the same file together.

    Args:
        path: The file, which all processes see.
        decode: Makes the lines of a turn, some at a time.
        count: How many lines there are.
        turn: How many of them are made together.
        state: The processes that share the work; None for this one alone.
        check: Raises a `ValueError` for a line, by its number, that an earlier call for something else has left.

    Raises:
        ValueError: as `check`, and where there is one, if the file has more lines, or fewer and is complete; if it was begun by
            another number of processes.
    """
    process, processes = (state.process_index, state.num_processes) if state is not None else (0, 1)
    if path.exists():
        if process == 0 and check is not None:
            _check_complete(path, count, check)
        return
    parts = [path.with_suffix(f".{i}of{processes}.part" if processes > 1 else ".part") for i in range(processes)]
    begun = re.compile(rf"{re.escape(path.stem)}(\.\d+of\d+)?\.part")
    if others := sorted({other for other in path.parent.iterdir() if begun.fullmatch(other.name)} - {*parts}):
        raise ValueError(f"{others[0]} was begun by another number of processes: go on with as many, or remove it")
    begins = range(process * turn, count, processes * turn)
    done = _keep_whole_turns(parts[process], begins, turn, check)
    sizes = [min(turn, count - begin) for begin in begins]
    with parts[process].open("a") as file, tqdm(total=sum(sizes), initial=sum(sizes[:done]), desc="decoding") as progress:
        for begin in begins[done:]:
            for lines in decode(range(begin, min(begin + turn, count))):
                file.write("".join(f"{line}\n" for line in lines))
                progress.update(len(lines))
            file.flush()
            os.fsync(file.fileno())
    if state is not None:
        state.wait_for_everyone()
    if process == 0:
        _put_together(parts, path, turn)
    if state is not None:
        state.wait_for_everyone()


def _check_complete(path: Path, count: int, check: Callable[[int, str], None]) -> None:
    lines = 0
    with path.open() as file:
        for line in file:
            if lines < count:
                check(lines, line)
            lines += 1
    if lines != count:
        raise ValueError(f"{path} is complete and has {lines} lines, not {count}: name another file, or remove it")


def _keep_whole_turns(part: Path, begins: range, turn: int, check: Callable[[int, str], None] | None) -> int:
    """How many whole turns a part holds, which begin at these lines; what was begun behind them is cut off."""
    done = end = 0
    part.touch()
    with part.open("r+b") as file:
        while done < len(begins):
            size = min(turn, begins.stop - begins[done])
            lines = [line for line in islice(file, size) if line.endswith(b"\n")]
            if check is not None:
                for number, line in enumerate(lines, begins[done]):
                    check(number, line.decode())
            if len(lines) < size:
                break
            done, end = done + 1, end + sum(map(len, lines))
        if check is not None and done == len(begins) and file.readline():
            raise ValueError(f"{part} goes on behind the {begins.stop} lines asked for: name another file, or remove it")
        file.truncate(end)
    return done


def _put_together(parts: list[Path], path: Path, turn: int) -> None:
    """One file of the processes' parts, whose turns take turns."""
    if len(parts) == 1:
        os.replace(parts[0], path)
        return
    whole = path.with_suffix(".whole")
    files = [part.open() for part in parts]
    with whole.open("w") as file:
        while lines := [line for part in files for line in islice(part, turn)]:
            file.writelines(lines)
    os.replace(whole, path)
    for open_part, part in zip(files, parts, strict=True):
        open_part.close()
        part.unlink()


def digest(model: Any) -> str | None:
    """Changes with a backbone's weights, and not with the type they were loaded in; None where there are none.

    It reads the first values of every tensor, rounded to bfloat16, without those of adapters.
    """
    weights = [weight for name, weight in model.model.named_parameters() if "lora_" not in name]
    if any(weight.is_meta for weight in weights):
        return None
    firsts = [weight.detach().flatten()[:_DIGESTED].to("cpu", torch.bfloat16) for weight in weights]
    return hashlib.sha256(torch.cat(firsts).view(torch.int16).numpy().tobytes()).hexdigest()[:16]


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
            ids, start, steps = record["ids"], record["response_start"], record["reveal_step"]
            sample = decoded_sample(0, ids, start, steps, block_size, [eos_token_id], pad_token_id)
            if sample is not None:
                self.recorded.append(sample)
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
