"""Encoding of records, such as chats, as training samples: token ids, and for each token whether it
is *learned* (has a loss)."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from transformers.utils.chat_template_utils import render_jinja_template

from .records import Chat, FieldError, Text, Trajectory, parse, parse_prompt
from .samples import Sample, make_sample

logger = logging.get_logger(__name__)

Segment = tuple[str, bool]  # part of a text, and whether its tokens are learned
Span = tuple[int, int]  # begin and end of a part of a text
# Marks the text of the assistant in a template.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RENDER_OPTIONS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}


@dataclass(frozen=True)
class RecordEncoder:
    """An encoder of records as training samples of whole blocks.

    Learned tokens are those with a loss. In a chat, they are those of all assistant turns that the
    record does not exclude, and the tokens that end them. If the chat template marks these turns by
    `{% generation %}`, the marks are used. Most published templates have no marks. In a template
    without marks, a turn is found by rendering the conversation up to the turn. This works with any
    template that renders earlier turns independently of later ones.

    Args:
        tokenizer: The tokenizer, whose chat template renders chats.
        block_size: Number of tokens per block.
        max_length: The largest number of tokens in a sample; longer samples are cut to whole
            blocks. `ValueError` if it is less than a block.
        mask_token_id: Id of the model's mask token, which the text of a record must not contain.
        end_token_ids: Ids of the tokens that end a turn. If a text does not end with one of them,
            the first one is appended. The default is the tokenizer's eos token; a model's
            `generation_config.eos_token_id` is better. `ValueError` if there is no end token, or
            the tokenizer has no pad token.
        vocab_size: The ids of a `Trajectory` must be below this number; the tokenizer's size if
            None.
        digest: Digest of the backbone in training (see `train.inputs.digest`); None if unknown. A
            warning is logged if the backbone that decoded a `Trajectory` has another digest.
        last_turn_only: Whether only one turn of each chat is learned: the last of those that would
            otherwise be learned.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    max_length: int
    mask_token_id: int
    end_token_ids: Sequence[int] = ()
    vocab_size: int | None = None
    digest: str | None = None
    last_turn_only: bool = False

    def __post_init__(self) -> None:
        if self.max_length < self.block_size:
            raise ValueError(
                f"max_length is {self.max_length}: at least one block of {self.block_size} tokens "
                "must fit"
            )
        if self.tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no pad token: set tokenizer.pad_token")
        if not self.end_token_ids:
            if self.tokenizer.eos_token_id is None:
                raise ValueError(
                    "the tokenizer has no eos token: set tokenizer.eos_token or give end_token_ids"
                )
            object.__setattr__(self, "end_token_ids", (self.tokenizer.eos_token_id,))

    @property
    def capacity(self) -> int:
        """Return the largest number of tokens in a sample: `max_length` rounded down to whole
        blocks."""
        return self.max_length // self.block_size * self.block_size

    def prompt(self, row: Any) -> list[int]:
        """Encode the prompt of a record as ids. The prompt is the record's field `messages` or its
        field `prompt`, which is a text or a list of messages. Messages are rendered by the chat
        template with its generation prompt. If the last message is an assistant turn, it is left
        out.

        Raises:
            FieldError: if the record is malformed, if its prompt is empty or contains the mask
                token, or if the chat template refuses the record.
        """
        record = parse_prompt(row)
        begin: list[int] = []
        if isinstance(record, Chat):
            text = self._render(record, len(record.messages), add_generation_prompt=True)
            _check_rendered("tools", _names(record.tools), text)
        else:
            begin = self._begin_ids
            text = record.prompt
        if not (ids := self._ids([text])[0]):
            raise FieldError("prompt", "it has no token: write a longer one")
        return self._without_mask([*begin, *ids])

    def sample(self, row: Any) -> Sample | None:
        """Make the training sample of a record. Its `index` is 0.

        Returns:
            The sample. If the text is longer than `capacity`, it is cut, and the sample's `length`
                is None. Return None instead of a sample if no learned token is left after the cut.

        Raises:
            FieldError: if the record is malformed or contains the mask token; if the chat template
                refuses a chat, leaves out a tool, or renders assistant turns so that they cannot be
                found; or if a text that a model decoded (`Trajectory`) has other ids, another block
                size or another mask token than the model in training.
        """
        record = parse(row)
        ended = True
        steps: list[int] | None = None
        if isinstance(record, Trajectory):
            self._check_decoder(record)
            ids = record.ids
            start = record.response_start
            learned = [False] * start + [True] * (len(ids) - start)
            ended = ids[-1] in self.end_token_ids
            steps = [-1] * start + record.reveal_step
        else:
            ids, learned = self._encode(record)
        pad = self.tokenizer.pad_token_id
        return make_sample(
            self._without_mask(ids), learned, self.block_size, pad, ended, self.capacity, steps
        )

    @cached_property
    def _end_tokens(self) -> list[str]:
        """Return the texts of those end tokens that are added tokens. A tokenizer encodes added
        tokens in the same way in every context."""
        added = self.tokenizer.added_tokens_decoder
        return [added[token].content for token in self.end_token_ids if token in added]

    @cached_property
    def _begin_ids(self) -> list[int]:
        """Return the ids that begin a plain text or prompt: the bos token if the tokenizer prepends
        one, otherwise no ids."""
        begin = self.tokenizer.bos_token_id
        if begin is None or self.tokenizer("a")["input_ids"][0] != begin:
            return []
        return [begin]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _without_mask(self, ids: list[int]) -> list[int]:
        if self.mask_token_id in ids:
            raise FieldError(
                None, f"its text holds the mask token, id {self.mask_token_id}: remove it"
            )
        return ids

    def _check_decoder(self, record: Trajectory) -> None:
        """Raise `FieldError` if the ids of a trajectory, or the block size or mask id with which it
        was decoded, do not fit the model. Warn if another backbone decoded it.

        The target `sequential` reveals from left to right in blocks of any size, so the block size
        of its texts need not be the model's.
        """
        vocab_size = self.vocab_size or len(self.tokenizer)
        decoder = record.decoded_by
        if invalid := [token for token in record.ids if not 0 <= token < vocab_size]:
            raise FieldError(
                "ids", f"found {invalid[0]}: needed are ids from 0 to {vocab_size - 1}"
            )
        names = ["mask_token_id"]
        if decoder.get("target") != "sequential":
            names.append("block_size")
        for name in names:
            if decoder.get(name, getattr(self, name)) != getattr(self, name):
                raise FieldError(
                    f"decoded_by.{name}",
                    f"found {decoder[name]}, and the model that trains has {getattr(self, name)}: "
                    "decode with that model",
                )
        if None not in (self.digest, decoder.get("digest")) and decoder["digest"] != self.digest:
            logger.warning_once(
                f"{decoder.get('model')!r} wrote texts of the data, and another backbone trains: a "
                "head learns most from what its own backbone wrote, decode the prompts with that "
                "one"
            )

    def _encode(self, record: Chat | Text) -> tuple[list[int], list[bool]]:
        if isinstance(record, Chat):
            if self.last_turn_only:
                record = replace(record, learned=record.learned[-1:])
            segments = self._segments(record)
            ids: list[int] = []
        else:
            segments = [(record.prompt, False), (record.completion, True)]
            ids = list(self._begin_ids)
        learned = [False] * len(ids)
        encoded = self._ids([text for text, _ in segments])
        for segment_ids, (_, is_learned) in zip(encoded, segments, strict=True):
            ids += segment_ids
            learned += [is_learned] * len(segment_ids)
        if not ids or ids[-1] not in self.end_token_ids:
            ids.append(self.end_token_ids[0])
            learned.append(True)
        return ids, learned

    def _segments(self, record: Chat) -> list[Segment]:
        """Cut the text of a chat into learned turns and the parts between them. Each segment is
        tokenized on its own, as a prompt is in decoding. `FieldError` if a turn contains an end
        token, or if the template leaves out a tool or a call."""
        for index in record.learned:
            for token in self._end_tokens:
                if token in (record.messages[index].get("content") or ""):
                    remedy = "which ends a turn: remove it, the chat template sets it"
                    raise FieldError(f"messages[{index}].content", f"found {token}, {remedy}")
        text = self._render(record, len(record.messages))
        _check_rendered("tools", _names(record.tools), text)
        segments: list[Segment] = []
        position = 0
        for begin, end in self._learned_spans(record, text):
            segments += [(text[position:begin], False), (text[begin:end], True)]
            position = end
        learned_text = "".join(segment for segment, is_learned in segments if is_learned)
        for index in record.learned:
            calls = _names(record.messages[index].get("tool_calls"))
            _check_rendered(f"messages[{index}].tool_calls", calls, learned_text)
        return segments

    def _learned_spans(self, record: Chat, text: str) -> list[Span]:
        """Find the learned spans in the text of a chat, in order. They are the spans that the
        template marks or, without marks, the learned turns. `FieldError` if turns cannot be told
        apart."""
        turns = []
        for index, message in enumerate(record.messages):
            if message["role"] == "assistant":
                turns.append(index)
        marked = self._marked_spans(record, text)
        if len(marked) == len(turns):  # otherwise some turn has several marked spans, or none
            by_turn = dict(zip(turns, marked, strict=True))
            return [by_turn[index] for index in record.learned]
        if marked and len(record.learned) == len(turns):
            return marked
        spans: list[Span] = []
        for index in record.learned:
            span = self._span(record, index, text)
            if span is None or (spans and span[0] < spans[-1][1]):
                raise FieldError(
                    "messages",
                    f"the chat template renders what precedes message {index + 1} differently once "
                    "later messages follow, so that its turns cannot be told apart: give each turn "
                    "as a record of its own that ends with it",
                )
            spans.append(span)
        return spans

    def _marked_spans(self, record: Chat, text: str) -> list[Span]:
        """Return the spans that the template marks as the assistant's. If an end token follows a
        span, the span includes it. Return an empty list if the template has no marks."""
        template = self.tokenizer.get_chat_template(tools=record.tools)
        if not _GENERATION.search(template):
            return []
        _, indices = render_jinja_template(
            [record.messages],
            record.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **record.variables},
        )
        spans = []
        for begin, end in indices[0]:
            for token in self._end_tokens:
                if text.startswith(token, end):
                    end += len(token)
                    break
            if begin < end:
                spans.append((begin, end))
        return spans

    def _span(self, record: Chat, index: int, text: str) -> Span | None:
        """Find an assistant turn in the text of the whole chat. Return the positions at which the
        turn begins and ends, where the end is after the end token. Return None if the turn is not
        found."""
        prefix = self._render(record, index, add_generation_prompt=True)
        rendered = text
        if index < len(record.messages) - 1:
            rendered = self._render(record, index + 1)
        if not text.startswith(prefix) or not rendered.startswith(prefix):
            return None
        begin = len(prefix)
        # No turn's content holds an end token, so the next one ends this turn, even where later
        # messages change how this one is rendered (some templates drop an earlier turn's
        # reasoning).
        if any(token in rendered[begin:] for token in self._end_tokens):
            ends = []
            for token in self._end_tokens:
                position = text.find(token, begin)
                if position >= 0:
                    ends.append(position + len(token))
            return (begin, min(ends)) if ends else None
        return (begin, len(rendered)) if text.startswith(rendered) else None

    def _render(self, record: Chat, count: int, **options: Any) -> str:
        """Render the first `count` messages of a chat with the tokenizer's chat template;
        `FieldError` if the template refuses them."""
        if reserved := sorted(_RENDER_OPTIONS & record.variables.keys()):
            raise FieldError(
                "chat_template_kwargs",
                f"found {reserved[0]!r}, which is no variable of a template: remove it",
            )
        try:
            return self.tokenizer.apply_chat_template(
                record.messages[:count],
                tools=record.tools,
                tokenize=False,
                **options,
                **record.variables,
            )
        except (TemplateError, TypeError, ValueError) as error:  # ValueError: there is no template
            raise FieldError("messages", f"the chat template refuses it: {error}") from error


def _names(entries: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    """Yield the names of tools or tool calls. An entry is in OpenAI's form, with the name inside
    `function`, or has the name itself."""
    for entry in entries or ():
        function = entry.get("function", entry)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            yield name


def _check_rendered(field_name: str, names: Iterator[str], text: str) -> None:
    """Raise `FieldError` if the name of a tool is missing in a rendered text, since some templates
    leave out tools."""
    for name in names:
        if name not in text:
            raise FieldError(
                field_name,
                f"the chat template leaves out {name!r}: give a tokenizer whose template renders "
                "tools and their calls, or remove the record",
            )
