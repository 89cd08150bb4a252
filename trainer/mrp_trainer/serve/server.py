"""The command `mrp serve`: it offers one model through OpenAI's API, and decodes concurrent
requests together.

FastAPI routes requests, pydantic checks them (`requests`), and one thread reads and tokenises them.
The manager of `init_continuous_batching` decodes them in another thread. The event loop writes
answers (`answers`), and waits for neither thread.
"""

import asyncio
import copy
import hmac
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any
from uuid import uuid4

try:
    import uvicorn
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.middleware.trustedhost import TrustedHostMiddleware
    from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from openai.types import Model
    from pydantic import ValidationError
    from starlette.exceptions import HTTPException as StarletteHTTPException
    from starlette.requests import ClientDisconnect

    from .answers import Answer, Job, TextOfAnswer, Token
    from .requests import MOST_TEXTS, ChatRequest, CompletionRequest, options_of
    from .tools import BEGIN, Tools
except ImportError as error:
    raise ImportError(
        f"mrp serve needs FastAPI and OpenAI's types: pip install 'modeling-mrp[serve]' ({error})"
    ) from error

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation import ContinuousBatchingConfig

from modeling_mrp.generate.batching import ContinuousBatchingManager
from modeling_mrp.generate.option_table import CONSTRAINTS
from modeling_mrp.generate.options import MRPGenerationConfig, check_ids

from ..data.records import check_utf8
from ..evaluate.command import check_setting
from ..evaluate.options import generate_options
from ..loading import load_config, load_model, tokenizer_of
from .metrics import Metrics
from .options import ServeOptions

_NEW_TOKENS = 1024  # limit of a text if neither the request nor the checkpoint sets one
_LOOPBACK = ["127.0.0.1", "localhost"]
_BODY_BYTES = 4 << 20
_BODY_SECONDS = 30.0  # the longest time in which a body must arrive
_BYTES_OF_TOKEN = 32  # the most bytes of a token of a prompt; the longest words have no more
_RETRY_SECONDS = 2
_END_SECONDS = 2  # time for sending answers once the server is told to end
_SHOWN = 1000  # the most characters of an error message


class CountPenalty(LogitsProcessor):
    """A logits processor with OpenAI's penalties for tokens that the text already contains to the
    left of a position.

    Args:
        prompt: Number of tokens of the prompt, which do not count.
        presence: The penalty that is subtracted once from the logit of each such token.
        frequency: The penalty that is subtracted once for each occurrence.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt = prompt
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Subtract the penalties from scores [rows, vocab], by the tokens in `input_ids` [rows,
        length]. The ids may contain masks, which are never chosen anyway."""
        counts = torch.zeros_like(scores)
        text = input_ids[:, self.prompt :]
        counts.scatter_add_(1, text, torch.ones_like(text, dtype=counts.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Service:
    """One model, its queue, and the requests to it.

    Args:
        name: The model's name for clients.
        model: An `MRPForCausalLM`. Its generation config gives the options that a request does not
            set.
        tokenizer: The tokenizer of the model.
        texts: The maximum number of texts that are decoded at the same time.
        waiting: The maximum number of texts that may wait for a free row.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        texts: int,
        waiting: int,
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.listed = Model(id=name, object="model", created=int(time.time()), owned_by="mrp")
        self.metrics = Metrics()
        self.most_waiting = waiting
        # one entry for each request that is being read; it goes where the request begins to wait
        self.reading: set[object] = set()
        self.ending = False
        limits = ContinuousBatchingConfig(max_requests_per_batch=texts)
        self.manager: ContinuousBatchingManager = model.init_continuous_batching(
            continuous_batching_config=limits
        )
        # Requests are read one at a time, so that no other thread uses the tokenizer meanwhile.
        self._reader = ThreadPoolExecutor(1, "reader")
        self._reading_tokenizer = copy.deepcopy(tokenizer)
        self._scoring = asyncio.Lock()

    def start(self) -> None:
        """Start the decoding thread."""
        self.manager.start()

    def stop(self) -> None:
        """Accept no more requests, and tell the decoding thread to end the running ones before
        their next round. Do not wait for that."""
        self.ending = True
        if self.manager.is_running():
            self.manager.stop(block=False, hard_stop=True)

    def close(self) -> None:
        """Drop the requests that wait to be read, and wait briefly for the decoding thread to end.
        The thread that reads requests is not waited for."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self.manager.is_running():
            self.manager.stop(hard_stop=True, timeout=_END_SECONDS)

    def check_room(self) -> None:
        """Raise `HTTPException` if too many texts wait already (429), or if the server is ending
        (503)."""
        if self.ending:
            raise HTTPException(503, "the server is shutting down: ask again later")
        if self.manager.waiting + len(self.reading) >= self.most_waiting:
            raise HTTPException(
                429,
                f"{self.most_waiting} texts wait already: ask again later",
                {"Retry-After": str(_RETRY_SECONDS)},
            )

    def check_model(self, name: str | None) -> None:
        """Raise `HTTPException` (404) if a request asks for a model with another name than that of
        the served one. A request that names no model (None) is accepted."""
        if name not in (None, self.name):
            raise HTTPException(
                404, f"the model {name!r} does not exist: this server has {self.name!r} alone"
            )

    async def answer(
        self, kind: type[ChatRequest] | type[CompletionRequest], body: bytes
    ) -> Answer:
        """Read a request of the class `kind` from its JSON `body`, and start decoding its texts.
        Return the answer at once; its texts grow while they are decoded.

        Raises:
            HTTPException, ValueError: for an invalid or unsupported request.
        """
        self.check_room()
        loop = asyncio.get_running_loop()
        entry = object()
        self.reading.add(entry)
        try:
            job = await loop.run_in_executor(self._reader, self._read, kind, body)
            echoed = await self.echoed(job) if job.echo else []
            texts = []
            if job.limit:
                for index in range(len(job.prompts) * job.copies):
                    texts.append(self._text(job, f"{uuid4().hex}-{index}"))
                await loop.run_in_executor(self._reader, self._enqueue, job, texts, entry)
        finally:
            self.reading.discard(entry)
        return Answer(job, self.name, self._decode, texts, echoed)

    def cancel(self, answer: Answer) -> None:
        """End the texts of an answer whose client has left."""
        for text in answer.texts:
            self.manager.cancel_request(text.name)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _text(self, job: Job, name: str) -> TextOfAnswer:
        return TextOfAnswer(name, self._decode, job.stops, self.metrics.count)

    def _read(self, kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> Job:
        """Check a request and tokenise its prompts, in the reading thread."""
        request = kind.model_validate_json(body)
        self.check_model(request.model)
        config = self.model.config
        options = options_of(request, config.vocab_size)
        check_setting({"set": options}, config)
        tools = None
        if isinstance(request, ChatRequest):
            tools = Tools.of(request)
            if tools is not None and tools.required:
                self._require_call(options, tools)
            prompts = [self._chat_ids(request, tools)]
        else:
            prompts = [self._prompt_ids(prompt) for prompt in request.prompts]
        if len(prompts) * request.n > MOST_TEXTS:
            raise ValueError(
                f"the request asks for {len(prompts) * request.n} texts: ask for {MOST_TEXTS} at "
                "most, prompts times n"
            )
        room = config.max_position_embeddings - max(map(len, prompts))
        limit = request.limit
        if limit is None:
            limit = options.pop("max_new_tokens", None)
        if limit is None:
            limit = min(self.model.generation_config.max_new_tokens or _NEW_TOKENS, max(1, room))
        options.pop("max_new_tokens", None)
        echo = isinstance(request, CompletionRequest) and request.echo
        if limit == 0 and not echo:
            raise ValueError("max_tokens is 0: it must be an int of 1 or more, or ask for echo")
        if limit > room:
            raise ValueError(
                f"a prompt of {max(map(len, prompts))} tokens and {limit} new ones exceed "
                f"max_position_embeddings={config.max_position_embeddings}: shorten the prompt, or "
                "lower max_tokens"
            )
        seed = options.pop("seed", None) if request.seed is None else request.seed
        if isinstance(request, ChatRequest):
            logprobs, top = request.logprobs, request.top_logprobs
            if top and not logprobs:
                raise ValueError("top_logprobs needs logprobs: set it to true")
        else:
            logprobs, top = request.logprobs is not None, request.logprobs or 0
        return Job(
            isinstance(request, ChatRequest),
            prompts,
            request.n,
            options,
            limit,
            seed,
            (request.presence_penalty, request.frequency_penalty),
            request.stops,
            request.stream,
            request.stream_options.include_usage,
            logprobs,
            top,
            echo,
            tools,
        )

    def _require_call(self, options: dict[str, Any], tools: Tools) -> None:
        """Set the option that constrains the text to a tool call."""
        if not options.keys().isdisjoint(CONSTRAINTS):
            raise ValueError("tool_choice requires a call, and the text is bound to a language too")
        options["regex"] = tools.pattern()

    def _chat_ids(self, request: ChatRequest, tools: Tools | None) -> list[int]:
        """Render messages with the chat template, and tokenise them."""
        messages = [message.for_template() for message in request.messages]
        declared = [] if tools is None else tools.for_template()
        self._check_size(json.dumps([messages, declared], ensure_ascii=False), "messages")
        text = self._chat_text(messages, declared)
        if tools is not None:
            self._check_template(text, messages)
        for message in request.messages:
            called = [call.function.name for call in message.tool_calls]
            results = [message.text()] if message.role == "tool" else []
            for shown in (*called, *results):
                if shown not in text:
                    raise ValueError(
                        "the chat template leaves out calls of tools or their results: write them "
                        "as messages of the user and the assistant"
                    )
        ids = self._reading_tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._checked(ids)

    def _chat_text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            text = self._reading_tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(
                f"messages cannot be written as a chat: {type(error).__name__}: {error}"
            ) from error
        return str(text)

    def _check_template(self, text: str, messages: list[dict[str, Any]]) -> None:
        """Refuse tools if the chat template leaves them out, or writes tool calls in another
        form."""
        template = self._reading_tokenizer.get_chat_template()
        if text == self._chat_text(messages, []) or BEGIN not in template:
            raise ValueError(
                "tools: the model's chat template declares none, or has calls in another form than "
                f"{BEGIN}: leave them out"
            )

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check_size(prompt, "prompt")
            return self._checked(self._reading_tokenizer(prompt)["input_ids"])
        return self._checked(prompt)

    def _check_size(self, text: str, source: str) -> None:
        """Refuse a text that has too many bytes for the model, before it is tokenised. `source` is
        the name of its field in the error message."""
        check_utf8(text)
        positions = self.model.config.max_position_embeddings
        size = len(text.encode())
        if size > _BYTES_OF_TOKEN * positions:
            raise ValueError(
                f"{source}: {size} bytes of text are more than max_position_embeddings={positions} "
                "tokens: shorten it"
            )

    def _checked(self, ids: list[int]) -> list[int]:
        positions = self.model.config.max_position_embeddings
        if len(ids) >= positions:
            raise ValueError(
                f"a prompt of {len(ids)} tokens and new ones exceed "
                f"max_position_embeddings={positions}: shorten it"
            )
        check_ids(torch.tensor([ids], dtype=torch.long), None, self.model.config)
        return ids

    def _enqueue(self, job: Job, texts: Sequence[TextOfAnswer], entry: object) -> None:
        """Submit the texts of a request to the manager: all of them, or none. The request's entry
        among those that are read is removed first, as `check_room` counts both kinds."""
        self.reading.discard(entry)
        try:
            for index, text in enumerate(texts):
                prompt = job.prompts[index // job.copies]
                options = dict(job.options)
                if job.seed is not None:
                    options["seed"] = (job.seed + index) % (1 << 62)
                if not options.keys().isdisjoint(CONSTRAINTS):
                    options["tokenizer"] = self._reading_tokenizer
                if any(job.penalties):
                    options["logits_processor"] = [CountPenalty(len(prompt), *job.penalties)]
                self.manager.register_result_handler(text.name, text.tell)
                self.manager.add_request(
                    prompt,
                    text.name,
                    job.limit,
                    streaming=job.stream or bool(job.stops),
                    top_logprobs=job.top,
                    **options,
                )
        except BaseException:
            for text in texts:
                self.manager.cancel_request(text.name)
            raise

    async def echoed(self, job: Job) -> list[tuple[str, list[Token]]]:
        """Return the text and the tokens of each prompt, for an answer that repeats its prompts.
        The tokens have exact log-probabilities if the request asks for them."""
        echoed = []
        for prompt in job.prompts:
            logprobs: list[float | None] = [None] * len(prompt)
            top: list[dict[int, float]] = [{} for _ in prompt]
            if job.logprobs:
                async with self._scoring:
                    logprobs, top = await asyncio.to_thread(self._score, prompt, job.top)
            text = ""
            tokens = []
            for token, logprob, best in zip(prompt, logprobs, top, strict=True):
                begin = len(text)
                text += self._decode([token])
                tokens.append(Token(token, logprob, best, begin, len(text)))
            echoed.append((self._decode(prompt), tokens))
        return echoed

    def _score(
        self, prompt: list[int], top: int
    ) -> tuple[list[float | None], list[dict[int, float]]]:
        """Score a prompt between two rounds. For each token, return its log-probability, and a dict
        from the `top` likeliest ids to their log-probabilities. By convention the first token,
        which follows nothing, has no log-probability."""
        with self.manager.pause():
            ids = torch.tensor([prompt], device=self.model.device)
            output = self.model.score(ids, top_tokens=top)
        logprobs: list[float | None] = output.logprobs[0].tolist()
        logprobs[0] = None
        best: list[dict[int, float]] = [{} for _ in prompt]
        if top:
            rows = zip(output.top_ids[0].tolist(), output.top_logprobs[0].tolist(), strict=True)
            best = [dict(zip(others, values, strict=True)) for others, values in rows]
        return logprobs, best


async def whole(service: Service, answer: Answer) -> dict[str, Any]:
    """Wait until all texts of an answer have ended; return the complete answer as a JSON object.

    Raises:
        HTTPException: for the error that ended a text.
    """
    for text in answer.texts:
        while not text.ended:
            await text.grow()
        check_error(text)
        if text.stopped:
            service.manager.cancel_request(text.name)
    return answer.whole()


async def parts(service: Service, answer: Answer) -> AsyncIterator[dict[str, Any]]:
    """Yield the parts of an answer, each a JSON object of OpenAI's streaming form, as its texts
    grow.

    Raises:
        HTTPException: for the error that ended a text.
    """
    for chunk in answer.opening():
        yield chunk
    begins = [0] * len(answer.texts)
    growing = {asyncio.ensure_future(text.grow()): index for index, text in enumerate(answer.texts)}
    try:
        while growing:
            await asyncio.wait(growing, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in growing if task.done()]:
                index = growing.pop(task)
                task.result()
                text = answer.texts[index]
                check_error(text)
                grown, begins[index] = answer.part(index, begins[index])
                if grown is not None:
                    yield grown
                if not text.ended:
                    growing[asyncio.ensure_future(text.grow())] = index
                elif text.stopped:
                    service.manager.cancel_request(text.name)
    finally:
        for task in growing:
            task.cancel()
    if answer.job.usage:
        yield answer.closing()


def check_error(text: TextOfAnswer) -> None:
    """Raise an `HTTPException` for the error that ended a text, if there is one."""
    if text.error is None:
        return
    if "has stopped" in text.error:
        raise HTTPException(503, "the server is shutting down: ask again later")
    if "no token with a finite score" in text.error:
        raise HTTPException(400, text.error)
    raise HTTPException(500, text.error)


class Counted:
    """An ASGI application that passes requests on to another one, and counts the answers.

    Args:
        app: The other application.
        counts: The number of answers by HTTP status, to which each answer is added.
    """

    def __init__(self, app: Any, counts: Counter[int]) -> None:
        self.app = app
        self.counts = counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on to the wrapped application, and count its answer."""

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.counts[message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)


class EventStream(StreamingResponse):
    """A response that streams an answer as server-sent events. Once the stream has been sent, or
    the client has left, texts of the answer that are still being decoded are ended.

    Args:
        service: The service that decodes the texts.
        answer: The answer, whose texts may still grow.
    """

    def __init__(self, service: Service, answer: Answer) -> None:
        super().__init__(self.events(service, answer), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self.leave = partial(service.cancel, answer)

    async def events(self, service: Service, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the parts of an answer as server-sent events, and then the event that ends the
        stream. If there is an error, it is yielded as an event in place of the remaining parts."""
        try:
            async for chunk in parts(service, answer):
                yield self._event(chunk)
        except HTTPException as error:
            yield self._event(error_of(error.status_code, str(error.detail)))
        yield b"data: [DONE]\n\n"

    def _event(self, content: dict[str, Any]) -> bytes:
        return b"data: " + JSONResponse(content).body + b"\n\n"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the stream; then end the texts of the answer that are still being decoded."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave()


async def unless_left(request: Request, service: Service, answer: Answer) -> Response:
    """Wait for an answer as long as its client stays, and return it as a response. If the client
    leaves, end the texts of the answer."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(whole(service, answer))
    watch = asyncio.ensure_future(left())
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return Response(status_code=499)
        return JSONResponse(task.result())
    finally:
        service.cancel(answer)
        task.cancel()
        watch.cancel()


async def body_of(request: Request) -> bytes:
    """Read the body of a request. Raise `HTTPException` if it is too long, or arrives too
    slowly."""
    too_long = HTTPException(413, f"the body has more than {_BODY_BYTES} bytes: shorten it")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > _BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > _BODY_BYTES:
                    raise too_long
    except TimeoutError as error:
        raise HTTPException(408, "the body did not come in time") from error
    return bytes(body)


def error_of(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Make an error object in OpenAI's form. `param` is the name of the field with the error."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if len(message) > _SHOWN:
        message = f"{message[: _SHOWN // 2]} ... {message[-_SHOWN // 2 :]}"
    message = message.encode("utf-8", "replace").decode()
    code = "model_not_found" if status == 404 and "model" in message else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def described(error: ValidationError) -> tuple[str, str | None]:
    """Return the message of pydantic's first error, and the name of the field with the error."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    names = [str(part) for part in first["loc"] if "[" not in str(part)]
    names = [name for name in names if name not in ("constrained-str", "str")]
    field = ".".join(names)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "not followed here: leave it out"
    return (f"{field}: {message}" if field else message), field or None


async def refused(_request: Request, error: Exception) -> JSONResponse:
    """Make the response for an error, in OpenAI's form. An HTTP exception keeps its status. An
    invalid request has 400, an error of a server that is ending 503, and any other error 500."""
    headers = None
    param = None
    message = str(error) or type(error).__name__
    status = 500
    if isinstance(error, StarletteHTTPException):
        status, message = error.status_code, str(error.detail)
        headers = error.headers
    elif isinstance(error, ValidationError):
        status = 400
        message, param = described(error)
    elif isinstance(error, ValueError | RecursionError | OverflowError):
        status = 400
    elif isinstance(error, RuntimeError) and "has stopped" in message:
        status, message = 503, "the server is shutting down: ask again later"
    return JSONResponse(error_of(status, message, param), status, headers)


def application(
    name: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    loopback: bool = True,
    api_key: str | None = None,
    max_batch_size: int = 16,
    max_queue_size: int = 64,
) -> FastAPI:
    """Make the application that answers requests. It serves OpenAI's `/v1/chat/completions`,
    `/v1/completions` and `/v1/models`, as well as `/health`, `/metrics`, and `/load_model`, which
    `transformers chat` calls first.

    Args:
        name: The model's name for clients.
        model: An `MRPForCausalLM`. Its generation config gives the options that a request does not
            set.
        tokenizer: The tokenizer of the model.
        loopback: Whether requests are refused unless their `Host` header is 127.0.0.1 or localhost.
            This keeps out requests from websites.
        api_key: The key that clients must send; None if they need none.
        max_batch_size: The maximum number of texts that are decoded at the same time.
        max_queue_size: The maximum number of texts that may wait for a free row.
    """
    service = Service(name, model, tokenizer, max_batch_size, max_queue_size)

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()
        await asyncio.to_thread(service.close)

    def authorised(request: Request) -> None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if api_key is not None and not hmac.compare_digest(key, api_key.encode()):
            raise HTTPException(
                401, "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"}
            )

    async def answered(kind: Any, request: Request) -> Response:
        try:
            body = await body_of(request)
        except ClientDisconnect:  # the client left in the middle of the body
            return Response(status_code=499)
        answer = await service.answer(kind, body)
        if answer.job.stream:
            return EventStream(service, answer)
        return await unless_left(request, service, answer)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    with_key = [Depends(authorised)]

    @app.post("/v1/chat/completions", dependencies=with_key)
    async def chat(request: Request) -> Response:
        return await answered(ChatRequest, request)

    @app.post("/v1/completions", dependencies=with_key)
    async def complete(request: Request) -> Response:
        return await answered(CompletionRequest, request)

    @app.post("/v1/systemone", dependencies=with_key)
    async def decide() -> Response:
        raise HTTPException(
            501, "decisions are not served: call model.decide in Python, or ask for `choices`"
        )

    @app.get("/v1/models", dependencies=with_key)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.listed.model_dump()]}

    @app.get("/v1/models/{model_id:path}", dependencies=with_key)
    async def listed_model(model_id: str) -> dict[str, Any]:
        service.check_model(model_id)
        return service.listed.model_dump()

    @app.post("/load_model", dependencies=with_key)
    async def load(request: Request) -> Response:
        with suppress(ValueError, AttributeError):
            fields = await request.json()
            service.check_model(fields.get("model"))
        event = {"status": "ready", "model": name, "cached": True}
        content = b"data: " + JSONResponse(event).body + b"\n\n"
        return Response(content, media_type="text/event-stream")

    @app.get("/health")
    async def health() -> Response:
        if service.ending or not service.manager.is_running():
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", dependencies=with_key)
    async def metrics() -> Response:
        page = service.metrics.page(service.manager)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    for kind in (ValueError, RuntimeError, RecursionError, OverflowError, StarletteHTTPException):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(Exception, refused)

    app.add_middleware(Counted, counts=service.metrics.answers)
    if loopback:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK)
    return app


class Server(uvicorn.Server):
    """A uvicorn server for the application that `application` makes. When it stops, it ends the
    texts that are being decoded, instead of waiting for their answers. At a second signal, it stops
    immediately.

    Args:
        config: The `uvicorn.Config` with the application, the host and the port.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop at the first signal, as `uvicorn.Server.handle_exit` does; end the process
        at the second."""
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all texts, then shut down as `uvicorn.Server.shutdown` does."""
        self.config.app.state.service.stop()
        await super().shutdown(sockets)


def check_address(host: str, port: int) -> None:
    """Raise `ValueError` for an address at which the server cannot listen, such as one that is in
    use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ValueError(
            f"{host}:{port} cannot be listened at ({error.strerror}): give another --port or --host"
        ) from error


def serve(options: ServeOptions) -> None:
    """Serve requests until the process ends. The address, options and checkpoint's config are
    checked before the weights are read.

    Raises:
        ValueError: for an address at which the server cannot listen, options that `generate`
            refuses, or damaged files.
        OSError: if the checkpoint does not exist.
    """
    check_address(options.host, options.port)
    setting = options.setting()
    check_setting(setting, load_config(options.model, options.revision))
    tokenizer = tokenizer_of(options)
    model: Any = load_model(
        options.model, options.dtype, options.device, options.revision, options.backbone
    )
    model.generation_config = MRPGenerationConfig(
        **{**model.generation_config.to_dict(), **generate_options(setting)}
    )
    first = tokenizer("Hello", return_tensors="pt").to(model.device)
    # a device that cannot decode fails here, and not in an answer
    model.generate(**first, tokenizer=tokenizer, max_new_tokens=1)
    app = application(
        options.served_model_name or options.model,
        model,
        tokenizer,
        loopback=options.host in _LOOPBACK,
        api_key=options.api_key,
        max_batch_size=options.max_batch_size,
        max_queue_size=options.max_queue_size,
    )
    config = uvicorn.Config(
        app, host=options.host, port=options.port, timeout_graceful_shutdown=_END_SECONDS
    )
    Server(config).run()
    if app.state.service.manager.is_running():  # the thread may be in a forward that takes seconds
        os._exit(128 + signal.SIGTERM)
