"""The report of `mrp doctor`: machine, checks and times on one page."""

import copy
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from textwrap import fill

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from modeling_mrp import __version__
from modeling_mrp.kernels.dispatch import triton

from ..loading import checked_device, load_model, tokenizer_of
from ..publish.card import markdown_table
from .checks import (
    Check,
    check_drafts,
    check_kernels,
    check_noise,
    check_ways,
    check_weights,
    checked,
    inputs_of,
    published_config,
    random_model,
)
from .options import DoctorOptions
from .rounds import Timed, proposed, time_rounds

# Rows of compared texts; states per row and round; and the most parameters of a model that a CPU
# compares in float64.
ROWS, STATES, WIDENED = 3, 8, 500_000_000
WIDTH = 80


@dataclass
class Report:
    """The findings of `mrp doctor`: versions, device and model; checks; times for each batch and K;
    and for each batch the K with the most tokens per second (`proposed`), empty for random
    weights."""

    machine: dict[str, str]
    checks: list[Check] = field(default_factory=list)
    rounds: list[Timed] = field(default_factory=list)
    proposed: dict[int, int] = field(default_factory=dict)

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
            *self._checked(),
        ]
        if self.rounds:
            sections += ["## Rounds", self._times()]
        proposals = [
            f"batch {batch}: `num_draft_states={states}`" for batch, states in self.proposed.items()
        ]
        proposals = proposals and [
            f"Most tokens a second on these prompts, {'; '.join(proposals)}. `auto`, the default, "
            "finds it by trying."
        ]
        counted = sum(check.ok is True for check in self.checks)
        verdict = (
            f"**Failed: {'; '.join(self.failed)}.**"
            if self.failed
            else f"All {counted} checks passed."
        )
        return "\n\n".join([*sections, *map(_filled, proposals), _filled(verdict)])

    def _checked(self) -> list[str]:
        """Format the checks as a table; a note that does not fit beside its check stands below,
        once for all that have it."""
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
        notes = [_filled(f"{', '.join(names)}: {note}") for note, names in below.items()]
        return [markdown_table(["check", "", "largest difference", ""], rows), *notes]

    def _times(self) -> str:
        single_state = {
            timing.batch: timing.seconds for timing in self.rounds if timing.states == 1
        }
        rows = []
        for timing in self.rounds:
            base = single_state.get(timing.batch)
            speed = (
                [f"{timing.tokens_per_forward:.2f}", f"{timing.tokens_per_second:.0f}"]
                if self.proposed
                else ["", ""]
            )
            pays = "" if base is None or timing.states == 1 else f"{timing.seconds / base:.2f}"
            rows.append(
                [str(timing.batch), str(timing.states), f"{1e3 * timing.seconds:.2f}", pays, *speed]
            )
        head = ["rows", "K", "round, ms", "pays from", "tokens a forward", "tokens a second"]
        pays = (
            "*pays from*: K states are faster than K = 1 if they make more than this many times "
            "its tokens a forward."
        )
        return f"{markdown_table(head, rows)}\n\n{_filled(pays)}"


def _filled(text: str) -> str:
    """Wrap a paragraph."""
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def machine_of(device: torch.device) -> dict[str, str]:
    """Collect the versions of packages, and the device's name."""
    cuda, processor = (
        device.type == "cuda",
        platform.machine() if device.type == "cpu" else f"{device}, {platform.machine()}",
    )
    return {
        "mrp": __version__,
        "python, torch, transformers": f"{platform.python_version()}, {torch.__version__}, "
        f"{transformers.__version__}",
        "triton": "none"
        if triton is None
        else triton.__version__ + ", interpreted" * bool(triton.knobs.runtime.interpret),
        "device": torch.cuda.get_device_name(device)
        if cuda
        else f"{processor}, threads: {torch.get_num_threads()}",
        **(
            {
                "CUDA, capability": f"{torch.version.cuda}, "
                f"{torch.cuda.get_device_capability(device)}"
            }
            if cuda
            else {}
        ),
    }


def examine(options: DoctorOptions) -> Report:
    """Load the model, check it and time its rounds; report progress on standard error. Errors are
    those of loading a model."""
    device = checked_device(options.device)
    report = Report(machine_of(device))
    tokenizer: PreTrainedTokenizerBase | None = None
    if options.random is not None:
        dtype = (
            options.dtype
            if options.dtype not in (None, "auto")
            else "float32"
            if device.type == "cpu"
            else "bfloat16"
        )
        name = f"random weights of {options.random.upper()}"
        model = random_model(published_config(options.random), getattr(torch, dtype), device)
    else:
        name, model = (
            options.model,
            load_model(
                options.model, options.dtype, str(device), options.revision, options.backbone
            ),
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

    def timed() -> Check:
        for batch in options.batch:
            report.rounds += time_rounds(
                model,
                inputs_of(model, tokenizer, batch, options.prefix),
                options.states,
                options.turns,
            )
        return Check("times", True)

    gather(check_weights(model))
    gather(check_noise(device))
    gather(check_kernels(model))
    inputs = inputs_of(model, tokenizer, ROWS, options.prefix)
    gather(check_ways(model, inputs, STATES))
    widened = device.type == "cpu" and model.num_parameters() <= WIDENED
    gather(check_drafts(copy.deepcopy(model).double() if widened else model, inputs, STATES))
    if not (times := checked("times", timed)).ok:  # checks are printed even if timing fails
        gather([times])
    report.proposed = proposed(report.rounds) if tokenizer is not None else {}
    return report
