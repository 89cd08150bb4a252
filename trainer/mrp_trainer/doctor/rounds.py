"""Timings of rounds for each number of rows and each K (the number of states per row and round),
and the choice of the K that gives the most tokens per second."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from modeling_mrp.generate.generation import laid_out
from modeling_mrp.generate.loop import Decoder, Mode, draft_amount
from modeling_mrp.generate.options import resolved
from modeling_mrp.kernels.dispatch import AUTOMATIC, PYTORCH
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Hidden, Networks, networks_for
from modeling_mrp.networks.picker import Picker
from modeling_mrp.rules.costs import WIDTHS, RoundCosts
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Counts, Row, Scores, State

from .checks import TOKENS, WARM_UPS, decode, drafters

# New tokens of the shorter of two timed calls, whose difference is the time of further rounds.
SHORT = 16
# Number of forwards of a shape before it is timed: these are run eagerly, recorded and compared.
RECORDINGS = 5


@dataclass(frozen=True)
class Timed:
    """Timings of rounds with `batch` rows of `states` states each, as medians over repetitions.

    Attributes:
        batch: Number of rows.
        states: Number of states per row; 1 means the target without drafts.
        seconds: Time of a round.
        tokens_per_forward: Tokens per backbone forward, in a whole call with its prompts.
        tokens_per_second: Tokens per second, in a whole call with its prompts.
        host_seconds: The part of a round's time that the host takes for its decisions.
    """

    batch: int
    states: int
    seconds: float
    tokens_per_forward: float
    tokens_per_second: float
    host_seconds: float = 0.0


def time_rounds(
    model: MRPForCausalLM, inputs: dict[str, Tensor], state_counts: Sequence[int], repetitions: int
) -> Iterator[Timed]:
    """Time rounds on the batch `inputs` of `generate`. Yield a `Timed` for each number of states
    per row in `state_counts`, where 1 means the target without drafts. Each of the `repetitions`
    goes through all numbers, and the results are medians over the repetitions.

    The time of a round is the difference in seconds between a long and a short call, divided by
    their difference in rounds, so that the time of the prompts cancels out. Drafts are made for the
    target in the model's generation config, or else for `static`.
    """
    target = model.generation_config.target or "static"
    measured: dict[int, list[tuple[float, ...]]] = {states: [] for states in state_counts}
    for repetition in range(-WARM_UPS if model.device.type != "cpu" else 0, repetitions):
        for states in state_counts:
            mode: dict[str, Any] = {"decoding": target}
            if states != 1:
                mode |= {"decoding": drafters(model)[0], "target": target}
                mode |= {"num_draft_states": states}
            without_eos = {**mode, "eos_token_id": None}
            short, short_output = _timed_decode(model, inputs, max_new_tokens=SHORT, **without_eos)
            long, long_output = _timed_decode(model, inputs, max_new_tokens=TOKENS, **without_eos)
            seconds, out = _timed_decode(model, inputs, **mode)
            if repetition >= 0:
                tokens = int((out.reveal_step >= 0).sum())
                rounds = max(1, _round_count(long_output) - _round_count(short_output))
                in_round = (long - short) / rounds
                per_forward = tokens / int(out.stats.row_forwards.sum())
                host = time_host(model, inputs, **mode)
                measured[states].append((in_round, per_forward, tokens / seconds, host))
    for states in state_counts:
        yield Timed(
            len(inputs["input_ids"]),
            states,
            *map(statistics.median, zip(*measured[states], strict=True)),
        )
    model.release_graphs()


def _timed_decode(
    model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any
) -> tuple[float, Any]:
    start = now(model.device)
    out = decode(model, inputs, **options)
    return now(model.device) - start, out


def now(device: torch.device) -> float:
    """Wait for a device to finish; return the clock's time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _round_count(out: Any) -> int:
    """Count the rounds of an output: its backbone forwards without those of the prompt."""
    return int(out.stats.forwards["denoise"] + out.stats.forwards["verify"])


def proposed(timed: Sequence[Timed]) -> dict[int, int]:
    """Return, for each number of rows, the K (the number of states per row and round,
    `num_draft_states`) that gives the most tokens per second."""
    by_speed = sorted(timed, key=lambda timing: (timing.batch, timing.tokens_per_second))
    return {timing.batch: timing.states for timing in by_speed}


class _Stopwatch:
    """A wrapper of networks that adds the time spent in their methods to `seconds`. The rest of a
    call's time is the host's."""

    def __init__(self, networks: Networks) -> None:
        self.networks = networks
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.networks, name)
        if not callable(value) or isinstance(value, Picker):
            return value

        def timed(*arguments: Any, **named: Any) -> Any:
            start = now(self.networks.device)
            result = value(*arguments, **named)
            self.seconds += now(self.networks.device) - start
            return result

        return timed


@contextmanager
def call_of(
    model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any
) -> Iterator[tuple[Mode, Networks, list[Row]]]:
    """A context manager that sets up a call of `generate` with `options`, without decoding. It
    yields the call's mode, its networks with an empty cache, and its rows, whose prompts are not
    computed yet."""
    options = {"max_new_tokens": TOKENS, "eos_token_id": None, **options}
    config, _ = resolved(model, None, options)
    prompts = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        prompts.append(ids[mask.bool()])
    mode = config.mode(model.config.block_size, len(prompts))
    limit = options["max_new_tokens"]
    rows = laid_out(prompts, None, limit, config, 0, model.config, None)
    for row in rows:
        row.counts = Counts(mode.width, mode.drafting is not None)
    weight = model.lm_head.weight
    shortlist = 0 if mode.drafting is None else mode.drafting.listed(len(weight), False)
    picker = Picker(
        weight,
        model.config.mask_token_id,
        entropy=mode.rule.needs_entropy,
        candidates=shortlist,
        shortlist=shortlist,
        dispatch=AUTOMATIC if AUTOMATIC.allows("those of the pick", weight) else PYTORCH,
    )
    length = max(len(row.text) for row in rows)
    size = (len(rows), length, mode.width * model.config.block_size)
    with networks_for(model, picker, None, None, *size, mode.uses_head) as networks:
        networks.cache.empty()
        yield mode, networks, rows


@torch.inference_mode()
def time_host(model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any) -> float:
    """Return the seconds per round that the host takes for its decisions in `generate`: drafts,
    acceptance and the writing of reveals. `options` are those of `generate`."""
    with call_of(model, inputs, **options) as (mode, networks, rows):
        watch = _Stopwatch(networks)
        amount = draft_amount(mode, networks.picker, model.config, None)
        decoder = Decoder(mode, cast(Networks, watch), amount)
        start = now(model.device)
        decoder.decode(rows, [0] * len(rows))
        seconds = now(model.device) - start
    return (seconds - watch.seconds) / max(1, networks.forwards["denoise"])


@torch.inference_mode()
def measure_costs(
    model: MRPForCausalLM,
    inputs: dict[str, Tensor],
    state_counts: Sequence[int] = (1, 2, 3, 4, 6, 8, 16, 32),
    repetitions: int = 5,
) -> RoundCosts:
    """Measure the costs that the option `round_costs` holds, in milliseconds: a backbone forward
    and a head pass for each number of states, each with its picks, and the drafting of one state on
    the host. Without a head, there are no costs of head passes.

    Each forward is run on rows with the same prompt. Up to 8 states are in one row; more states are
    in rows of 8 states each. The cost is the least time of several runs. On a GPU, these come after
    the runs in which the forward may be recorded as a CUDA graph. A cost that is below that of
    fewer states is raised to it.

    Args:
        model: The model.
        inputs: `input_ids` [batch, length] and `attention_mask`. The first row is the prompt of the
            forwards. The cost on the host is measured by decoding all rows.
        state_counts: The numbers of states to measure, in increasing order, each of them at most 8
            or a multiple of 8.
        repetitions: Number of timed forwards for each number of states.
    """
    mode: dict[str, Any] = {"decoding": drafters(model)[0], "target": "static"}
    backbone = []
    head = []
    for states in state_counts:
        width = min(states, WIDTHS[-1])
        some = {name: tensor[:1].expand(states // width, -1) for name, tensor in inputs.items()}
        with call_of(model, some, **mode, num_draft_states=WIDTHS[-1]) as (_, networks, rows):
            scores = networks.prefill(rows, [0] * len(rows))
            forwards = (
                partial(_score, networks, rows, width),
                partial(_read, networks, rows, scores, width),
            )
            backbone.append(_least_milliseconds(forwards[0], model.device, repetitions))
            if model.mrp_head is not None:
                head.append(_least_milliseconds(forwards[1], model.device, repetitions))
    model.release_graphs()
    drafted = 4
    host = time_host(model, inputs, **mode, num_draft_states=drafted)
    host_of_state = 1e3 * host / (drafted * len(inputs["input_ids"]))
    return RoundCosts(
        tuple(state_counts), _rising(backbone), _rising(head), round(host_of_state, 4)
    )


def _score(networks: Networks, rows: Sequence[Row], width: int) -> None:
    """Score `width` copies of each row's state in one forward."""
    networks.score(rows, [[Node(row.state, -1, None)] * width for row in rows])


def _read(networks: Networks, rows: Sequence[Row], scores: Sequence[Scores], width: int) -> None:
    """Run the head over `width` copies of each row's state in one pass, and pick tokens."""
    asked: list[list[tuple[State, Hidden]]] = []
    states: list[tuple[Row, State]] = []
    candidates: list[Hidden | None] = []
    for row, row_scores in zip(rows, scores, strict=True):
        assert row_scores.hidden is not None
        asked.append([(row.state, row_scores.hidden)] * width)
        states += [(row, row.state)] * width
        candidates += [row_scores.candidates] * width
    outputs = [hidden for row in networks.head(rows, asked) for hidden in row]
    networks.sampler.estimate(states, outputs, candidates=candidates)


def _least_milliseconds(
    forward: Callable[[], None], device: torch.device, repetitions: int
) -> float:
    """Return the least time of a forward in milliseconds. Untimed forwards come first, so that it
    may be recorded."""
    times = []
    for repetition in range(-RECORDINGS, repetitions):
        start = now(device)
        forward()
        if repetition >= 0:
            times.append(now(device) - start)
    return 1e3 * min(times)


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """Round values, and raise each of them to at least the previous one, as more states never cost
    less."""
    rising: list[float] = []
    for value in values:
        rising.append(round(max([value, *rising[-1:]]), 3))
    return tuple(rising)
