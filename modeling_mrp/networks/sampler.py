"""The sampler: it turns hidden states into tokens, log-odds and entropies at the masked columns of
states.

Rows may have different pickers. For all rows that have the same picker, tokens are picked together,
with one transfer to the host.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rules.draft import Node
from ..rules.state import Row, Scores, State
from .picker import Picker, Picks, Spots, token_logits
from .uploads import upload, upload_all

# Hidden states of one block: a tensor [n, block, hidden_size], and the block's index in n.
Hidden = tuple[Tensor, int]
# By state, some of its free columns, and tokens by column.
TokensAt = Sequence[tuple[Sequence[int], Sequence[int]]]


# Copies column indices [n] to the device; returns them, and the values of each list of blocks at
# them, [n, size] each.
Gather = Callable[..., list[Tensor]]


class Sampler:
    """Picks tokens at the free columns of states, which are the masked ones that may be revealed.

    Args:
        picker_of: A function that returns the picker of a row.
        lm_head_weight: [vocab, hidden_size], the weight of `lm_head`. Its device is that of all
            tensors.
        block: Number of tokens in a block.
        gather: A function that gathers hidden states at columns, with the arguments and results of
            `gather_columns` except for the device; None for `gather_columns`.
    """

    def __init__(
        self,
        picker_of: Callable[[Any], Picker],
        lm_head_weight: Tensor,
        block: int,
        gather: Gather | None = None,
    ) -> None:
        self.picker_of = picker_of
        self.lm_head_weight = lm_head_weight
        self.device = lm_head_weight.device
        self.block = block
        self.gather: Gather = partial(gather_columns, self.device) if gather is None else gather

    def score(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        hidden: Tensor,
        first_states: Sequence[int],
    ) -> list[list[Scores]]:
        """Return the scores of submitted nodes, by row and node.

        Args:
            rows: The rows.
            drafts: For each row, its nodes.
            hidden: [n, block, hidden_size], the backbone's hidden states of all nodes.
            first_states: For each row, the index in `hidden` of its first node. Those of its other
                nodes follow.
        """
        states: list[tuple[Row, State]] = []
        blocks: list[Hidden] = []
        parents: list[State | None] = []
        for row, nodes, first in zip(rows, drafts, first_states, strict=True):
            for index, node in enumerate(nodes, first):
                states.append((row, node.state))
                blocks.append((hidden, index))
                parents.append(nodes[node.parent].state if node.parent >= 0 else None)
        scores = iter(self.pick(states, blocks, parents))
        return [list(islice(scores, len(nodes))) for nodes in drafts]

    def pick(
        self,
        states: Sequence[tuple[Row, State]],
        hidden: Sequence[Hidden],
        parents: Sequence[State | None] = (),
    ) -> list[Scores]:
        """Pick tokens at the free columns of states from the backbone's hidden states; return the
        scores of each state.

        Args:
            states: The states, each with its row.
            hidden: For each state, its hidden states: a tensor [n, block, hidden_size], and the
                index of the state in it.
            parents: For each state, its parent (see `Spots`), or None; processors see the parent's
                tokens. The sequence may be empty if no state has a parent.
        """
        return self._by_picker(self._pick, states, hidden, parents, ())

    def estimate(
        self,
        states: Sequence[tuple[Row, State]],
        hidden: Sequence[Hidden],
        parents: Sequence[State | None] = (),
        candidates: Sequence[Hidden | None] = (),
    ) -> list[Scores]:
        """Pick tokens for drafts at the free columns of states, from the head's estimates of hidden
        states; return the scores of each state.

        Args:
            states: The states, each with its row.
            hidden: For each state, the estimate of its hidden states: a tensor [n, block,
                hidden_size], and the index of the state in it.
            parents: For each state, its parent (see `Spots`), or None. The sequence may be empty if
                no state has a parent.
            candidates: For each state, the likeliest tokens that were found at the state from which
                it was made (`Scores.candidates`), or None. The sequence may be empty. States whose
                rows have the same picker are processed together: if all of them have candidates,
                each state's tokens are chosen among its candidates, and otherwise among all tokens.
        """
        return self._by_picker(self._estimate, states, hidden, parents, candidates)

    def _by_picker(
        self,
        pick: Callable[..., list[Scores]],
        states: Sequence[tuple[Row, State]],
        *others: Sequence[Any],
    ) -> list[Scores]:
        """Call `pick` once for each picker of the rows, with the picker and with those states whose
        rows have this picker. Pass on the entries of `others` that belong to these states. Each of
        `others` may be empty."""
        groups = self._groups([row for row, _ in states])
        if len(groups) == 1:
            return pick(groups[0][0], states, *others)
        scores: dict[int, Scores] = {}
        for picker, indices in groups:
            arguments: list[Any] = []
            for values in (states, *others):
                arguments.append([values[index] for index in indices] if values else values)
            scores |= zip(indices, pick(picker, *arguments), strict=True)
        return [scores[index] for index in range(len(states))]

    def _groups(self, rows: Sequence[Row]) -> list[tuple[Picker, list[int]]]:
        """List the pickers of the rows, each with the indices of the rows that have it."""
        pickers = list(map(self.picker_of, rows))
        members: dict[int, list[int]] = {}
        for index, picker in enumerate(pickers):
            members.setdefault(id(picker), []).append(index)
        return [(pickers[indices[0]], indices) for indices in members.values()]

    def _estimate(self, picker: Picker, *arguments: Any) -> list[Scores]:
        return self._pick(picker.for_drafts, *arguments)

    def _pick(
        self,
        picker: Picker,
        states: Sequence[tuple[Row, State]],
        hidden: Sequence[Hidden],
        parents: Sequence[State | None],
        candidates: Sequence[Hidden | None],
    ) -> list[Scores]:
        block = self.block
        count = len(states)
        columns = np.array(
            [
                index * block + column
                for index, (_, state) in enumerate(states)
                for column in state.free
            ],
            np.int64,
        )
        if not len(columns):
            return [
                Scores([0] * block, [-torch.inf] * block, hidden=location) for location in hidden
            ]
        locations = [location for location in candidates if location is not None]
        flat_index, hidden_states, *earlier = self.gather(
            columns, hidden, *[locations] * (len(locations) == count)
        )
        spots = Spots(states, self.device, parents)
        if earlier:
            picks = picker.among(hidden_states, earlier[0], spots)
        else:
            picks = picker(hidden_states, spots)
        kept: Sequence[Hidden | None] = candidates or [None] * count
        if picker.shortlist and picks.candidates is not None and not candidates:
            size = picks.candidates.shape[1]
            by_column = picks.candidates.new_zeros(count * block, size)
            by_column.index_copy_(0, flat_index, picks.candidates)
            by_column = by_column.view(count, block, size)
            kept = [(by_column, index) for index in range(count)]
        on_the_host = on_host(picks, columns, count, block, picker.sample)
        picked = zip(on_the_host, hidden, kept, strict=True)
        return [Scores(*fields, location, listed) for fields, location, listed in picked]

    def token_odds(
        self,
        queries: Sequence[tuple[Row, State, Sequence[int], Sequence[int]]],
        hidden: Sequence[Hidden],
    ) -> list[list[float]]:
        """Compute the log-odds of given tokens at some columns of each state. Return a list [block]
        for each state, with -inf at all other columns. There is one transfer to the host for each
        picker.

        Args:
            queries: For each state, a tuple: its row, the state, some of its free columns, and a
                sequence of token ids. The token given at a column is the item of this sequence at
                the index `column`.
            hidden: For each state, its hidden states: a tensor [n, block, hidden_size], and the
                index of the state in it.
        """
        log_odds: dict[int, list[float]] = {}
        for picker, indices in self._groups([row for row, *_ in queries]):
            states = []
            tokens = []
            blocks = []
            for index in indices:
                row, state, columns, token = queries[index]
                narrowed = State(state.key, tuple(columns), state.end, state.masks, 0)
                states.append((row, narrowed))
                tokens.append((columns, token))
                blocks.append(hidden[index])
            compute = partial(picker.token_odds, spots=Spots(states, self.device))
            computed = self._compute_at_tokens(tokens, blocks, compute)
            log_odds |= zip(indices, computed, strict=True)
        return [log_odds[index] for index in range(len(queries))]

    def magnitudes(self, queries: TokensAt, hidden: Sequence[Hidden]) -> list[list[float]]:
        """Compute the absolute values of the residual logits of given tokens at some columns of
        each state. Return a list [block] for each state, with -inf at all other columns. Residual
        logits are `lm_head` applied to the head's output h_C.

        Args:
            queries: For each state, a pair: some of its columns, and a sequence of token ids. The
                token given at a column is the item of this sequence at the index `column`.
            hidden: For each state, its h_C: a tensor [n, block, hidden_size], and the index of the
                state in it.
        """
        weight = self.lm_head_weight
        return self._compute_at_tokens(
            queries,
            hidden,
            lambda hidden_states, token: token_logits(weight, hidden_states, token[:, None])[
                :, 0
            ].abs(),
        )

    def _compute_at_tokens(
        self, queries: TokensAt, hidden: Sequence[Hidden], compute: Callable[..., Tensor]
    ) -> list[list[float]]:
        """Call `compute(hidden states [n, hidden_size], tokens [n])` once, on the given tokens of
        all states. Return the n numbers that it computes by state and column, with -inf at all
        other columns. `queries` is as in `magnitudes`."""
        pairs = []
        for index, (columns, token) in enumerate(queries):
            for column in columns:
                pairs.append((index * self.block + column, token[column]))
        indices, tokens = np.array(pairs, np.int64).T.copy()
        _, hidden_states = self.gather(indices, hidden)
        numbers = compute(hidden_states, upload(tokens, self.device))
        rows: list[list[float]] = spread_columns(
            numbers, indices, len(queries), self.block
        ).tolist()
        return rows


def gather_columns(
    device: torch.device, columns: np.ndarray, *several: Sequence[Hidden]
) -> list[Tensor]:
    """Gather the values at the same n columns from several lists of blocks. All indices go to the
    device in one copy.

    Args:
        device: The device.
        columns: int64 [n], the columns. The column c of the block with the index i in its list is
            given as i * block + c.
        several: The lists of blocks. A block is a pair: a tensor [m, block, size] that holds it,
            and its index in that tensor.

    Returns:
        A list of tensors: first `columns`, copied to the device; then, for each list of blocks, the
        values at the columns, [n, size].
    """
    vectors = [columns]
    # By list, from where its result is copied: values, the numbers of the vectors that index them
    # and the result; the latter is None if the values are the whole result.
    copies: list[list[tuple[Tensor, int, int | None]]] = []
    for blocks in several:
        holders = {id(holder): holder for holder, _ in blocks}
        indices = [index for _, index in blocks]
        if len(holders) == 1 and indices == list(range(len(blocks))):
            copies.append([(blocks[0][0].flatten(0, 1), 0, None)])
            continue
        block = blocks[0][0].shape[1]
        block_index, offset = np.divmod(columns, block)
        positions = np.array(indices, np.int64)[block_index] * block + offset
        if len(holders) == 1:
            copies.append([(blocks[0][0].flatten(0, 1), len(vectors), None)])
            vectors.append(positions)
            continue
        owners = np.array([id(holder) for holder, _ in blocks])[block_index]
        copies.append([])
        for key, holder in holders.items():
            chosen = np.flatnonzero(owners == key)
            copies[-1].append((holder.flatten(0, 1), len(vectors), len(vectors) + 1))
            vectors += [positions[chosen], chosen]
    on_device = upload_all(vectors, device)
    gathered = [on_device[0]]
    for sources in copies:
        out = sources[0][0].new_empty(0)
        for values, source, target in sources:
            indexed = values[on_device[source].to(values.device)]
            if target is None:
                out = indexed
                continue
            if not len(out):
                out = indexed.new_empty(len(columns), indexed.shape[1])
            out[on_device[target].to(out.device)] = indexed.to(out.device)
        gathered.append(out)
    return gathered


def gather_blocks(hidden: Sequence[Hidden]) -> Tensor:
    """Gather the hidden states of n blocks in one tensor [n, block, hidden_size], in the given
    order. Each block is given as a pair: a tensor [m, block, hidden_size] that holds it, and its
    index in that tensor. The result can be the given tensor itself."""
    first = hidden[0][0]
    indices = [index for _, index in hidden]
    tensors = {id(tensor): tensor for tensor, _ in hidden}
    if len(tensors) == 1:
        if indices == list(range(len(first))):
            return first
        return first[upload(indices, first.device)]
    vectors = []
    for key in tensors:
        targets = [target for target, (holder, _) in enumerate(hidden) if id(holder) == key]
        vectors += [np.array(targets), np.array(indices)[targets]]
    on_device = iter(upload_all(vectors, first.device))
    out = first.new_empty(len(hidden), *first.shape[1:])
    for tensor in tensors.values():
        targets_here = next(on_device)
        sources = next(on_device).to(tensor.device)
        out[targets_here] = tensor[sources].to(out.device)
    return out


def spread_columns(numbers: Tensor, columns: np.ndarray, states: int, block: int) -> np.ndarray:
    """Copy numbers [n] or [n, m] to the host, and put them at the columns at which they belong.
    Return a float64 array [states, block] or [states, block, m], which is -inf at all other
    columns.

    `columns` [n] has, for each number, the index of its state times `block`, plus its column in the
    state.
    """
    values = numbers.detach().cpu().double().numpy()
    spread = np.full((states * block, *values.shape[1:]), -np.inf)
    spread[columns] = values
    return spread.reshape(states, block, *values.shape[1:])


def on_host(
    picks: Picks, columns: np.ndarray, states: int, block: int, draws: bool
) -> list[tuple[list[int], list[float], Any, Any]]:
    """Copy picks to the host in one transfer. Return, for each state, the fields `token`,
    `log_odds`, `entropy` and `drawable` of its `Scores`.

    Args:
        picks: Picks at n columns of the states.
        columns: [n], for each pick, the index of its state times `block`, plus its column in the
            state.
        states: The number of states.
        block: The number of tokens of a block.
        draws: Whether the host draws tokens among the picks' candidates. If not, these are not
            copied, and `drawable` is None.
    """
    candidates = picks.candidates if draws else None
    numbers = []
    for field in (picks.token, picks.log_odds, picks.entropy, candidates):
        if field is not None:
            numbers.append(field.view(len(columns), -1).to(picks.log_odds.dtype))
    spread = spread_columns(torch.cat(numbers, 1), columns, states, block)
    # exact in float32: a vocabulary has fewer than 2^24
    token = np.maximum(spread[..., 0], 0).astype(np.int64).tolist()
    entropy: list[Any] = [None] * states
    if picks.entropy is not None:
        entropy = spread[..., 2].tolist()
    drawable: list[Any] = [None] * states
    if candidates is not None:
        drawable = list(spread[..., -candidates.shape[1] :])
    return list(zip(token, spread[..., 1].tolist(), entropy, drawable, strict=True))
