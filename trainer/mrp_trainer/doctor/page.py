"""The report of `mrp doctor`: machine, checks and times on one page."""

import copy
import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import fill

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from modeling_mrp import __version__
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.costs import RoundCosts

from ..evaluate.roofline import BYTES, Device
from ..loading import checked_device, load_model, tokenizer_of
from ..publish.card import markdown_table
from .baselines import time_baselines
from .checks import (
    Check,
    check_drafts,
    check_fast_paths,
    check_kernels,
    check_noise,
    check_weights,
    checked,
    inputs_of,
    published_config,
    random_model,
)
from .log_odds import check_log_odds
from .options import DoctorOptions
from .replays import PARTS, Replayed, measure_device, replay_rounds
from .rounds import Timed, measure_costs, proposed, time_rounds

# The number of rows of compared texts, the states of a row in a round, and the most parameters of a
# model whose texts a CPU compares in float64.
ROWS, STATES, WIDENED = 3, 8, 500_000_000
WIDTH = 80
# Numbers of rows, and of tokens of a prefix, that are timed: on every device, and on CUDA.
BATCHES, PREFIXES = [1, 4], [512]
# Numbers of states whose costs are measured; on a CPU without the last two.
COSTED_STATES = (1, 2, 4, 8, 16, 32)
CUDA_BATCHES, CUDA_PREFIXES = [1, 4, 16], [512, 4096]


@dataclass(frozen=True)
class Baseline:
    """The seconds that plain transformers take for a step, which is a forward of one block and the
    choice of the likeliest tokens, for `rows` rows after `prefix` tokens each. `name` tells the
    kind of cache."""

    name: str
    rows: int
    prefix: int
    seconds: float


@dataclass
class Report:
    """The findings of `mrp doctor`.

    Attributes:
        machine: Maps labels to the versions of packages, and to descriptions of device and model.
        checks: The results of checks.
        replays: The times of the parts of a round, measured by scoring the same states repeatedly,
            without decoding a text.
        baselines: The times of a decoding step in plain transformers, for comparison with a round.
        rounds: The times of rounds of `generate` while it decodes texts, with one item for each
            combination of a number of rows and a number of states per row.
        proposed: Maps each number of rows to the K (`num_draft_states`) with the most tokens per
            second; empty for random weights.
        costs: The measured costs of forwards; None if they were not measured.
    """

    machine: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    replays: list[Replayed] = field(default_factory=list)
    baselines: list[Baseline] = field(default_factory=list)
    rounds: list[Timed] = field(default_factory=list)
    proposed: dict[int, int] = field(default_factory=dict)
    costs: RoundCosts | None = None

    @property
    def failed(self) -> list[str]:
        """List the names of the checks that failed."""
        return [check.name for check in self.checks if check.ok is False]

    def page(self) -> str:
        """Format the report as Markdown."""
        sections = [
            "# mrp doctor",
            markdown_table(["", ""], self.machine.items()),
            "## Checks",
            *self._check_table(),
        ]
        if self.replays:
            sections += ["## Parts of a round", self._replay_table()]
        if self.baselines:
            sections += ["## Steps of plain transformers", self._baseline_table()]
        if self.rounds:
            sections += ["## Rounds of generate", self._round_table()]
        if self.proposed:
            proposals = "; ".join(
                f"batch {batch}: `num_draft_states={states}`"
                for batch, states in self.proposed.items()
            )
            sections.append(
                _wrapped(
                    f"Most tokens a second on these prompts, {proposals}. `auto`, the default, "
                    "chooses in every round, by the costs below."
                )
            )
        if self.costs is not None:
            sections += ["## Costs of rounds", self._costs()]
        if self.failed:
            verdict = f"**Failed: {'; '.join(self.failed)}.**"
        else:
            verdict = f"All {sum(check.ok is True for check in self.checks)} checks passed."
        return "\n\n".join([*sections, _wrapped(verdict)])

    def _costs(self) -> str:
        assert self.costs is not None
        note = (
            "Milliseconds of a forward by its number of states, as drafts by `auto` take them: "
            "set `model.generation_config.round_costs` to this dict and save the config. Without "
            "it, `auto` goes by costs that are predicted for the device."
        )
        lines = []
        for name, costs in self.costs.to_dict().items():
            lines.append(f"  {json.dumps(name)}: {json.dumps(costs)}")
        table = ",\n".join(lines)
        return f"{_wrapped(note)}\n\n```json\n{{\n{table}\n}}\n```"

    def _check_table(self) -> list[str]:
        """Format the checks as a table, followed by notes. A note that does not fit beside its
        check is printed below the table, once for all checks that have the same note."""
        rows, below = [], dict[str, list[str]]()
        for check in self.checks:
            row = [
                check.name,
                check.verdict,
                "" if check.difference is None else f"{check.difference:.2g}",
                check.note,
            ]
            if len(f"| {' | '.join(row)} |") > WIDTH:
                below.setdefault(check.note, []).append(check.name)
                row[-1] = "see below"
            rows.append(row)
        notes = [_wrapped(f"{', '.join(names)}: {note}") for note, names in below.items()]
        return [markdown_table(["check", "", "largest difference", ""], rows), *notes]

    def _replay_table(self) -> str:
        rows = []
        for replayed in self.replays:
            row = [str(replayed.rows), str(replayed.prefix), str(replayed.states)]
            gaps = "" if replayed.busy is None else _milliseconds(replayed.wall - replayed.busy)
            row += [_milliseconds(replayed.wall), _milliseconds(replayed.floor), gaps]
            parts = {part.name: part for part in replayed.parts}
            for name in PARTS:
                row.append(_milliseconds(parts[name].wall) if name in parts else "")
            rows.append(row)
        head = ["rows", "prefix", "K", "round", "floor", "gaps", *PARTS[:-1], "its pick"]
        note = (
            "In ms, medians of the same states scored again and again; a round with one pass of "
            "the head. *floor*: the least that bytes and products take at the rates above. "
            "*gaps*: in which no kernel ran."
        )
        return f"{markdown_table(head, rows)}\n\n{_wrapped(note)}"

    def _baseline_table(self) -> str:
        rows = []
        for step in self.baselines:
            rows.append([str(step.rows), str(step.prefix), step.name, _milliseconds(step.seconds)])
        table = markdown_table(["rows", "prefix", "way", "step, ms"], rows)
        note = "A step is the forward of a block and its pick: what a round with K = 1 does."
        return f"{table}\n\n{_wrapped(note)}"

    def _round_table(self) -> str:
        single_state = {
            timing.batch: timing.seconds for timing in self.rounds if timing.states == 1
        }
        rows = []
        for timing in self.rounds:
            pays = ""
            if timing.states != 1 and timing.batch in single_state:
                pays = f"{timing.seconds / single_state[timing.batch]:.2f}"
            row = [str(timing.batch), str(timing.states), _milliseconds(timing.seconds)]
            row += [_milliseconds(timing.host_seconds), pays]
            if self.proposed:
                row += [f"{timing.tokens_per_forward:.2f}", f"{timing.tokens_per_second:.0f}"]
            else:
                row += ["", ""]
            rows.append(row)
        head = ["rows", "K", "round, ms", "host, ms"]
        head += ["pays from", "tokens a forward", "a second"]
        note = (
            "*host*: what drafts, acceptance and writing take of a round, by the clock. *pays "
            "from*: K states are faster than K = 1 if they make more than this many times its "
            "tokens a forward."
        )
        return f"{markdown_table(head, rows)}\n\n{_wrapped(note)}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _wrapped(text: str) -> str:
    """Wrap a paragraph."""
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def machine_of(device: torch.device) -> dict[str, str]:
    """Return a dict from labels to the versions of packages and the device's name."""
    machine = {
        "mrp": __version__,
        "python, torch, transformers": f"{platform.python_version()}, {torch.__version__}, "
        f"{transformers.__version__}",
        "triton": "none",
    }
    if triton is not None:
        interpreted = bool(triton.knobs.runtime.interpret)
        machine["triton"] = triton.__version__ + ", interpreted" * interpreted
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        machine["device"] = torch.cuda.get_device_name(device)
        machine["CUDA, capability"] = f"{torch.version.cuda}, {capability}"
        return machine
    processor = platform.machine()
    if device.type != "cpu":
        processor = f"{device}, {processor}"
    machine["device"] = f"{processor}, threads: {torch.get_num_threads()}"
    return machine


def examine(options: DoctorOptions) -> Report:
    """Load the model, check it and time its rounds. Print the result of each check on standard
    error as soon as it is known. A check that fails does not raise an error, and an error during
    timing becomes a failed check.

    Raises:
        ValueError: if the checkpoint or adapter is damaged or of another kind, the tokenizer cannot
            be loaded, the device does not exist, or `options.random` is no published size.
        OSError: if the checkpoint does not exist.
    """
    device = checked_device(options.device)
    report = Report(machine_of(device))
    tokenizer: PreTrainedTokenizerBase | None = None
    if options.random is not None:
        dtype = options.dtype
        if dtype is None or dtype == "auto":
            dtype = "float32" if device.type == "cpu" else "bfloat16"
        name = f"random weights of {options.random.upper()}"
        model = random_model(published_config(options.random), getattr(torch, dtype), device)
    else:
        name = options.model
        model = load_model(
            options.model, options.dtype, str(device), options.revision, options.backbone
        )
        tokenizer = tokenizer_of(options)
    shape = model.config
    layers = (
        f"{shape.num_hidden_layers} layers of {shape.hidden_size}, vocabulary {shape.vocab_size}"
    )
    report.machine |= {
        "model": name,
        "layers": layers,
        "blocks, dtype": f"{shape.block_size}, {str(model.dtype)[6:]}",
    }

    def gather(checks: Iterable[Check]) -> None:
        for check in checks:
            report.checks.append(check)
            print(f"{check.name}: {check.verdict.strip('*')}", file=sys.stderr, flush=True)

    on_cuda = device.type == "cuda"
    batches = CUDA_BATCHES if on_cuda else BATCHES
    prefixes = CUDA_PREFIXES if on_cuda else PREFIXES
    batches = batches if options.batch is None else options.batch
    prefixes = prefixes if options.prefix is None else options.prefix

    def timed() -> Check:
        if batches and options.states:
            _time_parts(report, model, options, batches, prefixes)
        for batch in batches:
            report.rounds += time_rounds(
                model,
                inputs_of(model, tokenizer, batch, prefixes[0]),
                options.states,
                options.turns,
            )
        if batches and options.states:
            states = COSTED_STATES[: None if on_cuda else -2]
            prompt = inputs_of(model, tokenizer, 1, prefixes[0])
            report.costs = measure_costs(model, prompt, states)
        return Check("times", True)

    gather(check_weights(model))
    gather(check_noise(device))
    gather(check_kernels(model))
    gather(check_log_odds(model, prefixes[0]))
    inputs = inputs_of(model, tokenizer, ROWS, prefixes[0])
    gather(check_fast_paths(model, inputs, STATES))
    widened = device.type == "cpu" and model.num_parameters() <= WIDENED
    gather(check_drafts(copy.deepcopy(model).double() if widened else model, inputs, STATES))
    if not (times := checked("times", timed)).ok:  # checks are printed even if timing fails
        gather([times])
    report.proposed = proposed(report.rounds) if tokenizer is not None else {}
    if on_cuda:
        gibibytes = torch.cuda.max_memory_allocated(device) / 2**30
        report.machine["peak memory"] = f"{gibibytes:.1f} GiB"
    return report


def _time_parts(
    report: Report,
    model: MRPForCausalLM,
    options: DoctorOptions,
    batches: Sequence[int],
    prefixes: Sequence[int],
) -> None:
    """Measure the device's rates, and time replayed rounds and baselines; add the results to the
    report."""
    rates: Device = measure_device(model.device, model.dtype)
    bandwidth = rates.bandwidth * model.dtype.itemsize / BYTES
    report.machine["copies, products"] = (
        f"{bandwidth / 1e9:.3g} GB/s, {rates.peak / 1e12:.3g} TFLOP/s"
    )
    for batch in batches:
        for prefix in prefixes:
            report.replays += replay_rounds(model, rates, batch, prefix, options.states)
            if options.baselines:
                compiled = model.device.type == "cuda"
                for name, seconds in time_baselines(model, batch, prefix, compiled):
                    report.baselines.append(Baseline(name, batch, prefix, seconds))
