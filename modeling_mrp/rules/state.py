"""States of a block, their scores, and the row of text that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .bans import Bans
from .constraint import Constraint, TokenSet

# A state's key: the position where its block starts, and its ids. Within a row, a state's scores
# depend on nothing else.
Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class State:
    """A partly revealed block of one row.

    Attributes:
        key: `(start, ids)`: the absolute position where the block begins, and its token ids, masks
            included.
        free: Columns that may be revealed: the masked columns before the first eos that was
            generated in the block.
        end: The column of the first generated eos; the block size if there is none.
        masks: Number of masked columns, including those after the eos.
        step: Number of denoising steps since the block was opened.
    """

    key: Key
    free: tuple[int, ...]
    end: int
    masks: int
    step: int

    @property
    def start(self) -> int:
        """The absolute position where the block begins."""
        return self.key[0]

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the block, masks included."""
        return self.key[1]

    def revealing(self, columns: Sequence[int], key: Key) -> "State":
        """Return the state that results from revealing `columns`. `key` is its `State.key`, so it
        holds the revealed tokens, none of which may be an eos."""
        if len(columns) == 1:
            index = self.free.index(columns[0])
            free = self.free[:index] + self.free[index + 1 :]
        else:
            free = tuple([column for column in self.free if column not in columns])
        return State(key, free, self.end, self.masks - len(columns), self.step + 1)


@dataclass(slots=True, eq=False)
class Scores:
    """The picked token and its log-odds at each column of one state. They come from the backbone's
    logits, or from the head's estimate of these.

    Attributes:
        token: For each column, the picked token; arbitrary where the state has no mask.
        log_odds: For each column, the log-odds of the picked token. They order columns as
            probabilities do, but stay precise where probabilities round to 1. NaN if the logit of
            the picked token is not finite.
        entropy: For each column, the entropy in nats; None unless the rule needs it.
        drawable: A numpy array [block, 2 m + 1], among whose tokens drafts draw. For each column,
            it has the ids of the m likeliest tokens, their m scores (logits divided by the
            temperature), and the log-sum-exp of the scores of all other tokens. None unless tokens
            are sampled and drafts are made.
        hidden: A tensor [n, block, hidden_size], and the index of this state's hidden states in it.
            None for scores made by hand, without a network.
        candidates: The tokens among which the head's drafts choose: a tensor [n, block, 2 m + 1],
            for n states, in the form of `drawable`, and the index of this state in it. None if they
            choose among all tokens.
    """

    token: list[int]
    log_odds: list[float]
    entropy: list[float] | None = None
    drawable: Any = None
    hidden: tuple[Any, int] | None = None
    candidates: tuple[Any, int] | None = None


@dataclass(slots=True, eq=False)
class PendingReveal:
    """A row's last accepted state and a reveal made there. The state after the reveal (the
    successor) has not yet been scored by any forward.

    Attributes:
        state: The last accepted state, which has masks.
        scores: The backbone's scores of that state.
        columns: Revealed columns.
        memo: The rule's memo after the reveal.
        successor: The state after the reveal.
        drawn: Maps each column that the head revealed to the state and the hidden states (in the
            form of `Scores.hidden`) from which its token was picked. None if the head has not
            refined the reveal.
        remasked: Columns that the step revealed and the head then masked again.
    """

    state: State
    scores: Scores
    columns: tuple[int, ...]
    memo: Any
    successor: State
    drawn: dict[int, tuple[State, Any]] | None = None
    remasked: tuple[int, ...] = ()


class Counts:
    """The counts of one row's forwards and drafts, at first 0.

    Args:
        width: The largest number of states of the row in a round.
        drafts: Whether rounds draft. If not, there are no counts by depth.

    Attributes:
        forwards, head_forwards: Number of forwards of the backbone and of the head in which the row
            took part.
        states: Number of states that rounds scored, those that open a block included.
        drafted, accepted: Number of drafts that were submitted, and that were accepted.
        revoked: Number of reveals that the head masked again.
        lengths: For each n from 0 on, the number of rounds that accepted n states. The first state
            of a round counts, although it is not a draft. States that the round before had scored
            count, too.
        offered_at_depth: For each k from 1 on, the number of rounds that accepted at least k - 1
            drafts and offered a k-th one, which could follow the (k - 1)-th.
        accepted_at_depth: For each k from 1 on, the number of rounds that accepted a k-th draft.
    """

    def __init__(self, width: int, drafts: bool) -> None:
        # a path continues through states that the previous round scored
        depths = 2 * width - 1 if drafts else 0
        self.forwards = self.head_forwards = 0
        self.states = self.drafted = self.accepted = self.revoked = 0
        self.lengths = [0] * ((1 + drafts) * width + 1)
        self.offered_at_depth = [0] * depths
        self.accepted_at_depth = [0] * depths


@dataclass(eq=False)
class Row:
    """One sequence of the batch: its text so far, its next state, and the scores from which its
    drafts start.

    Attributes:
        place: Index of the row in the call.
        text: The token at each absolute position, or the mask where it is not known. Masks pad the
            text beyond `limit` to whole blocks.
        block_size: Number of tokens in a block.
        mask_id: The id of the mask token.
        eos: Ids that end the text.
        prompt: Number of tokens in the prompt.
        given_end: One past the position of the last given token, be it of the prompt or of a
            template that is to be filled in.
        limit: One past the last position to generate.
        open_end: One past the last position before `limit` whose token is not given.
        no_eos_before: No position before this one may take an eos.
        seed: Seed of the sampling noise.
        bans: Banned sequences, or None.
        constraint: The constraint on the new tokens, or None.
        fills: Whether a token that the constraint forces is revealed at once, together with the
            tokens that force it, so that it needs no forward.
        state: The next state. The last reveal made it; at first it is the state of the block with
            the first mask.
        source: Scores of the last accepted state, from which drafts start; None if that state had
            no masks.
        memo: The rule's memo at `state`.
        memory: States with masks that the last round with drafts scored, each with its scores, by
            the state's key. A later path may still reach such a state. First states of next blocks,
            which were scored behind an unwritten block, are not kept.
        preview: The key of the next block's first state, and the scores of that state made while
            the block before it was unfinished. Drafts of the next block start from these scores.
            Both are None if there is no preview.
        held, head_held: Number of leading tokens whose keys and values are cached in the layers of
            the backbone (`held`) and of the head (`head_held`).
        logprob, step: For each position after the prompt, the log-probability of its token when it
            was revealed, and the denoising step that revealed it. They are 0 and -1 where nothing
            was revealed.
        steps: Number of denoising steps so far.
        stop: One past the last token once the text is complete; else None.
        counts: Counts of forwards and drafts.
        written: The reveals written so far if the caller wants them; else None.
        origins: Maps positions where blocks begin to the constraint's origin there (see
            `Constraint`), as far as it has been computed.
        filled_in: Positions of the tokens that the constraint filled in.
    """

    place: int
    text: list[int]
    block_size: int
    mask_id: int
    eos: frozenset[int]
    prompt: int
    given_end: int
    limit: int
    open_end: int
    no_eos_before: int
    seed: int
    bans: Bans | None = None
    constraint: Constraint | None = None
    fills: bool = True
    state: State = field(init=False)
    source: Scores | None = field(init=False, default=None)
    memo: Any = field(init=False, default=None)
    memory: dict[Key, tuple[State, Scores]] = field(init=False, default_factory=dict)
    preview: tuple[Key | None, Scores | None] = field(init=False, default=(None, None))
    held: int = field(init=False, default=0)
    head_held: int = field(init=False, default=0)
    logprob: list[float] = field(init=False)
    step: list[int] = field(init=False)
    steps: int = field(init=False, default=0)
    stop: int | None = field(init=False, default=None)
    counts: Counts = field(init=False)
    written: list[PendingReveal] | None = field(init=False, default=None)
    origins: dict[int, Any] = field(init=False, default_factory=dict)
    filled_in: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        first = next(
            (index for index in range(self.limit) if self.text[index] == self.mask_id),
            self.limit - 1,
        )
        self.state = self.first_state(first // self.block_size * self.block_size)
        self.logprob = [0.0] * (len(self.text) - self.prompt)
        self.step = [-1] * (len(self.text) - self.prompt)
        self.counts = Counts(1, False)
        self.write_filled()

    def forget(self) -> None:
        """Free the scores that the row keeps for later drafts, which hold tensors of whole rounds.
        To be called once the row has ended; its text and counts stay."""
        self.source = None
        self.memory = {}
        self.preview = (None, None)

    def rewound(self, start: int) -> "Row":
        """Return a copy of the row as it was when the block at `start` was opened: each token that
        was revealed at `start` or later is a mask again."""
        steps = [-1] * self.prompt + self.step
        text = self.text[: len(steps)]
        for position in range(start, len(text)):
            if steps[position] >= 0:
                text[position] = self.mask_id
        return replace(self, text=text)

    def text_at(self, state: State, parent: State | None = None) -> list[int]:
        """Return the text as it is at a state, up to the end of the state's block or, if that is
        later, up to the last given token.

        `parent` is the finished state of the block before, if `text` does not hold it yet.
        """
        ids = self.text[: state.start]
        if parent is not None:
            ids[parent.start :] = parent.ids
        return [*ids, *state.ids, *self.text[state.start + self.block_size : self.given_end]]

    def first_state(self, start: int, parent: State | None = None) -> State:
        """Return the first state of the block at `start`.

        It consists of masks, given tokens, and tokens that the constraint fills in. A given eos
        does not end the text. `parent` is the finished state of the block before, if `text` does
        not hold it yet.
        """
        ids = tuple(self.text[start : start + self.block_size])
        ids += (self.mask_id,) * (self.block_size - len(ids))
        free = tuple([column for column, token in enumerate(ids) if token == self.mask_id])
        return self.filled(State((start, ids), free, self.block_size, len(free), 0), parent)

    def successor(
        self,
        state: State,
        columns: Sequence[int],
        token: Sequence[int],
        parent: State | None = None,
    ) -> State:
        """Return the state that results from revealing `token[column]` at each column of `columns`,
        and then filling in the tokens that the constraint forces.

        `parent` is the finished state of the block before, if `text` does not hold it yet.
        """
        start, old_ids = state.key
        ids = list(old_ids)
        end = state.end
        eos = self.eos
        for column in columns:
            ids[column] = new_token = token[column]
            if column < end and new_token in eos:
                end = column
        key = (start, tuple(ids))
        if end == state.end:
            return self.filled(state.revealing(columns, key), parent)
        free = tuple([column for column in state.free if column < end and column not in columns])
        return self.filled(
            State(key, free, end, state.masks - len(columns), state.step + 1), parent
        )

    def origin(self, start: int, parent: State | None = None) -> Any:
        """Return the constraint's origin for the block at `start`: what the constraint needs to
        know of the text before the block (see `Constraint`).

        That text ends with the block of the state `parent`, if it is given, and otherwise is the
        row's text. Return None if there is no constraint, or if the text before the block has masks
        or is not allowed.
        """
        constraint = self.constraint
        if constraint is None:
            return None
        if parent is not None:
            before = self.origin(parent.start)
            return None if before is None else constraint.advance(before, *parent.key)
        known = start
        first = self.prompt // self.block_size * self.block_size
        while known > first and known not in self.origins:
            known -= self.block_size
        origin = self.origins.get(known, constraint.first)
        while known < start and origin is not None:
            block = self.text[known : known + self.block_size]
            origin = constraint.advance(origin, known, block)
            known += self.block_size
            if origin is not None:
                self.origins[known] = origin
        return origin

    def allowed(self, state: State, parent: State | None = None) -> list[TokenSet | None] | None:
        """Return, for each free column of a state, the tokens that the constraint allows there
        (None for all tokens). Return None if all columns may take all tokens.

        `parent` is the finished state of the block before, if `text` does not hold it yet.
        """
        if self.constraint is None:
            return None
        origin = self.origin(state.start, parent)
        return None if origin is None else self.constraint.allowed(origin, *state.key, state.free)

    def filled(self, state: State, parent: State | None = None) -> State:
        """Return the state after filling in the tokens that the constraint forces, up to the first
        eos among them. This takes no denoising step.

        `parent` is the finished state of the block before, if `text` does not hold it yet.
        """
        if self.constraint is None or not self.fills or not state.free:
            return state
        origin = self.origin(state.start, parent)
        if origin is None:
            return state
        forced = self.constraint.forced(origin, *state.key, state.free)
        end = min([column for column in forced if forced[column] in self.eos], default=state.end)
        ids = list(state.ids)
        columns = [column for column in forced if column <= end]
        for column in columns:
            ids[column] = forced[column]
        free = tuple([column for column in state.free if column < end and column not in columns])
        key = (state.start, tuple(ids))
        return State(key, free, end, state.masks - len(columns), state.step)

    def write_filled(self) -> None:
        """Write into the text the tokens of the row's state that the constraint has filled in. They
        get the present step and probability 1."""
        if self.constraint is None:
            return
        for position, token in enumerate(self.state.ids, self.state.start):
            if self.text[position] == self.mask_id != token:
                self.text[position] = token
                self.step[position - self.prompt] = self.steps
                self.filled_in.append(position)

    def ends(self, state: State) -> bool:
        """Return whether the text is complete at a state: it ends in the state's block, and no mask
        is left before its end."""
        room = self.open_end - state.key[0]
        if state.end == self.block_size < room:
            return False
        return not state.free or state.free[0] >= room

    def update_stop(self) -> None:
        """If the text is complete at the row's state (`ends`), set the attribute `stop` to one past
        the position of its last token. Otherwise, change nothing."""
        if self.ends(self.state):
            start = self.state.start
            end = self.state.end
            self.stop = min(self.limit, start + end + 1) if end < self.block_size else self.limit
