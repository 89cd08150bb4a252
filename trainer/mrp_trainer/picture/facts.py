"""Facts about how a text was decoded, from the output of `generate`: the forward that revealed each
token, and the outcome of drafts."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

_INCOMPLETE = "\ufffd"  # a tokenizer's text for an incomplete character
_LONGEST = 8  # the most tokens of one character


@dataclass(frozen=True)
class Token:
    """A token of a text, with facts about its reveal.

    Attributes:
        text: The decoded token. A character that consists of several tokens is the text of the last
            of them; the others have "".
        forward: The number of the forward that revealed it, from 1 on; None for a token that was
            given (`infill_ids`).
        step: The denoising step that revealed it; -1 for a given token.
        drafted: Whether it was revealed at a drafted state. Without drafts, its reveal would have
            taken another forward.
        probability: Its probability when it was revealed.
        taken_back: Number of reveals at its position that were masked again.
        special: Whether it is a special token of the tokenizer.
    """

    text: str
    forward: int | None
    step: int = -1
    drafted: bool = False
    probability: float = 0.0
    taken_back: int = 0
    special: bool = False


@dataclass(frozen=True)
class Forward:
    """A backbone forward in which the row took part.

    Attributes:
        own: Number of tokens that the forward revealed at the row's current state, which is not
            drafted.
        accepted: Number of tokens that the forward revealed at drafted states.
        refused: Number of drafted states that were not accepted, including those that a later
            forward can use.
    """

    own: int
    accepted: int
    refused: int


@dataclass(frozen=True)
class Decode:
    """Facts about how one row was decoded.

    Attributes:
        name: The name to show in a picture.
        tokens: The tokens after the prompt.
        forwards: The backbone's forwards in order, including those over the prompt.
        head_forwards: Number of head passes in which the row took part.
        drafted: Number of drafted states that were submitted.
        accepted: Number of drafted states that were accepted.
        blocks: Indices of the tokens at which a block begins, except the first block.
    """

    name: str
    tokens: tuple[Token, ...]
    forwards: tuple[Forward, ...]
    head_forwards: int
    drafted: int
    accepted: int
    blocks: tuple[int, ...]

    @property
    def tokens_per_forward(self) -> float:
        """Divide generated tokens by forwards."""
        return sum(token.forward is not None for token in self.tokens) / max(1, len(self.forwards))


def read_decode(output: Any, tokenizer: Any, name: str = "decode", row: int = 0) -> Decode:
    """Read a row of an `MRPGenerateOutput`; return a `Decode` with the given name. `ValueError` for
    other outputs and missing rows."""
    rounds = getattr(getattr(output, "stats", None), "rounds", None)
    if rounds is None:
        raise ValueError(
            f"output is a {type(output).__name__} without stats.rounds: pass what generate(..., "
            "return_dict_in_generate=True) of this package returns, or read other checkpoints' "
            "with its MRPForCausalLM"
        )
    steps_of = output.reveal_step.tolist()
    if not 0 <= row < len(steps_of):
        raise ValueError(f"row is {row}: the output has the rows 0 to {len(steps_of) - 1}")
    reveal_step = steps_of[row]
    ids = output.sequences[row, output.sequences.shape[1] - len(reveal_step) :].tolist()
    special = set(tokenizer.all_special_ids)
    # the row's padding is left out
    while reveal_step and reveal_step[-1] < 0 and ids[len(reveal_step) - 1] in special:
        reveal_step.pop()
    of_row = {key: counts[:, row].tolist() for key, counts in rounds.items()}
    taken_back = Counter(
        column for batch_row, column, _ in output.stats.revocations.tolist() if batch_row == row
    )
    logprobs = output.token_logprobs[row].tolist()
    texts = token_texts(ids[: len(reveal_step)], tokenizer)
    tokens = []
    for column, (text, step) in enumerate(zip(texts, reveal_step, strict=True)):
        is_special = ids[column] in special
        token = Token(text, None, step, taken_back=taken_back[column], special=is_special)
        if step >= 0:
            forward, drafted = _revealed_by(of_row, step)
            probability = math.exp(logprobs[column])
            token = replace(token, forward=forward, drafted=drafted, probability=probability)
        tokens.append(token)
    return Decode(
        name,
        tuple(tokens),
        _forwards(of_row, tokens),
        int(output.stats.row_head_forwards[row]),
        of_row["drafted"][-1],
        of_row["accepted"][-1],
        tuple(sorted({column for column in of_row["column"] if 0 < column < len(tokens)})),
    )


def _revealed_by(of_row: dict[str, list[int]], step: int) -> tuple[int, bool]:
    """Return the number of the forward that made a denoising step, and whether the step was made at
    a draft. All steps of a forward except its first are made at drafts. `of_row` has the row's
    counts from `MRPGenerateStats.rounds`."""
    index = min(bisect_right(of_row["steps"], step), len(of_row["steps"]) - 1)
    first = of_row["steps"][index - 1] if index else 0
    return of_row["row_forwards"][index], step > first


def _forwards(of_row: dict[str, list[int]], tokens: Sequence[Token]) -> tuple[Forward, ...]:
    """List the forwards of a row, in which `tokens` were revealed. If the prefill took several
    forwards, only the last of them can have revealed tokens. `of_row` has the row's counts from
    `MRPGenerateStats.rounds`."""
    undrafted: Counter[int | None] = Counter()
    accepted: Counter[int | None] = Counter()
    for token in tokens:
        if token.drafted:
            accepted[token.forward] += 1
        else:
            undrafted[token.forward] += 1
    refused: Counter[int] = Counter()
    counts = zip(of_row["row_forwards"], of_row["drafted"], of_row["accepted"], strict=True)
    for (before, drafts, right), (after, all_drafts, all_right) in pairwise(counts):
        if after > before:
            refused[after] = max(0, (all_drafts - drafts) - (all_right - right))
    return tuple(
        Forward(undrafted[n], accepted[n], refused[n])
        for n in range(1, of_row["row_forwards"][-1] + 1)
    )


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Decode the text of each token. A character that consists of several tokens belongs to the
    last of them; the others have ""."""
    texts: list[str] = []
    pending: list[int] = []
    for token_id in ids:
        pending.append(token_id)
        text = _decoded(pending, tokenizer)
        if not text.endswith(_INCOMPLETE):
            texts += [""] * (len(pending) - 1) + [text]
            pending = []
        elif len(pending) == _LONGEST:  # no character is longer
            texts += _decoded_apart(pending, tokenizer)
            pending = []
    return texts + _decoded_apart(pending, tokenizer)


def _decoded_apart(ids: list[int], tokenizer: Any) -> list[str]:
    return [_decoded([token_id], tokenizer) for token_id in ids]


def _decoded(ids: list[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
