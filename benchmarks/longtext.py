"""Long, real texts: a small model of the texts of installed packages, decoded on packages that it
has never seen.

    python -m benchmarks.longtext prepare  # runs/long: texts, split by package, and a tokenizer
    python -m benchmarks.longtext causal   # an autoregressive model, which judges decoded texts
    mrp train backbone --config packages   # makes it a block-diffusion model of three block sizes
    mrp train head --config packages-head
    python -m benchmarks.longtext measure  # lines to benchmarks/results/long.jsonl, or the rest
    python -m benchmarks.longtext times    # more lines of it: time and memory along a text
    python -m benchmarks.longtext tables

`make long` runs all of these; each goes on where it was interrupted. `measure` decodes beginnings
of texts of held-out packages greedily and at temperature 1, by every target alone and drafted, with
each block size, in float64. Counts along a text are by windows of `WINDOW` tokens; head passes are
charged evenly along it. No text ends before its last token. `python -m benchmarks.plots long` draws
the tokens a unit along a text.
"""

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mrp_trainer.evaluate.cost import charged
from mrp_trainer.evaluate.intervals import ratio_of_sums
from mrp_trainer.evaluate.results import ResultsFile
from mrp_trainer.outputs import OwnFolder
from mrp_trainer.publish.card import markdown_table
from mrp_trainer.train.checkpoints import last_whole_checkpoint
from mrp_trainer.train.optimizer import MuonAdamW
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer

from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.picker import LIKELIEST, SHORTLIST

from .common import RESULTS, header, load, parser_of, read_lines
from .corpus import cut, installed, new_tokenizer, split_packages
from .frontier import Setting
from .measure import Measured
from .tables import interval
from .targets import TARGETS, alone, drafted
from .turns import speed_ratios

VOCABULARY, PROMPT, LONGEST, WINDOW = 4096, 64, 1024, 64
BLOCKS, STATES = (8, 16, 32), 4
WATCHED = 64  # pieces for the validation loss
PARTS = 4  # parts of a text whose times are compared
Line = dict[str, Any]


def prepare(options: Namespace) -> None:
    """Write a tokenizer, and each split's texts as pieces (a prompt and its continuation) and as
    one stream of ids."""
    files = []
    for split in ("train", "tune", "heldout"):
        files += [f"{split}.jsonl", f"{split}.npy"]
    OwnFolder(options.folder).claim(*files)
    splits = split_packages(installed())
    texts = list(chain.from_iterable(splits["train"].values()))
    tokenizer = new_tokenizer(iter(texts[::5]), VOCABULARY, PROMPT + LONGEST)
    tokenizer.save_pretrained(options.folder)
    for split, packages in splits.items():
        lines: list[Line] = []
        stream: list[int] = []
        for name, package_texts in packages.items():
            for text in package_texts:
                ids, segments = cut(text, tokenizer, PROMPT + LONGEST)
                stream += [*ids, tokenizer.eos_token_id]
                lines += [{"text": segment, "package": name} for segment in segments]
        print(
            f"{split}: {len(packages)} packages, {len(stream):,} tokens, "
            f"{len(lines):,} pieces: {', '.join(packages)}"
        )
        if split == "tune":
            lines = lines[:: max(1, len(lines) // WATCHED)]
        with (options.folder / f"{split}.jsonl").open("w") as file:
            for line in lines:
                file.write(f"{json.dumps(line)}\n")
        np.save(options.folder / f"{split}.npy", np.asarray(stream, np.uint16))


def training_windows(path: Path) -> list[dict[str, np.ndarray]]:
    """Cut a stream of ids into windows of `LONGEST` tokens; return them as examples."""
    ids = np.load(path).astype(np.int64)
    windows = ids[: len(ids) // LONGEST * LONGEST].reshape(-1, LONGEST)
    return [{"input_ids": window, "labels": window} for window in windows]


def causal(options: Namespace) -> None:
    """Train the autoregressive model that judges decoded texts, on the stream of ids."""
    set_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.folder)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "head_dim": 64,
        "initializer_range": 0.04,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    config = Qwen3Config(
        vocab_size=VOCABULARY, max_position_embeddings=2048, **shape, **heads, **ends
    )
    model = Qwen3ForCausalLM(config)
    folder = options.folder / "causal"
    schedule = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": options.steps // 5},
    }
    watched = {
        "logging_steps": 20,
        "save_steps": 50,
        "save_total_limit": 1,
        "report_to": [],
        "use_cpu": True,
    }
    size = {"per_device_train_batch_size": options.batch_size, "per_device_eval_batch_size": 4}
    arguments = TrainingArguments(
        str(folder), max_steps=options.steps, warmup_steps=50, **schedule, **watched, **size
    )
    optimizer = MuonAdamW(model, 3e-3, 1.5e-3)
    trainer = Trainer(
        model,
        arguments,
        default_data_collator,
        training_windows(options.folder / "train.npy"),
        training_windows(options.folder / "tune.npy")[:WATCHED],
        optimizers=(optimizer, None),
    )
    newest = last_whole_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    print(trainer.evaluate())
    trainer.save_model()
    tokenizer.save_pretrained(folder)


def prompts_of(
    folder: Path, tokenizer: PreTrainedTokenizerFast, count: int
) -> tuple[list[str], Tensor]:
    """Select `count` long held-out texts, one per package in turn; return their packages and ids
    [count, PROMPT + LONGEST]."""
    texts_by_package: dict[str, list[list[int]]] = {}
    for line in map(json.loads, (folder / "heldout.jsonl").open()):
        if len(ids := tokenizer.encode(line["text"], verbose=False)) >= PROMPT + LONGEST:
            texts_by_package.setdefault(line["package"], []).append(ids[: PROMPT + LONGEST])
    packages = []
    selected = []
    for index in range(count):
        for name, texts in texts_by_package.items():
            if index < len(texts):
                packages.append(name)
                selected.append(texts[index])
    return packages[:count], torch.tensor(selected[:count])


def settings() -> Iterator[list[Setting]]:
    """Yield the settings to measure in groups: a target, then its drafts."""
    for block_size, sampled, target in product(BLOCKS, (False, True), TARGETS):
        # the default of real vocabularies
        shortlist = LIKELIEST if sampled else SHORTLIST
        variants = (
            alone(target),
            drafted("self_spec", target, STATES),
            drafted("mrp_spec", target, STATES, draft_shortlist=shortlist),
        )
        yield [{"block_size": block_size, "do_sample": sampled, **variant} for variant in variants]


def to_the_end(new: int) -> Line:
    """Return the options of `generate` for texts of exactly `new` new tokens."""
    return {
        "max_new_tokens": new,
        "eos_token_id": None,
        "suppress_tokens": [0, 1],
        "return_dict_in_generate": True,
    }


def decode(
    model: MRPForCausalLM, prompts: Tensor, new: int, batch_size: int, **options: Any
) -> tuple[Measured, Line]:
    """Decode prompts [rows, PROMPT] long; return texts with costs by row, and counts by window of
    text, summed over rows."""
    measured = Measured([], [], [], [])
    edges = torch.arange(0, new + 1, WINDOW)[:, None, None]
    along: dict[str, Tensor] = {}
    for name in ("row_forwards", "drafted", "accepted"):
        along[name] = torch.zeros(len(edges) - 1, dtype=torch.long)
    for prompt_batch in prompts.split(batch_size):
        sampled: Line = {}
        if options["do_sample"]:
            sampled = {"temperature": 1.0, "top_k": 0, "seed": len(measured.ids)}
        out: Any = model.generate(
            prompt_batch,
            attention_mask=torch.ones_like(prompt_batch),
            **to_the_end(new),
            **sampled,
            **options,
        )
        reached = out.stats.rounds["column"] >= edges  # [edges, rounds, rows]
        # The round that reaches a block scores its first state, too, so the counts of a block begin
        # before that round.
        first_rounds = torch.where(reached.any(1), reached.int().argmax(1), reached.shape[1])
        for name, counts in along.items():
            cumulative = pad(out.stats.rounds[name], (0, 0, 1, 0)).gather(0, first_rounds)
            counts += cumulative.diff(dim=0).sum(1)
        measured.ids.extend(out.sequences[:, PROMPT:].tolist())
        measured.forwards.extend(out.stats.row_forwards.tolist())
        measured.head_forwards.extend(out.stats.row_head_forwards.tolist())
        measured.states.extend(out.stats.row_states.tolist())
    return measured, {"along": {name: counts.tolist() for name, counts in along.items()}}


@torch.inference_mode()
def judged(judge: Qwen3ForCausalLM, texts: Tensor) -> Line:
    """Return result fields of continuations: nats per token under `judge`, in all and by window;
    share of repeated 4-grams."""
    logits = torch.cat([judge(text[None]).logits[:, PROMPT - 1 : -1] for text in texts])
    nats = -logits.float().log_softmax(-1).gather(-1, texts[:, PROMPT:, None])[..., 0]
    repeated = 0.0
    for grams in texts[:, PROMPT:].unfold(1, 4, 1):
        repeated += 1 - len(grams.unique(dim=0)) / len(grams)
    window_nats = nats.unflatten(1, (-1, WINDOW)).mean((0, 2)).tolist()
    average = ratio_of_sums(nats.sum(1).tolist(), [nats.shape[1]] * len(nats))
    assert average is not None
    return {
        "nats": round(average.value, 3),
        "nats_95": average.rounded(),
        "nats_along": [round(value, 3) for value in window_nats],
        "repeated": round(repeated / len(texts), 3),
    }


def measure(options: Namespace) -> None:
    """Decode held-out texts with each setting that has no line in the output file yet, and add its
    line."""
    model, tokenizer = load(options.folder / "head")
    judge = Qwen3ForCausalLM.from_pretrained(options.folder / "causal").eval()
    packages, texts = prompts_of(options.folder, tokenizer, options.count)
    texts = texts[:, : PROMPT + options.tokens]
    identity = {"prompts": options.count, "tokens": options.tokens}
    results = ResultsFile(options.output, "asked")
    results.begin(header("longtext", options, model))
    model = model.double()
    if results.find(text="real", asked=identity) is None:
        results.add(
            {"text": "real", "asked": identity, "packages": packages, **judged(judge, texts)}
        )
    for group in settings():
        recorded = [results.find(**setting, asked=identity) for setting in group]
        if None not in recorded:
            continue
        of_target = None  # the target's texts are in no file
        for setting, line in zip(group, recorded, strict=True):
            if line is not None and of_target is not None:
                continue
            decode_options = dict(setting)
            model.config.block_size = decode_options.pop("block_size")
            decoded, counts = decode(
                model, texts[:, :PROMPT], options.tokens, options.batch_size, **decode_options
            )
            measured = {**setting, **decoded.line(), **counts, "asked": identity}
            if of_target is None:
                of_target = decoded
                measured |= judged(
                    judge, torch.cat([texts[:, :PROMPT], torch.tensor(decoded.ids)], 1)
                )
            else:
                measured |= {
                    "texts_that_differ": decoded.differ(of_target),
                    **decoded.over(target=of_target),
                }
            if line is None:
                results.add(measured)
                print(f"{setting}: {measured['tokens_per_forward']} a forward", flush=True)


class Clock(BaseStreamer):
    """A streamer that notes the text's length and the process's CPU time whenever a row's text
    grows."""

    def __init__(self) -> None:
        self.tokens = [0]
        self.seconds = [0.0]

    def put(self, value: Tensor) -> None:
        """Note time and length; the first call is for the prompt."""
        self.tokens.append(self.tokens[-1] + value.numel())
        self.seconds.append(time.process_time())

    def end(self) -> None:
        """Do nothing at the end of the text."""


def times(options: Namespace) -> None:
    """Time the quarters of texts decoded one by one, by `static` alone and by drafts in turns;
    count bytes of the caches."""
    model, tokenizer = load(options.folder / "head")
    _, texts = prompts_of(options.folder, tokenizer, options.count)
    results = ResultsFile(options.output, "asked")
    results.begin(header("longtext", options, model))
    variants = {
        "static": alone("static"),
        "mrp_spec": drafted("mrp_spec", "static", STATES, draft_shortlist=SHORTLIST),
    }
    edges = [PROMPT + options.tokens * quarter // PARTS for quarter in range(PARTS + 1)]
    for block_size in BLOCKS:
        model.config.block_size = block_size
        seconds: dict[str, list[Any]] = {name: [] for name in variants}
        size = {}
        for prompt in texts[:, :PROMPT].split(1):
            for name, variant in variants.items():
                clock = Clock()
                fixed = {**to_the_end(options.tokens), "streamer": clock, "do_sample": False}
                out: Any = model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), **fixed, **variant
                )
                seconds[name].append(np.diff(np.interp(edges, clock.tokens, clock.seconds)))
                size[name] = round(out.past_key_values.nbytes / 1e6, 2)
        static_quarters = list(zip(*seconds["static"], strict=True))
        for name, text_seconds in seconds.items():
            over_static = []
            over_first = []
            quarters = zip(*text_seconds, strict=True)
            for quarter, base in zip(quarters, static_quarters, strict=True):
                over_static.append(speed_ratios(quarter, base))
                over_first.append(speed_ratios(static_quarters[0], quarter))
            line = {"block_size": block_size, "timed": name, "megabytes": size[name]}
            line |= {"over_static": over_static, "over_first": over_first}
            results.add({**line, "asked": {"prompts": options.count, "tokens": options.tokens}})


def units_along(line: Line) -> tuple[Line, Any]:
    """Charge head passes evenly along the texts of a line; return the charged line, and tokens per
    unit by window [windows]."""
    line = charged(line)
    tokens = (
        line["tokens_per_unit"] / line["tokens_per_forward"] * line["asked"]["prompts"] * WINDOW
    )
    return line, tokens / np.asarray(line["along"]["row_forwards"])


def ends(values: Any, digits: int) -> str:
    """Format the means of the first and of the last quarter of values, as "first -> last"."""
    quarter = max(1, len(values) // PARTS)
    return f"{np.mean(values[:quarter]):.{digits}f} -> {np.mean(values[-quarter:]):.{digits}f}"


def spreads(ratios: list[Line]) -> list[str]:
    """Format the median of each `turns.spread`, with its quartiles in brackets."""
    entries = []
    for ratio in ratios:
        low, high = ratio["quartiles"]
        entries.append(f"{ratio['median']:.2f} ({low:.2f}-{high:.2f})")
    return entries


def tables(options: Namespace) -> None:
    """Print tables of the measurements: cost and acceptance, the autoregressive model's judgement
    of the texts, and times."""
    costs = []
    judgements = []
    timed = []
    stale = 0.0
    names = ("real", *TARGETS, "self_spec", "mrp_spec")

    def sort_key(line: Line) -> tuple[int, ...]:
        decoding: str = line.get("decoding", "real")
        return (
            line.get("block_size", 0),
            line.get("do_sample", False),
            names.index(line.get("target", decoding)),
            names.index(line.get("timed", decoding)),
        )

    for line in sorted(read_lines(options.output, current=False), key=sort_key):
        block_size = str(line.get("block_size", ""))
        source = line.get("target", line.get("decoding", "real"))
        row = [block_size, f"{line.get('do_sample', 0):d}", source]
        if "timed" in line:
            over_first = spreads(line["over_first"])
            over_static = [""] * PARTS
            if line["timed"] != "static":
                over_static = spreads(line["over_static"])
            timed.append(
                [block_size, line["timed"], str(line["megabytes"]), *over_first, *over_static]
            )
        if "nats" in line:
            nats = interval(line, "nats", 2)
            repeated = f"{100 * line['repeated']:.0f}"
            judgements.append([*row, nats, ends(line["nats_along"], 2), repeated])
        if "decoding" in line:
            accepted_along = np.asarray(line["along"]["accepted"])
            drafted_along = np.asarray(line["along"]["drafted"])
            line, along = units_along(line)
            drafter = "alone"
            drafts = ["", "", "", ""]
            if "target" in line:
                drafter = line["decoding"]
                if drafter == "self_spec":  # sorted before `mrp_spec`
                    stale = line["tokens_per_unit"]
                    speedup = ""
                else:
                    speedup = f"{line['tokens_per_unit'] / stale:.2f}x"
                acceptance = 100 * accepted_along.sum() / drafted_along.sum()
                drafts = [
                    speedup,
                    f"{acceptance:.0f}",
                    ends(100 * accepted_along / drafted_along, 0),
                    str(line["texts_that_differ"]),
                ]
            costs.append(
                [*row, drafter, interval(line, "tokens_per_unit", 2), ends(along, 2), *drafts]
            )
    quarters = "first -> last quarter"
    head = [
        "tokens / unit",
        quarters,
        "over self_spec",
        "accepted %",
        quarters,
        "texts that differ",
    ]
    print(markdown_table(["block", "T", "target", "way", *head], costs), end="\n\n")
    print(
        markdown_table(
            ["block", "T", "text of", "nats / token", quarters, "4-grams twice, %"], judgements
        ),
        end="\n\n",
    )
    columns = []
    for quantity in ("time over static's first", "speed over static"):
        for quarter in range(1, PARTS + 1):
            columns.append(f"{quantity}, quarter {quarter}")
    print(markdown_table(["block", "way", "MB", *columns], timed))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: carry out one stage."""
    stages = {stage.__name__: stage for stage in (prepare, causal, measure, times, tables)}
    parser = parser_of("longtext", __doc__ or "")
    parser.add_argument("stage", choices=list(stages))
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/long"), help="for all that stages make"
    )
    parser.add_argument("--steps", type=int, default=1000, help="training steps of causal")
    parser.add_argument("--batch-size", type=int, default=4, help="rows at once")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "long.jsonl", help="file of measured lines"
    )
    parser.add_argument("--count", type=int, default=8, help="number of texts to decode")
    parser.add_argument("--tokens", type=int, default=LONGEST, help="new tokens of each text")
    options = parser.parse_args(arguments)
    stages[options.stage](options)


if __name__ == "__main__":
    main()
