"""Records as token ids: chats through the tokenizer's template, and which of their tokens are learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .records import Backbone, Chat, FieldError, RecordParser, Text, Trajectory
from .samples import Sample, make_sample

Piece = tuple[str, bool]  # a text, and whether it is learned


@dataclass(frozen=True)
class RecordEncoder:
    """Makes samples of records.

    Of a chat every assistant turn is learned, with the token that ends it, and nothing else. Turns are found by rendering
    the conversation up to each of them, so that any chat template serves whose later turns leave the earlier text alone.

    Args:
        tokenizer: Encodes, and holds the chat template.
        block_size: Samples are whole blocks.
        max_length: Longer samples are cut to it, or to fewer whole blocks.
        mask_token_id: The model's mask, which clean text must not hold.
        end_token_ids: What ends a turn; the first one is put behind a text that does not end itself. The tokenizer's eos
            token if there are none; give a model's `generation_config.eos_token_id`.
        vocab_size: Ids that decoded texts may have; the tokenizer's if None.
        digest: Of the backbone that decoded texts are for (`trajectories.digest`); None if it is not known.
        with_decoded: Whether decoded texts may be among the records; not where `inverse_level` weighs random masks.

    Raises:
        ValueError: The tokenizer lacks a pad or an end token, or no block fits.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    max_length: int
    mask_token_id: int
    end_token_ids: Sequence[int] = ()
    vocab_size: int | None = None
    digest: str | None = None
    with_decoded: bool = True

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
        """The longest a sample can be: `max_length` in whole blocks."""
        return self.max_length // self.block_size * self.block_size

    @cached_property
    def parser(self) -> RecordParser:
        """Turns lines and rows into records."""
        vocab_size = len(self.tokenizer) if self.vocab_size is None else self.vocab_size
        backbone = Backbone(vocab_size, self.block_size, self.mask_token_id, self.digest)
        return RecordParser(self._text_of(self.mask_token_id), self._end_tokens, backbone)

    def prompt(self, raw: bytes | Mapping[str, Any]) -> list[int]:
        """The ids that a decoder is given: of a chat before a last turn of the assistant, or of a `prompt`.

        Raises:
            FieldError: The record is malformed, asks nothing or holds the mask token; or the chat template refuses it.
            ValueError: It is a chat and the tokenizer has no chat template.
        """
        record = self.parser.parse_prompt(raw)
        if isinstance(record, Chat):
            self._need_template()
            begin, text = [], self._render(record, len(record.messages), add_generation_prompt=True)
        else:
            begin, text = self._begin_ids, record.prompt
        ids = [*begin, *self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
        if len(ids) == len(begin):
            raise FieldError("prompt", "it has no token: write a longer one")
        self._check_no_mask(ids)
        return ids

    def sample(self, raw: bytes | Mapping[str, Any]) -> Sample | None:
        """The sample of a record, of visit 0; None if nothing that is learned lies within `max_length`.

        A text that was cut has no end, and its sample no `length`.

        Raises:
            FieldError: It is malformed, holds the mask token, or the chat template cannot render it so that its turns are
                found.
            ValueError: It is a chat and the tokenizer has no chat template.
        """
        record = self.parser.parse(raw)
        if isinstance(record, Trajectory):
            if not self.with_decoded:
                raise FieldError(
                    "reveal_step",
                    "a decoded text has no random masks for inverse_level to weigh: switch that off, or leave "
                    "decoded texts out",
                )
            start, ids = record.response_start, record.ids
            learned = [place >= start for place in range(len(ids))]
            ended, steps = ids[-1] in self.end_token_ids, [*[-1] * start, *record.reveal_step]
        else:
            (ids, learned), ended, steps = self._encode(record), True, None
            self._check_no_mask(ids)
        pad = self.tokenizer.pad_token_id
        return make_sample(ids, learned, self.block_size, pad, ended, self.capacity, steps)

    @cached_property
    def _end_tokens(self) -> list[str]:
        return [text for text in map(self._text_of, self.end_token_ids) if text]

    @cached_property
    def _begin_ids(self) -> list[int]:
        """What the tokenizer puts before a plain text, as it will before a prompt."""
        begin = self.tokenizer.bos_token_id
        return [begin] if begin is not None and self.tokenizer("a")["input_ids"][0] == begin else []

    def _text_of(self, token_id: int) -> str | None:
        """The text of a token that is itself wherever it stands, as special ones are; None for others."""
        token = self.tokenizer.added_tokens_decoder.get(token_id)
        return None if token is None else token.content

    def _check_no_mask(self, ids: Sequence[int]) -> None:
        if self.mask_token_id in ids:
            raise FieldError(None, f"its text holds the mask token, id {self.mask_token_id}: remove it")

    def _encode(self, record: Chat | Text) -> tuple[list[int], list[bool]]:
        pieces = self._pieces(record)
        encoded = self.tokenizer([text for text, _ in pieces], add_special_tokens=False, verbose=False)["input_ids"]
        begin = [] if isinstance(record, Chat) else self._begin_ids
        ids = [*begin, *chain.from_iterable(encoded)]
        learned = [False] * len(begin)
        for part, (_, wanted) in zip(encoded, pieces, strict=True):
            learned += [wanted] * len(part)
        return (ids, learned) if ids and ids[-1] in self.end_token_ids else ([*ids, self.end_token_ids[0]], [*learned, True])

    def _need_template(self) -> None:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "a record is a chat and the tokenizer has no chat template: set tokenizer.chat_template, or give 'prompt' and"
                " 'completion' as strings"
            )

    def _pieces(self, record: Chat | Text) -> list[Piece]:
        """A record's text in pieces that are encoded one by one, as a decoder is given the prompt alone."""
        if not isinstance(record, Chat):
            return [(record.prompt, False), (record.completion, True)]
        self._need_template()
        whole = self._render(record, len(record.messages))
        if (mask := self.parser.mask_token) and mask in whole:
            raise FieldError(
                record.field_name,
                f"the chat template renders it with the mask token {mask}, which clean text must not hold: remove it from what "
                "the template writes",
            )
        pieces: list[Piece] = []
        done = 0
        for turn, message in enumerate(record.messages):
            if message["role"] != "assistant" or turn < record.learned_from:
                continue
            span = self._span(record, turn, whole, done)
            if span is None:
                raise FieldError(
                    record.field_name,
                    f"the chat template renders what precedes message {turn + 1} otherwise once later messages follow, so that"
                    " its turns cannot be told apart: give each turn as a record of its own that ends with it",
                )
            pieces += [(whole[done : span[0]], False), (whole[span[0] : span[1]], True)]
            done = span[1]
        return pieces

    def _span(self, record: Chat, turn: int, whole: str, done: int) -> tuple[int, int] | None:
        """Where an assistant turn begins and ends (behind its end token) in the whole text; None if that cannot be told."""
        before = self._render(record, turn, add_generation_prompt=True)
        if len(before) < done or not whole.startswith(before):
            return None
        after = whole if turn == len(record.messages) - 1 else self._render(record, turn + 1)
        if not after.startswith(before):
            return None
        # No turn holds an end token, so the next one ends this turn, even where later messages change how it is rendered
        # (some templates drop an earlier turn's reasoning).
        if any(token in after[len(before) :] for token in self._end_tokens):
            ends = [whole.find(token, len(before)) + len(token) for token in self._end_tokens if token in whole[len(before) :]]
            return (len(before), min(ends)) if ends else None
        return (len(before), len(after)) if whole.startswith(after) else None

    def _render(self, record: Chat, count: int, add_generation_prompt: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                record.messages[:count],
                tools=record.tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:
            raise FieldError(record.field_name, f"the chat template refuses it: {error}") from error
