"""Picks: the token that is chosen at a masked position, and its log-odds. Picks are greedy or
sampled, and reproducible to the bit.

A sampled pick is a Gumbel-max whose noise is a pure function of the row's seed, the absolute
position, the number of masks left in the block, and the token id. So two decoders that reach the
same state draw the same token, whatever path led there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from ..kernels.dispatch import AUTOMATIC, Dispatch
from ..kernels.pick import (
    LIST,
    MOST_LISTED,
    PICK,
    Unembedding,
    likeliest_tokens,
    list_rows_ref,
    log_odds,
    pick_rows_ref,
    upcast,
)
from ..rules.bans import Bans
from ..rules.constraint import TokenSet
from ..rules.draft import noise_key
from ..rules.state import Row, State
from .masks import TokenMasks
from .uploads import upload, upload_all

# Kinds of truncation, and whether each always keeps the n likeliest tokens for some n; if so, it
# needs only the k logits that a top-k before it leaves.
TRUNCATIONS: dict[type, bool] = {
    TopKLogitsWarper: True,
    TopPLogitsWarper: True,
    MinPLogitsWarper: True,
    EpsilonLogitsWarper: True,
    EtaLogitsWarper: True,
    TopHLogitsWarper: False,
    TypicalLogitsWarper: False,
}

# Tokens that a sampled draft chooses among at a position: all that transformers' default top-k of
# 50 leaves.
LIKELIEST = 64
# Tokens that the head's drafts choose among at a position: this many draft as well as all
# (`benchmarks/NOTES.md`, Shortlist).
SHORTLIST = 16


@dataclass(frozen=True)
class Spots:
    """The positions at which tokens are picked: the `free` columns of each state, one state after
    the other.

    Attributes:
        states: The states, each with its row.
        device: The device for the tensors of the positions.
        parents: For each state, its parent, which is the uncommitted state to which it attends
            (`Node.parent`), or None. If no state has a parent, the sequence may be empty.
    """

    states: Sequence[tuple[Row, State]]
    device: torch.device
    parents: Sequence[State | None] = ()

    def keys(self) -> Tensor:
        """Compute a key of the sampling noise for each position, int64 [n]: a hash of the row's
        seed, the absolute position, and the number of masks of the state."""
        numbers: list[int] = []
        for row, state in self.states:
            for column in state.free:
                numbers += (row.seed, state.start + column, state.masks)
        keys: Tensor = noise_key(*upload(numbers, self.device).view(-1, 3).unbind(1))
        return keys

    def no_eos(self) -> Tensor | None:
        """Return a bool tensor [n] that is True at positions where an eos is forbidden. Return None
        if it is forbidden nowhere."""
        if not any(state.start < row.no_eos_before > row.prompt for row, state in self.states):
            return None
        early = [
            state.start + column < row.no_eos_before
            for row, state in self.states
            for column in state.free
        ]
        return upload(early, self.device).bool()

    def allowed(self) -> list[TokenSet | None]:
        """Return, for each position, the tokens that the constraint of its row allows; None stands
        for all tokens. The list is empty if no row has a constraint."""
        if all(row.constraint is None for row, _ in self.states):
            return []
        sets: list[TokenSet | None] = []
        for index, (row, state) in enumerate(self.states):
            parent = self.parents[index] if self.parents else None
            sets += row.allowed(state, parent) or [None] * len(state.free)
        return sets

    def texts(self) -> Iterator[tuple[list[int], int]]:
        """Yield a pair for each position: the text of its row as it is at its state, with masks
        where nothing is revealed, and the position's index in that text."""
        for index, (row, state) in enumerate(self.states):
            ids = row.text_at(state, self.parents[index] if self.parents else None)
            yield from ((ids, state.start + column) for column in state.free)


class Picks(NamedTuple):
    """Picks at n positions, and the tokens among which drafts choose. Fields that the picker does
    not compute are None.

    Attributes:
        token: int64 [n], the picked tokens.
        log_odds: float [n], the log-odds of the token's probability after temperature and
            processors, before truncation. NaN where no token has a finite logit.
        entropy: float [n], in nats, of the distribution after temperature and processors, before
            truncation.
        candidates: [n, 2 m + 1] in at least float32, for the m likeliest tokens: m ids, the
            likeliest first; their m scores (logits after processors, divided by the temperature),
            which are -inf for tokens that truncation leaves out; and the log-sum-exp of the scores
            of all other tokens, including those left out.
    """

    token: Tensor
    log_odds: Tensor
    entropy: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True)
class Picker:
    """Turns hidden states into picks, with one set of sampling options.

    Attributes:
        lm_head_weight: [vocab, hidden_size], the weight of `lm_head`.
        mask_token_id: The id of the mask. It is never picked, and left out of the softmax.
        temperature: Divides the logits.
        sample: Whether to add Gumbel noise before the argmax.
        processors: The user's logits processors, applied before temperature.
        bans: Banned sequences, applied after the processors; or None.
        truncation: top-k, top-p and the like, applied after the confidence is computed.
        eos_token_ids: Ids that positions before a minimum length must not take.
        entropy: Whether to compute entropies.
        candidates: Number of likeliest tokens that are returned with each pick. Drafts choose among
            them.
        shortlist: Number of these likeliest tokens among which the head's drafts choose (method
            `among`); 0 for all tokens of the vocabulary.
        dispatch: Decides between kernels and PyTorch.
        in_order: None, or a function that is used in place of `processors` and acts only on the
            first position of each state. It gets the spots and the logits [n, vocab] at the n first
            positions, and returns new logits for them.
    """

    lm_head_weight: Tensor
    mask_token_id: int
    temperature: float = 1.0
    sample: bool = False
    processors: LogitsProcessorList | None = None
    bans: Bans | None = None
    truncation: LogitsProcessorList | None = None
    eos_token_ids: tuple[int, ...] = ()
    entropy: bool = False
    candidates: int = 0
    shortlist: int = 0
    dispatch: Dispatch = field(default=AUTOMATIC)
    in_order: Callable[[Spots, Tensor], Tensor] | None = None

    @cached_property
    def unembedding(self) -> Unembedding:
        """The map from hidden states to logits, before any processors."""
        return Unembedding(
            self.lm_head_weight, self.mask_token_id, self.temperature, self.eos_token_ids
        )

    @cached_property
    def for_drafts(self) -> "Picker":
        """A copy of this picker that picks tokens for drafts. It computes no entropies. It returns
        candidates only if tokens are sampled, because the host then draws among them."""
        return replace(self, entropy=False, candidates=self.candidates if self.sample else 0)

    @cached_property
    def masks(self) -> TokenMasks:
        """The store on the device of masks over the vocabulary, one for each set of tokens that a
        constraint allows. It is made at first use."""
        return TokenMasks()

    def __call__(self, hidden: Tensor, spots: Spots | None = None) -> Picks:
        """Pick at n positions from hidden states [n, hidden_size]. Without `spots`, picks are
        greedy, and no processors or bans apply."""
        keys = None if spots is None or not self.sample else spots.keys()
        shape = self._shaper(spots)
        if spots is not None and self.in_order is not None:
            shape = self._ordered(spots, hidden, shape)
        picks = []
        for chunk in self.unembedding.chunks(len(hidden)):
            logits = shape(self.unembedding.logits(hidden[chunk]), chunk)
            picks.append(self._pick(logits, None if keys is None else keys[chunk]))
        return _join(picks)

    def among(self, hidden: Tensor, candidates: Tensor, spots: Spots) -> Picks:
        """Pick a token for a draft at each of n positions, greedily and among few candidates.

        The candidates of a position are the first `shortlist` of the tokens that were listed there
        at an earlier state. They get new logits from `hidden`. All other tokens keep the scores
        (logits divided by the temperature) of the earlier state; they are never picked, but count
        in the softmax that gives the log-odds. Candidates that truncation left out at the earlier
        state are not picked, nor is an eos where none is allowed. Processors and bans are not
        applied.

        This reads only the candidates' rows of `lm_head`. It suffices for drafts, because the
        argmax after a reveal is nearly always one of the likeliest tokens before it.

        Args:
            hidden: [n, hidden_size], hidden states.
            candidates: [n, 2 m + 1], `Picks.candidates` of the same positions at an earlier state.
            spots: The positions.
        """
        unembedding = self.unembedding
        listed = candidates.shape[1] // 2
        count = min(self.shortlist, listed)
        picks = []
        ids = candidates[:, :count].long()
        earlier_scores = candidates[:, listed : listed + count]
        other_scores = candidates[:, listed + count :]
        no_eos = spots.no_eos()
        for chunk in unembedding.chunks(len(hidden), count * hidden.shape[1]):
            logits = unembedding.tempered(
                token_logits(self.lm_head_weight, hidden[chunk], ids[chunk])
            )
            logits = logits.masked_fill(earlier_scores[chunk] == -torch.inf, -torch.inf)
            logits = unembedding.barred(
                logits, None if no_eos is None else no_eos[chunk], ids[chunk]
            )
            best = logits.argmax(-1)
            scores = torch.cat([logits, other_scores[chunk].to(logits.dtype)], 1)
            token = ids[chunk].gather(1, best[:, None])[:, 0]
            odds = log_odds(scores, best)
            now = None
            if self.candidates:
                rest = scores[:, count:].logsumexp(-1, keepdim=True)
                now = torch.cat([ids[chunk].to(scores.dtype), logits, rest], 1)
            picks.append(Picks(token, odds, candidates=now))
        return _join(picks)

    def token_odds(self, hidden: Tensor, token: Tensor, spots: Spots) -> Tensor:
        """Compute the log-odds [n] of given tokens, one at each of n positions. They are those of
        the token's probability after temperature and processors, before truncation.

        Args:
            hidden: [n, hidden_size], the hidden states at the positions.
            token: int64 [n], the tokens.
            spots: The positions.
        """
        shape = self._shaper(spots)
        odds = []
        for chunk in self.unembedding.chunks(len(hidden)):
            logits = shape(self.unembedding.logits(hidden[chunk]), chunk)
            odds.append(log_odds(self.unembedding.tempered(logits), token[chunk]))
        return torch.cat(odds)

    def distributions(self, hidden: Tensor, spots: Spots) -> tuple[Tensor, Tensor]:
        """Compute the logits [n, vocab] at n positions in two forms: raw, and after processors,
        temperature and truncation, which is the form from which tokens are drawn."""
        shape = self._shaper(spots)
        raw_logits = []
        truncated_scores = []
        for chunk in self.unembedding.chunks(len(hidden)):
            raw_logits.append(upcast(self.unembedding.logits(hidden[chunk])))
            logits = shape(raw_logits[-1].clone(), chunk)
            truncated_logits, min_logit = self._truncate_logits(logits)
            scores = self.unembedding.tempered(truncated_logits)
            if min_logit is not None:
                scores = scores.masked_fill(logits < min_logit[:, None], -torch.inf)
            truncated_scores.append(scores)
        return torch.cat(raw_logits), torch.cat(truncated_scores)

    def _shaper(self, spots: Spots | None) -> Callable[[Tensor, slice], Tensor]:
        """Make a function that applies processors, bans, constraints and minimum lengths. The
        function takes logits [m, vocab] and the slice of the positions to which they belong."""
        no_eos = None if spots is None else spots.no_eos()
        allowed = [] if spots is None else spots.allowed()
        if spots is None or (not allowed and no_eos is self.processors is self.bans is None):
            return lambda logits, chunk: logits
        contexts: list[list[int]] = []
        barred: list[tuple[int, int]] = []
        texts = spots.texts() if self.processors or self.bans else ()
        for index, (ids, position) in enumerate(texts):
            if self.processors:
                contexts.append(ids[:position])
            if self.bans:
                for token in self.bans.barred(ids, position, self.mask_token_id):
                    barred.append((index, token))
        indices, tokens = np.array(barred, np.int64).reshape(-1, 2).T

        def shape(logits: Tensor, chunk: slice) -> Tensor:
            if self.processors:
                logits = self._process(upcast(logits), contexts[chunk])
            if len(indices):
                in_chunk = (indices >= chunk.start) & (indices < chunk.stop)
                vectors = [indices[in_chunk] - chunk.start, tokens[in_chunk]]
                uploaded = upload_all(vectors, logits.device)
                logits[uploaded[0], uploaded[1]] = -torch.inf
            if allowed:
                logits = self.masks.bar(logits, allowed[chunk])
            return self.unembedding.barred(logits, None if no_eos is None else no_eos[chunk])

        return shape

    def _ordered(
        self, spots: Spots, hidden: Tensor, shape: Callable[[Tensor, slice], Tensor]
    ) -> Callable[[Tensor, slice], Tensor]:
        """Call `in_order` with the logits at the first position of each state, computed from hidden
        states [n, hidden_size]. Return a function of the same form as `shape`: it replaces the
        logits at these positions with the answers of `in_order`, and then applies `shape`."""
        assert self.in_order is not None
        columns = []
        for _, state in spots.states:
            columns.append(len(state.free))
        starts = np.cumsum([0, *columns[:-1]])[np.array(columns, np.int64) > 0]
        firsts = upload(starts, hidden.device)
        answers = self.in_order(spots, upcast(self.unembedding.logits(hidden[firsts])))
        answers = answers.masked_fill(answers.isnan(), -torch.inf)
        answers[:, self.mask_token_id] = -torch.inf

        def ordered(logits: Tensor, chunk: slice) -> Tensor:
            logits = upcast(logits)
            in_chunk = (starts >= chunk.start) & (starts < chunk.stop)
            logits[upload(starts[in_chunk] - chunk.start, logits.device)] = answers[
                upload(np.flatnonzero(in_chunk), logits.device)
            ]
            return shape(logits, chunk)

        return ordered

    def _process(self, logits: Tensor, contexts: list[list[int]]) -> Tensor:
        """Apply the processors to logits [n, vocab]. For each position, `contexts` has the ids
        before it. Positions with equally long contexts are processed together."""
        lengths: dict[int, list[int]] = {}
        for row, context in enumerate(contexts):
            lengths.setdefault(len(context), []).append(row)
        for rows in lengths.values():
            selected = upload(rows, logits.device)
            numbers = np.array([contexts[row] for row in rows], np.int64)
            ids = upload(numbers.ravel(), logits.device).view(numbers.shape)
            processed = logits[selected]
            for processor in self.processors or ():
                processed = check_scores(processor, processor(ids, processed), processed)
            logits[selected] = processed.masked_fill(processed.isnan(), -torch.inf)
        logits[:, self.mask_token_id] = -torch.inf
        return logits

    def _pick(self, logits: Tensor, keys: Tensor | None) -> Picks:
        """Pick at n positions from logits [n, vocab], with the noise of `keys` [n], or without
        noise if `keys` is None."""
        truncated_logits, min_logit = self._truncate_logits(logits)
        given = (self.unembedding, logits, min_logit, keys)
        by_kernel = truncated_logits is logits
        entropy = None
        if self.entropy:
            logp = self.unembedding.tempered(logits).log_softmax(-1)
            entropy = -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1)
        if not self.candidates:
            if by_kernel:
                token, odds = self.dispatch.run(PICK, *given)
            else:
                token, odds = pick_rows_ref(*given, truncated_logits)
            return Picks(token, odds, entropy)
        if by_kernel and self.candidates <= MOST_LISTED:
            token, odds, candidates = self.dispatch.run(LIST, *given, self.candidates)
        else:
            token, odds, candidates = list_rows_ref(*given, self.candidates, truncated_logits)
        return Picks(token, odds, entropy, candidates)

    def _truncate_logits(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Truncate logits [n, vocab]; return the truncated logits and None. If truncation begins
        with a top-k, return instead the whole logits and the least logit that may be picked at each
        position, [n]."""
        top_k = self._top_k()
        tempered = self.unembedding.tempered
        if not self.truncation or not len(logits):
            return logits, None
        if top_k is None:
            return logits.masked_fill(
                self._truncated(tempered(logits).clone()) == -torch.inf, -torch.inf
            ), None
        # what is kept is not under a logit that is found among k
        top, _ = likeliest_tokens(logits, top_k)
        return logits, top.masked_fill(
            self._truncated(tempered(top)) == -torch.inf, torch.inf
        ).amin(-1)

    def _top_k(self) -> int | None:
        """If truncation begins with a top-k, and its other parts need only the k logits that this
        leaves, return k. Otherwise return None."""
        warpers = self.truncation or []
        for warper in warpers:
            if not TRUNCATIONS.get(type(warper), False) or warper.filter_value != -torch.inf:
                return None
        first = next(iter(warpers), None)
        return first.top_k if isinstance(first, TopKLogitsWarper) else None

    def _truncated(self, scores: Tensor) -> Tensor:
        """Apply truncation to scores [n, vocab]. The warpers get zeros as ids, which they do not
        read."""
        assert self.truncation is not None
        return self.truncation(torch.zeros_like(scores[:, :1], dtype=torch.long), scores)


def token_logits(weight: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
    """Compute the logits [n, m] of m tokens at each of n positions, in at least float32, from their
    ids, int64 [n, m], and hidden states [n, hidden_size]."""
    return (upcast(weight[ids]) @ upcast(hidden)[:, :, None])[:, :, 0]


def _join(picks: Sequence[Picks]) -> Picks:
    """Concatenate picks of consecutive positions."""
    if len(picks) == 1:
        return picks[0]
    joined = []
    for values in zip(*picks, strict=True):
        joined.append(None if values[0] is None else torch.cat(values))
    return Picks._make(joined)


def check_scores(processor: LogitsProcessor, answer: Any, scores: Tensor) -> Tensor:
    """Check what a logits processor returned (`answer`) for `scores` [n, vocab], and return it in
    the dtype of the scores. Raise `ValueError` if it is not a floating-point tensor of the same
    shape, or contains +inf."""
    if (
        not isinstance(answer, Tensor)
        or answer.shape != scores.shape
        or not answer.is_floating_point()
    ):
        received = f"a {type(answer).__name__}"
        if isinstance(answer, Tensor):
            received = f"{answer.dtype} of {list(answer.shape)}"
        raise ValueError(
            f"the logits processor {type(processor).__name__} returned {received}: it must return "
            f"float scores of the shape it was given, {list(scores.shape)}"
        )
    if bool((answer == torch.inf).any()):
        raise ValueError(
            f"the logits processor {type(processor).__name__} returned +inf, under which no token "
            "has a probability: let it return -inf for all others"
        )
    return answer.to(scores.dtype)
