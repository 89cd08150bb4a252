"""The frontier: accuracy against tokens per unit of every mode and target at the settings people
use, with 95 % intervals.

``python -m benchmarks.frontier`` decodes 200 held-out problems per family, greedily, with each of
`settings()`: every target alone; the rules of `mrp_remask`; `mrp_direct`; four targets drafted
without a head, by `self_spec` and by the draft graph that is tuned for them
(`benchmarks.draft_graph`), and by `mrp_spec` with a shortlist of 16 tokens; `sequential` with
prompt lookup, too; the released reference (`benchmarks.released`), row by row; and
PSD (`benchmarks.psd`). Of `source`, which has no right answers, it decodes half as many, only with
the targets and their drafts. The problems are fresh: of another seed than those by which the
embedded head was chosen, without the prompts that both share.

With `--rules [NAME ...]` it decodes with reveal rules instead, those from papers as published:
alone, and drafted by `mrp_spec` with one head pass (`--count 40` is enough to see differences;
`python -m benchmarks.tables rules` prints them).

With `--rivals` it decodes each target with the head's competitors, `self_spec`, draft graphs and
PSD as tuned for it, and with `mrp_spec` with a shortlist of 16 tokens and one to three passes. With
`--sampled` it decodes each target at temperature 1, alone and drafted.

Lines go to `benchmarks/results/tiny_frontier.jsonl` or `--output FILE`; a setting that has a line
there, measured with the same weights, is skipped. `python -m benchmarks.tables frontier`
(`targets`, `break_even`, `headline`) prints tables, and `python -m benchmarks.plots` draws the
figure, from all of `tiny_frontier*.jsonl`: several processes may each take a family and a file.

Decodes are in float64, so that every drafted text is its target's, token by token;
`texts_that_differ` counts exceptions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import torch
from mrp_trainer.data.tasks import FAMILIES, SPLITS, Family, Problem, Split, problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from mrp_trainer.evaluate.results import ResultsFile, mode_name
from transformers import PreTrainedTokenizerFast

from modeling_mrp.generate.option_table import REMASK_RULES
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.picker import LIKELIEST, SHORTLIST
from modeling_mrp.rules.reveal import RevealRule

from . import draft_graph, psd
from .common import RESULTS, TINY, encode_prompts, header, load, parser_of
from .draft_graph import DraftGraph, Node, graph_drafts, recorded_paths
from .measure import Loop, Measured, measure, measure_loop
from .released import Released
from .targets import RULES, TARGETS, alone, drafted

Setting = dict[str, Any]
JUDGED: tuple[Family, ...] = ("math", "code")  # those with right answers
TAUS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
REMASK_TAUS = (0.4, *TAUS)
BOUNDS = (0.35, 0.7, 1.0)
STATES, WIDTHS, PASSES = (3, 4, 8), (4, 8), (1, 2, 3)
PSD_TAUS = (0.7, 0.8, 0.9)
# Names of ways to decode beyond the modes of `generate`.
GRAPH, PSD, RELEASED = "draft_graph", "psd", "released"
DRAFTERS = ("self_spec", GRAPH, "mrp_spec")
# Tuning problems of each family that a graph is calibrated on, as in the paper.
CALIBRATED_ON = 25
USED = 500  # problems of seed 0 that were known when the embedded head was chosen
COUNT, SEED = 200, 41  # problems in the tables
LOOKUP: Setting = {"prompt_lookup_num_tokens": 10}
SAMPLED: Setting = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 0}


def settings(family: Family = "math") -> list[Setting]:
    """List the settings to measure on a family; a setting has the fields of a result line that say
    how it was decoded."""
    lossless = [alone(target) for target in TARGETS]
    for prefix, states in product((False, True), STATES):
        lossless.append(drafted(RELEASED, "static", states, head_prefix=prefix))
    lossless += [drafted("self_spec", "static", 3), shortlisted("static", 3, 1)]
    for target, states in product(TARGETS, WIDTHS):
        headless, by_head = drafts_of(target, states)
        lossless += headless + by_head
    for target in TARGETS:
        lossless.append(shortlisted(target, 8, 2))
    for passes in (2, 7):
        lossless.append(shortlisted("dynamic", 16, passes))
    if family not in JUDGED:
        return lossless
    changing: list[Setting] = []
    for bound in BOUNDS:
        changing.append({"decoding": "entropy_bound", "entropy_threshold": bound})
    for tau in TAUS:
        changing.append({"decoding": "dynamic", "confidence_threshold": tau})
    for rule, tau in product(REMASK_RULES, REMASK_TAUS):
        changing.append(
            {"decoding": "mrp_remask", "remask_rule": rule, "confidence_threshold": tau}
        )
    for steps in (1, 2):
        changing.append({"decoding": "mrp_direct", "mrp_steps": steps})
    for tau, states in product(PSD_TAUS, WIDTHS):
        changing.append({"decoding": PSD, "confidence_threshold": tau, "num_draft_states": states})
    return lossless + [setting for setting in changing if setting not in lossless]


def drafts_of(target: str, states: int) -> tuple[list[Setting], list[Setting]]:
    """List the ways to draft for a target with K = `states`: those without a head, the draft graph
    tuned on tuning problems, and those with one pass of the head. Both have prompt lookup, too, for
    `sequential`, whose order of reveals it knows."""
    headless = [drafted("self_spec", target, states), graph_of(target, states)]
    by_head = [shortlisted(target, states, 1)]
    if target == "sequential":
        for ways in (headless, by_head):
            ways.append({**ways[0], **LOOKUP})
    return headless, by_head


def graph_of(target: str, states: int) -> Setting:
    """Return the setting of a target drafted by the draft graph that is tuned for it and K =
    `states`."""
    return drafted(GRAPH, target, states, graph=[*draft_graph.CHOSEN[target][states]])


def shortlisted(target: str, states: int, passes: int) -> Setting:
    """Return the setting of a target drafted by the head with a shortlist, in `passes` head passes
    and K = `states`."""
    return drafted("mrp_spec", target, states, draft_passes=passes, draft_shortlist=SHORTLIST)


def psd_of(policy: str, states: int) -> Setting:
    """Return the setting of PSD with the target `policy` as its policy, in the variant ("reading")
    tuned for this target."""
    # the first two are for readings that were tried and rejected
    reading = [0, False, psd.MIN_CHANCE.get(policy, 0.0)]
    return {
        "decoding": PSD,
        "policy": policy,
        **RULES[policy],
        "num_draft_states": states,
        "reading": reading,
    }


def rival_settings() -> list[Setting]:
    """List the settings of `--rivals`: all targets alone, then drafted in each way."""
    measured = [alone(target) for target in TARGETS]
    for target, states in product(TARGETS, WIDTHS):
        measured += [
            drafted("self_spec", target, states),
            graph_of(target, states),
            psd_of(target, states),
        ]
    for passes, target, states in product(PASSES, TARGETS, WIDTHS):
        measured.append(shortlisted(target, states, passes))
    return measured


def rule_settings(rules: Iterable[str] = RULES) -> list[Setting]:
    """List the settings of reveal rules: each alone, and drafted with two values of K."""
    measured: list[Setting] = []
    for target in rules:
        measured.append(alone(target))
        for states in WIDTHS:
            measured.append(drafted("mrp_spec", target, states, draft_passes=1))
    return measured


def sampled_settings() -> list[Setting]:
    """List the settings of `--sampled`: each target at temperature 1, alone and drafted with two
    values of K."""
    measured: list[Setting] = []
    for target in TARGETS:
        measured.append(alone(target))
        for states in WIDTHS:
            measured.append(drafted("self_spec", target, states))
            measured.append(
                drafted("mrp_spec", target, states, draft_passes=1, draft_shortlist=LIKELIEST)
            )
    return [{**setting, **SAMPLED} for setting in measured]


def of_target(setting: Setting) -> dict[str, Setting]:
    """Return {"target": the setting of the target alone} for a setting with drafts, {} for any
    other setting."""
    if "target" not in setting:
        return {}
    target = alone(setting["target"])
    if "do_sample" in setting:
        target |= SAMPLED
    return {"target": target}


def setting_name(line: Mapping[str, Any]) -> str:
    """Name a line's setting: "mrp_remask reread tau=0.5", "draft_graph of static K=4", "mrp_spec of
    static K=4 list=16"."""
    decoding = " ".join(
        filter(None, (line["decoding"], line.get("remask_rule"), line.get("policy")))
    )
    name = mode_name({**line, "decoding": decoding})
    if "entropy_threshold" in line:
        name += f" bound={line['entropy_threshold']}"
    if "mrp_steps" in line:
        name += f" steps={line['mrp_steps']}"
    if "draft_shortlist" in line:
        name += f" list={line['draft_shortlist']}"
    if "prompt_lookup_num_tokens" in line:
        name += " lookup"
    if line.get("draft_passes", 1) > 1:
        name += f" passes={line['draft_passes']}"
    if "temperature" in line:
        name += f" T={line['temperature']}"
    if line.get("head_prefix"):
        name += " with a head prefix"
    return name


def references(setting: Setting) -> dict[str, Setting]:
    """Return by name the settings to compare a drafted setting with: its target alone; for drafts
    by the head, those without it of the same K; and for `static` the released reference."""
    if not (baselines := of_target(setting)):
        return {}
    target = setting["target"]
    states = setting["num_draft_states"]
    if setting["decoding"] == "mrp_spec" and states in WIDTHS:
        for way in drafts_of(target, states)[0]:
            lookup = "_lookup" if "prompt_lookup_num_tokens" in way else ""
            baselines[way["decoding"] + lookup] = way
    released = drafted(RELEASED, target, states, head_prefix=False)
    if target == "static" and states in STATES and setting != released:
        baselines[RELEASED] = released
    return baselines


def rivals(setting: Setting) -> dict[str, Setting]:
    """Return by name the settings of `rival_settings` to compare a drafted setting with: its target
    alone, then drafts."""
    if (baselines := of_target(setting)) and setting["decoding"] == "mrp_spec":
        target = setting["target"]
        states = setting["num_draft_states"]
        baselines["self_spec"] = drafted("self_spec", target, states)
        baselines[GRAPH] = graph_of(target, states)
    return baselines


def on_frontier(line: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether no other line is at least as accurate and as fast (tokens per unit), and
    better in one of the two."""
    accuracy = line["accuracy"]
    speed = line["tokens_per_unit"]
    for rival in lines:
        is_equal = rival["accuracy"] == accuracy and rival["tokens_per_unit"] == speed
        if not is_equal and rival["accuracy"] >= accuracy and rival["tokens_per_unit"] >= speed:
            return False
    return True


def rule_of(target: str, **options: Any) -> RevealRule:
    """Make the reveal rule of a target, with its default options except for those given."""
    config = MRPGenerationConfig(**{**alone(target), **options})
    config.check(block_size=1, has_head=False)
    return config.mode(block_size=1).rule


class Decoder:
    """Decodes problems with one setting after another, and caches the recorded paths that draft
    graphs are calibrated on.

    Args:
        model: The model, of any dtype.
        tokenizer: The model's tokenizer.
        batch_size: Problems decoded at once.
    """

    def __init__(
        self, model: MRPForCausalLM, tokenizer: PreTrainedTokenizerFast, batch_size: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.paths = cache(self._paths)

    def decoded(self, setting: Setting, problem_set: list[Problem]) -> Measured:
        """Decode problems of one family with a setting; return texts and costs."""
        options = dict(setting)
        states = options.get("num_draft_states", 0)
        loop: Loop
        if options["decoding"] == GRAPH:
            target = options["target"]
            graph = DraftGraph.built(
                draft_graph.Build(*options.get("graph", ())), self.paths(target), states
            )
            loop = graph_drafts(rule_of(target), graph, states)
        elif options["decoding"] == RELEASED:
            loop = Released(states, options["head_prefix"])
        elif options["decoding"] == PSD:
            policy = options.get("policy", "dynamic")
            min_chance = options.get("reading", [0.0])[-1]
            rule = rule_of(policy, **{name: options[name] for name in RULES[policy]})
            loop = psd.parallel_speculative(rule, states, min_chance)
        else:
            return measure(self.model, self.tokenizer, problem_set, self.batch_size, **options)
        return measure_loop(loop, self.model, self.tokenizer, problem_set, self.batch_size)

    def _paths(self, target: str) -> list[list[Node]]:
        """Decode tuning problems with a target; return the paths of nodes that `recorded_paths`
        lists."""
        paths: list[list[Node]] = []
        eos = [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id]
        for family in FAMILIES:
            prompts = encode_prompts(problems(family, "tune", CALIBRATED_ON), self.tokenizer)
            paths += recorded_paths(self.model, rule_of(target), prompts, NEW_TOKENS[family], eos)
        return paths


def lines(
    decoder: Decoder,
    problem_set: list[Problem],
    selected: Iterable[Setting],
    results: ResultsFile,
    identity: dict[str, Any],
    compared: Callable[[Setting], dict[str, Setting]] = references,
) -> Iterator[dict[str, Any]]:
    """Measure `selected` settings that `results` lacks on problems of one family; yield lines, with
    ratios over `compared`."""
    decodes: dict[str, Measured] = {}

    def decoded(setting: Setting) -> Measured:
        if (name := setting_name(setting)) not in decodes:
            decodes[name] = decoder.decoded(setting, problem_set)
        return decodes[name]

    for setting in selected:
        fields: dict[str, Any] = {"family": problem_set[0].family, **setting}
        if results.find(**fields, asked=identity) is not None:
            continue
        measured = decoded(setting)
        line = fields | measured.line()
        baselines = {}
        for name, baseline in compared(setting).items():
            baselines[name] = decoded(baseline)
        line |= measured.over(**baselines)
        if baselines:
            line |= {
                "texts_that_differ": measured.differ(baselines["target"]),
                "tokens_compared": sum(measured.tokens),
            }
        yield {**line, "asked": identity}


def problems_of(family: Family, split: Split, count: int, seed: int) -> list[Problem]:
    """Return up to `count` problems of a family, split and seed; seeds but 0 leave out the `USED`
    prompts of the tables."""
    if not seed:
        return problems(family, split, count)
    used = {problem.prompt for problem in problems(family, split, USED)}
    candidates = problems(family, split, 2 * count, seed)
    return [problem for problem in candidates if problem.prompt not in used][:count]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: write a JSON line for each family and setting, and print its name and
    numbers."""
    parser = parser_of("frontier", __doc__)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument(
        "--output",
        default=str(RESULTS / "tiny_frontier.jsonl"),
        help="file that lines are added to",
    )
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--decoding", nargs="+", help="measure these alone: decodings, or names of settings"
    )
    parser.add_argument(
        "--rivals", action="store_true", help="measure the head's competitors instead"
    )
    parser.add_argument(
        "--rules",
        nargs="*",
        choices=list(RULES),
        help="measure these reveal rules instead; no name: all",
    )
    parser.add_argument(
        "--sampled", action="store_true", help="measure targets at temperature 1 instead"
    )
    parser.add_argument("--split", choices=SPLITS, default="heldout")
    parser.add_argument(
        "--count", type=int, default=COUNT, help="problems of a family; half as many of source"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the problems")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    options = parser.parse_args(arguments)
    identity = {"split": options.split, "problems": options.count, "dtype": options.dtype}
    if options.seed:
        identity["seed"] = options.seed
    results = ResultsFile(options.output, "asked")
    for line in results.lines:
        if line.get("asked", identity) != identity:
            parser.error(
                f"{options.output} is of {line['asked']}, and this would be of {identity}: give "
                "another --output"
            )
    model, tokenizer = load(options.model)
    results.begin(header("frontier", options, model))
    decoder = Decoder(model.to(getattr(torch, options.dtype)), tokenizer, options.batch_size)
    for family in options.family:
        selected: list[Setting]
        compared: Callable[[Setting], dict[str, Setting]] = of_target
        if options.rules is not None:
            selected = rule_settings(options.rules or RULES)
        elif options.sampled:
            selected = sampled_settings()
        elif options.rivals:
            selected = rival_settings()
            compared = rivals
        else:
            selected = settings(family)
            compared = references
        if options.decoding:
            chosen = []
            for setting in selected:
                if {setting["decoding"], setting_name(setting)} & {*options.decoding}:
                    chosen.append(setting)
            selected = chosen
        count = options.count // 2 if family == "source" else options.count
        problem_set = problems_of(family, options.split, count, options.seed)
        for line in lines(decoder, problem_set, selected, results, identity, compared):
            results.add(line)
            text = f"{family}: {setting_name(line)}: "
            if "accuracy" in line:
                text += f"{line['accuracy']} % at "
            text += f"{line['tokens_per_forward']} a forward"
            if "texts_that_differ" in line:
                text += f", {line['texts_that_differ']} texts differ"
            print(text, flush=True)


if __name__ == "__main__":
    main()
