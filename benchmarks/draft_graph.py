"""Draft graphs in the manner of Spiffy (arXiv 2509.18085): lossless drafts without a head, for any target.

Written from descriptions of the paper, which comes without code. A *pick* (i, j) names the i-th position, in the order in which
the target prefers them, and its j-th likeliest token, both by what the model said at the last accepted state. A *node* is a set
of picks: the state that reveals these beyond the row's next one. Reveals come in any order, so a node may have several parents.

- **Calibrated** offline: tuning problems are decoded with the target, and it is counted which nodes it goes through next; the
  graph grows by the node that most of the recorded paths come to next from what is in it, and so stays connected.
- **Pruned** at run time: nodes are made of the stale predictions, each is scored by the geometric mean of its tokens'
  probabilities and, where it has children, of that and their mean score; the best connected K - 1 are scored by the model
  beside the row's next state.
- **Verified** by this package's own round, which gives the graph what its description has not: a state scored in vain is
  remembered for a round and takes no place in the next, and behind a clean state the next block's first one rides along.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from modeling_mrp.generate.decode_state import DecodeState, RoundPlan, summary
from modeling_mrp.generate.loop import HeadPasses, Task, begin, decode, decode_round, verify_draft
from modeling_mrp.generate.modes import Amount, Drafting, Mode
from modeling_mrp.generate.pace import Fixed
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.drafting import DRAFT_PARENT, Draft, as_slots
from modeling_mrp.rules.revealing import EntropyBound, RevealRule, Sequential, ranks
from modeling_mrp.rules.rules import whole_text
from modeling_mrp.rules.states import States
from modeling_mrp.runner.runner import Runner

from .common import greedy_decode
from .loops import Made

Pick = tuple[int, int]  # rank of the position, rank of its token
Node = frozenset[Pick]
TOKENS = 3  # tokens of a position that picks may name


@dataclass(frozen=True)
class DraftGraph:
    """Nodes and who leads to whom.

    Attributes:
        nodes: In the order in which they were taken.
        edges: (parent, child) by number; the parent -1 is the row's next state.
    """

    nodes: tuple[Node, ...]
    edges: frozenset[tuple[int, int]]

    @classmethod
    def calibrated(cls, paths: Sequence[Sequence[Node]], size: int) -> "DraftGraph":
        """Take `size` nodes, one after the other that which most paths come to next; fewer where paths end before."""
        nodes: dict[Node, int] = {}
        depth = [0] * len(paths)
        for _ in range(size):
            ahead = Counter(path[at] for path, at in zip(paths, depth, strict=True) if at < len(path))
            if not ahead:
                break
            best = min(ahead, key=lambda node: (-ahead[node], len(node), sorted(node)))
            nodes[best] = len(nodes)
            depth = [_reached(path, at, nodes) for path, at in zip(paths, depth, strict=True)]
        walked = (path[:at] for path, at in zip(paths, depth, strict=True))
        steps = ((nodes.get(before, -1), nodes[after]) for path in walked for before, after in _pairs(path))
        return cls(tuple(nodes), frozenset(steps))

    @cached_property
    def picks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Position and token ranks [nodes, m] long, and which of them count, [nodes, m] bool."""
        most = max(map(len, self.nodes), default=1)
        padded = [[*sorted(node), *[(0, 0)] * (most - len(node))] for node in self.nodes]
        ranked = torch.tensor(padded, dtype=torch.long).view(len(self.nodes), most, 2)
        sizes = torch.tensor([len(node) for node in self.nodes], dtype=torch.long)
        return ranked[..., 0], ranked[..., 1], torch.arange(most) < sizes[:, None]

    @cached_property
    def links(self) -> Tensor:
        """[nodes, 1 + nodes] bool: whether the row's next state, or a node, leads to each."""
        links = torch.zeros(len(self.nodes), 1 + len(self.nodes), dtype=torch.bool)
        for parent, child in self.edges:
            links[child, 1 + parent] = True
        return links


def _reached(path: Sequence[Node], at: int, nodes: dict[Node, int]) -> int:
    while at < len(path) and path[at] in nodes:
        at += 1
    return at


def _pairs(path: Sequence[Node]) -> Iterable[tuple[Node, Node]]:
    return zip((frozenset(), *path), path, strict=False)


@dataclass(frozen=True)
class Ranking:
    """Ranks of positions and tokens by what the model said at states [rows].

    Attributes:
        order: [rows, block] float, by which positions come, the highest first.
        token: [rows, block, TOKENS] long, likeliest first,
        chance: [rows, block, TOKENS] float, and their probabilities.
    """

    order: Tensor
    token: Tensor
    chance: Tensor

    @classmethod
    def of(cls, task: Task, hidden: Tensor) -> "Ranking":
        """Rank by hidden states [rows, block, hidden_size], in the order that the task's rule goes by."""
        logits = hidden @ task.reader.sampler.lm_head_weight.T
        logits[..., task.mask_token_id] = -torch.inf
        logp = logits.log_softmax(-1)
        best = logp.topk(TOKENS)
        order = best.values[..., 0]
        if isinstance(task.mode.rule, EntropyBound):
            order = (logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
        elif isinstance(task.mode.rule, Sequential):
            order = -torch.arange(hidden.shape[1], dtype=order.dtype).expand_as(order)
        return cls(order, best.indices, best.values.exp())


def candidates(states: States, mask_id: int) -> Tensor:
    """[rows, block] bool: masked positions that are not behind an eos."""
    return states.masked(mask_id) & (torch.arange(states.ids.shape[-1]) < states.end[..., None])


# ------------------------------------------------------------------------------------------------------ drafting by a graph


def instantiated(graph: DraftGraph, task: Task, state: DecodeState, ranking: Ranking) -> tuple[States, Tensor]:
    """Make the state of every node behind each row's next one.

    Args:
        graph: What may be drafted.
        task: What is decoded.
        state: Where the decode stands.
        ranking: By what was said at the last accepted states.

    Returns:
        [rows, nodes] states; not valid where a pick is of no position that is left, or nothing is left to reveal behind it. And
        the geometric means of their tokens' probabilities, [rows, nodes].
    """
    position_rank, token_rank, used = graph.picks
    current, request, mask_id = state.current, task.reader.request, task.mask_token_id
    rows, block = torch.arange(len(current.start))[:, None, None], current.ids.shape[-1]
    left = candidates(current, mask_id)
    column = ranks(ranking.order, left).argsort(-1)[rows, position_rank]
    token, chance = (part[rows, column, token_rank] for part in (ranking.token, ranking.chance))
    ids = torch.cat([current.ids, current.ids[:, :1]], -1)[:, None].repeat(1, len(graph.nodes), 1)
    ids = ids.scatter(-1, torch.where(used, column, block), token)[..., :block]  # what is not used goes to one more column
    ends = (token[..., None] == request.eos).any(-1) & used
    end = torch.minimum(current.end[:, None], torch.where(ends, column, block).amin(-1))
    picks = used.sum(-1).expand_as(end)
    start = current.start[:, None].expand_as(end)
    whole = whole_text(ids, end, request.open_end[:, None] - start, mask_id)
    there = ((position_rank < left.sum(-1)[:, None, None]) | ~used).all(-1)
    valid = there & ~whole & (current.valid & state.has_seed)[:, None]
    made = States.of(ids, start, torch.full_like(end, -1), current.step[:, None] + picks, end, valid)
    return made, ((chance.log() * used).sum(-1) / picks).exp()


def scores(graph: DraftGraph, valid: Tensor, local: Tensor) -> Tensor:
    """Score nodes [rows, nodes]: a leaf by its own geometric mean `local`, others by that of this and their children's mean."""
    score = local.clone()
    for node in sorted(range(len(graph.nodes)), key=lambda node: -len(graph.nodes[node])):
        children = graph.links[:, 1 + node] & valid
        mean = (score * children).sum(-1) / children.sum(-1)
        score[:, node] = torch.where(children.any(-1), (local[:, node] * mean).sqrt(), local[:, node])
    return score


class Places:
    """Places of a round's states, filled one after the other.

    Args:
        current: [rows] the rows' next states, which take the first.
        states: K, so many there are.
    """

    def __init__(self, current: States, states: int) -> None:
        self.states, self.rows = states, torch.arange(len(current.start))
        self.slots = as_slots(current, -1)[:, None].repeat(1, states + 1, 1)  # the last takes what has no place
        self.valid = torch.zeros(len(self.rows), states + 1, dtype=torch.bool)
        self.valid[:, 0] = current.valid
        self.taken = torch.ones_like(self.rows)

    def put(self, which: Tensor, states: States, parent: Tensor | int = -1) -> Tensor:
        """Place states [rows] of the rows `which` [rows] as far as there is room, behind a parent; returns their places."""
        at = torch.where(which, self.taken, self.states).clamp(max=self.states)
        self.slots[self.rows, at] = as_slots(states, -1)
        self.slots[self.rows, at, DRAFT_PARENT] = torch.as_tensor(parent)
        self.valid[self.rows, at] = True
        self.taken += at < self.states
        return at

    @property
    def draft(self) -> Draft:
        """The states, as many places as some row filled."""
        used = int(self.taken.max())
        return Draft(self.slots[:, :used], self.valid[:, :used])


def drafted(graph: DraftGraph, task: Task, state: DecodeState, successor: States, ranking: Ranking, states: int) -> Draft:
    """Keep, of a graph, what scores best behind each row's next state.

    Arguments are those of `instantiated`, and:

    Args:
        successor: [rows] the first states of the next blocks.
        states: K, with the row's next state.
    """
    mask_id, places = task.mask_token_id, Places(state.current, states)
    rides = state.current.valid & successor.masked(mask_id).any(-1)
    places.put(rides & ~state.current.masked(mask_id).any(-1), successor, 0)
    made, local = instantiated(graph, task, state, ranking)
    clean, score, memory = ~made.masked(mask_id).any(-1), scores(graph, made.valid, local), state.memory.scored.states
    known = ((made.name[:, :, None] == memory.name[:, None]).all(-1) & memory.valid[:, None]).any(-1) & made.valid
    reached = torch.cat([torch.ones_like(places.valid[:, :1]), known], 1)
    for _ in range(min(states - 1, len(graph.nodes))):
        leads = (reached[:, None] & graph.links).any(-1)
        best, node = score.masked_fill(~(made.valid & leads & ~reached[:, 1:]), -torch.inf).max(-1)
        which, chosen = best > -torch.inf, made.map(lambda t: t[places.rows, node])  # noqa: B023
        at = places.put(which, chosen)
        places.put(which & clean[places.rows, node] & rides & (at < states), successor, at)
        reached[places.rows, 1 + node] |= which
    return places.draft


class GraphRounds:
    """Rounds whose drafts a graph makes (a `Step` of `decode`)."""

    def __init__(self, task: Task, runner: Runner, graph: DraftGraph, states: int) -> None:
        self.task, self.runner, self.graph, self.states = task, runner, graph, states

    def __call__(self, state: DecodeState, plan: RoundPlan) -> tuple[DecodeState, list[int], bool]:
        """Draft by the graph, and let the round go on."""
        successor, ranking = self.task.successor(state), Ranking.of(self.task, state.seed.hidden)
        draft = drafted(self.graph, self.task, state, successor, ranking, self.states)
        head = HeadPasses(self.runner, state.held, None, False)
        state, accepted = verify_draft(self.task, self.runner, state, successor, head, draft, plan)
        return state, summary(state, self.task.mask_token_id, accepted).tolist(), True


@dataclass(frozen=True)
class GraphDrafts:
    """A target drafted by a graph, as a `Loop`.

    Attributes:
        rule: The target's.
        graph: Calibrated for it.
        states: K, scored a forward, the row's next one included.
    """

    rule: RevealRule
    graph: DraftGraph
    states: int

    @torch.inference_mode()
    def __call__(self, model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]) -> Made:
        """See `Loop`."""
        mode = Mode(self.rule, drafting=Drafting(self.states, 1))
        task, runner, text, current = greedy_decode(model, mode, prompts, new_tokens, eos, max(2, self.states))
        state = begin(task, runner, text, current, torch.zeros_like(current.start))

        def rounds(task: Task, state: DecodeState) -> GraphRounds:
            return GraphRounds(task, runner, self.graph, self.states)

        decoded = decode(task, runner, state, Fixed(Amount(self.states)), rounds)
        return Made.of(decoded.state.text, decoded.state.held, prompts)


# --------------------------------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Watched:
    """A row's next states and the rankings that they were revealed by, round after round of a plain decode.

    Attributes:
        task: What is decoded.
        runner: Runs the model.
        seen: (states [rows], whether a ranking is theirs [rows], ranking), first of the state before the first round.
    """

    task: Task
    runner: Runner
    seen: list[tuple[States, Tensor, Ranking]]

    def note(self, state: DecodeState) -> None:
        """Note where the decode stands."""
        self.seen.append((state.current, state.has_seed, Ranking.of(self.task, state.seed.hidden)))

    def __call__(self, state: DecodeState, plan: RoundPlan) -> tuple[DecodeState, list[int], bool]:
        """Run the round, and note (a `Step` of `decode`)."""
        state, accepted = decode_round(self.task, self.runner, state, plan)
        self.note(state)
        return state, summary(state, self.task.mask_token_id, accepted).tolist(), True

    def paths(self) -> list[list[Node]]:
        """List, for each state that a row came to next, the nodes it went through from there, to the end of the block."""
        found = []
        for turn, (first, seeded, ranking) in enumerate(self.seen):
            place = ranks(ranking.order, candidates(first, self.task.mask_token_id))
            for row in (first.valid & seeded).nonzero()[:, 0].tolist():
                path: list[Node] = []
                for later, _, _ in self.seen[turn + 1 :]:
                    if not later.valid[row] or later.start[row] != first.start[row]:
                        break
                    node = node_of(first.ids[row], later.ids[row], place[row], ranking.token[row])
                    if node is None:
                        break
                    path.append(node)
                found.append(path)
        return found


def node_of(first: Tensor, later: Tensor, place: Tensor, token: Tensor) -> Node | None:
    """Name what a later state [block] reveals beyond a first one; None if a token is not among the likeliest."""
    picks = []
    for column in (first != later).nonzero()[:, 0].tolist():
        rank = (token[column] == later[column]).nonzero()[:, 0].tolist()
        if not rank:
            return None
        picks.append((int(place[column]), rank[0]))
    return frozenset(picks)


@torch.inference_mode()
def recorded_paths(
    model: MRPForCausalLM, rule: RevealRule, prompts: list[list[int]], new_tokens: int, eos: list[int]
) -> list[list[Node]]:
    """Decode prompts with a target, and record the paths that it took."""
    task, runner, text, current = greedy_decode(model, Mode(rule), prompts, new_tokens, eos, 2)
    state = begin(task, runner, text, current, torch.zeros_like(current.start))
    watched = Watched(task, runner, [])
    watched.note(state)
    decode(task, runner, state, Fixed(Amount()), lambda task, state: watched, least_rows=len(prompts))
    return watched.paths()
