"""The one owner of a model's forwards and of their keys and values: `prefill`, `score`, `head`, `commit`.

States lie side by side in one forward: each sees the committed text of its row, itself, and its parent if it has one. Ids go in
by one copy and picks come out by one (likeliest tokens by two more); the host decides the rest. The keys and values of scored
states lie beyond the texts until the next forward; `commit` copies those of accepted clean states to the texts.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.round_layers import Plans, RoundMask, run_fused
from ..model.diffusion import block_causal_mask
from ..rules.draft import Node
from ..rules.state import Row, Scores, State
from .cache import BlockCache
from .picker import Picker, Picks, Spots, token_logits

# Prompt tokens per prefill forward, at most, in whole blocks.
PREFILL_CHUNK = 2048

# Hidden states of one block: a tensor [n, block, hidden_size], and the place in it.
Hidden = tuple[Tensor, int]
# States by row, each with the place of the clean one of its row that it looks at, or -1.
Packed = Sequence[Sequence[tuple[State, int]]]
# Of each state some of its free columns, and tokens by column.
TokensAt = Sequence[tuple[Sequence[int], Sequence[int]]]
# A forward over a part of the texts: its first column, its end, and ids, positions and mask.
Chunk = tuple[int, int, Tensor, Tensor, Tensor]


class Networks:
    """Backbone, head and pick of one decode.

    Args:
        model: An `MRPForCausalLM`; without `plans` any object with its `config`, `backbone` and `residual`.
        cache: Keys and values of backbone and head.
        with_head: Whether the head takes part.
        picker: Picks tokens from the backbone's hidden states, on the device of its `lm_head`, by its choice of kernels.
        plans: The fused layers (`plan_layers`); None: layers run as modules, under a dense mask.
        recorded: Runs a forward from a recording (`Graphs.call`); or None.

    Attributes:
        drafter: Picks tokens from the head's estimates of hidden states.
        forwards: Forwards of the whole batch by role, `prefill`, `denoise` (those over states of rounds) and `head`.
    """

    def __init__(
        self,
        model: Any,
        cache: BlockCache,
        with_head: bool,
        picker: Picker,
        plans: Plans | None = None,
        recorded: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model, self.cache, self.plans, self.recorded = model, cache, plans, recorded
        self.picker, self.drafter = picker, replace(picker, entropy=False, shortlist=0)
        self.device, config = picker.lm_head_weight.device, model.config
        self.block, self.mask_id, self.with_head = config.block_size, config.mask_token_id, with_head
        self.backbone_layers = range(config.num_hidden_layers)
        self.head_layers = range(len(self.backbone_layers), len(self.backbone_layers) + config.num_nextn_predict_layers)
        self.forwards = {"prefill": 0, "denoise": 0, "head": 0}
        self._swaps: list[list[tuple[int, int]]] = []
        self.shifted = cache.shifted  # hidden states of the backbone are those of the next position
        self._scored: Tensor | None = None  # hidden states of the last `score`, [n, block, hidden_size]; shifted, block + 1
        cache.active = cache.rows

    def prefill(self, rows: Sequence[Row], reused: Sequence[int]) -> list[Scores]:
        """Compute the whole blocks before each row's first mask and, in the same forward, score the row's first state.

        By row, the first `reused` tokens have cached keys and values; prefill starts at the least of these numbers.
        """
        length = max(row.state.start for row in rows) + self.block
        read = max(row.head_held for row in rows)
        for at, row in enumerate(rows):
            if row.head_held < read:  # of a cache that is gone on from
                self.cache.blank(self.head_layers, at, row.head_held, read)
        first: dict[int, Hidden] = {}
        for begin, end, *given in self._chunks(rows, min(reused), length):
            hidden = self.model.backbone(*given, self.cache).to(self.device)
            self.forwards["prefill"] += 1
            if self.with_head or self.shifted:
                self.cache.hidden[: len(rows), begin + self.shifted : end + self.shifted] = hidden
            if self.shifted:
                hidden = self.cache.hidden[: len(rows), begin:end].to(self.device, copy=True)
            blocks = hidden.unflatten(1, (-1, self.block)).flatten(0, 1)
            for at, row in enumerate(rows):
                row.counts.forwards += row.state.start >= begin and reused[at] < end
                if begin <= row.state.start < end:
                    first[at] = blocks, (at * (end - begin) + row.state.start - begin) // self.block
        for row in rows:
            row.held = row.state.start
        return self.pick(self.picker, [(row, row.state) for row in rows], [first[at] for at in range(len(rows))])

    def _catch_up(self, rows: Sequence[Row], behind: Sequence[Row]) -> None:
        """Let the head read what it has not read yet of the texts of the rows `behind`."""
        first, last = min(row.head_held for row in behind), max(row.held for row in behind)
        for begin, end, ids, positions, mask in self._chunks(rows, first, last):
            hidden = self.cache.hidden[: len(rows), begin:end]
            held = torch.tensor([row.held for row in rows], device=hidden.device)
            kept = torch.arange(begin, end, device=hidden.device) < held[:, None]
            self.model.residual(ids, torch.where(kept[..., None], hidden, 0), positions, mask, self.cache)
            self.forwards["head"] += 1
            for row in behind:
                row.counts.head_forwards += row.held > begin and row.head_held < end
        for row in behind:
            row.head_held = row.held

    def _chunks(self, rows: Sequence[Row], begin: int, length: int) -> Iterator[Chunk]:
        """Iterate over the rows' texts from `begin` to `length`, one forward at a time; see `prefill_chunks`."""
        texts = torch.tensor([(row.text + [self.mask_id] * length)[:length] for row in rows], device=self.device)
        return prefill_chunks(self.cache, texts, begin, max(1, PREFILL_CHUNK // self.block) * self.block, self.block)

    def score(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]]) -> list[list[Scores]]:
        """Score the nodes of each row of the batch, side by side, in one forward of the backbone; an ended row has none."""
        packed = [[(node.state, node.parent) for node in nodes] for nodes in drafts]
        self._scored, firsts = self._run_backbone(packed, [row.held for row in rows])
        self.forwards["denoise"] += 1
        hidden = self._scored[:, :-1] if self.shifted else self._scored
        states, places, parents = [], [], []
        for row, nodes, first in zip(rows, drafts, firsts, strict=True):
            row.counts.forwards += bool(nodes)
            states += [(row, node.state) for node in nodes]
            places += [(hidden, first + slot) for slot in range(len(nodes))]
            parents += [nodes[node.parent].state if node.parent >= 0 else None for node in nodes]
        found = iter(self.pick(self.picker, states, places, parents))
        return [[next(found) for _ in nodes] for nodes in drafts]

    def _run_backbone(self, packed: Packed, held: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Run the backbone over states; return hidden states [n, block, hidden_size] and each row's first index in n.

        A serving engine runs its own in place of this.
        """
        hidden = self._network(packed, held)
        return hidden, range(0, len(hidden), max(map(len, packed)))

    def head(
        self, rows: Sequence[Row], asked: Sequence[Sequence[tuple[State, Hidden]]], residual: bool = False
    ) -> list[list[Hidden]]:
        """Compute h_A + h_C, or if `residual` h_C alone, at states of each row of the batch, in one pass of the head.

        In the same pass, the head computes its keys and values of a clean block that it has not read yet, for rows that ask.
        Each state is `asked` with the hidden states h_A, or the estimates of them, that the head starts from; one at least.
        """
        asking = [row for row, states in zip(rows, asked, strict=True) if states]
        if behind := [row for row in asking if row.held - row.head_held > self.block]:
            self._catch_up(rows, behind)
        kept = self.cache.hidden.unflatten(1, (-1, self.block)).flatten(0, 1)
        packed: list[list[tuple[State, int]]] = []
        given: list[list[Hidden]] = []
        leads: list[int] = []  # rows that lack the head's keys and values of one clean block, which leads their states
        for at, (row, states) in enumerate(zip(rows, asked, strict=True)):
            row.counts.head_forwards += bool(states)
            lead = bool(states) and row.held > row.head_held
            cells, starts = [(state, lead - 1) for state, _ in states], [hidden for _, hidden in states]
            if lead:
                leads.append(at)
                cells.insert(0, (row.opened(row.head_held), -1))
                starts.insert(0, (kept, (at * self.cache.hidden.shape[1] + row.head_held) // self.block))
            packed.append(cells)
            given.append(starts)
        width, filler = max(map(len, packed)), next(starts[0] for starts in given if starts)
        wide = gather_blocks([one for starts in given for one in [*starts, *[filler] * (width - len(starts))]])
        made = self._network(packed, [row.head_held for row in rows], wide)
        self.forwards["head"] += 1
        if leads:
            self.cache.move(self.head_layers, [(at, self.cache.begin, rows[at].head_held) for at in leads], self.block)
        for at in leads:
            rows[at].head_held += self.block
        made = made if residual else wide.to(made.device) + made
        return [
            [(made, at * width + slot) for slot in range(len(states) - len(asked[at]), len(states))]
            for at, states in enumerate(packed)
        ]

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep keys and values of the clean ones of the states just scored, and their hidden states for the head to read.

        `clean` has their places for each row of the batch, in order; there is one at least.
        """
        moves = []
        for at, (row, slots) in enumerate(zip(rows, clean, strict=True)):
            for slot in slots:
                moves.append((at, self.cache.begin + slot * self.block, row.held))
                row.held += self.block
        self.cache.move(self.backbone_layers, moves, self.block)
        if self.with_head or self.shifted:
            assert self._scored is not None
            kept, width = self.cache.hidden, len(self._scored) // len(rows)
            place, source, target = torch.tensor(moves, device=kept.device).unbind(1)
            states = place * width + (source - self.cache.begin) // self.block
            columns = target[:, None] + torch.arange(self._scored.shape[1], device=kept.device)
            kept[place[:, None], columns] = self._scored[states.to(self.device)].to(kept.device)

    def pick(
        self,
        picker: Picker,
        states: Sequence[tuple[Row, State]],
        hidden: Sequence[Hidden],
        parents: Sequence[State | None] = (),
        shortlists: Sequence[Hidden | None] = (),
    ) -> list[Scores]:
        """Pick at the free columns of states from the hidden states of each; one transfer to the host.

        `parents` are the clean states that states attend to, for processors to see. Tokens are chosen among those of
        `shortlists` (`Scores.shortlist`) if every state has one.
        """
        block, count = self.block, len(states)
        columns = np.array([at * block + column for at, (_, state) in enumerate(states) for column in state.free], np.int64)
        if not len(columns):
            return [Scores([0] * block, [-torch.inf] * block, hidden=one) for one in hidden]
        listed = [one for one in shortlists if one is not None]
        index, given, *short = self._at_columns(columns, hidden, *[listed] * (len(listed) == count))
        spots = Spots(states, self.device, parents)
        picks = picker.among(given, short[0], spots) if short else picker(given, spots)
        few: Sequence[Hidden | None] = shortlists or [None] * count
        if picks.shortlist is not None:
            size = picks.shortlist.shape[1]
            spread = picks.shortlist.new_zeros(count * block, size).index_copy_(0, index, picks.shortlist)
            few = [(spread.view(count, block, size), place) for place in range(count)]
        found = zip(on_host(picks, columns, count, block), hidden, few, strict=True)
        return [Scores(*said, one, shortlist) for said, one, shortlist in found]

    def _at_columns(self, columns: np.ndarray, *several: Sequence[Hidden]) -> list[Tensor]:
        """Copy columns [n] to the device, and gather them from each of several lists of blocks: [n, size] each."""
        index = torch.from_numpy(columns).to(self.device, non_blocking=True)
        return [index, *(gather_blocks(blocks).flatten(0, 1)[index] for blocks in several)]

    def token_odds(
        self, asked: Sequence[tuple[Row, State, Sequence[int], Sequence[int]]], hidden: Sequence[Hidden]
    ) -> list[list[float]]:
        """Compute the log-odds [block] of given tokens at each state, -inf at other columns; one transfer to the host.

        `asked` has of each state its row, the state, some of its free columns, and the tokens by column.
        """
        states = [(row, State(state.key, tuple(where), state.end, state.masks, 0)) for row, state, where, _ in asked]
        tokens, spots = [(where, token) for _, _, where, token in asked], Spots(states, self.device)
        return self._of_tokens(tokens, hidden, lambda given, token: self.picker.token_odds(given, token, spots))

    def magnitudes(self, asked: TokensAt, hidden: Sequence[Hidden]) -> list[list[float]]:
        """Compute the magnitude |C| of given tokens' logits, one dot product each; the result is as in `token_odds`."""
        weight = self.picker.lm_head_weight
        return self._of_tokens(asked, hidden, lambda given, token: token_logits(weight, given, token[:, None])[:, 0].abs())

    def _of_tokens(self, asked: TokensAt, hidden: Sequence[Hidden], compute: Callable[..., Tensor]) -> list[list[float]]:
        """Compute a number of each given token [n] from the hidden states [n, hidden_size] at its column; see `token_odds`."""
        pairs = [(place * self.block + c, token[c]) for place, (where, token) in enumerate(asked) for c in where]
        columns, tokens = np.array(pairs, np.int64).T.copy()
        _, given = self._at_columns(columns, hidden)
        numbers = compute(given, torch.from_numpy(tokens).to(self.device, non_blocking=True))
        found: list[list[float]] = spread_columns(numbers, columns, len(asked), self.block).tolist()
        return found

    def _network(self, packed: Packed, held: Sequence[int], hidden: Tensor | None = None) -> Tensor:
        """Run the backbone, or with `hidden` [rows * width, block, hidden_size] the head, over states and their parents.

        Keys and values of states go beyond the longest of all rows' texts, so that rows that take no part are not touched.

        Returns:
            Hidden states or h_C, [rows * width, block, hidden_size], `width` being the most states of a row; shifted hidden
            states have one more column, for the next block's first token.
        """
        rows, width, used = len(packed), max(map(len, packed)), max(held)
        self.cache.target(used, width * self.block)
        empty = ((0, (self.mask_id,) * self.block), -1)
        numbers, cells = array("q"), []
        for states in packed:
            cells += [(state.key, parent) for state, parent in states] + [empty] * (width - len(states))
        for (_, ids), _ in cells:
            numbers.extend(ids)
        numbers.extend([start for (start, _), _ in cells])
        numbers.extend([parent for _, parent in cells])
        numbers.extend(held)
        table, begin = torch.frombuffer(numbers, dtype=torch.long), self.cache.begin
        plain = width == 1 and min(held) == begin and self.recorded is None
        forward = partial(self._packed, rows, width, begin, plain)
        inputs = [] if hidden is None else [hidden.reshape(rows, width * self.block, -1)]
        if self.recorded is None:
            made = forward(table.to(self.device, non_blocking=True), *inputs)
        else:
            key = (rows, width, begin, self.picker.dispatch, self.plans is not None)
            made = self.recorded(key, forward, table, *inputs)
        return made.view(rows * width, -1, made.shape[-1])

    def _packed(self, rows: int, width: int, begin: int, plain: bool, table: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Unpack `table` (ids, starts, parents, held) and run the network; a function of tensors that can be recorded."""
        states = rows * width
        ids, starts, parents, held = table.split([states * self.block, states, states, rows])
        ids, parent = ids.view(rows, -1), parents.view(rows, width)
        positions = (starts[:, None] + torch.arange(self.block, device=self.device)).view(rows, -1)
        mask = RoundMask(held, parent, self.block, self.picker.dispatch, plain)
        if self.plans is not None:
            made = self._fused(self.plans, ids, positions, mask, hidden)
        elif hidden is None:
            made = self.model.backbone(ids, positions, mask.dense(begin), self.cache).to(self.device)
        else:
            made = self.model.residual(ids, hidden, positions, mask.dense(begin), self.cache).to(self.device)
        return self._shifted_states(made, held, parent) if self.shifted and hidden is None else made

    def _fused(self, plans: Plans, ids: Tensor, positions: Tensor, mask: RoundMask, hidden: Tensor | None) -> Tensor:
        """Run the fused layers of the backbone, or with `hidden` of the head, over states side by side."""
        backbone, head = self.model.model, self.model.mrp_head
        embeds = backbone.embed_tokens(ids)
        owner, begun = (backbone, embeds) if hidden is None else (head, head.joined(embeds, hidden))
        return run_fused(plans[owner], owner.norm, begun, backbone.rotary_emb(embeds, positions), mask, self.cache)

    def _shifted_states(self, hidden: Tensor, held: Tensor, parent: Tensor) -> Tensor:
        """Put before the hidden states of each state, [rows, width * block, hidden_size], the one that predicts its first
        column: the last one of its parent or else of its row's text."""
        states, kept = hidden.unflatten(1, (-1, self.block)), self.cache.hidden
        before = kept[torch.arange(len(hidden), device=kept.device), held.to(kept.device)].to(self.device)[:, None]
        lasts = states[:, :, -1].gather(1, parent.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
        before = torch.where(parent[..., None] >= 0, lasts, before)
        return torch.cat([before[:, :, None], states], 2)

    def narrow(self, rows: list[Row], size: int) -> list[Row]:
        """Move unfinished rows to the first `size` places, which must suffice for them, and return the rows there."""
        ended = [place for place in range(size) if rows[place].stop is not None]
        behind = [place for place in range(size, len(rows)) if rows[place].stop is None]
        pairs = list(zip(ended, behind, strict=False))  # there may be more room than rows
        rows = list(rows)
        for place, other in pairs:
            rows[place], rows[other] = rows[other], rows[place]
        if pairs:
            self.cache.swap(pairs, max(row.held for row in rows))
            self._swaps.append(pairs)
        self.cache.active = size
        return rows[:size]

    def widen(self, used: int) -> None:
        """Return all rows to their places, each with its first `used` slots."""
        for pairs in reversed(self._swaps):
            self.cache.swap(pairs, used)
        self._swaps.clear()
        self.cache.active = self.cache.rows


def prefill_chunks(cache: BlockCache, texts: Tensor, begin: int, chunk: int, block: int) -> Iterator[Chunk]:
    """Iterate over texts [rows, length] long from `begin` on, a `chunk` of whole blocks per forward under a block-causal mask.

    Keys and values go to their slots.
    """
    positions = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
    for at in range(begin, texts.shape[1], chunk):
        end = min(texts.shape[1], at + chunk)
        here, seen = positions[:, at:end], positions[:, :end]
        cache.target(at, end - at, prefill=True)
        yield at, end, texts[:, at:end], here, block_causal_mask(here, seen, torch.ones_like(seen, dtype=torch.bool), block)


def gather_blocks(hidden: Sequence[Hidden]) -> Tensor:
    """Gather hidden states of n blocks from the few tensors that hold them: [n, block, hidden_size]."""
    first, places = hidden[0][0], [place for _, place in hidden]
    tensors = {id(tensor): tensor for tensor, _ in hidden}
    if len(tensors) == 1:
        return first if places == list(range(len(first))) else first[torch.tensor(places, device=first.device)]
    out = first.new_empty(len(hidden), *first.shape[1:])
    for name, tensor in tensors.items():
        pairs = [(at, place) for at, (other, place) in enumerate(hidden) if id(other) == name]
        to, of = torch.tensor(pairs, device=tensor.device).unbind(1)
        out[to.to(out.device)] = tensor[of].to(out.device)
    return out


def spread_columns(numbers: Tensor, columns: np.ndarray, states: int, block: int) -> np.ndarray:
    """Copy numbers [n] or [n, m] to the host in float64, at columns [n] of [states, block, ...], -inf elsewhere."""
    read = numbers.detach().cpu().double().numpy()
    spread = np.full((states * block, *read.shape[1:]), -np.inf)
    spread[columns] = read
    return spread.reshape(states, block, *read.shape[1:])


def on_host(picks: Picks, columns: np.ndarray, states: int, block: int) -> list[tuple[list[int], list[float], Any, Any]]:
    """Read picks at columns of states in one transfer: tokens, odds, entropies and likeliest of each state, as in `Scores`."""
    numbers = [one.view(len(columns), -1).to(picks.odds.dtype) for one in picks[:4] if one is not None]
    spread = spread_columns(torch.cat(numbers, 1), columns, states, block)
    token = np.maximum(spread[..., 0], 0).astype(np.int64).tolist()  # exact in float32: a vocabulary has fewer than 2^24
    entropy = [None] * states if picks.entropy is None else spread[..., 2].tolist()
    likeliest: list[Any] = [None] * states
    if picks.likeliest is not None:
        ids, odds = np.split(spread[..., -picks.likeliest.shape[1] :], 2, -1)
        likeliest = list(zip(np.maximum(ids, 0).astype(np.int64), odds, strict=True))
    return list(zip(token, spread[..., 1].tolist(), entropy, likeliest, strict=True))
