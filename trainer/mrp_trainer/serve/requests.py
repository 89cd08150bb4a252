"""Requests in OpenAI's form. Their fields are checked before any work is done, and translated into
options of `generate`.

A field is supported, or it is ignored because its value has no effect, or it is refused. The
pydantic models below (`ChatRequest`, `CompletionRequest`) list the supported fields; further fields
must be options of `generate` (`SETTABLE`). A field of OpenAI's that this server does not support is
refused unless its value has no effect (`_IDLE`). Only `options_of` translates fields into options,
including the fields that bind a text to a language.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from modeling_mrp.generate.constrain import response_options
from modeling_mrp.generate.option_table import CONSTRAINTS, OPTIONS, closest_name
from modeling_mrp.generate.options import OPTION_NAMES

MOST_TEXTS = 16  # the most texts of one request
MOST_TOP = 20  # the most likeliest tokens per position
# Options of `generate` that a request may set, by their names.
SETTABLE = {option.name for option in OPTIONS} - {"kernels", "graphs", "max_batch_size", "seed"}
SETTABLE |= {"top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
SETTABLE |= {"repetition_penalty", "no_repeat_ngram_size", "min_new_tokens"}
# Options that the JSON of a generation config may also set, which `transformers chat` sends.
_OF_JSON = SETTABLE | {"do_sample", "temperature", "top_p", "max_new_tokens", "seed"}
_OF_JSON |= {"eos_token_id", "stop_strings"}
# The largest values that one request may set, so that it does not delay the others.
_MOST = {"num_draft_states": 16, "draft_branches": 8, "draft_passes": 8}
_MOST |= {"prompt_lookup_num_tokens": 64, "max_matching_ngram_size": 16}
# Fields that serve only the client's bookkeeping, and by field the values that have no effect.
_NOTES = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "store"}
_IDLE: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("auto",),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
}

# The names in vLLM and SGLang of the options that bind a text to a language, and the keys of vLLM's
# `structured_outputs`.
_LANGUAGES = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
_MOST_OF_LANGUAGE = 65536  # the most characters of a language in JSON

Stop = Annotated[str, StringConstraints(min_length=1, max_length=100)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]
Text = Annotated[str, StringConstraints(min_length=1)]


class _Strict(BaseModel):
    """A JSON object that has only these fields, with exactly these types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """Remove fields that are null."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class Part(_Strict):
    """A part of a message. Only parts that are texts are supported."""

    type: Literal["text"]
    text: str


ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(_Strict):
    """A function that a model may call.

    Attributes:
        name: The name of the function.
        description: What the function does, in words for the model.
        parameters: The JSON schema of its arguments, an object.
        strict: Accepted without effect, since a required call always follows the schema.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """A tool that a request declares."""

    type: Literal["function"]
    function: Function

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.name


class FunctionName(_Strict):
    """The name of the function that must be called."""

    name: str


class ToolChoice(_Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Strict):
    """A function that an assistant has called; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """A tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Convert the call to the form that chat templates take. `ValueError` if the arguments are
        not a JSON object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the arguments of the call {self.id} are no JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of the call {self.id} are no JSON object")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(_Strict):
    """A message of a chat.

    These are refused: a message with neither content nor tool calls; tool calls in a message of
    another role than `assistant`; a message of the role `tool` without `tool_call_id`, or one of
    another role with it; and any further field that is not empty, since chat templates would
    silently drop it.

    Attributes:
        role: The role of the speaker.
        content: The text, or the parts of the text. In a message of the role `tool`, it is the
            result of a call.
        tool_calls: The calls that the assistant makes.
        tool_call_id: The id of the call whose result the message is.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] = Field([], max_length=64)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: Any) -> Any:
        """Remove empty fields: clients send back an assistant's message together with its empty
        fields for tool calls."""
        if not isinstance(fields, dict):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if name in ("role", "content") or value not in ([], "")
        }

    @model_validator(mode="after")
    def _consistent(self) -> "Message":
        """Refuse fields that belong to another role, and messages without content."""
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls stand in a message of the role {self.role}")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("a message of the role tool, and no other, has a tool_call_id")
        if self.content is None and not self.tool_calls:
            raise ValueError("the message has no content")
        return self

    def text(self) -> str:
        """Return the content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content or ())

    def for_template(self) -> dict[str, Any]:
        """Convert the message to the form that chat templates take."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.text()}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class StreamOptions(_Strict):
    """Options of a streamed answer.

    Attributes:
        include_usage: Whether counts of tokens follow the last text.
        include_obfuscation: Accepted without effect, since nothing is obfuscated.
    """

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted without effect: nothing is obfuscated


class Request(_Strict):
    """The common fields of chat and completion requests. Those that are not listed below have the
    meaning of OpenAI's API or, such as `ignore_eos`, of vLLM and SGLang.

    A further field is accepted if it is an option of `generate` that a request may set
    (`SETTABLE`), a name that other servers give to constraints of the text, such as `guided_json`,
    or a field whose value has no effect, such as `user`. Any other field is refused.

    Attributes:
        structured_outputs: A constraint of the text in vLLM's form: a dict with one of the keys
            `json`, `regex`, `choice` and `grammar`.
        generation_config: JSON text of an object with options of `generate`.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MOST_TEXTS)
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] = Field([])
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=300)
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] = Field({}, max_length=1)
    generation_config: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, fields: Any) -> Any:
        """Remove fields whose values have no effect."""
        if not isinstance(fields, dict):
            return fields
        kept = {}
        for name, value in fields.items():
            if name == "tool_choice" and value == "none" and not fields.get("tools"):
                continue
            idle = [other for other in _IDLE.get(name, ()) if type(value) is type(other)]
            if name not in _NOTES and value not in idle:
                kept[name] = value
        return kept

    @model_validator(mode="after")
    def _followed(self) -> "Request":
        """Refuse fields that are neither supported nor options of `generate`."""
        known = type(self).model_fields.keys() | SETTABLE | _LANGUAGES.keys()
        for name in self.model_extra or {}:
            if name not in known:
                raise ValueError(
                    f"{name} is not followed here{closest_name(name, known)}: leave it out"
                )
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings of the request."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatRequest(Request):
    """The body of a request to `/v1/chat/completions`. Its fields have the meaning of OpenAI's
    API."""

    messages: list[Message] = Field(min_length=1, max_length=2048)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_TOP)

    @property
    def limit(self) -> int | None:
        """The maximum number of new tokens in each text; None if the request sets none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Request):
    """The body of a request to `/v1/completions`. Its fields have the meaning of OpenAI's API."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_TEXTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool = False

    @property
    def limit(self) -> int | None:
        """The maximum number of new tokens in each text; None if the request sets none."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts of the request, as a list even if there is only one."""
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if single else prompt


def options_of(request: Request, vocab_size: int) -> dict[str, Any]:
    """Translate a request into options of `generate`, by name, including those in its field
    `generation_config` (a JSON text) and in further fields. The result leaves out OpenAI's fields
    for stop strings, penalties, the seed and the maximum number of new tokens, which are applied to
    each text separately.

    Raises:
        ValueError: for options out of range, ids outside of the vocabulary, several constraints of
            the same kind, and a malformed `generation_config` or an option that it may not have.
    """
    options = {} if request.generation_config is None else _from_json(request.generation_config)
    options |= _with_language(request)
    for name, most in _MOST.items():
        value = options.get(name)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{name} is {value}: a request may ask for {most} at most")
    if request.min_tokens is not None:
        options["min_new_tokens"] = request.min_tokens
    if request.top_p is not None:
        options["top_p"] = request.top_p
    temperature = options.get("temperature", 1.0 if request.top_p is not None else None)
    if request.temperature is not None:
        temperature = request.temperature
    if temperature is not None and options.get("do_sample") is not False:
        options["do_sample"] = temperature > 0
        options["temperature"] = float(temperature) or 1.0
    if request.ignore_eos:
        options["eos_token_id"] = []
    if request.logit_bias:
        options["sequence_bias"] = _biases(request.logit_bias, vocab_size)
    if "stop_strings" in options:
        raise ValueError("generation_config has stop_strings: use the field stop")
    return options


def _with_language(request: Request) -> dict[str, Any]:
    """Return the options of `generate` in a request's further fields, together with the option that
    binds its text to a language. Of the latter, the names in OpenAI's API, vLLM and SGLang are
    translated into the name that `generate` uses."""
    options: dict[str, Any] = {}
    fields = [*(request.model_extra or {}).items()]
    fields += response_options(request.response_format).items()
    for key, value in request.structured_outputs.items():
        if key not in _STRUCTURED:
            raise ValueError(f"structured_outputs has {key}: it may have {', '.join(_STRUCTURED)}")
        fields.append((_STRUCTURED[key], value))
    for field, value in fields:
        name = _LANGUAGES.get(field, field)
        if name in options:
            raise ValueError(f"the text is bound to two languages, both a {name}: give one")
        if name in CONSTRAINTS and len(json.dumps(value)) > _MOST_OF_LANGUAGE:
            raise ValueError(f"{field} has more than {_MOST_OF_LANGUAGE} characters: shorten it")
        options[name] = value
    return options


def _biases(given: Mapping[str, float], vocab_size: int) -> dict[tuple[int], float]:
    """Translate `logit_bias` into `sequence_bias`. The result is a dict, since transformers 5.17
    does not accept the token 0 in a list."""
    for token in given:
        if not (token.isascii() and token.isdecimal() and len(token) < 10) or (
            int(token) >= vocab_size
        ):
            raise ValueError(f"logit_bias has {token[:40]!r}: give ids of tokens")
    return {(int(token),): bias for token, bias in given.items()}


def _from_json(text: str) -> dict[str, Any]:
    """Convert `generation_config`, a field of a request with the JSON of a generation config, into
    options of `generate`."""
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"generation_config is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("generation_config must be the JSON of an object")
    options = {name: value for name, value in fields.items() if value is not None}
    options.pop("transformers_version", None)
    for name in options:
        if name not in OPTION_NAMES:
            raise ValueError(
                f"generation_config has {name}: generate has no such option"
                f"{closest_name(name, OPTION_NAMES)}"
            )
        if name not in _OF_JSON:
            raise ValueError(
                f"generation_config has {name}, which no request can set: leave it out"
            )
    return options
