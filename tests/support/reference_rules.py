"""The reveal rules as their definitions read, slowly: from all earlier steps, without memos, in
probabilities.

A rule is a function of the step, the earlier steps of its block, and the options. It returns picks;
if there are none, `chosen_by` takes the surest.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Step:
    """A denoising step: the picks that it may reveal, and the picks that it chose.

    Attributes:
        start, block: Start and size of the step's block.
        masks, number: Number of masks in the block, and of steps since the block was opened.
        picks: The picks that may be revealed, in order of position.
        chosen: The picks that the step chose.
    """

    start: int
    block: int
    masks: int
    number: int
    picks: list[Any]
    chosen: list[Any] = field(default_factory=list)


def chosen_by(rule: str, step: Step, past: list[Step], options: Any) -> list[Any]:
    """Return the picks that a rule reveals, in order of position."""
    assert f"by_{rule}" in globals(), f"write by_{rule} here: the rule once more, slowly"
    picks = globals()[f"by_{rule}"](step, [one for one in past if one.start == step.start], options)
    return sorted(picks or ranked(step.picks)[:1], key=lambda pick: pick.position)


def ranked(picks: list[Any]) -> list[Any]:
    """Sort picks by confidence, the surest first, of equals the leftmost."""
    return sorted(picks, key=lambda pick: (-pick.log_odds, pick.position))


def p(pick: Any) -> float:
    return math.exp(pick.logprob)


def lower(options: Any, published: float) -> float:
    return published if options.low_threshold is None else options.low_threshold


def quota(step: Step, options: Any) -> int:
    """Return the number of picks that a step reveals by its schedule."""
    steps = options.denoising_steps or step.block
    return step.block // steps + (min(step.number, steps - 1) < step.block % steps)


def by_static(step: Step, past: list[Step], options: Any) -> list[Any]:
    return ranked(step.picks)[: quota(step, options)]


def by_sequential(step: Step, past: list[Step], options: Any) -> list[Any]:
    return step.picks[: quota(step, options)]


def by_dynamic(step: Step, past: list[Step], options: Any) -> list[Any]:
    return [pick for pick in step.picks if p(pick) > options.confidence_threshold]


def by_entropy_bound(step: Step, past: list[Step], options: Any) -> list[Any]:
    order = sorted(step.picks, key=lambda pick: (pick.entropy, pick.position))
    sums = [sum(pick.entropy for pick in order[: n + 1]) for n in range(len(order))]
    return [
        pick for pick, total in zip(order, sums, strict=True) if total < options.entropy_threshold
    ] or order[:1]


def by_fast_dllm(step: Step, past: list[Step], options: Any) -> list[Any]:
    order, n = ranked(step.picks), 1
    while n < len(order) and (n + 2) * (1 - p(order[n])) <= options.factor:
        n += 1
    return order[:n]


def by_eb_sampler(step: Step, past: list[Step], options: Any) -> list[Any]:
    order, best = sorted(step.picks, key=lambda pick: (pick.entropy, pick.position)), 1
    for n in range(1, len(order) + 1):
        # the n-th is the largest
        if sum(pick.entropy for pick in order[: n - 1]) <= options.entropy_threshold:
            best = n
    return order[:best]


def by_hierarchy(step: Step, past: list[Step], options: Any) -> list[Any]:
    groups: list[list[Any]] = []
    for pick in step.picks:
        if groups and groups[-1][-1].position == pick.position - 1:
            groups[-1].append(pick)
        else:
            groups.append([pick])
    found = [pick for pick in step.picks if p(pick) > options.confidence_threshold]
    for group in groups:
        best = ranked(group)[0]
        if p(best) > lower(options, 0.4) and best not in found:
            found.append(best)
    return found


def by_local_leap(step: Step, past: list[Step], options: Any) -> list[Any]:
    anchors = [pick.position for pick in step.picks if p(pick) >= options.confidence_threshold]
    found = []
    for pick in step.picks:
        near = [anchor for anchor in anchors if -4 <= anchor - pick.position <= 4]
        if pick.position in anchors or (near and p(pick) >= lower(options, 0.75)):
            found.append(pick)
    return found


def by_cad(step: Step, past: list[Step], options: Any) -> list[Any]:
    picks = step.picks
    if (step.block - step.masks) / step.block < 0.5:
        picks = [pick for pick in picks if pick.token not in options.eos_ids] or picks
    four = ranked(picks)[:4]
    return [pick for pick in four if p(pick) >= options.confidence_threshold] or four[:1]


def by_eoser(step: Step, past: list[Step], options: Any) -> list[Any]:
    steps = max(int(math.log2(step.block)), 1)
    share = (2 ** (min(step.number, steps - 1) + 1) - 1) / 2**steps
    factor = 0.01 + 0.99 * share

    def believed(pick: Any) -> tuple[float, int]:
        """Make a sort key from log-odds, which keep their precision where a probability rounds to
        one."""
        if pick.token not in options.eos_ids:
            return -pick.log_odds, pick.position
        return -math.log(factor * p(pick) / (1 - factor * p(pick))) if p(
            pick
        ) > 0 else math.inf, pick.position

    order = sorted(step.picks, key=believed)
    return (
        order[: 2**step.number]
        if step.number < steps - 1
        else order[: step.block - 2 ** (steps - 1) + 1]
    )


def by_prophet(step: Step, past: list[Step], options: Any) -> list[Any]:
    steps = options.denoising_steps or step.block
    progress = step.number / steps
    wide = 7.5 if progress < 0.33 else 5 if progress < 0.67 else 2.5
    if sum(pick.log_odds for pick in step.picks) / len(step.picks) >= wide:
        return step.picks
    return by_static(step, past, options)


def by_bacd(step: Step, past: list[Step], options: Any) -> list[Any]:
    shown = [p(pick) for one in past for pick in one.chosen] or [
        max(p(pick) for pick in step.picks)
    ]
    tau = min(max(sum(shown) / len(shown), lower(options, 0.6)), options.confidence_threshold)
    return [pick for pick in step.picks if p(pick) >= tau]


def by_slow_fast(step: Step, past: list[Step], options: Any) -> list[Any]:
    begin, end, estimates = 0, None, list[int]()
    for one in [*past, step]:
        free = [pick.position - step.start for pick in one.picks]
        if end is not None and not [column for column in free if begin <= column < end]:
            begin, end, estimates = end, None, []
        scope = [column for column in free if begin <= column < (end or one.block)] or free
        if end is None:
            sure = [
                pick.position - step.start for pick in one.picks if p(pick) >= lower(options, 0.3)
            ]
            sure = [column for column in sure if column in scope]
            estimates.append(sure[-1] + 1 if sure else begin + 1)
            # their variance
            if len(estimates) > 1 and (estimates[-1] - estimates[-2]) ** 2 / 4 < 1:
                end = estimates[-1]
            elif len(estimates) == 6:
                end = max(int((estimates[-1] + estimates[-2]) / 2), begin + 1)
    inside = [pick for pick in step.picks if pick.position - step.start in scope]
    return [pick for pick in inside if p(pick) >= options.confidence_threshold] or ranked(inside)[
        :1
    ]


def by_ccd(step: Step, past: list[Step], options: Any) -> list[Any]:
    if not past:
        return []
    rest = [pick for pick in ranked(past[-1].picks) if pick not in past[-1].chosen][:4]
    before = [(pick.position, pick.token) for pick in rest]
    return [pick for pick in ranked(step.picks)[:4] if (pick.position, pick.token) in before]


def by_credit(step: Step, past: list[Step], options: Any) -> list[Any]:
    fused = {}
    for pick in step.picks:
        credit, token = 0.0, None
        for one in [*past, step]:
            for then in one.picks:
                if then.position == pick.position:
                    credit = (credit * 0.8 if then.token == token else 0.0) + p(then) ** 0.2
                    token = then.token
        fused[pick.position] = pick.log_odds + 0.7 * math.log(1 + credit)
    best = min(step.picks, key=lambda pick: (-fused[pick.position], pick.position))
    tau = options.confidence_threshold
    least = -math.inf if tau == 0 else math.inf if tau == 1 else math.log(tau / (1 - tau))
    return [pick for pick in step.picks if pick is best or fused[pick.position] >= least]


def by_klass(step: Step, past: list[Step], options: Any) -> list[Any]:
    found = []
    for pick in step.picks:
        seen = [
            one
            for then in [*past[-2:], step]
            for one in then.picks
            if one.position == pick.position
        ]
        stable = len(seen) == 3 and all(one.token == pick.token for one in seen)
        for before, now in pairwise(seen):
            stable = stable and two_events(now.log_odds, before.log_odds) < 0.01
        if stable and p(pick) > options.confidence_threshold:
            found.append(pick)
    return found


def two_events(odds: float, before: float) -> float:
    """Compute the KL divergence between two distributions over two events, given the first event's
    log-odds in each."""
    total = 0.0
    for now, was in ((odds, before), (-odds, -before)):
        if now > -700:
            total += math.log((1 + math.exp(-was)) / (1 + math.exp(-now))) / (1 + math.exp(-now))
    return total
