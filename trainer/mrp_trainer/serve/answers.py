"""Answers in OpenAI's form. Ids are decoded to text as they arrive, and stop strings are never
shown. Log-probabilities, counts and the reason of the end are in the fields where clients expect
them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from modeling_mrp.generate.request import RequestOutput
from modeling_mrp.rules.state import Counts

from .tools import Tools

# the text that decoders return for an incomplete character
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextOfIds:
    """Decodes ids to text one by one. Text that was returned is not changed by later ids.

    Args:
        decode: A function that decodes ids to text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self._ids: list[int] = []
        # The text of the ids from `_begin` to `_read` was already returned. They are decoded again
        # together with new ids, since a decoder treats the first id of a text differently.
        self._begin = self._read = 0

    def add(self, token: int) -> str:
        """Return the text that an id adds; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._begin = self._read
        self._read = len(self._ids)
        return text

    def end(self) -> str:
        """Return the remaining text once there are no more ids."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self.decode(self._ids[self._begin : self._read])
        return self.decode(self._ids[self._begin :])[len(known) :]


@dataclass
class Token:
    """A token of an answer.

    Attributes:
        id: The token's id.
        logprob: Its log-probability; None if there is none.
        top: Maps the likeliest ids at its position to their log-probabilities.
        begin, end: The character positions in the answer at which its text begins and ends.
    """

    id: int
    logprob: float | None
    top: dict[int, float]
    begin: int
    end: int


class TextOfAnswer:
    """One text of an answer while it is decoded. All methods except `tell` are called in the event
    loop.

    Args:
        name: The id of the text's request to the `ContinuousBatchingManager`.
        decode: A function that decodes ids to text.
        stops: Stop strings, which end the text and are not part of it.
        counted: A function that is called with the last result of the request, in the decoding
            thread.

    Attributes:
        text: The text so far.
        tokens: The tokens so far, including those of a stop string.
        finish_reason: "stop" or "length" once the text is complete.
        stopped: Whether a stop string ended the text.
        error: The error that ended the text, if any.
        counts: Counts of the request's forwards and drafts so far.
    """

    def __init__(
        self,
        name: str,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        counted: Callable[[RequestOutput], None],
    ) -> None:
        self.name = name
        self.stops = stops
        self.text = ""
        self.tokens: list[Token] = []
        self.finish_reason: str | None = None
        self.stopped = False
        self.error: str | None = None
        self.counts = Counts(1, False)
        self._longest = max(map(len, stops), default=0)
        self._decoder = TextOfIds(decode)
        self._counted = counted
        self._latest: RequestOutput | None = None  # a slow reader gets several results at once
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def tell(self, output: RequestOutput) -> None:
        """Receive a result of the text's request: the tokens so far. This is called in the decoding
        thread; `grow` then adds the tokens to the text."""
        if output.is_finished():
            self._counted(output)
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: RequestOutput) -> None:
        self._latest = output
        self._changed.set()

    @property
    def ended(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None or self.error is not None

    async def grow(self) -> None:
        """Wait for the next result of the request, and add its new tokens to the text. The text
        ends at a stop string, or if the result is the request's last one, or an error."""
        await self._changed.wait()
        self._changed.clear()
        output = self._latest
        assert output is not None
        self.counts = output.counts
        for index in range(len(self.tokens), len(output.generated_tokens)):
            token = output.generated_tokens[index]
            top = output.top_logprobs[index] if output.top_logprobs else {}
            begin = len(self.text)
            self._write(self._decoder.add(token))
            self.tokens.append(Token(token, output.logprobs[index], top, begin, len(self.text)))
            if self.finish_reason is not None:
                return
        if output.error is not None:
            self.error = output.error
        elif output.is_finished():
            self._write(self._decoder.end())
            if self.finish_reason is None:
                self.finish_reason = "length" if output.finish_reason == "length" else "stop"

    def _write(self, piece: str) -> None:
        """Append a piece to the text; if the text now contains a stop string, cut it there and end
        it."""
        searched = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [self.text.find(stop, searched) for stop in self.stops if piece]
        if begins := [index for index in found if index >= 0]:
            self.text = self.text[: min(begins)]
            self.finish_reason = "stop"
            self.stopped = True

    @property
    def certain(self) -> int:
        """The number of characters that can be sent: all, except those at the end that may become a
        stop string."""
        if not self.ended:
            for length in range(min(self._longest - 1, len(self.text)), 0, -1):
                if any(stop.startswith(self.text[-length:]) for stop in self.stops):
                    return len(self.text) - length
        return len(self.text)


@dataclass
class Job:
    """A checked request, ready to be decoded.

    Attributes:
        chat: Whether the request is a chat.
        prompts: The ids of each prompt.
        copies: Number of texts for each prompt.
        options: Options of `generate` for all texts, by name.
        limit: The maximum number of new tokens in each text.
        seed: The seed of the first text; each further text has the next number. None if the request
            sets none.
        penalties: The presence penalty and the frequency penalty.
        stops: Stop strings.
        stream: Whether the answer is streamed.
        usage: Whether counts of tokens follow the stream.
        logprobs: Whether the answer contains log-probabilities.
        top: Number of likeliest tokens that the answer contains for each position.
        echo: Whether the answer contains the prompt.
        tools: The tools that the model may call; None if there are none.
    """

    chat: bool
    prompts: list[list[int]]
    copies: int
    options: dict[str, Any]
    limit: int
    seed: int | None
    penalties: tuple[float, float]
    stops: list[str]
    stream: bool
    usage: bool
    logprobs: bool
    top: int
    echo: bool = False
    tools: Tools | None = None


@dataclass
class Answer:
    """The answer to a request.

    Attributes:
        job: The checked request.
        model: The model's name as the client knows it.
        decode: A function that decodes ids to text.
        texts: The texts that are decoded for the answer; empty if only the prompt is requested.
        echoed: For each prompt, its text and tokens; empty if the answer does not contain the
            prompt.
    """

    job: Job
    model: str
    decode: Callable[[Sequence[int]], str]
    texts: list[TextOfAnswer]
    echoed: list[tuple[str, list[Token]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.job.chat else "cmpl"
        self._name = f"{prefix}-{uuid4().hex}"
        self._created = int(time.time())

    def whole(self) -> dict[str, Any]:
        """Return the complete answer as a JSON object, once all texts have ended."""
        choices = []
        for index in range(len(self.job.prompts) * self.job.copies):
            text, tokens = "", list[Token]()
            if self.echoed:
                text, prompt_tokens = self.echoed[index // self.job.copies]
                tokens = list(prompt_tokens)
            offset = len(text)
            finish_reason = "length"
            if self.texts:
                row = self.texts[index]
                text += row.text
                tokens += _shifted(row, 0, len(row.text), offset)
                finish_reason = row.finish_reason or "length"
            choices.append(self._choice(index, text, tokens, finish_reason))
        return self._enveloped(choices, usage=self._usage())

    def opening(self) -> list[dict[str, Any]]:
        """Return the first parts of a stream, each a JSON object. A chat has one part for each
        text, with the role "assistant". A completion with echo has one part for each text, with its
        prompt. A completion without echo has none."""
        parts = []
        for index in range(len(self.job.prompts) * self.job.copies):
            if self.job.chat:
                delta = ChoiceDelta(role="assistant", content="")
                choice = ChunkChoice(index=index, delta=delta, finish_reason=None, logprobs=None)
                parts.append(self._enveloped([choice]))
            elif self.echoed:
                text, tokens = self.echoed[index // self.job.copies]
                end = None if self.texts else "length"
                parts.append(self._enveloped([self._choice(index, text, tokens, end, part=True)]))
        return parts

    def part(self, index: int, begin: int) -> tuple[dict[str, Any] | None, int]:
        """Make the next part of a stream: the characters of the text `index` from position `begin`
        on. Return this part as a JSON object, or None if there is nothing new, and the position at
        which the next part begins. Characters at the end that may become a stop string, or a tool
        call, are left for later parts."""
        row = self.texts[index]
        end = row.certain
        if self.job.tools is not None:
            end = len(row.text) if row.ended else min(end, self.job.tools.certain(row.text))
        if end <= begin and row.finish_reason is None:
            return None, begin
        tokens = _shifted(row, begin, end, self._echoed_length(index))
        choice = self._choice(index, row.text[begin:end], tokens, row.finish_reason, part=True)
        return self._enveloped([choice]), end

    def closing(self) -> dict[str, Any]:
        """Return the part that ends a stream, a JSON object with the counts of tokens."""
        return self._enveloped([], usage=self._usage())

    def _echoed_length(self, index: int) -> int:
        return len(self.echoed[index // self.job.copies][0]) if self.echoed else 0

    def _enveloped(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        """Wrap choices in the object that OpenAI's API returns."""
        kind: Any = Completion
        name = "text_completion"
        if self.job.chat and self.job.stream:
            kind, name = ChatCompletionChunk, "chat.completion.chunk"
        elif self.job.chat:
            kind, name = ChatCompletion, "chat.completion"
        envelope = kind.construct(
            id=self._name, object=name, created=self._created, model=self.model, choices=choices
        )
        content: dict[str, Any] = envelope.model_dump(exclude_unset=True, mode="json")
        return {**content, **more}

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.job.prompts))
        new = sum(len(text.tokens) for text in self.texts)
        usage = CompletionUsage(
            prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new
        )
        return usage.model_dump(exclude_unset=True)

    def _choice(
        self,
        index: int,
        text: str,
        tokens: list[Token],
        finish_reason: str | None,
        part: bool = False,
    ) -> Any:
        """Make a choice in OpenAI's form from a text or, in a stream, from a `part` of it."""
        calls: list[dict[str, Any]] = []
        if self.job.tools is not None and finish_reason is not None:
            text, calls = self.job.tools.split(text)
        if calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        common: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
        if finish_reason is not None and self.texts:
            common["meta_info"] = meta_info(self.texts[index])
        if not self.job.chat:
            logprobs = self._logprobs(tokens) if self.job.logprobs else None
            return CompletionChoice.construct(text=text, logprobs=logprobs, **common)
        chat_logprobs = None
        if self.job.logprobs:
            chat_logprobs = ChoiceLogprobs(content=list(map(self._chat_logprob, tokens)))
        if part:
            parts: dict[str, Any] = {} if calls and not text else {"content": text}
            if calls:
                parts["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
            delta = ChoiceDelta.model_validate(parts)
            return ChunkChoice.construct(delta=delta, logprobs=chat_logprobs, **common)
        fields: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            fields |= {"content": text or None, "tool_calls": calls}
        message = ChatCompletionMessage.model_validate(fields)
        return Choice.construct(message=message, logprobs=chat_logprobs, **common)

    def _logprobs(self, tokens: list[Token]) -> Logprobs:
        top: list[Any] = []
        for token in tokens:
            best = dict[str, float]()
            for other, logprob in token.top.items():
                best.setdefault(self.decode([other]), logprob)
            top.append(best if token.logprob is not None else None)
        return Logprobs.construct(
            tokens=[self.decode([token.id]) for token in tokens],
            token_logprobs=[token.logprob for token in tokens],
            top_logprobs=top if self.job.top else None,
            text_offset=[token.begin for token in tokens],
        )

    def _chat_logprob(self, token: Token) -> ChatCompletionTokenLogprob:
        text = self.decode([token.id])
        top = []
        for other, logprob in token.top.items():
            other_text = self.decode([other])
            top.append(
                TopLogprob(token=other_text, logprob=logprob, bytes=list(other_text.encode()))
            )
        return ChatCompletionTokenLogprob(
            token=text, logprob=token.logprob or 0.0, bytes=list(text.encode()), top_logprobs=top
        )


def _shifted(row: TextOfAnswer, begin: int, end: int, offset: int) -> list[Token]:
    """List the tokens whose text begins at or after the character `begin` of a text and before
    `end`. The positions of the tokens are shifted by `offset`, the number of characters that
    precede the text in the answer. At the end of a text, the list includes tokens without text,
    such as an eos."""
    last = row.ended and not row.stopped and end == len(row.text)
    tokens = []
    for token in row.tokens:
        if begin <= token.begin < end or (last and token.begin == end):
            tokens.append(replace(token, begin=token.begin + offset, end=token.end + offset))
    return tokens


def meta_info(row: TextOfAnswer) -> dict[str, Any]:
    """Collect the costs of a text: counts of forwards, of drafted and accepted states, and their
    ratios. They are under SGLang's names for speculative decoding and, in the field `mrp`, under
    this package's names."""
    counts = row.counts
    rounds = sum(counts.lengths)
    tokens = len(row.tokens)
    return {
        "spec_verify_ct": rounds,
        "spec_accept_length": tokens / max(1, rounds),
        "spec_accept_rate": counts.accepted / max(1, counts.drafted),
        "spec_accept_token_num": counts.accepted,
        "spec_draft_token_num": counts.drafted,
        "mrp": {
            "forwards": counts.forwards,
            "head_forwards": counts.head_forwards,
            "drafted": counts.drafted,
            "accepted": counts.accepted,
            "revoked": counts.revoked,
            "tokens_per_forward": tokens / max(1, counts.forwards),
            "acceptance": counts.accepted / max(1, counts.drafted),
            "offered_at_depth": counts.offered_at_depth,
            "accepted_at_depth": counts.accepted_at_depth,
        },
    }
