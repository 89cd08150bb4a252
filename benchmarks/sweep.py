"""Tokens per forward against the batch size and the prompt's length.

``python -m benchmarks.sweep`` prints one line per point: held-out problems, `static`, `self_spec`, `mrp_spec` and the released
reference, each with its 95 % interval over problems and what a round computes. `--axis` names the sweeps to run.

Prompts of the length sweep are real source text. A problem is a place in a module; what lies before it makes the prompt, cut
at the line that comes nearest to the length asked for, so that every length continues the same text. (The embedded checkpoint
saw at most 128 tokens in training.)
"""

import argparse
import random
from collections.abc import Iterator
from typing import Any

from mrp_trainer.data import encode
from mrp_trainer.evaluate import NEW_TOKENS
from mrp_trainer.tasks import FAMILIES, Problem, Split, problems, source_modules
from transformers import PreTrainedTokenizerBase

from modeling_mrp.modeling import MRPForCausalLM

from .common import TINY, emit, header, load
from .loops import measure_loop
from .measure import Measured, measure
from .released import Released
from .targets import alone, drafted

AXES = ("batch", "prompt")
MODES = ("static", "released", "self_spec", "mrp_spec")
DRAFTING = ("self_spec", "mrp_spec")
# More than any tokenizer that reads source well needs for a token, on average.
CHARS_PER_TOKEN = 8


def long_source(tokenizer: PreTrainedTokenizerBase, lengths: list[int], count: int, split: Split) -> dict[int, list[Problem]]:
    """`source` problems whose prompts have about so many tokens; the i-th of every length continues the same text.

    Args:
        tokenizer: A fast one: the cut needs its offsets.
        lengths: Tokens asked for.
        count: Problems of each length.
        split: Whose modules to read.

    Raises:
        ValueError: if no module of the split is long enough.
    """
    reach = CHARS_PER_TOKEN * max(lengths)
    modules = [text for text in source_modules(split) if len(text) > 2 * reach]
    if not modules:
        raise ValueError(
            f"no module of {split!r} has {2 * reach} characters: ask for shorter prompts than {max(lengths)} tokens"
        )
    rng = random.Random(f"prompts/{split}")
    found: dict[int, list[Problem]] = {length: [] for length in lengths}
    for _ in range(count):
        text = rng.choices(modules, weights=[len(module) for module in modules])[0]
        cut = rng.randrange(reach, len(text) - 240)
        before = text[cut - reach : cut]
        offsets = tokenizer(before, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        starts = [begin for begin, _ in offsets]
        lines = [i for i, begin in enumerate(starts) if begin == 0 or before[begin - 1] == "\n"]
        for length in lengths:
            first = min(lines, key=lambda i: abs(len(starts) - i - length))
            found[length].append(Problem("source", before[starts[first] :], text[cut : cut + 240]))
    return found


def point(
    model: MRPForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    asked: list[Problem],
    mode: str,
    states: int,
    batch_size: int,
    branches: int,
) -> Measured:
    """One mode at one K and batch size; `static` has no K."""
    if mode == "released":
        return measure_loop(Released(states), model, tokenizer, asked, batch_size)
    options = {**drafted(mode, "static", states), "draft_branches": branches} if mode in DRAFTING else alone(mode)
    return measure(model, tokenizer, asked, batch_size, **options)


def points(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[dict[str, Any], list[Problem]]]:
    """What to measure: the fields `axis`, `family`, `batch_size`, `prompt_tokens` and `states` of a point, and its problems."""
    for family in options.family if "batch" in options.axis else ():
        asked = problems(family, "heldout", options.count)
        fields = {"axis": "batch", "family": family, **_mean_length(tokenizer, asked)}
        for batch_size in options.batch_size:
            for states in options.states:
                yield {**fields, "batch_size": batch_size, "states": states}, asked
    if "prompt" in options.axis:
        for tokens, asked in long_source(tokenizer, options.prompt, options.count, "heldout").items():
            fields = {"axis": "prompt", "family": "source", "prompt_asked": tokens, **_mean_length(tokenizer, asked)}
            for states in options.states:
                yield {**fields, "batch_size": 1, "states": states}, asked


def _mean_length(tokenizer: PreTrainedTokenizerBase, asked: list[Problem]) -> dict[str, float]:
    lengths = [len(encode(problem, tokenizer)[0]) for problem in asked]
    return {"prompt_tokens": round(sum(lengths) / len(lengths), 1)}


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line per point and mode."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt", nargs="+", type=int, default=[32, 128, 512], help="tokens")
    parser.add_argument("--states", nargs="+", type=int, default=[4, 8], help="K")
    parser.add_argument("--branches", type=int, default=3)
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("sweep", options, model))
    room = model.config.max_position_embeddings - NEW_TOKENS["source"]
    if "prompt" in options.axis and max(options.prompt) > room:
        parser.error(f"--prompt is {max(options.prompt)}: at most {room} tokens fit before {NEW_TOKENS['source']} new ones")
    statics: dict[tuple[Any, ...], Measured] = {}
    for fields, asked in points(options, tokenizer):
        for mode in options.mode:
            place = (fields["axis"], fields["family"], fields["batch_size"], fields.get("prompt_asked"))
            if mode == "static" and place in statics:
                continue
            measured = point(model, tokenizer, asked, mode, fields["states"], fields["batch_size"], options.branches)
            line = {**fields, "mode": mode, **measured.line(), **measured.over(static=statics.get(place))}
            if mode == "static":
                statics[place] = measured
                del line["states"]
            emit(line)


if __name__ == "__main__":
    main()
