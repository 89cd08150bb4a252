"""Automata over bytes, made from a regex, and automata over tokens, made from an automaton over
bytes and the tokens of a tokenizer. Decoding follows the automata over tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

# Number of token sets that are kept; with 150,000 tokens they take 80 MB.
_KNOWN_SETS = 4096

# Sets of states are ints with a bit for each state.
States = int


def members(states: States) -> list[int]:
    """List the numbers of the states in a set, in increasing order. The set is an int with a bit
    for each state."""
    listed = []
    while states:
        lowest = states & -states
        listed.append(lowest.bit_length() - 1)
        states ^= lowest
    return listed


@dataclass(frozen=True)
class ByteAutomaton:
    """A deterministic automaton over bytes. Texts start at state 0. From each state that a text can
    reach, a final state can be reached.

    Attributes:
        next_state: int32 [states, 256], the next state for each state and byte; -1 if no text
            continues with that byte.
        final: bool [states], whether a text may end at each state.
    """

    next_state: np.ndarray
    final: np.ndarray

    @cached_property
    def only(self) -> np.ndarray:
        """An array int [states]: for each state, the byte with which every text continues; -1 where
        a text may end or may continue with different bytes."""
        has_next = self.next_state >= 0
        is_forced = (has_next.sum(1) == 1) & ~self.final
        return np.where(is_forced, has_next.argmax(1), -1)

    def forced(self, state: int) -> bytes:
        """Return the bytes with which every text continues after a state, up to the first place
        where a text may end or where texts differ."""
        text = bytearray()
        while (letter := int(self.only[state])) >= 0:
            text.append(letter)
            state = self.next_state[state, letter]
        return bytes(text)


class TokenTrie:
    """A trie (prefix tree) of tokens by their bytes.

    Args:
        tokens: Maps the id of each token that may occur in a text to the token's bytes, which are
            not empty. Several ids may have the same bytes.
        vocab_size: The number of rows of the model's unembedding, at least the number of ids.

    Attributes:
        first_child, child_count: int [nodes], for each node, its first child and the number of its
            children, which are numbered consecutively. Node 0 is the root.
        byte: uint8 [nodes], for each node, the last byte of the prefix that the node stands for.
        first_token, token_count: int [nodes], for each node, the index in `tokens` of the first
            token that ends there, and the number of tokens that end there.
        tokens: int32 [n], the token ids in the order of the nodes at which they end: by increasing
            number of bytes, then by the bytes.
    """

    def __init__(self, tokens: Mapping[int, bytes], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.text = dict(tokens)
        ordered = sorted(tokens, key=tokens.__getitem__)
        self.tokens = np.array(ordered, np.int32)
        texts = [tokens[token] for token in ordered]
        length = max(map(len, texts), default=0)
        sizes = np.array([len(text) for text in texts], np.int64)
        table = np.array([text.ljust(length, b"\0") for text in texts], f"S{max(length, 1)}")
        matrix = table.view(np.uint8).reshape(len(texts), -1)
        # By text, the node of its current prefix; the loop makes prefixes longer.
        node = np.zeros(len(texts), np.int64)
        rows = np.arange(len(texts))
        parents = [np.zeros(0, np.int64)]
        letters = [np.zeros(1, np.uint8)]
        ends = np.zeros(len(texts), np.int64)
        count = 1
        for depth in range(length):
            rows = rows[sizes[rows] > depth]
            letter = matrix[rows, depth]
            is_new = np.ones(len(rows), bool)
            is_new[1:] = (letter[1:] != letter[:-1]) | (node[rows[1:]] != node[rows[:-1]])
            parents.append(node[rows[is_new]])
            letters.append(letter[is_new])
            node[rows] = count + np.cumsum(is_new) - 1
            count += int(is_new.sum())
            ended = rows[sizes[rows] == depth + 1]
            ends[ended] = node[ended]
        # Nodes are numbered by depth, then in the order of their prefixes, so that the children of
        # a node have consecutive numbers.
        self.byte = np.concatenate(letters)
        self.child_count = np.bincount(np.concatenate(parents), minlength=count)
        self.first_child = 1 + np.cumsum(self.child_count) - self.child_count
        self.token_count = np.bincount(ends, minlength=count)
        self.first_token = np.cumsum(self.token_count) - self.token_count
        self.tokens = self.tokens[np.argsort(ends, kind="stable")]

    def walk(
        self, automaton: ByteAutomaton, states: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find the tokens that may follow each of the given states of an automaton. Return three
        arrays [n], with an entry for each pair of a state and a token that may follow it: the
        state, the token, and the state after the token."""
        origin = np.array(states, np.int32)
        state = origin
        node = np.zeros(len(origin), np.int64)
        outputs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        while len(origin):
            indices, children = _ranges(self.first_child[node], self.child_count[node])
            reached = automaton.next_state[state[indices], self.byte[children]]
            alive = reached >= 0
            origin = origin[indices[alive]]
            state, node = reached[alive], children[alive]
            indices, positions = _ranges(self.first_token[node], self.token_count[node])
            outputs.append((origin[indices], self.tokens[positions], state[indices]))
        source, token, target = (np.concatenate(arrays) for arrays in zip(*outputs, strict=True))
        return source, token, target


def _ranges(starts: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expand ranges, given by their starts and lengths, into their elements. Return two arrays with
    an entry for each element: the index of the element's range, and the element itself."""
    indices = np.repeat(np.arange(len(starts)), counts)
    offsets = np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)
    return indices, starts[indices] + offsets


class PackedSet:
    """A set of token ids.

    Attributes:
        packed: uint8, one bit for each token id of the vocabulary, as `numpy.packbits` packs them;
            the bit is 1 if the id belongs to the set.
        size: The size of the vocabulary.
        only: The id in a set with a single id, or the first eos in a set of eos ids alone; else
            None.
    """

    def __init__(self, packed: np.ndarray, size: int, only: int | None = None) -> None:
        self.packed = packed
        self.size = size
        self.only = only

    @classmethod
    def of(cls, is_member: np.ndarray, only: int | None = None) -> Self:
        """Make a set from a bool array [vocab] that says whether each token id belongs to the set.
        `only` becomes the attribute of this name: the single id in the set, or the first eos if all
        ids are eos."""
        return cls(np.packbits(is_member), len(is_member), only)

    def is_member(self) -> np.ndarray:
        """Return a bool array [vocab]: whether each token id belongs to the set."""
        return np.unpackbits(self.packed, count=self.size).view(bool)


class TokenAutomaton:
    """A deterministic automaton over token ids. Texts start at state 0. A set of states (`States`)
    is an int with a bit for each state.

    The last state is the end. An eos leads from each final state to the end, where only eos tokens
    may follow.

    Args:
        source, token, target: int [n], the transitions except those of eos tokens: `token` leads
            from the state `source` to the state `target`. They are sorted by source, then by token.
        final: bool [states - 1], for each state except the end, whether an eos may follow.
        eos: Ids that end a text; at least one. The first is used where only the end can follow.
        vocab_size: The number of rows of the model's unembedding.
    """

    def __init__(
        self,
        source: np.ndarray,
        token: np.ndarray,
        target: np.ndarray,
        final: np.ndarray,
        eos: Sequence[int],
        vocab_size: int,
    ) -> None:
        self.eos = tuple(eos)
        self.vocab_size = vocab_size
        self.end = len(final)
        self.final = final
        self.first = np.searchsorted(source, np.arange(len(final) + 1))
        self.token = token
        self.target = target
        self.finals: States = 1 << self.end
        for state in np.flatnonzero(final).tolist():
            self.finals |= 1 << state
        # results that depend only on the automaton, so that each is computed once
        self._any_next: dict[States, States] = {}
        self._next: dict[tuple[States, int], States] = {}
        self._origins: dict[tuple[States, int, States], States] = {}
        self._any_origins: dict[tuple[States, States], States] = {}
        self._only: dict[tuple[States, States], int | None] = {}
        self._sets: dict[tuple[States, States], PackedSet] = {}
        self._edges: dict[tuple[int, int], PackedSet] = {}

    @cached_property
    def single(self) -> list[dict[int, int | None]]:
        """For each state except the end, a dict whose keys are the next states, again except the
        end. It maps a next state to the only token that leads there, or to None if several tokens
        do."""
        by_state: list[dict[int, int | None]] = []
        for state in range(self.end):
            edges = self._slice(state)
            targets, first, counts = np.unique(
                self.target[edges], return_index=True, return_counts=True
            )
            tokens = self.token[edges][first].tolist()
            singles: dict[int, int | None] = {}
            for target, token, count in zip(targets.tolist(), tokens, counts.tolist(), strict=True):
                singles[target] = token if count == 1 else None
            by_state.append(singles)
        return by_state

    @cached_property
    def successors(self) -> list[States]:
        """For each state, the set of possible next states."""
        successors = []
        for state, targets in enumerate(self.single):
            following = 0
            for target in targets:
                following |= 1 << target
            successors.append(following | bool(self.final[state]) << self.end)
        return [*successors, 1 << self.end]

    @cached_property
    def within(self) -> list[States]:
        """A list of sets. Entry n holds the states from which a text can end within n tokens, not
        counting the eos. The last entry also holds for every larger n."""
        levels = [self.finals]
        while True:
            states = levels[-1]
            for state in range(self.end):
                if self.successors[state] & levels[-1]:
                    states |= 1 << state
            if states == levels[-1]:
                return levels
            levels.append(states)

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest text, not counting the eos."""
        return next(count for count, states in enumerate(self.within) if states & 1)

    def ending_within(self, count: int) -> States:
        """Return the set of states from which a text can end within `count` tokens, not counting
        the eos."""
        return self.within[min(count, len(self.within) - 1)]

    def step(self, state: int, token: int) -> int | None:
        """Return the state to which a token leads from a state; None if the token may not follow
        there."""
        if token in self.eos:
            return self.end if self.finals >> state & 1 else None
        if state == self.end:
            return None
        edges = self._slice(state)
        tokens = self.token[edges]
        index = int(np.searchsorted(tokens, token))
        if index == len(tokens) or tokens[index] != token:
            return None
        return int(self.target[edges][index])

    def behind(self, states: States, token: int | None) -> States:
        """Return the set of states to which a token leads from any of the given states. If `token`
        is None, it may be any token."""
        if token is None:
            following = self._any_next.get(states)
            if following is None:
                following = 0
                for state in members(states):
                    following |= self.successors[state]
                self._any_next[states] = following
            return following
        key = (states, token)
        following = self._next.get(key)
        if following is None:
            following = 0
            for state in members(states):
                target = self.step(state, token)
                following |= 0 if target is None else 1 << target
            self._next[key] = following
        return following

    def before(self, states: States, token: int | None, targets: States) -> States:
        """Return those of the given states from which a token leads to one of `targets`. If `token`
        is None, it may be any token."""
        if token is None:
            pair = (states, targets)
            origins = self._any_origins.get(pair)
            if origins is None:
                origins = 0
                for state in members(states):
                    origins |= bool(self.successors[state] & targets) << state
                self._any_origins[pair] = origins
            return origins
        key = (states, token, targets)
        origins = self._origins.get(key)
        if origins is None:
            origins = 0
            for state in members(states):
                target = self.step(state, token)
                origins |= (target is not None and bool(targets >> target & 1)) << state
            self._origins[key] = origins
        return origins

    def paths(self, first: States, tokens: Sequence[int | None], room: int) -> list[States]:
        """Follow a sequence of tokens through the automaton, along all paths on which the text can
        still be completed afterwards. Return the sets of states on these paths: one set before each
        token, and one after the last token. All sets are empty if there is no such path.

        Args:
            first: The possible states before the first token.
            tokens: The tokens; None where any token may stand.
            room: The largest number of tokens that the text may have from the first of `tokens` on,
                not counting the eos; after that many tokens, only eos may follow.
        """
        any_next = self._any_next
        any_origins = self._any_origins
        states = first
        paths = [states]
        for index, token in enumerate(tokens):
            if token is None:
                following = any_next.get(states)
                states = self.behind(states, None) if following is None else following
            else:
                states = self.behind(states, token)
            if index >= room:
                states &= 1 << self.end
            paths.append(states)
        if len(tokens) <= room:
            states &= self.ending_within(room - len(tokens))
            paths[-1] = states
        for index in range(len(tokens) - 1, -1, -1):
            token = tokens[index]
            if token is None:
                origins = any_origins.get((paths[index], states))
                if origins is None:
                    origins = self.before(paths[index], None, states)
                states = origins
            else:
                states = self.before(paths[index], token, states)
            paths[index] = states
        return paths

    def only(self, states: States, targets: States) -> int | None:
        """Return the only token that leads from one of the given states to one of `targets`; None
        if there are several such tokens or none. If they are all eos tokens, return the first
        eos."""
        key = (states, targets)
        try:
            return self._only[key]
        except KeyError:
            token = self._only[key] = self._find_only(states, targets)
            return token

    def _find_only(self, states: States, targets: States) -> int | None:
        end: States = 1 << self.end
        single: int | None = None
        if states & self.finals and targets & end:
            single = self.eos[0]
        for state in members(states & ~end):
            tokens = self.single[state]
            for target in members(self.successors[state] & targets & ~end):
                token = tokens[target]
                if token is None or single not in (None, token):
                    return None
                single = token
        return single

    def tokens(self, states: States, targets: States) -> PackedSet:
        """Return the set of tokens that lead from one of the given states to one of `targets`."""
        key = (states, targets)
        token_set = self._sets.get(key)
        if token_set is None:
            if len(self._sets) >= _KNOWN_SETS:
                self._sets.clear()
            token_set = self._sets[key] = self._tokens(states, targets)
        return token_set

    def _tokens(self, states: States, targets: States) -> PackedSet:
        end: States = 1 << self.end
        edges = []
        for state in members(states & ~end):
            for target in members(self.successors[state] & targets & ~end):
                edges.append(self._edge(state, target))
        if states & self.finals and targets & end:
            edges.append(self._eos)
        if len(edges) == 1:
            return edges[0]
        packed = np.zeros_like(self._eos.packed)
        for edge in edges:
            packed |= edge.packed
        return PackedSet(packed, self.vocab_size, self.only(states, targets))

    def _edge(self, state: int, target: int) -> PackedSet:
        """Return the set of tokens that lead from `state` to `target`; neither of the two is the
        end."""
        edge = self._edges.get((state, target))
        if edge is None:
            edges = self._slice(state)
            tokens = self.token[edges][self.target[edges] == target]
            edge = self._edges[state, target] = self._packed(tokens)
        return edge

    @cached_property
    def _eos(self) -> PackedSet:
        """The set of eos tokens, which lead to the end. Its `only` is the first eos, which is used
        where only the end can follow."""
        packed = self._packed(np.array(self.eos)).packed
        return PackedSet(packed, self.vocab_size, self.eos[0])

    def _packed(self, tokens: np.ndarray) -> PackedSet:
        is_member = np.zeros(self.vocab_size, bool)
        is_member[tokens] = True
        return PackedSet.of(is_member, int(tokens[0]) if len(tokens) == 1 else None)

    def forget(self) -> None:
        """Drop the results that earlier calls of methods computed; later calls compute them
        again."""
        for results in (self._any_next, self._next, self._origins, self._any_origins):
            results.clear()
        for kept in (self._only, self._sets, self._edges):
            kept.clear()

    def _slice(self, state: int) -> slice:
        return slice(self.first[state], self.first[state + 1])


def token_automaton(
    automaton: ByteAutomaton, trie: TokenTrie, eos: Sequence[int]
) -> TokenAutomaton | None:
    """Make the automaton that accepts token sequences whose bytes form a text of a language. Return
    None if the tokens cannot form any text of the language.

    At some states, every text continues with the same bytes, for instance "name". Of the tokens
    that may follow there, such as "n", "na" and "name", only the longest is allowed, so that the
    model need not choose where the language leaves no choice. There are two exceptions, in which
    all these tokens stay allowed: if one of them is longer than the common bytes, such as "names",
    and if some byte of the language is not a token by itself, as a text might then have no spelling
    left.

    Args:
        automaton: Accepts the texts of the language, as bytes.
        trie: The tokens.
        eos: Ids that end a text.
    """
    letters = np.flatnonzero((automaton.next_state >= 0).any(0)).tolist()
    single = {text[0] for text in trie.text.values() if len(text) == 1}
    has_bytes = single.issuperset(letters)
    # by states of bytes
    sources: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    seen = np.zeros(len(automaton.final), bool)
    seen[0] = True
    pending = [0]
    while pending:
        free = []
        reached = []
        for state in pending:
            transitions = trie.walk(automaton, [state]) if automaton.only[state] >= 0 else None
            if transitions is None or not has_bytes:
                free.append(state)
                continue
            lengths = [len(trie.text[token]) for token in transitions[1].tolist()]
            longest = int(np.argmax(lengths))
            kept = slice(None)
            if lengths[longest] <= len(automaton.forced(state)):
                kept = slice(longest, longest + 1)
            sources.append(transitions[0][kept])
            tokens.append(transitions[1][kept])
            targets.append(transitions[2][kept])
            reached.extend(targets[-1].tolist())
        if free:
            transitions = trie.walk(automaton, free)
            sources.append(transitions[0])
            tokens.append(transitions[1])
            targets.append(transitions[2])
            reached.extend(np.unique(transitions[2]).tolist())
        pending = sorted({state for state in reached if not seen[state]})
        seen[pending] = True
    source, token, target = (np.concatenate(arrays) for arrays in (sources, tokens, targets))
    alive = alive_states(source, target, automaton.final & seen)
    if not alive[0]:
        return None
    number = np.cumsum(alive) - 1
    kept = alive[source] & alive[target]
    source, token, target = number[source[kept]], token[kept], number[target[kept]]
    order = np.lexsort((token, source))
    return TokenAutomaton(
        source[order],
        token[order].astype(np.int32),
        target[order].astype(np.int32),
        automaton.final[alive],
        eos,
        trie.vocab_size,
    )


def alive_states(source: np.ndarray, target: np.ndarray, final: np.ndarray) -> np.ndarray:
    """Find the states from which a final state can be reached; return bool [states].

    Args:
        source, target: int [n], the state before and the state after each transition.
        final: bool [states], whether each state is final.
    """
    edges = np.unique(source.astype(np.int64) * len(final) + target)
    source, target = np.divmod(edges, len(final))
    alive = final.copy()
    while True:
        count = alive.sum()
        alive[source[alive[target]]] = True
        if alive.sum() == count:
            return alive
