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

from ..kernels.round_layers import RoundMask
from ..model.diffusion import block_causal_mask
from ..rules.draft import Node
from ..rules.state import Row, Scores, State
from .cache import BlockCache
from .layers import Plans
from .picker import Picker, Picks, Spots, token_logits

# Prompt tokens per prefill forward, at most, in whole blocks.
PREFILL_CHUNK = 2048

# Hidden states of one block: a tensor [n, block, hidden_size], and the place in it.
Hidden = tuple[Tensor, int]
# States by row, each with the place of the clean one of its row that it looks at, or -1.
Packed = Sequence[Sequence[tuple[State, int]]]


class Networks:
    """Backbone, head and pick of one decode.

    Args:
        model: An `MRPForCausalLM`, or any object with its `config`, `backbone` and `residual`.
        cache: Keys and values of backbone and head.
        with_head: Whether the head takes part.
        picker: Picks tokens from the backbone's hidden states. It also decides the device of the rows (its `lm_head`'s) and the
            use of kernels.
        plans: How the layers run, fused (`plan_layers`); None: as modules, under a dense mask.
        recorded: Runs a forward from a recording (`Graphs.call`); or None.

    Attributes:
        drafter: Picks tokens from the head's estimates of hidden states.
        forwards: Forwards of the whole batch by role, `prefill`, `denoise` (those over rounds' states) and `head`.
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
        self.shifted = cache.every > 0  # hidden states of the backbone are those of the next position
        self._scored: Tensor | None = None  # hidden states of the last `score`
        self._ends: Tensor | None = None  # where they are shifted, the last one of each state, which predicts what comes next
        # The cache's slot where the last forward over states wrote the first of them; set by `_network`, for `head` and `score`
        # alike. The loop calls `commit` right behind `score`, so that there it is where scored states lie.
        self._begin = 0
        cache.active = cache.rows

    # ------------------------------------------------------------------------------------------------------- prefill

    def prefill(self, rows: Sequence[Row], reused: Sequence[int]) -> list[Scores]:
        """Compute the whole blocks before each row's first mask and, in the same forward, score the row's first state.

        By row, the first `reused` tokens have cached keys and values; prefill starts at the least of these numbers. So with a
        cache, or beyond one chunk, the number of a row's forwards may depend on its neighbours; its text does not.
        """
        length = max(row.state.start for row in rows) + self.block
        read = max(row.head_held for row in rows)
        for at, row in enumerate(rows):
            if row.head_held < read:  # of a cache that is gone on from
                self.cache.blank(self.head_layers, at, row.head_held, read)
        first: list[Hidden | None] = [None] * len(rows)
        for begin, end, *given in self._chunks(rows, min(reused), length):
            hidden = self.model.backbone(*given, self.cache).to(self.device)
            self.forwards["prefill"] += 1
            if self.shifted:
                hidden = self._shifted_text(hidden, begin)
            if self.with_head:
                self.cache.hidden[: len(rows), begin:end] = hidden
            blocks = hidden.unflatten(1, (-1, self.block)).flatten(0, 1)
            for at, row in enumerate(rows):
                row.counts.forwards += row.state.start >= begin and reused[at] < end
                if begin <= row.state.start < end:
                    first[at] = blocks, (at * (end - begin) + row.state.start - begin) // self.block
        for row in rows:
            row.held = row.state.start
        states = [(row, row.state) for row in rows]
        return self.pick(self.picker, states, [hidden for hidden in first if hidden is not None])

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

    def _chunks(self, rows: Sequence[Row], begin: int, length: int) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
        """Iterate over the rows' texts from `begin` to `length`, one forward at a time; see `prefill_chunks`."""
        texts = torch.tensor([(row.text + [self.mask_id] * length)[:length] for row in rows], device=self.device)
        return prefill_chunks(self.cache, texts, begin, max(1, PREFILL_CHUNK // self.block) * self.block, self.block)

    # --------------------------------------------------------------------------------------------------------- rounds

    def score(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]]) -> list[list[Scores]]:
        """Score the nodes of each row of the batch, side by side, in one forward of the backbone; an ended row has none."""
        for row, nodes in zip(rows, drafts, strict=True):
            row.counts.forwards += bool(nodes)
        packed = [[(node.state, node.parent) for node in nodes] for nodes in drafts]
        self._scored, firsts = self._run_backbone(packed, [row.held for row in rows])
        self.forwards["denoise"] += 1
        states, places, parents = [], [], []
        for row, nodes, first in zip(rows, drafts, firsts, strict=True):
            states += [(row, node.state) for node in nodes]
            places += [(self._scored, first + slot) for slot in range(len(nodes))]
            parents += [nodes[node.parent].state if node.parent >= 0 else None for node in nodes]
        found = iter(self.pick(self.picker, states, places, parents))
        return [[next(found) for _ in nodes] for nodes in drafts]

    def _run_backbone(self, packed: Packed, held: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """Run the backbone over states: hidden states [n, block, hidden_size], and by row the place of its first state."""
        hidden = self._network(packed, held)
        if self.shifted:
            self._ends, hidden = hidden[:, -1], hidden[:, :-1]
        return hidden, range(0, len(hidden), max(map(len, packed)))

    def head(
        self, rows: Sequence[Row], asked: Sequence[Sequence[tuple[State, Hidden]]], residual: bool = False
    ) -> list[list[Hidden]]:
        """Compute h_A + h_C at states of each row, given hidden states h_A or estimates of them, in one pass of the head.

        In the same pass, the head computes its keys and values of a clean block that it has not read yet, for rows that ask.

        Args:
            rows: The rows of the batch.
            asked: For each row its states, each with the hidden states that the head starts from; at least one in all.
            residual: Whether to return h_C alone.
        """
        asking = [row for row, states in zip(rows, asked, strict=True) if states]
        if behind := [row for row in asking if row.held - row.head_held > self.block]:
            self._catch_up(rows, behind)
        kept = self.cache.hidden.unflatten(1, (-1, self.block)).flatten(0, 1)
        packed: list[list[tuple[State, int]]] = []
        given: list[list[Hidden]] = []
        # Rows that lack the head's keys and values of one clean block: it leads their states, each of which sees it as its
        # parent, and its keys and values are copied to the text below.
        leads: list[int] = []
        for at, (row, states) in enumerate(zip(rows, asked, strict=True)):
            row.counts.head_forwards += bool(states)
            lead: list[tuple[State, int]] = []
            starts = [hidden for _, hidden in states]
            if states and row.held > row.head_held:
                leads.append(at)
                lead.append((row.opened(row.head_held), -1))
                starts.insert(0, (kept, (at * self.cache.capacity + row.head_held) // self.block))
            packed.append(lead + [(state, len(lead) - 1) for state, _ in states])
            given.append(starts)
        width, filler = max(map(len, packed)), next(starts[0] for starts in given if starts)
        wide = gather_blocks([one for starts in given for one in [*starts, *[filler] * (width - len(starts))]])
        made = self._network(packed, [row.head_held for row in rows], wide)
        self.forwards["head"] += 1
        if leads:
            self.cache.move(self.head_layers, [(at, self._begin, rows[at].head_held) for at in leads], self.block)
        for at in leads:
            rows[at].head_held += self.block
        made = made if residual else wide.to(made.device) + made
        return [
            [(made, at * width + slot) for slot in range(len(states) - len(asked[at]), len(states))]
            for at, states in enumerate(packed)
        ]

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of accepted clean states, and their hidden states for the head to read.

        `clean` has the slots of accepted clean states for each row of the batch, in order.
        """
        moves = []
        for at, (row, slots) in enumerate(zip(rows, clean, strict=True)):
            for slot in slots:
                moves.append((at, self._begin + slot * self.block, row.held))
                row.held += self.block
        if not moves:
            return
        self.cache.move(self.backbone_layers, moves, self.block)
        if not self.with_head and not self.shifted:
            return
        assert self._scored is not None
        width, where = len(self._scored) // len(rows), self.cache.hidden.device
        place, source, target = torch.tensor(moves, device=self.device).unbind(1)
        states, place, target = place * width + (source - self._begin) // self.block, place.to(where), target.to(where)
        if self.with_head:
            columns = target[:, None] + torch.arange(self.block, device=where)
            self.cache.hidden[place[:, None], columns] = self._scored[states].to(where)
        if self._ends is not None:
            self.cache.ends[place, target // self.block] = self._ends[states].to(where)

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

        Args:
            asked: For each state its row, the state, some of its free columns, and the tokens by column.
            hidden: The hidden states of each.
        """
        states = [(row, State(state.key, tuple(where), state.end, state.masks, 0)) for row, state, where, _ in asked]

        def odds(given: Tensor, token: Tensor) -> Tensor:
            return self.picker.token_odds(given, token, Spots(states, self.device))

        return self._of_tokens([(where, token) for _, _, where, token in asked], hidden, odds)

    def magnitudes(self, asked: Sequence[tuple[Sequence[int], Sequence[int]]], hidden: Sequence[Hidden]) -> list[list[float]]:
        """Compute the magnitude |C| of given tokens' logits, one dot product each; arguments and result as in `token_odds`."""
        weight = self.picker.lm_head_weight
        return self._of_tokens(asked, hidden, lambda given, token: token_logits(weight, given, token[:, None])[:, 0].abs())

    def _of_tokens(
        self,
        asked: Sequence[tuple[Sequence[int], Sequence[int]]],
        hidden: Sequence[Hidden],
        compute: Callable[[Tensor, Tensor], Tensor],
    ) -> list[list[float]]:
        """Compute a number of each given token [n] from the hidden states [n, hidden_size] at its column; see `token_odds`."""
        pairs = [(place * self.block + c, token[c]) for place, (where, token) in enumerate(asked) for c in where]
        columns, tokens = np.array(pairs, np.int64).T.copy()
        _, given = self._at_columns(columns, hidden)
        numbers = compute(given, torch.from_numpy(tokens).to(self.device, non_blocking=True))
        found: list[list[float]] = spread_columns(numbers, columns, len(asked), self.block).tolist()
        return found

    def _network(self, packed: Packed, held: Sequence[int], hidden: Tensor | None = None) -> Tensor:
        """Run the backbone, or with `hidden` [rows * width, block, hidden_size] the head, over states and their parents.

        Keys and values of states are written beyond the longest of all rows' texts, so that rows that take no part are not
        touched.

        Returns:
            Hidden states or h_C, [rows * width, block, hidden_size], `width` being the most states of a row; shifted hidden
            states have one more column, for the next block's first token.
        """
        rows, width, used = len(packed), max(map(len, packed)), max(held)
        self._begin = self.cache.target(used, width * self.block)
        empty = (self.mask_id,) * self.block
        numbers, starts, parents = array("q"), array("q"), array("q")
        for states in packed:
            for state, parent in states:
                start, ids = state.key
                numbers.extend(ids)
                starts.append(start)
                parents.append(parent)
            for _ in range(width - len(states)):
                numbers.extend(empty)
                starts.append(0)
                parents.append(-1)
        numbers.extend(starts)
        numbers.extend(parents)
        numbers.extend(held)
        table = torch.frombuffer(numbers, dtype=torch.long)
        plain = width == 1 and min(held) == self._begin and self.recorded is None
        forward = partial(self._packed, rows, width, self._begin, plain)
        columns = self.block + (self.shifted and hidden is None)
        inputs = [table] if hidden is None else [table, hidden.reshape(rows, width * self.block, -1)]
        if self.recorded is not None:
            key = (rows, width, self._begin, self.picker.dispatch, self.plans is not None)
            return self.recorded(key, forward, *inputs).view(rows * width, columns, -1)
        inputs[0] = table.to(self.device, non_blocking=True)
        return forward(*inputs).view(rows * width, columns, -1)

    def _packed(self, rows: int, width: int, begin: int, plain: bool, table: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Unpack `table` (ids, starts, parents, held) and run the network; a function of tensors that can be recorded."""
        states = rows * width
        ids, starts, parents, held = table.split([states * self.block, states, states, rows])
        ids, parent = ids.view(rows, -1), parents.view(rows, width)
        positions = (starts[:, None] + torch.arange(self.block, device=self.device)).view(rows, -1)
        mask: Any = RoundMask(held, parent, width, self.block, self.picker.dispatch, plain, self.plans)
        mask = mask if self.plans is not None else mask.dense(begin)
        if hidden is not None:
            return self.model.residual(ids, hidden, positions, mask, self.cache).to(self.device)
        made = self.model.backbone(ids, positions, mask, self.cache).to(self.device)
        return self._shifted_states(made, held, parent) if self.shifted else made

    def _shifted_text(self, hidden: Tensor, begin: int) -> Tensor:
        """Shift hidden states [rows, length, hidden_size] of texts from `begin` on by one position, and keep the last one of
        each block."""
        ends, first = self.cache.ends[: len(hidden)], begin // self.block
        before = ends[:, first - 1].to(self.device) if first else torch.zeros_like(hidden[:, 0])
        lasts = hidden[:, self.block - 1 :: self.block]
        ends[:, first : first + lasts.shape[1]] = lasts.to(ends.device)
        return torch.cat([before[:, None], hidden[:, :-1]], 1)

    def _shifted_states(self, hidden: Tensor, held: Tensor, parent: Tensor) -> Tensor:
        """Put before the hidden states of each state, [rows, width * block, hidden_size], the one that predicts its first
        column: the last one of its parent or else of its row's text."""
        states, ends = hidden.unflatten(1, (-1, self.block)), self.cache.ends
        rows = torch.arange(len(hidden), device=ends.device)
        before = ends[rows, (held.to(ends.device) // self.block - 1).clamp(min=0)].to(self.device)
        before = torch.where(held[:, None] > 0, before, 0)[:, None]
        lasts = states[:, :, -1].gather(1, parent.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
        before = torch.where(parent[..., None] >= 0, lasts, before)
        return torch.cat([before[:, :, None], states], 2)

    # ------------------------------------------------------------------------------------------- rows that have ended

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


def prefill_chunks(
    cache: BlockCache, texts: Tensor, begin: int, chunk: int, block: int
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor]]:
    """Iterate over texts [rows, length] long from `begin` on, a `chunk` of whole blocks per forward under a block-causal mask.

    Yields of each forward its first column, its end, ids, positions and mask; keys and values go to their slots.
    """
    positions = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
    for at in range(begin, texts.shape[1], chunk):
        end = min(texts.shape[1], at + chunk)
        here, seen = positions[:, at:end], positions[:, :end]
        cache.target(at, end - at, prefill=True)
        yield at, end, texts[:, at:end], here, block_causal_mask(here, seen, torch.ones_like(seen, dtype=torch.bool), block)


def gather_blocks(hidden: Sequence[Hidden]) -> Tensor:
    """Gather hidden states of n blocks from the few tensors that hold them: [n, block, hidden_size]."""
    first = hidden[0][0]
    tensors = {id(tensor): tensor for tensor, _ in hidden}
    if len(tensors) == 1:
        places = [place for _, place in hidden]
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
    """Read picks at columns of states in one transfer: tokens, odds, entropies and likeliest of each state, as in `Scores`.

    Ids are exact in float32: a vocabulary has fewer than 2^24.
    """
    numbers = [picks.token[:, None], picks.odds[:, None]]
    numbers += [] if picks.entropy is None else [picks.entropy[:, None]]
    numbers += [] if picks.likeliest is None else [picks.likeliest]
    spread = spread_columns(torch.cat([one.to(picks.odds.dtype) for one in numbers], 1), columns, states, block)
    token = np.maximum(spread[..., 0], 0).astype(np.int64).tolist()
    entropy = [None] * states if picks.entropy is None else spread[..., 2].tolist()
    likeliest: list[Any] = [None] * states
    if picks.likeliest is not None:
        ids, odds = np.split(spread[..., -picks.likeliest.shape[1] :], 2, -1)
        likeliest = list(zip(np.maximum(ids, 0).astype(np.int64), odds, strict=True))
    return list(zip(token, spread[..., 1].tolist(), entropy, likeliest, strict=True))
