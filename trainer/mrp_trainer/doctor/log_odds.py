"""Comparison of the log-odds that decoding computes at given states with those that a `Reference`
computes at the same states.

Rows of several lengths go through the same four steps as in `generate` (prefill, score, head,
commit), but follow a script. In a script, the revealed tokens and their order are drawn from a
seed, so that decoding and reference see the same states regardless of rounding. A second reference,
in the model's own dtype, is the *control*: it shows the deviation that rounding alone causes.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from modeling_mrp.kernels.dispatch import PYTORCH, Dispatch
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.graphs import obstacle
from modeling_mrp.networks.networks import Networks, networks_for
from modeling_mrp.networks.picker import Picker
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Key, Row, Scores, State

from .checks import Check, checked
from .reference import Hidden, Reference

# The number of rows, the blocks that a script commits to each row, and the most states of a row in
# a round.
ROWS, BLOCKS, WIDTH = 3, 2, 4
# If the networks are recorded, scripts of other tokens run through them this many times: the first
# run is the warm-up, the second is recorded, the next two are compared with ordinary runs.
REPLAYED = 5
# The largest errors as multiples of the control's: over all positions of a group, and at a single
# state. Errors of sound models are about as large as the control's.
POOLED, SINGLE = 3.0, 10.0
GROUPS = ("prompts", "rounds", "the head")


@dataclass(frozen=True)
class Comparison:
    """How far the scores of one state deviate from a reference, and how far rounding alone would
    make them deviate.

    The reference computes the scores by formula in float32 or float64 (see `Reference`). The
    control is the same computation in the model's own dtype, so its errors show what rounding alone
    causes.

    Attributes:
        error: The error of the scores: a root mean square, in nats, of two numbers for each masked
            column. The first is the difference between the picked token's log-odds and the
            reference's log-odds of this token. The second is how far the picked token lies below
            the likeliest token, both in the reference's log-odds.
        control: The error of the control, computed in the same way from its likeliest token at each
            masked column and this token's log-odds.
        columns: The number of masked columns.
    """

    error: float
    control: float
    columns: int


@dataclass
class Recorded:
    """The states of one row that were scored in one way, with their scores. There are three ways,
    the groups: `prompts` (first states after prompts), `rounds` (states of rounds), and `the head`
    (states that the head estimates).

    Attributes:
        states: The states.
        scores: For each state, its scores.
        sources: For each state that the head scored, the index of the state that the head started
            from, among the row's recorded states of the group `rounds`; -1 in other groups.
    """

    states: list[State] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def columns(self) -> list[tuple[int, int, int, float]]:
        """List the masked columns of all states, each as a tuple: the index of the state, the
        column, the picked token, and this token's log-odds."""
        columns = []
        for index, (state, scores) in enumerate(zip(self.states, self.scores, strict=True)):
            for column in state.free:
                columns.append((index, column, scores.token[column], scores.log_odds[column]))
        return columns


class Script:
    """A fixed course of decoding for one row: the states to submit in each round, whatever their
    scores, and the scores that are recorded for them. Tokens and their order are drawn at random,
    so that rounding does not change which states are compared.

    Args:
        prompt: Ids of the prompt.
        model: The model. Its config has the block size and special ids.
        index: Index of the row.
        generator: Draws tokens and the order in which they are revealed.

    Attributes:
        row: The row. Its text is the prompt, then masks until a block is committed.
        text: The complete text without masks, in whole blocks.
        rounds: For each round, the states that it submits, as `Node`s.
        clean: For each round, the index of the node whose block has no masks and is committed after
            the round, or None.
        recorded: For each group (see `Recorded`), the scored states and their scores.
    """

    def __init__(
        self, prompt: Sequence[int], model: MRPForCausalLM, index: int, generator: random.Random
    ) -> None:
        config = model.config
        block = config.block_size
        first = len(prompt) // block * block
        end = first + (BLOCKS + 1) * block
        answer = generator.choices(_ids_of(config), k=end - len(prompt))
        self.text = [*prompt, *answer]
        text = [*prompt, *[config.mask_token_id] * len(answer)]
        length = len(prompt)
        self.row = Row(
            index, text, block, config.mask_token_id, frozenset(), length, length, end, end, 0, 0
        )
        self.rounds: list[list[Node]] = []
        self.clean: list[int | None] = []
        self.recorded = {group: Recorded() for group in GROUPS}
        following: State | None = None  # a state that the previous round has left for this round
        for start in range(first, first + BLOCKS * block, block):
            state = following or self.row.first_state(start)
            following = self._rounds_of_block(state, generator)
        assert following is not None
        self._add([Node(following, -1, None)], None)

    def _rounds_of_block(self, state: State, generator: random.Random) -> State:
        """Add two rounds for the block of `state`. The first round has three states of one path,
        and one state beside the path. The second round has the last of these three, the clean state
        at the end of the path, and the first two states of the next block, which attend to the
        clean state. Return the last of these two, at which the next block's rounds begin."""
        order = list(state.free)
        generator.shuffle(order)
        half = max(1, len(order) // 2)
        path = [state, self._reveal(state, order[:1])]
        path.append(self._reveal(path[-1], order[1:half]))
        sibling = self._reveal(state, order[-1:])
        # in a block with a single mask, some of these are the same state
        states = dict.fromkeys([path[0], path[1], sibling, path[2]])
        self._add([Node(state, -1, None) for state in states], None)
        clean = self._reveal(path[-1], order[half:])
        following = self.row.first_state(state.start + self.row.block_size)
        first = self._reveal(following, generator.sample(following.free, 1))
        nodes = [Node(path[-1], -1, None), Node(clean, -1, None)]
        nodes += [Node(following, 1, None), Node(first, 1, None)]
        self._add(nodes, 1)
        return first

    def _add(self, nodes: list[Node], clean: int | None) -> None:
        self.rounds.append(nodes)
        self.clean.append(clean)

    def _reveal(self, state: State, columns: Sequence[int]) -> State:
        columns = [column for column in columns if column in state.free]
        if not columns:
            return state
        return self.row.successor(state, columns, self.text[state.start :][: self.row.block_size])

    def record(self, group: str, state: State, scores: Scores, source: int = -1) -> None:
        """Record the scores of a state in a group: "prompts", "rounds" or "the head". In the last,
        `source` is the index, in the group "rounds", of the state that the head started from."""
        recorded = self.recorded[group]
        recorded.states.append(state)
        recorded.scores.append(scores)
        recorded.sources.append(source)


def scripts_of(model: MRPForCausalLM, length: int, seed: int) -> list[Script]:
    """Make three scripts (see `Script`) of random tokens. Their prompts have one block, two and a
    half blocks, and about `length` tokens."""
    generator = random.Random(seed)
    block = model.config.block_size
    ids = _ids_of(model.config)
    lengths = (block, 2 * block + block // 2, max(length, 3 * block) + 1)
    scripts = []
    for index in range(ROWS):
        prompt = generator.choices(ids, k=lengths[index % len(lengths)])
        scripts.append(Script(prompt, model, index, generator))
    return scripts


def _ids_of(config: Any) -> list[int]:
    """List the ids of all tokens except the mask."""
    ids = list(range(config.vocab_size))
    ids.remove(config.mask_token_id)
    return ids


def check_log_odds(model: MRPForCausalLM, length: int) -> Iterator[Check]:
    """Compare the log-odds that decoding computes with those that `Reference` computes from the
    weights by formula. Yield a check for each of three groups: states after prompts, states of
    rounds and, if the model has a head, states that the head estimates. `length` is the approximate
    length of the longest prompt.

    On a GPU, repeat the comparison without CUDA graphs, and with neither graphs nor kernels.
    """
    settings: dict[str, tuple[bool | None, bool | None]] = {"": (None, None)}
    if model.device.type == "cuda":
        settings |= {", without graphs": (None, False), ", without kernels": (False, False)}
    groups = GROUPS if model.config.has_head else GROUPS[:2]
    if (reason := _unreadable(model)) is not None:
        for group in groups:
            yield Check(f"log-odds of {group}", None, None, reason)
        return
    for setting, (kernels, graphs) in settings.items():
        comparisons: dict[str, list[Comparison]] = {}
        run = checked(
            f"log-odds{setting}", partial(_run, model, length, kernels, graphs, comparisons)
        )
        if not run.ok:
            yield run
            continue
        rounding = _pooled(list(chain.from_iterable(comparisons.values())), "control")
        for group in groups:
            yield judge(f"log-odds of {group}{setting}", comparisons[group], rounding)
    model.release_graphs()


def _run(
    model: MRPForCausalLM,
    length: int,
    kernels: bool | None,
    graphs: bool | None,
    comparisons: dict[str, list[Comparison]],
) -> Check:
    """Run scripts, and add their comparisons to `comparisons` by group; `kernels` and `graphs` are
    as in `generate`. The check that is returned has always passed."""
    recorded = graphs is None and obstacle(model) is None
    for seed in range(REPLAYED if recorded else 1):
        scripts = scripts_of(model, length, seed)
        play(model, scripts, kernels, graphs)
        for group, results in compare(model, scripts).items():
            comparisons.setdefault(group, []).extend(results)
    return Check("", True)


def _unreadable(model: MRPForCausalLM) -> str | None:
    """Explain why the reference's formulas cannot use the model's weights; return None if they
    can."""
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(module) is not nn.Linear:
            return f"{name} is a {type(module).__name__}, whose weights are not plain numbers"
    return None


def judge(name: str, comparisons: Sequence[Comparison], rounding: float) -> Check:
    """Check that the errors in comparisons are about as large as those of the control, which
    rounding alone causes (see `Comparison`).

    An error over all states is the root mean square over all their masked columns. The base error
    is the control's error over all states, or `rounding` if that is larger. The check passes if
    both conditions hold, and fails for NaN:

    1. The error over all states is at most 3 times the base error.
    2. The error of each state is at most 10 times the base error, or at most 10 times the control's
       error of this state.

    Args:
        name: The name of the check.
        comparisons: The comparisons of one group, one for each state.
        rounding: The root mean square error of the control over all groups, in nats.
    """
    error = _pooled(comparisons, "error")
    control = max(_pooled(comparisons, "control"), rounding, 1e-12)
    worst = 0.0
    for state in comparisons:
        worst = max(state.error / max(control, state.control), worst)
        if math.isnan(worst):
            break  # as the maximum of NaN and a number may be either of them
    ratio = error / control
    # written so that NaN fails
    ok = ratio <= POOLED and worst <= SINGLE
    note = f"{ratio:.2g} x rounding, {worst:.2g} x at a state"
    return Check(name, ok, error, note)


def _pooled(comparisons: Sequence[Comparison], name: str) -> float:
    """Return the root mean square of the field `name` (`error` or `control`) of comparisons, over
    all their columns."""
    columns, squares = 0, 0.0
    for state in comparisons:
        columns += state.columns
        squares += state.columns * getattr(state, name) ** 2
    return math.sqrt(squares / columns)


@torch.inference_mode()
def play(
    model: MRPForCausalLM, scripts: Sequence[Script], kernels: bool | None, graphs: bool | None
) -> None:
    """Run the rounds of scripts (see `Script`) through the model's networks, as `generate` would.
    Record the scores in the scripts.

    Args:
        model: The model.
        scripts: The scripts. Committed blocks are also written to the texts of their rows.
        kernels: Whether Triton kernels are used. True: required. False: never. None: where
            possible.
        graphs: The same for CUDA graphs.
    """
    weight = model.lm_head.weight
    dispatch = Dispatch(kernels)
    picker = Picker(
        weight,
        model.config.mask_token_id,
        dispatch=dispatch if dispatch.allows("those of the pick", weight) else PYTORCH,
    )
    rows = [script.row for script in scripts]
    block = model.config.block_size
    size = (len(rows), max(len(row.text) for row in rows), WIDTH * block)
    with networks_for(model, picker, graphs, None, *size, model.config.has_head) as networks:
        networks.cache.empty()
        first_scores = networks.prefill(rows, [0] * len(rows))
        for script, scores in zip(scripts, first_scores, strict=True):
            script.record("prompts", script.row.state, scores)
        for index in range(len(scripts[0].rounds)):
            _play_round(networks, scripts, index)


def _play_round(networks: Networks, scripts: Sequence[Script], index: int) -> None:
    """Run the round `index` of each script: score its states, run the head over them, and commit
    its clean block, if any."""
    rows = [script.row for script in scripts]
    drafts = [script.rounds[index] for script in scripts]
    scores = networks.score(rows, drafts)
    queries: list[list[tuple[State, Any]]] = []
    sources = []
    for script, nodes, row_scores in zip(scripts, drafts, scores, strict=True):
        recorded = script.recorded["rounds"]
        first = len(recorded.states)
        row_queries: list[tuple[State, Any]] = []
        for offset, (node, node_scores) in enumerate(zip(nodes, row_scores, strict=True)):
            script.record("rounds", node.state, node_scores)
            previous = nodes[offset - 1].state
            same_block = node.parent < 0 and previous.start == node.state.start
            # the head reads a state of the row's block from the hidden states of the one before
            if offset and same_block and node.state.masks:
                row_queries.append((node.state, row_scores[offset - 1].hidden))
                sources.append(first + offset - 1)
        queries.append(row_queries)
    if networks.with_head and any(queries):
        outputs = networks.head(rows, queries)
        states = []
        hidden = []
        for row, row_queries, row_outputs in zip(rows, queries, outputs, strict=True):
            states += [(row, state) for state, _ in row_queries]
            hidden += row_outputs
        picked = networks.sampler.estimate(states, hidden)
        for (row, state), estimate, source in zip(states, picked, sources, strict=True):
            scripts[row.place].record("the head", state, estimate, source)
    clean = []
    for script in scripts:
        slot = script.clean[index]
        clean.append([] if slot is None else [slot])
        if slot is not None:
            state = script.rounds[index][slot].state
            script.row.text[state.start : state.start + len(state.ids)] = state.ids
    if any(clean):
        networks.commit(rows, clean)


@torch.inference_mode()
def compare(model: MRPForCausalLM, scripts: Sequence[Script]) -> dict[str, list[Comparison]]:
    """Compare the scores that `play` recorded in scripts with those that `Reference` computes at
    the same states. Return a dict from each group ("prompts", "rounds", "the head") to its
    comparisons, one for each state that has masks."""
    dtype = torch.float32 if model.dtype.itemsize == 2 else torch.float64
    reference = Reference(model, dtype)
    control = Reference(model, model.dtype, rounds_norms=True)
    comparisons = defaultdict[str, list[Comparison]](list)
    for script in scripts:
        expected = _hidden_states(reference, script)
        rounded = _hidden_states(control, script)
        for group in GROUPS:
            recorded = script.recorded[group]
            columns = recorded.columns()
            if not columns:
                continue
            slots, flat, tokens, odds = map(list, zip(*columns, strict=True))
            deviations, rounding = _deviations(
                reference.log_odds(expected[group][slots, flat]),
                control.log_odds(rounded[group][slots, flat]),
                tokens,
                odds,
            )
            sizes = list(Counter(slots).values())
            for state_deviations, state_rounding in zip(
                deviations.split(sizes), rounding.split(sizes), strict=True
            ):
                comparisons[group].append(
                    Comparison(
                        _root_mean_square(state_deviations),
                        _root_mean_square(state_rounding),
                        len(state_deviations),
                    )
                )
    return comparisons


def _hidden_states(reference: Reference, script: Script) -> dict[str, Tensor]:
    """Compute a reference's hidden states at the recorded states of a script; return a dict from
    each group to a tensor [states, block, hidden_size]."""
    prompts, rounds, head = (_keys_of(script.recorded[group].states) for group in GROUPS)
    hidden = reference.backbone(script.text, [*prompts, *rounds])
    first, scored = hidden.states.split([len(prompts), len(rounds)])
    estimated = scored[:0]
    if head:
        sources = scored[script.recorded["the head"].sources]
        estimated = reference.head(script.text, Hidden(hidden.text, scored), head, sources)
    return {"prompts": first, "rounds": scored, "the head": estimated}


def _keys_of(states: Sequence[State]) -> list[Key]:
    return [state.key for state in states]


def _deviations(
    expected: Tensor, rounded: Tensor, tokens: Sequence[int], odds: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Compute how far picks at n columns deviate from the reference, and how far the control's
    likeliest tokens do; return two tensors [n, 2].

    The two numbers for each column are the deviation of the token's log-odds from the reference,
    and how far the token lies below the likeliest token in the reference.

    Args:
        expected: Log-odds of the reference, [n, vocab].
        rounded: Log-odds of the control, [n, vocab].
        tokens: The picked tokens.
        odds: The log-odds of the picked tokens.
    """
    best, likeliest = rounded.max(1)
    values = torch.tensor(odds, dtype=torch.float64, device=expected.device)
    results = []
    for log_odds, index in (
        (values, torch.tensor(tokens, device=expected.device)),
        (best, likeliest),
    ):
        exact = expected.gather(1, index[:, None])[:, 0]
        results.append(torch.stack([log_odds - exact, expected.amax(1) - exact], 1))
    return results[0], results[1]


def _root_mean_square(numbers: Tensor) -> float:
    return float(numbers.double().pow(2).mean().sqrt())
