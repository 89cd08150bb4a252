"""`mrp doctor`: the machine, the checks, the times, and one page that tells all of it."""

import copy
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from modeling_mrp import __version__
from modeling_mrp.kernels.dispatch import KERNEL_DTYPES, check_close, kernels_usable, relative_error, triton
from modeling_mrp.kernels.pick import PICK
from modeling_mrp.kernels.round_layers import ROTATED, ROUND_ATTENTION, SUM_AND_NORM
from modeling_mrp.modeling import MRPForCausalLM

from ..loading import load_model, load_tokenizer
from ..publish.card import markdown_table
from .kernels import compared, samples_of
from .options import DoctorOptions
from .report import Check
from .rounds import Timed, proposed, time_rounds
from .texts import check_drafts, check_ways, inputs_of, published_config, random_model

# Rows of the texts that are compared, and the states of their rounds; parameters up to which a CPU compares in float64.
ROWS, STATES, WIDENED = 3, 8, 500_000_000
KERNELS = (PICK, ROUND_ATTENTION, SUM_AND_NORM, ROTATED)


@dataclass
class Report:
    """What was found.

    Attributes:
        machine: Versions, device and model.
        checks: All of them.
        rounds: Times by batch and K.
        proposed: By batch, the K that made the most tokens a second; none where the weights are random.
    """

    machine: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    rounds: list[Timed] = field(default_factory=list)
    proposed: dict[int, int] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """The checks that failed, by name."""
        return [check.name for check in self.checks if check.ok is False]

    def page(self) -> str:
        """All of it as Markdown."""
        parts = ["# mrp doctor", markdown_table(["", ""], self.machine.items())]
        rows = [
            [check.name, check.verdict, "" if check.difference is None else f"{check.difference:.2g}", check.note]
            for check in self.checks
        ]
        parts += ["## Checks", markdown_table(["check", "", "largest difference", ""], rows)]
        if self.rounds:
            parts += ["## Rounds", self._times()]
        said = [f"batch {batch}: `num_draft_states={states}`" for batch, states in self.proposed.items()]
        said = said and [f"Most tokens a second on these prompts, {'; '.join(said)}. `auto`, the default, finds it by trying."]
        counted = sum(check.ok is True for check in self.checks)
        verdict = f"**Failed: {'; '.join(self.failed)}.**" if self.failed else f"All {counted} checks passed."
        return "\n\n".join([*parts, *said, verdict])

    def _times(self) -> str:
        alone = {one.batch: one.seconds for one in self.rounds if one.states == 1}
        rows = []
        for one in self.rounds:
            base = alone.get(one.batch)
            speed = [f"{one.tokens_per_forward:.2f}", f"{one.tokens_per_second:.0f}"] if self.proposed else ["", ""]
            pays = "" if base is None or one.states == 1 else f"{one.seconds / base:.2f}"
            rows.append([str(one.batch), str(one.states), f"{1e3 * one.seconds:.2f}", pays, *speed])
        head = ["rows", "K", "round, ms", "pays from", "tokens a forward", "tokens a second"]
        return (
            f"{markdown_table(head, rows)}\n\n*pays from*: the width is faster than K = 1 if it makes more than so many times "
            "its tokens a forward."
        )


def machine_of(device: torch.device) -> dict[str, str]:
    """Collect versions and the device."""
    cuda = device.type == "cuda"
    return {
        "mrp": __version__,
        "python, torch, transformers": f"{platform.python_version()}, {torch.__version__}, {transformers.__version__}",
        "triton": "none" if triton is None else triton.__version__ + ", interpreted" * bool(triton.knobs.runtime.interpret),
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()}, threads: {torch.get_num_threads()}",
        **({"CUDA, capability": f"{torch.version.cuda}, {torch.cuda.get_device_capability(device)}"} if cuda else {}),
    }


def check_weights(model: MRPForCausalLM) -> Iterator[Check]:
    """Look for numbers that are not finite."""
    for part in ("backbone", *["head"] * model.config.has_head):
        named = [pair for pair in model.named_parameters() if pair[0].startswith("mrp_head.") == (part == "head")]
        wrong = [name for name, weight in named if not weight.isfinite().all()]
        note = f"not finite: {', '.join(wrong[:3])}" if wrong else f"{sum(weight.numel() for _, weight in named):,} numbers"
        yield Check(f"weights of the {part}", not wrong, None, note)


def check_kernels(model: MRPForCausalLM) -> Iterator[Check]:
    """Compare each kernel with its PyTorch twin on samples as wide as the model."""
    weight, config = model.lm_head.weight.detach(), model.config
    like = weight if weight.dtype in KERNEL_DTYPES else weight.float()
    if not (kernels_usable(like.device, like.dtype) or (triton is not None and triton.knobs.runtime.interpret)):
        why = "an NVIDIA GPU, triton and 16 or 32 bits are needed, or on a CPU TRITON_INTERPRET=1"
        yield from (Check(f"kernel {kernel.name}", None, None, why) for kernel in KERNELS)
        return
    for kernel, samples in samples_of(config, like).items():
        try:
            pairs = [pair for given in samples for pair in compared(kernel, given)]
            for pair in pairs:
                check_close("its results differ from PyTorch's", *pair)
            yield Check(f"kernel {kernel.name}", True, max(relative_error(*pair) for pair in pairs))
        except Exception as error:  # the others are checked all the same
            yield Check.raised(f"kernel {kernel.name}", error)


def examine(options: DoctorOptions, tell: Callable[[str], None] = lambda text: None) -> Report:
    """Load the model, check it and time it.

    Raises:
        ValueError, OSError: as from loading a model.
    """
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    report = Report(machine_of(device))
    tokenizer: PreTrainedTokenizerBase | None = None
    if options.random is not None:
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        name, dtype = (
            f"random weights of {options.random.upper()}",
            options.dtype if options.dtype not in (None, "auto") else dtype,
        )
        model = random_model(published_config(options.random), getattr(torch, dtype), device)
    else:
        name, model = options.model, load_model(options.model, options.dtype).to(device)
        tokenizer = load_tokenizer(options.tokenizer or options.model)
    shape = model.config
    layers = f"{shape.num_hidden_layers} layers of {shape.hidden_size}, vocabulary {shape.vocab_size}"
    report.machine["model"] = f"{name}: {layers}, blocks of {shape.block_size}, {str(model.dtype)[6:]}"

    def gather(title: str, checks: Iterable[Check]) -> None:
        tell(title)
        for check in checks:
            report.checks.append(check)
            tell(f"  {check.name}: {check.verdict.strip('*')}")

    gather("weights", check_weights(model))
    gather("kernels", check_kernels(model))
    inputs = inputs_of(model, tokenizer, ROWS, options.prefix)
    gather("graphs", check_ways(model, inputs, STATES))
    widened = device.type == "cpu" and model.num_parameters() <= WIDENED
    gather("drafts", check_drafts(copy.deepcopy(model).double() if widened else model, inputs, STATES))
    try:
        for batch in options.batch:
            tell(f"rounds of {batch} rows")
            inputs = inputs_of(model, tokenizer, batch, options.prefix)
            report.rounds += time_rounds(model, inputs, options.states, options.turns)
        report.proposed = proposed(report.rounds) if tokenizer is not None else {}
    except Exception as error:  # what was checked is told all the same
        report.checks.append(Check.raised("times", error))
    return report


def main(options: DoctorOptions) -> bool:
    """Print the page; return whether no check failed."""
    report = examine(options, partial(print, file=sys.stderr, flush=True))
    print(report.page())
    return not report.failed


__all__: list[Any] = ["Report", "examine", "main"]
