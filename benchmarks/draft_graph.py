"""Draft graphs in the manner of Spiffy (arXiv 2509.18085): lossless drafts without a head, for any
target.

Written from descriptions of the paper, which comes without code. A *pick* (i, j) names the i-th
position, in the target's order of preference, and its j-th likeliest token, both by the model's
scores at the last accepted state. A *node* is a set of picks: it stands for the row's next state
with these picks revealed. Reveals come in any order, so a node may have several parents.

- **Calibrated** offline: tuning problems are decoded with the target, and the nodes that it passes
  are counted. The graph grows by the node that most recorded paths reach next from within it, and
  so stays connected.
- **Pruned** at run time: stale predictions turn nodes into states. A node's score is the geometric
  mean of its tokens' probabilities, averaged with its children's mean score if it has children; the
  best connected K - 1 are scored by the model together with the row's next state. Without pruning,
  these are the first K - 1 of the calibration.
- **Tuned** for each target and K (`CHOSEN`): the number of nodes, pruning, and the number of tokens
  per position that picks may name, on tuning problems that no graph is calibrated on (`NOTES.md`,
  Rivals, tuned).
- **Verified** by this package's own round, which adds two things that the description lacks: a
  rejected draft keeps its scores for the next round and is not drafted again, and after a state
  without masks the next block's first state is scored, too.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import torch

from modeling_mrp.generate.loop import Decoder, Mode, RoundPlan
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Networks
from modeling_mrp.networks.sampler import gather_blocks
from modeling_mrp.rules import draft
from modeling_mrp.rules.gain import Fixed
from modeling_mrp.rules.reveal import EntropyBound, RevealRule, Sequential
from modeling_mrp.rules.state import Row, State

from .common import greedy_decode
from .measure import Loop, loop_of

Pick = tuple[int, int]  # rank of the position, rank of its token
Node = frozenset[Pick]
TOKENS = 3  # most tokens per position that picks may name


class Build(NamedTuple):
    """The options for building a graph of drafts with K states.

    Attributes:
        times: Number of nodes, as a multiple of K - 1.
        pruned: Whether the nodes with the best scores are drafted, rather than those added first.
        tokens: Number of likeliest tokens per position that nodes may reveal.
    """

    times: int = 2
    pruned: bool = True
    tokens: int = TOKENS


# The best graphs by target and K (`NOTES.md`, Rivals, tuned).
CHOSEN = {
    "static": {4: Build(2, True, 1), 8: Build(4, False)},
    "dynamic": {4: Build(2, False), 8: Build()},
    "sequential": {4: Build(1, False), 8: Build(4, True)},
    "entropy_bound": {4: Build(), 8: Build()},
}


@dataclass(frozen=True)
class DraftGraph:
    """A graph of drafts: a node is a set of reveals after a row's next state, an edge leads to a
    node with further reveals.

    Attributes:
        nodes: The nodes, in the order in which they were added.
        edges: Pairs (parent, child) of nodes' numbers; the parent -1 is the row's next state.
        pruned: See `Build`.
    """

    nodes: tuple[Node, ...]
    edges: frozenset[tuple[int, int]]
    pruned: bool = True

    @classmethod
    def built(cls, build: Build, paths: Sequence[Sequence[Node]], states: int) -> "DraftGraph":
        """Build the graph that `build` describes for K = `states`, calibrated on recorded paths of
        nodes."""

        def is_allowed(node: Node) -> bool:
            return all(rank < build.tokens for _, rank in node)

        allowed = [list(takewhile(is_allowed, path)) for path in paths]
        return replace(cls.calibrated(allowed, build.times * (states - 1)), pruned=build.pruned)

    @classmethod
    def calibrated(cls, paths: Sequence[Sequence[Node]], size: int) -> "DraftGraph":
        """Build a graph of up to `size` nodes, each time adding the node that most paths reach
        next, until the paths end."""
        nodes: dict[Node, int] = {}
        while True:
            walks = [list(takewhile(nodes.__contains__, path)) for path in paths]
            ahead = Counter[Node]()
            for path, walk in zip(paths, walks, strict=True):
                if len(walk) < len(path):
                    ahead[path[len(walk)]] += 1
            if not ahead or len(nodes) == size:
                break
            nodes[min(ahead, key=lambda node: (-ahead[node], len(node), sorted(node)))] = len(nodes)
        edges = set()
        for walk in walks:
            for parent, child in pairwise((frozenset[Pick](), *walk)):
                edges.add((nodes.get(parent, -1), nodes[child]))
        return cls(tuple(nodes), frozenset(edges))


@dataclass(frozen=True)
class Ranking:
    """Ranks of columns and tokens by the model's scores at one state.

    Attributes:
        order: [block], each column's sort key; columns are sorted from the highest key down.
        token: [block][TOKENS], the likeliest tokens of each column, the likeliest first.
        chance: [block][TOKENS], the probabilities of these tokens.
    """

    order: list[float]
    token: list[list[int]]
    chance: list[list[float]]

    def columns(self, state: State) -> list[int]:
        """List the masked columns of a state in the target's order of preference."""
        return sorted(state.free, key=lambda column: -self.order[column])


def rankings(networks: Networks, rule: RevealRule, rows: Sequence[Row]) -> dict[int, Ranking]:
    """Rank each row's columns, in the rule's order, and tokens at its last accepted state; return
    rankings by `Row.place`."""
    seeded = []
    states_hidden = []
    for row in rows:
        if row.stop is None and row.source is not None:
            seeded.append(row)
            assert row.source.hidden is not None
            states_hidden.append(row.source.hidden)
    if not seeded:
        return {}
    hidden = gather_blocks(states_hidden)
    logits = hidden @ networks.picker.lm_head_weight.T
    logits[..., networks.mask_id] = -torch.inf
    logp = logits.log_softmax(-1)
    best = logp.topk(TOKENS)
    order = best.values[..., 0]
    if isinstance(rule, EntropyBound):
        order = (logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
    elif isinstance(rule, Sequential):
        order = -torch.arange(order.shape[1], dtype=order.dtype).expand_as(order)
    orders = order.tolist()
    tokens = best.indices.tolist()
    chances = best.values.exp().tolist()
    ranked = {}
    for index, row in enumerate(seeded):
        ranked[row.place] = Ranking(orders[index], tokens[index], chances[index])
    return ranked


def instantiated(graph: DraftGraph, row: Row, ranking: Ranking) -> dict[int, tuple[State, float]]:
    """Make the state that each node stands for after a row's next state; return states and scores
    by the node's number.

    A leaf's score is the geometric mean of its tokens' probabilities; any other node's is the
    geometric mean of this number and its children's mean score. Nodes that need more masked columns
    than are left, or leave nothing to reveal, are left out.
    """
    masked = ranking.columns(row.state)
    instances = dict[int, tuple[State, float]]()
    # children before their parents
    for number, node in sorted(enumerate(graph.nodes), key=lambda entry: -len(entry[1])):
        if any(rank >= len(masked) for rank, _ in node):
            continue
        tokens = [0] * row.block_size
        columns = []
        logs = []
        for rank, token_rank in node:
            column = masked[rank]
            columns.append(column)
            tokens[column] = ranking.token[column][token_rank]
            chance = ranking.chance[column][token_rank]
            logs.append(math.log(chance) if chance else -math.inf)
        state = row.successor(row.state, sorted(columns), tokens)
        if row.ends(state):
            continue
        score = math.exp(sum(logs) / len(logs))
        children = []
        for child in sorted(instances):
            if (number, child) in graph.edges:
                children.append(instances[child][1])
        if children:
            score = math.sqrt(score * sum(children) / len(children))
        instances[number] = (state, score)
    return instances


def drafted(graph: DraftGraph, row: Row, ranking: Ranking | None, states: int) -> list[draft.Node]:
    """Select drafts by the best scores (`graph.pruned`) or in the graph's order; return the row's
    next state and the drafts.

    Args:
        graph: The draft graph.
        row: The row to draft for.
        ranking: Ranks by the scores at the last accepted state; None if the row has no such scores.
        states: K, which counts the row's next state, too.
    """
    nodes = [draft.Node(row.state, -1, row.source)]
    next_block = row.first_state(row.state.start + row.block_size)
    if not row.state.masks and next_block.masks and states > 1:
        nodes.append(draft.Node(next_block, 0, None))
    instances = {}
    if ranking is not None:
        instances = instantiated(graph, row, ranking)
    reached = {-1}
    for number, (state, _) in instances.items():
        if state.key in row.memory:
            reached.add(number)

    def preference(number: int) -> tuple[float, int]:
        score = instances[number][1] if graph.pruned else 0.0
        return score, -number

    for _ in range(min(states - 1, len(graph.nodes))):
        open_numbers = []
        for number in instances.keys() - reached:
            if any((parent, number) in graph.edges for parent in reached):
                open_numbers.append(number)
        if not open_numbers or len(nodes) >= states:
            break
        best = max(open_numbers, key=preference)
        reached.add(best)
        nodes.append(draft.Node(instances[best][0], -1, row.source))
        if not instances[best][0].masks and next_block.masks and len(nodes) < states:
            nodes.append(draft.Node(next_block, len(nodes) - 1, None))
    return nodes


class GraphDecoder(Decoder):
    """A `Decoder` whose drafts come from a graph; further arguments are those of `Decoder`."""

    def __init__(self, graph: DraftGraph, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.graph = graph

    def draft(self, rows: Sequence[Row], plan: RoundPlan) -> list[list[draft.Node]]:
        """See `Decoder.draft`."""
        ranked = rankings(self.networks, self.mode.rule, rows)
        drafts: list[list[draft.Node]] = []
        for row in rows:
            if row.stop is None:
                drafts.append(drafted(self.graph, row, ranked.get(row.place), plan.amount.states))
            else:
                drafts.append([])
        return drafts


def graph_drafts(rule: RevealRule, graph: DraftGraph, states: int) -> Loop:
    """Make a loop that decodes with the target `rule` and drafts from its `graph`, scoring K =
    `states` states per forward."""
    return loop_of(rule, states, partial(GraphDecoder, graph))


def passed(first: State, ranking: Ranking, later: Iterable[State]) -> Iterator[Node]:
    """Yield the states `later` in the block of `first` as nodes relative to it, until one has a
    token that is not ranked."""
    ranks = {column: rank for rank, column in enumerate(ranking.columns(first))}
    for state in takewhile(lambda reached: reached.start == first.start, later):
        picks = set()
        for column, (old_token, token) in enumerate(zip(first.ids, state.ids, strict=True)):
            if token == old_token:
                continue
            if token not in ranking.token[column]:
                return
            picks.add((ranks[column], ranking.token[column].index(token)))
        yield frozenset(picks)


@torch.inference_mode()
def recorded_paths(
    model: MRPForCausalLM,
    rule: RevealRule,
    prompts: list[list[int]],
    new_tokens: int,
    eos: list[int],
) -> list[list[Node]]:
    """Decode prompts with the target `rule`; return for each state reached the path of nodes that
    led on in its block."""
    networks, rows = greedy_decode(model, Mode(rule), prompts, new_tokens, eos, 2)
    walks: dict[int, list[tuple[State, Ranking | None]]] = {row.place: [] for row in rows}

    def note(rows: Sequence[Row]) -> None:
        ranked = rankings(networks, rule, rows)
        for row in rows:
            if row.stop is None:
                walks[row.place].append((row.state, ranked.get(row.place)))

    Decoder(Mode(rule), networks, Fixed(), [note], len(prompts)).decode(rows, [0] * len(rows))
    paths = []
    for walk in walks.values():
        states = [state for state, _ in walk]
        for index, (state, ranking) in enumerate(walk):
            if ranking is not None:
                paths.append(list(passed(state, ranking, states[index + 1 :])))
    return paths
