"""Parts of a session that time rounds and texts."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from mrp_trainer.doctor.baselines import time_baselines
from mrp_trainer.doctor.checks import decode, inputs_of
from mrp_trainer.doctor.replays import measure_device, replay_rounds
from mrp_trainer.doctor.rounds import call_of, measure_costs
from mrp_trainer.evaluate.roofline import Device
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.loop import Decoder, draft_amount
from modeling_mrp.networks.predicted import predicted_costs
from modeling_mrp.rules.costs import interpolated
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.gain import Amount, DraftAmount, Drafts
from modeling_mrp.rules.state import PendingReveal, Row, Scores

from ..common import now
from ..forced import force
from .session import Session

WIDTHS = (1, 4, 8)
# Chance that a draft is right if all before it are: 2.7 tokens a round of K = 4, as published.
ACCEPTANCE = 0.75
PROFILED = 24  # new tokens of a profiled call


def _device(session: Session, model: MRPForCausalLM) -> Device:
    return measure_device(session.device, model.dtype)


def time_rounds(
    session: Session, name: str, rows: Sequence[int], prefix: int, widths: Sequence[int] = WIDTHS
) -> None:
    """Time the parts of rounds of a random model, each beside its floor."""
    model = session.random(name)
    rates = _device(session, model)
    for count in rows:
        for replayed in replay_rounds(model, rates, count, prefix, widths):
            parts = {}
            for part in replayed.parts:
                parts[part.name.replace("'s", "").replace(" ", "_")] = 1e3 * part.wall
            busy = None if replayed.busy is None else 1e3 * replayed.busy
            fields: dict[str, Any] = {
                "round_ms": 1e3 * replayed.wall,
                "floor_ms": 1e3 * replayed.floor,
            }
            fields |= {"busy_ms": busy, **parts}
            shape = {"model": name, "rows": count, "prefix": prefix, "K": replayed.states}
            session.line("Parts of a round", **shape, **fields)
            if session.left < 0:
                return
    _peak(session, name)


def _peak(session: Session, name: str) -> None:
    if session.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(session.device) / 2**30
        session.line("Peak of memory", of=name, GiB=peak)


def _prefix(session: Session, length: int) -> int:
    return 32 if session.small else length


def rounds(session: Session) -> None:
    """Rounds of random 4B weights behind 512 tokens."""
    time_rounds(session, "4B", (1, 4) if session.small else (1, 4, 16), _prefix(session, 512))


def long_prefix(session: Session) -> None:
    """The same behind 4,096 tokens."""
    time_rounds(session, "4B", (1, 4), _prefix(session, 4096), (1, 4))


def larger(session: Session) -> None:
    """Rounds of random 8B weights."""
    time_rounds(session, "8B", (1, 4), _prefix(session, 512))


def profile_of(session: Session, rows: int) -> None:
    """List the kernels of drafted rounds by what they take, and what the host waits for."""
    model = session.random("4B")
    inputs = inputs_of(model, None, rows, _prefix(session, 512))
    mode: dict[str, Any] = {"decoding": "mrp_spec", "target": "static", "num_draft_states": 4}
    mode |= {"max_new_tokens": PROFILED}
    for _ in range(1 if session.small else 3):
        decode(model, inputs, **mode)
    activities = [ProfilerActivity.CPU]
    if session.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch_profile(activities=activities) as profiler:
        out = decode(model, inputs, **mode)
    count = sum(out.stats.forwards[role] for role in ("denoise", "verify"))
    events = list(profiler.key_averages())
    on_device = [event for event in events if event.self_device_time_total]
    by_time = sorted(on_device, key=lambda event: -event.self_device_time_total)
    table = f"Kernels of a round, {rows} rows, K = 4, random 4B"
    launches = sum(event.count for event in on_device)
    total = sum(event.self_device_time_total for event in on_device)
    session.line(table, kernel="all", launches=launches / count, us=total / count)
    for event in by_time[:20]:
        fields = {"launches": event.count / count, "us": event.self_device_time_total / count}
        session.line(table, kernel=event.key[:70], **fields)
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total):
        if event.key.startswith("cuda") or (session.small and event.key.startswith("aten::copy")):
            fields = {"calls": event.count / count, "us": event.self_cpu_time_total / count}
            session.line(f"Calls of the driver in a round, {rows} rows", call=event.key, **fields)


def profile(session: Session) -> None:
    """See `profile_of`; one row and four."""
    for rows in (1, 4):
        profile_of(session, rows)


class Forced(Decoder):
    """A decoder in which drafts are right by the toss of a seeded coin.

    Attributes:
        chance: That a draft is right if all before it are.
        coin: The coin.
    """

    chance = ACCEPTANCE
    coin = random.Random(0)

    def accept(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        scores: Sequence[Sequence[Scores]],
    ) -> list[PendingReveal | None]:
        """See `Decoder.accept`."""
        for row, nodes, row_scores in zip(rows, drafts, scores, strict=True):
            force(nodes, row_scores, row.mask_id, self.chance, self.coin)
        return super().accept(rows, drafts, scores)


class Noted:
    """A `DraftAmount` that counts the amounts it decided."""

    def __init__(self, amount: DraftAmount) -> None:
        self.amount = amount
        self.chosen: Counter[tuple[int, int]] = Counter()
        self.outline = amount.outline

    def plan(self, drafts: Drafts) -> Amount:
        """See `DraftAmount`."""
        amount = self.amount.plan(drafts)
        self.chosen[amount.states, amount.passes] += 1
        return amount

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """See `DraftAmount`."""
        return self.amount.cut(amount, drafts)

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """See `DraftAmount`."""
        self.amount.learn(amount, outlines, drafts)


@torch.inference_mode()
def forced_text(
    session: Session, model: MRPForCausalLM, rows: int, states: int | str, tokens: int
) -> None:
    """Decode a batch whose drafts are right by a coin, and time it: seconds a round, tokens a
    second, and the amounts of drafting."""
    inputs = inputs_of(model, None, rows, _prefix(session, 512))
    mode: dict[str, Any] = {"decoding": "static", "max_new_tokens": tokens}
    if states != 1:
        mode |= {"decoding": "mrp_spec", "target": "static", "num_draft_states": states}
    seconds = 0.0
    rounds = 0
    chosen: Counter[tuple[int, int]] = Counter()
    for _ in range(2 if session.small else 3):  # the last one counts: all is recorded by then
        with call_of(model, inputs, **mode) as (decoding, networks, batch):
            amount = Noted(draft_amount(decoding, networks.picker, model.config, None))
            decoder = Forced(decoding, networks, cast(DraftAmount, amount))
            start = now(session.device)
            decoder.decode(batch, [0] * rows)
            seconds = now(session.device) - start
            rounds = networks.forwards["denoise"]
            chosen = amount.chosen
    amounts = ", ".join(f"K={k} passes={p}: {n}" for (k, p), n in chosen.most_common(4))
    fields = {
        "rounds": rounds,
        "round_ms": 1e3 * seconds / rounds,
        "tokens_a_second": rows * tokens / seconds,
    }
    fields["tokens_a_round_and_row"] = tokens / rounds
    session.line("Texts with forced acceptance", rows=rows, K=states, **fields, amounts=amounts)


def texts(session: Session) -> None:
    """Texts of random 4B weights whose drafts are accepted as often as published; `auto` over 600
    rounds."""
    model = session.random("4B")
    for rows in (1, 4) if session.small else (1, 4, 16):
        for states in (1, 4, 8, "auto"):
            tokens = 32 if session.small else 256
            if states == "auto" and rows == 1 and not session.small:
                tokens = 1600
            forced_text(session, model, rows, states, tokens)
            if session.left < 0:
                return
        model.release_graphs()


def costs(session: Session) -> None:
    """Measured costs of forwards, as `auto` takes them, beside those that are predicted."""
    model = session.random("4B")
    inputs = inputs_of(model, None, 1, _prefix(session, 512))
    counts = (1, 2, 8) if session.small else (1, 2, 4, 6, 8, 16, 32)
    measured = measure_costs(model, inputs, counts, 2 if session.small else 5)
    predicted = predicted_costs(model.config, model.lm_head.weight)
    for index, states in enumerate(measured.states):
        expected = interpolated(predicted.states, predicted.backbone, states)
        fields = {"backbone_ms": measured.backbone[index], "predicted_ms": 1e3 * expected}
        if measured.head:
            expected = interpolated(predicted.states, predicted.head, states)
            fields |= {"head_ms": measured.head[index], "predicted_head_ms": 1e3 * expected}
        session.line("Costs of forwards, random 4B", states=states, **fields)
    session.line("Cost table", round_costs=str(measured.to_dict()))


def embedded(session: Session) -> None:
    """Texts of the embedded checkpoint, alone and drafted."""
    model = session.embedded(torch.float32)
    prompts = inputs_of(model, None, 16, 40)
    for rows in (1, 4) if session.small else (1, 16):
        inputs = {name: tensor[:rows] for name, tensor in prompts.items()}
        for target in ("static", "dynamic"):
            for states in (1, 4, 8, "auto"):
                mode: dict[str, Any] = {"decoding": target, "eos_token_id": None}
                if states != 1:
                    mode |= {"decoding": "mrp_spec", "target": target, "num_draft_states": states}
                mode["max_new_tokens"] = 32 if session.small else 128
                for _ in range(1 if session.small else 3):
                    start = now(session.device)
                    out = decode(model, inputs, **mode)
                    seconds = now(session.device) - start
                count = sum(out.stats.forwards[role] for role in ("denoise", "verify"))
                tokens = rows * mode["max_new_tokens"]
                fields = {"rounds": count, "round_ms": 1e3 * seconds / count}
                fields["tokens_a_second"] = tokens / seconds
                session.line("Embedded checkpoint", rows=rows, target=target, K=states, **fields)
                if session.left < 0:
                    return
        model.release_graphs()


def baselines(session: Session) -> None:
    """A step of plain transformers, with a `DynamicCache`, and compiled with a `StaticCache`."""
    model = session.random("4B")
    for rows in (1, 4):
        prefix = _prefix(session, 512)
        for name, seconds in time_baselines(model, rows, prefix, not session.small):
            fields = {"rows": rows, "prefix": prefix, "step_ms": 1e3 * seconds}
            session.line("Steps of plain transformers, random 4B", way=name, **fields)
