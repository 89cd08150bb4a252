"""The frontier: accuracy against tokens per forward of every mode and target at the settings people use, with 95 % intervals.

``python -m benchmarks.frontier`` decodes 500 held-out problems a family, greedily, with each of `settings()`: every target
alone; the rules of `mrp_remask`; `mrp_direct`; four targets drafted by `self_spec`, a calibrated draft graph
(`benchmarks.draft_graph`) and `mrp_spec`; and PSD (`benchmarks.psd`). Lines go to `benchmarks/results/tiny_frontier.jsonl` or
`--output FILE`; a setting that has one there, of the weights that it uses, is not measured again. `python -m
benchmarks.tables frontier` prints the table, and `python -m benchmarks.plots` draws the figure, both from all of
`tiny_frontier*.jsonl`: two processes may take a family and a file each.

Both families take about 80 minutes of an idle core in float32, where near ties may differ: `texts_that_differ` counts them.
With `--dtype float64` every drafted text is its target's, token by token.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from mrp_trainer.data import encode
from mrp_trainer.decoded import NEW_TOKENS
from mrp_trainer.intervals import wilson
from mrp_trainer.results import ResultsFile, mode_name
from mrp_trainer.tasks import SPLITS, Family, Problem, problems
from transformers import PreTrainedTokenizerFast

from modeling_mrp.generate.option_table import REMASK_RULES
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.revealing import Dynamic, RevealRule, logit

from .common import RESULTS, TINY, header, load
from .draft_graph import DraftGraph, GraphDrafts, Node, recorded_paths
from .loops import measure_loop
from .measure import Measured, measure
from .psd import ParallelSpeculative
from .targets import TARGETS

Setting = dict[str, Any]
FAMILIES: tuple[Family, ...] = ("math", "code")  # those with right answers
TAUS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
REMASK_TAUS = (0.4, *TAUS)
BOUNDS = (0.35, 0.7, 1.0)
STATES = (3, 4, 8)
PSD_TAUS, PSD_STATES = (0.7, 0.8, 0.9), (4, 8)
# Beside the modes of `generate`.
GRAPH, PSD = "draft_graph", "psd"
DRAFTERS = ("self_spec", GRAPH, "mrp_spec")
# Tuning problems of each family that a graph is calibrated on, as in the paper, and nodes for each that a round may score.
CALIBRATED_ON, NODES = 25, 2


def settings() -> list[Setting]:
    """List what is measured: the fields of a line that say how it was decoded."""
    return [
        {"decoding": "static"},
        {"decoding": "sequential"},
        *({"decoding": "entropy_bound", "entropy_threshold": bound} for bound in BOUNDS),
        *({"decoding": "dynamic", "confidence_threshold": tau} for tau in TAUS),
        *(
            {"decoding": "mrp_remask", "remask_rule": rule, "confidence_threshold": tau}
            for rule in REMASK_RULES
            for tau in REMASK_TAUS
        ),
        *({"decoding": "mrp_direct", "mrp_steps": steps} for steps in (1, 2)),
        *(
            {"decoding": drafter, "target": target, **options, "num_draft_states": states}
            for target, options in TARGETS.items()
            for drafter in DRAFTERS
            for states in STATES
        ),
        *(
            {"decoding": PSD, "confidence_threshold": tau, "num_draft_states": states}
            for tau in PSD_TAUS
            for states in PSD_STATES
        ),
    ]


def setting_name(line: Mapping[str, Any]) -> str:
    """Name a line's setting: "mrp_remask reread tau=0.5", "draft_graph of static K=4"."""
    decoding = " ".join(filter(None, (line["decoding"], line.get("remask_rule"))))
    name = mode_name({**line, "decoding": decoding})
    name += f" bound={line['entropy_threshold']}" if "entropy_threshold" in line else ""
    return name + (f" steps={line['mrp_steps']}" if "mrp_steps" in line else "")


def on_frontier(line: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> bool:
    """Tell if none of others is as accurate and as fast as a line, and better at one of them."""
    ours = line["accuracy"], line["tokens_per_forward"]
    theirs = ((other["accuracy"], other["tokens_per_forward"]) for other in others)
    return not any(each != ours and each[0] >= ours[0] and each[1] >= ours[1] for each in theirs)


def target_of(setting: Setting) -> Setting | None:
    """Give the setting whose texts a drafted one has to make; None for one that is none."""
    target = setting.get("target")
    return None if target is None else {"decoding": target, **TARGETS[target]}


def rule_of(target: str) -> RevealRule:
    """Make the reveal rule of a target at its setting."""
    config = MRPGenerationConfig(decoding=target, **TARGETS[target])
    config.check(block_size=1, has_head=False)
    return config.mode().rule


class Decoder:
    """Decodes problems with one setting after another, and keeps what several need.

    Args:
        model: Of any dtype.
        tokenizer: Its tokenizer.
        batch_size: Problems at once.
    """

    def __init__(self, model: MRPForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_size: int) -> None:
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.paths = cache(self._paths)

    def decoded(self, setting: Setting, asked: list[Problem]) -> Measured:
        """Decode problems of one family."""
        options = dict(setting)
        states = options.get("num_draft_states", 0)
        if options["decoding"] == GRAPH:
            target = options["target"]
            graph = DraftGraph.calibrated(self.paths(target), NODES * (states - 1))
            loop: Any = GraphDrafts(rule_of(target), graph, states)
        elif options["decoding"] == PSD:
            loop = ParallelSpeculative(Dynamic(logit(options["confidence_threshold"])), states)
        else:
            return measure(self.model, self.tokenizer, asked, self.batch_size, **options)
        return measure_loop(loop, self.model, self.tokenizer, asked, self.batch_size)

    def _paths(self, target: str) -> list[list[Node]]:
        """Record what a target does on tuning problems of all families."""
        found: list[list[Node]] = []
        eos = [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id]
        for family in FAMILIES:
            prompts = [encode(problem, self.tokenizer)[0] for problem in problems(family, "tune", CALIBRATED_ON)]
            found += recorded_paths(self.model, rule_of(target), prompts, NEW_TOKENS[family], eos)
        return found


def lines(
    decoder: Decoder, asked: list[Problem], wanted: Iterable[Setting], results: ResultsFile, identity: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measure each of some settings that has no line yet, on problems of one family."""
    made: dict[str, Measured] = {}

    def decoded(setting: Setting) -> Measured:
        if (name := setting_name(setting)) not in made:
            made[name] = decoder.decoded(setting, asked)
        return made[name]

    for setting in wanted:
        fields = {"family": asked[0].family, **setting}
        if results.find(**fields, asked=identity) is not None:
            continue
        begun = time.perf_counter()
        measured = decoded(setting)
        seconds = round(time.perf_counter() - begun, 1)
        share = wilson(sum(map(bool, measured.right)), len(asked))
        line = {
            **fields,
            "accuracy": round(100 * share.value, 1),
            "accuracy_95": [round(100 * share.low, 1), round(100 * share.high, 1)],
        }
        line |= measured.line()
        if (target := target_of(setting)) is not None:
            line["texts_that_differ"] = sum(a != b for a, b in zip(measured.ids, decoded(target).ids, strict=True))
            del made[setting_name(setting)]
        yield {**line, "seconds": seconds, "asked": identity}


def main(arguments: list[str] | None = None) -> None:
    """Command line: writes a JSON line for each family and setting, and prints its name and numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frontier", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument(
        "--output", default=str(RESULTS / "tiny_frontier.jsonl"), help="lines; goes on behind those that are there"
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    decodings = list(dict.fromkeys(setting["decoding"] for setting in settings()))
    parser.add_argument("--decoding", nargs="+", choices=decodings, default=decodings, help="measure these alone")
    parser.add_argument("--split", choices=SPLITS, default="heldout")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args(arguments)
    identity = {"split": options.split, "problems": options.count, "dtype": options.dtype}
    results = ResultsFile(options.output, "asked")
    if other := next((line["asked"] for line in results.lines if line.get("asked", identity) != identity), None):
        parser.error(f"{options.output} is of {other}, and this would be of {identity}: give another --output")
    model, tokenizer = load(options.model)
    results.begin(header("frontier", options, model))
    decoder = Decoder(model.to(getattr(torch, options.dtype)), tokenizer, options.batch_size)
    wanted = [setting for setting in settings() if setting["decoding"] in options.decoding]
    for family in options.family:
        for line in lines(decoder, problems(family, options.split, options.count), wanted, results, identity):
            results.add(line)
            differ = f", {line['texts_that_differ']} texts differ" if "texts_that_differ" in line else ""
            print(
                f"{family}: {setting_name(line)}: {line['accuracy']} % at {line['tokens_per_forward']} a forward{differ}",
                flush=True,
            )


if __name__ == "__main__":
    main()
