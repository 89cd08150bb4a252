"""Texts that a server with OpenAI's API writes, as chats to train on."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from huggingface_hub import InferenceClient

from ..data.records import Chat, FieldError, parse_prompt
from ..data.sources import Source, checked
from ..publish.command import network_errors
from .options import DecodeOptions

# Options of `mrp decode` that are fields of OpenAI's requests; all others go beside these.
_FIELDS = ("temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty")


class EndpointDecoder:
    """A `TextMaker` whose texts are the answers of a server with OpenAI's API. The JSON line of an
    answer holds a chat that ends with the answer, without reveal steps. An answer that was cut at
    `max_new_tokens` has no end to learn, and gets no line.

    Args:
        options: The options of `mrp decode`. `endpoint` is the URL of the server, and `model` is
            the name of the model there. The target is sent in the field `decoding`, which
            `mrp serve` reads. Without a temperature in the options, answers are greedy.
        source: The records that hold the prompts, which must be chats; at most `options.limit` of
            them are used.

    Raises:
        RecordError: if a record is malformed, its prompt is no chat, or there are no records.
    """

    def __init__(self, options: DecodeOptions, source: Source) -> None:
        extra = options.extra()
        fields = {name: extra.pop(name) for name in _FIELDS if name in extra}
        extra |= {} if options.target is None else {"decoding": options.target}
        self.request = {"temperature": 0.0, **fields, "max_tokens": options.max_new_tokens}
        self.extra_body = extra
        self.model = options.model
        self.endpoint = str(options.endpoint)
        self.chats: list[Chat] = []
        for _, chat in islice(checked(source, _chat), options.limit):
            self.chats.append(chat)
        self.prompts = [[chat.messages, chat.tools, dict(chat.variables)] for chat in self.chats]
        # without a key, the client would send the key of the Hub
        key = os.environ.get("OPENAI_API_KEY") or "none"
        self.client = InferenceClient(base_url=self.endpoint, api_key=key)
        self.decoded_by: dict[str, Any] = {
            "model": options.model,
            "max_new_tokens": options.max_new_tokens,
            "options": {**fields, **extra},
        }
        self.fingerprint = {**self.decoded_by, "endpoint": self.endpoint}

    def batches(self, begins: Sequence[int], count: int) -> Iterator[tuple[int, list[str]]]:
        """Request the answers to batches of `count` chats each; the last batch may have fewer. The
        chats of a batch are sent at the same time. `begins` holds the index of the first chat of
        each batch to request. For each batch, yield this index and the JSON lines of the answers
        that were not cut. `OSError` if the server cannot be reached or refuses a request."""
        for begin in begins:
            yield begin, self._lines(self.chats[begin : begin + count], count)

    def _lines(self, chats: Sequence[Chat], count: int) -> list[str]:
        """Request the answers to chats, `count` of them at the same time. Return the JSON lines of
        those answers that were not cut at `max_new_tokens`."""
        with (
            network_errors(f"the server at {self.endpoint}", "repeat the command"),
            ThreadPoolExecutor(count) as threads,
        ):
            records = list(threads.map(self._record, chats))
        return [json.dumps(record) for record in records if record is not None]

    def note(self, lines: Sequence[str]) -> str:
        """Return a remark on the number of answers that were cut and left out, or an empty text if
        there are none. `lines` are the JSON lines of all other answers."""
        cut = len(self.chats) - len(lines)
        return f"; {cut} that max_new_tokens cut are left out" if cut else ""

    def _record(self, chat: Chat) -> dict[str, Any] | None:
        """Request the answer to a chat. Return a record that holds the chat and the answer, or None
        if the answer was cut."""
        extra_body = dict(self.extra_body)
        if chat.variables:
            extra_body["chat_template_kwargs"] = dict(chat.variables)
        tools: Any = chat.tools
        answer: Any = self.client.chat_completion(
            chat.messages,
            model=self.model,
            tools=tools,
            extra_body=extra_body or None,
            **self.request,
        )
        (choice,) = answer.choices
        if choice.finish_reason == "length":
            return None
        turn: dict[str, Any] = {"role": "assistant", "content": choice.message.content or ""}
        if choice.message.tool_calls:
            turn["tool_calls"] = []
            for call in choice.message.tool_calls:
                function = {"name": call.function.name, "arguments": call.function.arguments}
                turn["tool_calls"].append({"type": "function", "function": function})
        record: dict[str, Any] = {"messages": [*chat.messages, turn]}
        if chat.tools:
            record["tools"] = chat.tools
        if chat.variables:
            record["chat_template_kwargs"] = dict(chat.variables)
        return {**record, "decoded_by": self.decoded_by}


def _chat(row: Any) -> Chat:
    """Parse the prompt of a record; `FieldError` if the prompt is not a chat."""
    record = parse_prompt(row)
    if not isinstance(record, Chat):
        raise FieldError("prompt", "a text, and an endpoint answers chats: give 'messages'")
    return record
