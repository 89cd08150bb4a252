"""Rounds that are recorded whole and replayed with one launch: what is a register, and what a recording depends on.

A round is a function of a `Request` and a `DecodeState`, whose tensors lie in registers, of the task's numbers, which are in
the key of the registers, and of a `RoundPlan`, reduced to the kind of round. Attention reads on the device how much is
committed, so how long a text is plays no part. For each batch size there are so, at most: in `static` and the like, rounds
with a clean block and without; in speculation, these two for rows that cannot draft, one in which a late block catches up
alone, and the drafting round, once more for several head passes where at most one mask is left, and with
`num_draft_states="auto"` for each amount that is chosen. A drafting round always has room for all of its states, though
few masks may not let them be filled: what nobody fills is not valid. Below the compute-bound limit a forward takes no longer.

Not replayed as a whole are calls with logits processors or stopping criteria, which are the user's code, with truncation
other than top-k, top-p and min-p, and the remasking rule `reread`, which asks the device as it goes. Their forwards are
recorded one by one, and the rest of the round runs as it is.
"""

from collections.abc import Hashable
from dataclasses import replace

from ..runner.recorded import RecordedCache
from ..runner.runner import Runner
from .decode_state import SUMMARY, DecodeState, RoundPlan, summary
from .loop import Task, decode_round
from .sampling import Sampler, may_be_recorded


def replayable(task: Task) -> bool:
    """Tell whether a whole round of this task is tensor code and depends on nothing but registers and key."""
    sampler, refine = task.reader.sampler, task.mode.refine
    return (
        not (refine is not None and refine.asks_host)
        and task.stopping is None
        and sampler.processors is None
        and may_be_recorded(sampler.truncation)
    )


class RecordedRounds:
    """The rounds of one decode behind its prefill, recorded or replayed: a `Step` of `decode`.

    Args:
        recorded: Where the runner's cache is.
        runner: Runs the model.
        task: What is done.
        state: Where the decode stands.
    """

    def __init__(self, recorded: RecordedCache, runner: Runner, task: Task, state: DecodeState) -> None:
        reader = task.reader
        key = (
            *(task.mode, reader.bars_eos, runner.with_round_masks),
            *(_sampling(sampler) for sampler in (reader.sampler, reader.drafter)),
        )
        self.runner, self.registers = runner, recorded.registers_for(key, (reader.request, state))
        request, self.state = self.registers.tree
        self.task = replace(task, reader=replace(reader, request=request))

    def __call__(self, state: DecodeState, plan: RoundPlan) -> tuple[DecodeState, list[int], bool]:
        """Run a round on the registers, where `state` lies; returns them, the summary's numbers, and if it was not recorded."""
        task, registers, forwards = self.task, self.registers, self.runner.forwards
        if state is not self.state:
            registers.write((task.reader.request, state))
        kind, before, replays = self.kind(plan), dict(forwards), registers.graphs.replays
        numbers = registers.numbers_for(SUMMARY + len(state.has_seed) + task.mode.width)

        def step() -> None:
            after, accepted = decode_round(task, self.runner, self.state, kind)
            seen = summary(after, task.mask_token_id, accepted)
            numbers[: len(seen)] = seen
            registers.write((task.reader.request, after))

        registers.graphs.run(kind, step)
        ran = registers.host.setdefault(kind, {name: count - before[name] for name, count in forwards.items()})
        forwards |= {name: count + ran[name] for name, count in before.items()}
        return self.state, numbers.tolist(), registers.graphs.replays > replays or registers.graphs.recorder.failed

    def kind(self, plan: RoundPlan) -> RoundPlan:
        """The plan as far as a recording depends on it."""
        drafting, passes = plan.per_row > 1, plan.amount.passes
        with_head = bool(self.runner.head_layers) and (passes > 0 or not self.runner.rests)
        kind = RoundPlan(
            active=1,
            used=None,
            head_used=None,
            clean=0 if drafting else min(plan.clean, 1),
            masks=1 if drafting and passes > 1 and plan.masks <= 1 else self.task.block_size,
            drafting=drafting,
            late=with_head if drafting else plan.late,
            blocked=with_head if drafting else plan.blocked,
        )
        return kind.with_slots(plan.amount, None)


def _sampling(sampler: Sampler) -> Hashable:
    """Key of what a recording depends on in a sampler, beside the weights, which stay where they are."""
    warpers = tuple((type(warper), *sorted(vars(warper).items())) for warper in sampler.truncation or [])
    numbers = (sampler.temperature, sampler.sample, sampler.eos_token_ids, sampler.entropy, sampler.dispatch)
    return sampler.token_ids is None, *numbers, warpers


__all__ = ["RecordedRounds", "replayable"]
