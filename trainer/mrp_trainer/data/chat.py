"""Encoding of records as token ids: chats by the tokenizer's template, and which of their tokens are learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .records import Chat, FieldError, Text, Trajectory, parse, parse_prompt
from .samples import Sample, make_sample

logger = logging.get_logger(__name__)

Piece = tuple[str, bool]  # part of a text, and whether it is learned


@dataclass(frozen=True)
class RecordEncoder:
    """An encoder that makes samples of records, in whole blocks.

    In a chat every assistant turn is learned, with the token that ends it, and nothing else. Turns are found by rendering the
    conversation up to each of them, as published templates do not mark what the assistant writes: this works with any chat
    template that renders earlier turns the same whatever follows.

    Args:
        max_length: Longer samples are cut to it, or to fewer whole blocks; `ValueError` if it is less than a block.
        mask_token_id: The model's mask, which clean text must not hold.
        end_token_ids: Ids that end a turn; the first is appended to a text without one. By default the tokenizer's eos token;
            better give a model's `generation_config.eos_token_id`. `ValueError` if there is neither, or no pad token.
        vocab_size: Bound of the ids in decoded texts; the tokenizer's size if None.
        digest: That of the backbone that trains (`train.inputs.digest`), to compare with that of decoded texts; None if
            unknown.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    max_length: int
    mask_token_id: int
    end_token_ids: Sequence[int] = ()
    vocab_size: int | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        if self.max_length < self.block_size:
            raise ValueError(f"max_length is {self.max_length}: at least one block of {self.block_size} tokens must fit")
        if self.tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no pad token: set tokenizer.pad_token")
        if not self.end_token_ids:
            if self.tokenizer.eos_token_id is None:
                raise ValueError("the tokenizer has no eos token: set tokenizer.eos_token or give end_token_ids")
            object.__setattr__(self, "end_token_ids", (self.tokenizer.eos_token_id,))

    @property
    def capacity(self) -> int:
        """Return the length of the longest sample: `max_length` in whole blocks."""
        return self.max_length // self.block_size * self.block_size

    def prompt(self, row: Any) -> list[int]:
        """Encode what a decoder is given: a chat without a last turn of the assistant, or a `prompt`. `FieldError` if the
        record is malformed, asks nothing or holds the mask token, or the chat template refuses it."""
        record = parse_prompt(row)
        if isinstance(record, Chat):
            begin, text = [], self._render(record, len(record.messages), add_generation_prompt=True)
        else:
            begin, text = self._begin_ids, record.prompt
        if not (ids := self._ids([text])[0]):
            raise FieldError("prompt", "it has no token: write a longer one")
        return self._without_mask([*begin, *ids])

    def sample(self, row: Any) -> Sample | None:
        """Make the sample of a record, for visit 0; None if nothing that is learned lies within `max_length`.

        A text that was cut has no end, and its sample no `length`. `FieldError` if the record is malformed or holds the mask
        token, or the chat template does not render it so that its turns are found.
        """
        record = parse(row)
        if isinstance(record, Trajectory):
            self._check_decoder(record)
            start, ids = record.response_start, record.ids
            learned = [place >= start for place in range(len(ids))]
            ended, steps = ids[-1] in self.end_token_ids, [*[-1] * start, *record.reveal_step]
        else:
            (ids, learned), ended, steps = self._encode(record), True, None
        pad = self.tokenizer.pad_token_id
        return make_sample(self._without_mask(ids), learned, self.block_size, pad, ended, self.capacity, steps)

    @cached_property
    def _end_tokens(self) -> list[str]:
        """List the texts of the end tokens that are added tokens, encoded alike in every context."""
        added = self.tokenizer.added_tokens_decoder
        return [added[token].content for token in self.end_token_ids if token in added]

    @cached_property
    def _begin_ids(self) -> list[int]:
        """List the ids that the tokenizer puts before a plain text and so before a prompt."""
        begin = self.tokenizer.bos_token_id
        return [begin] if begin is not None and self.tokenizer("a")["input_ids"][0] == begin else []

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _without_mask(self, ids: list[int]) -> list[int]:
        if self.mask_token_id in ids:
            raise FieldError(None, f"its text holds the mask token, id {self.mask_token_id}: remove it")
        return ids

    def _check_decoder(self, record: Trajectory) -> None:
        """Raise `FieldError` for ids, a block size or a mask that the model does not have; warn of another backbone."""
        vocab_size, decoder = self.vocab_size or len(self.tokenizer), record.decoded_by
        if wrong := [token for token in record.ids if not 0 <= token < vocab_size]:
            raise FieldError("ids", f"found {wrong[0]}: needed are ids from 0 to {vocab_size - 1}")
        for name in ("block_size", "mask_token_id"):
            if decoder.get(name, getattr(self, name)) != getattr(self, name):
                raise FieldError(
                    f"decoded_by.{name}",
                    f"found {decoder[name]}, and the model that trains has {getattr(self, name)}: decode with that one",
                )
        if None not in (self.digest, decoder.get("digest")) and decoder["digest"] != self.digest:
            logger.warning_once(
                f"{decoder.get('model')!r} wrote texts of the data, and another backbone trains: a head learns most from what "
                "its own backbone wrote, decode the prompts with that one"
            )

    def _encode(self, record: Chat | Text) -> tuple[list[int], list[bool]]:
        pieces = self._pieces(record) if isinstance(record, Chat) else [(record.prompt, False), (record.completion, True)]
        encoded = self._ids([text for text, _ in pieces])
        begin = [] if isinstance(record, Chat) else self._begin_ids
        ids = [*begin, *chain.from_iterable(encoded)]
        learned = [False] * len(begin)
        for part, (_, wanted) in zip(encoded, pieces, strict=True):
            learned += [wanted] * len(part)
        return (ids, learned) if ids and ids[-1] in self.end_token_ids else ([*ids, self.end_token_ids[0]], [*learned, True])

    def _pieces(self, record: Chat) -> list[Piece]:
        """Cut a chat's text into pieces that are encoded one by one, as decoding encodes the prompt alone."""
        whole = self._render(record, len(record.messages))
        pieces: list[Piece] = []
        done = 0
        for turn, message in enumerate(record.messages):
            if message["role"] != "assistant" or turn < record.learned_from:
                continue
            for token in self._end_tokens:
                if token in (message.get("content") or ""):
                    remedy = "which ends a turn: remove it, the chat template sets it"
                    raise FieldError(f"messages[{turn}].content", f"found {token}, {remedy}")
            span = self._span(record, turn, whole)
            if span is None or span[0] < done:
                raise FieldError(
                    "messages",
                    f"the chat template renders what precedes message {turn + 1} otherwise once later messages follow, so that"
                    " its turns cannot be told apart: give each turn as a record of its own that ends with it",
                )
            pieces += [(whole[done : span[0]], False), (whole[slice(*span)], True)]
            done = span[1]
        return pieces

    def _span(self, record: Chat, turn: int, whole: str) -> tuple[int, int] | None:
        """Find the begin and end (with its end token) of an assistant turn in the whole text; None if they cannot be found."""
        before = self._render(record, turn, add_generation_prompt=True)
        after = whole if turn == len(record.messages) - 1 else self._render(record, turn + 1)
        if not whole.startswith(before) or not after.startswith(before):
            return None
        begin = len(before)
        # No turn holds an end token, so the next one ends this turn, even where later messages change how it is rendered
        # (some templates drop an earlier turn's reasoning).
        if any(token in after[begin:] for token in self._end_tokens):
            ends = [at + len(token) for token in self._end_tokens if (at := whole.find(token, begin)) >= 0]
            return (begin, min(ends)) if ends else None
        return (begin, len(after)) if whole.startswith(after) else None

    def _render(self, record: Chat, count: int, **options: Any) -> str:
        """Render the first messages of a chat by the tokenizer's template."""
        try:
            return self.tokenizer.apply_chat_template(record.messages[:count], tools=record.tools, tokenize=False, **options)
        except (TemplateError, TypeError, ValueError) as error:  # ValueError: there is no template
            raise FieldError("messages", f"the chat template refuses it: {error}") from error
