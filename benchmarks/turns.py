"""Time of the same texts decoded in several ways, which take turns in one process: drafts over
their target, or two versions.

    python -m benchmarks.turns --states alone 1 2 4 8 auto
    python -m benchmarks.turns ../before/hub_configs/sdar-tiny-mrp ./hub_configs/sdar-tiny-mrp \\
        --batches 1 16

A checkpoint's folder carries its code, so two checkouts can be compared, each run as a user of its
folder would run it. The first way of `--states` is the one that the others of a folder are compared
with: `alone` is the target without drafts, a number or `auto` is `mrp_spec` with that K, and `bare`
decodes single rows of `dynamic` in the minimal loop of `bare_loop`. `rests` is the target with the
schedule of `auto` and no drafts: where only some rows end a block, the clock decides whether these
alone are scored, in a narrower forward, or all rows beside their next blocks' first states.

Greedy, problems of math from the tuning split. Times are CPU time of this process, or with `--clock
wall` wall clock, which a GPU and several threads need. Ratios are of speed, over the turns of a
cell: the median, the least and most, and the quartiles.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS, pad_left
from transformers import PreTrainedTokenizerFast
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from .bare_loop import decoded
from .common import TINY, emit, encode_prompts, header, now, parser_of
from .targets import TARGETS, alone, drafted

Name = TypeVar("Name")
CLOCKS: dict[str, Callable[[torch.device], float]] = {
    "cpu": lambda device: time.process_time(),
    "wall": now,
}


def take_turns(
    functions: Mapping[Name, Callable[[int], float]], repeats: int, warm_ups: int = 1
) -> dict[Name, list[float]]:
    """Call every function once per turn, a different one first each time; return the times of each,
    by name.

    Args:
        functions: By name, a function of the turn's number that returns the time it took.
        repeats: Number of turns that count, numbered from 0 on.
        warm_ups: Number of turns before, which do not count, with negative numbers.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for number in range(-warm_ups, repeats):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            elapsed = functions[name](number)
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def spread(values: Sequence[float] | np.ndarray, digits: int = 3) -> dict[str, Any]:
    """Return the median of values, their range (least and most) and their first and third
    quartile."""
    low, first, median, third, high = (
        np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).round(digits).tolist()
    )
    return {"median": median, "range": [low, high], "quartiles": [first, third]}


def speed_ratios(seconds: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return the spread of `base` / `seconds`, turn by turn: the speed of one way to decode over
    that of another."""
    return spread([reference / private for private, reference in zip(seconds, base, strict=True)])


class TimedDecoder:
    """A way to decode batches with a checkpoint: a function of the turn, for `take_turns`, that
    keeps the texts.

    Args:
        model: An `MRPForCausalLM`, of this code or of the remote code in its folder.
        batches: Inputs of `generate`; each turn decodes the next batch.
        clock: Function that returns the time in seconds, given the device.
        options: Options of `generate`; and `most`, the largest K that `auto` may choose, by default
            that of the model's code.

    Attributes:
        texts: The ids [rows, length] of each batch, by the batch's index.
        forwards: Backbone forwards, summed over rows, by the batch's index.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[dict[str, torch.Tensor]],
        clock: Callable[[torch.device], float],
        **options: Any,
    ) -> None:
        self.model = model
        self.batches = batches
        self.clock = clock
        self.most = options.pop("most", None)
        self.options: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": NEW_TOKENS["math"],
            **options,
        }
        self.texts: dict[int, torch.Tensor] = {}
        self.forwards: dict[int, int] = {}

    def __call__(self, number: int) -> float:
        """Decode a batch; return the seconds that it took."""
        batch_index = number % len(self.batches)
        inputs = {}
        for name, value in self.batches[batch_index].items():
            inputs[name] = value.to(self.model.device)
        code = sys.modules[type(self.model).__module__]  # the code of its folder: all in one file
        with patch.object(code, "WIDTHS", (self.most,)) if self.most else nullcontext():
            start_time = self.clock(self.model.device)
            self.texts[batch_index], self.forwards[batch_index] = self.decode(inputs)
            return self.clock(self.model.device) - start_time

    def decode(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Decode a batch; return its ids, prompts included, and its backbone forwards, summed over
        rows."""
        out = self.model.generate(**inputs, **self.options, return_dict_in_generate=True)
        return out.sequences, int(out.stats.row_forwards.sum())

    def same(self, reference: "TimedDecoder") -> bool:
        """Return whether all texts are equal to those of `reference`."""
        for batch_index, text in self.texts.items():
            if not torch.equal(text, reference.texts[batch_index]):
                return False
        return True


class BareDecoder(TimedDecoder):
    """A `TimedDecoder` that decodes single rows of `dynamic` in the minimal loop; it counts no
    forwards."""

    def decode(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """See `TimedDecoder.decode`."""
        prompt, options = inputs["input_ids"][0].tolist(), self.options
        ids = decoded(
            self.model, prompt, options["max_new_tokens"], options["confidence_threshold"]
        )
        return torch.tensor([ids]), 0


DECODERS = {"bare": BareDecoder}  # in place of `generate`


def batches_of(
    tokenizer: PreTrainedTokenizerFast, split: Any, count: int, rows: int
) -> list[dict[str, torch.Tensor]]:
    """Encode `count` math problems of a split; return inputs of `generate`, batches of `rows`
    prompts."""
    prompts = encode_prompts(problems("math", split, count), tokenizer)
    batches = []
    for begin in range(0, count, rows):
        batches.append(pad_left(prompts[begin : begin + rows], tokenizer.pad_token_id))
    return batches


def own_code(folder: str) -> Any:
    """Return the class of a folder's own code, also where the Auto classes would take this
    package's."""
    return get_class_from_dynamic_module("modeling_mrp.MRPForCausalLM", folder)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: print a JSON line for each number of rows, target, folder and way to
    draft."""
    parser = parser_of("turns", __doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        default=[str(TINY)],
        help="checkpoints of the same weights, each with its code",
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="rows of a batch"
    )
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument(
        "--states",
        nargs="+",
        default=["alone", "4", "8"],
        help="`alone`, `rests`, `bare`, numbers, `auto`",
    )
    parser.add_argument(
        "--count",
        type=int,
        default=16,
        help="problems of a cell, or two batches where these are more",
    )
    parser.add_argument(
        "--turns", type=int, default=0, help="of a cell; each batch once by default"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    options = parser.parse_args(arguments)
    if "bare" in options.states and (options.batches, options.targets) != ([1], ["dynamic"]):
        parser.error("bare is a loop of `dynamic` and one row: --batches 1 --targets dynamic")
    torch.set_num_threads(options.threads)
    models = []
    folder_names = []
    for folder in options.folders:
        model = own_code(folder).from_pretrained(folder, dtype=getattr(torch, options.dtype))
        models.append(model.to(options.device).eval())
        folder_names.append(Path(folder).name)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.folders[-1])
    named = argparse.Namespace(**{**vars(options), "folders": folder_names})
    emit(header("turns", named, models[-1]))
    for rows in options.batches:
        batches = batches_of(tokenizer, "tune", max(2, options.count // rows) * rows, rows)
        for target in options.targets:
            decoders: dict[tuple[int, str], TimedDecoder] = {}
            for model_index, model in enumerate(models):
                for states in options.states:
                    make = DECODERS.get(states, TimedDecoder)
                    decoders[model_index, states] = make(
                        model, batches, CLOCKS[options.clock], **options_of(target, states)
                    )
            seconds = take_turns(decoders, options.turns or len(batches))
            for (model_index, states), decoder in decoders.items():
                line: dict[str, Any] = {
                    "checkpoint": folder_names[model_index],
                    "rows": rows,
                    "target": target,
                    "folder": model_index,
                    "states": states,
                    "seconds": spread(seconds[model_index, states], 4),
                    "forwards": sum(decoder.forwards.values()),
                    "texts_equal": decoder.same(decoders[0, options.states[0]]),
                }
                bases = {
                    "over_first": (model_index, options.states[0]),
                    "over_first_folder": (0, states),
                }
                for name, base in bases.items():
                    if base != (model_index, states):
                        line[name] = speed_ratios(seconds[model_index, states], seconds[base])
                emit(line)


def options_of(target: str, states: str) -> dict[str, Any]:
    """Return the options of a `TimedDecoder` for a value of `--states`."""
    if states == "rests":
        return drafted("self_spec", target, "auto", most=1)
    if states in ("alone", *DECODERS):
        return alone(target)
    return drafted("mrp_spec", target, states if states == "auto" else int(states))


if __name__ == "__main__":
    main()
