"""`mrp serve`: one model behind OpenAI's API on one machine.

A request is read and tokenized in one thread (`requests`) and decoded in another (`decoder`); the event loop, which
answers, waits for neither.
"""

import asyncio
import copy
import hmac
import ipaddress
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(f"mrp serve needs starlette and uvicorn: pip install '.[serve]' ({error})") from error

import torch
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.options import MRPGenerationConfig

from ..evaluate.command import check_setting
from ..evaluate.options import generate_options
from ..loading import load_config, load_model, load_tokenizer
from .decoder import Decoder, Job
from .options import ServeOptions
from .requests import Requests

_SECONDS_TO_END = 2  # for answers to be sent, and again for the last round, when the server is told to end
_BODY_BYTES = 4 << 20
_MOST_WAITING = 64
_SHOWN = 1000  # characters of an error


class _Application:
    """The endpoints of one model; see `application`."""

    def __init__(self, name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.requests = Requests(model, copy.deepcopy(tokenizer))
        self.reader, self.reading = ThreadPoolExecutor(1), 0
        self.decoder = Decoder(model, tokenizer)
        self.answered: Counter[int] = Counter()
        self.listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": name.partition("/")[0]}

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model_id:path}", self.one_model),
            Route("/load_model", self.load, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, True)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, False)

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.listed]})

    async def one_model(self, request: Request) -> Response:
        self._of_this_model(request.path_params["model_id"])
        return JSONResponse(self.listed)

    async def load(self, request: Request) -> Response:
        self._of_this_model(_parsed(await _body(request)).get("model"))
        return PlainTextResponse('data: {"status": "ready", "cached": true}\n\n', media_type="text/event-stream")

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, _request: Request) -> Response:
        counts, lines = self.decoder.counts, []

        def add(kind: str, name: str, values: dict[str, float]) -> None:
            lines.append(f"# TYPE mrp_{name} {kind}")
            lines.extend(f"mrp_{name}{labels} {value}" for labels, value in values.items())

        add("counter", "requests_total", {f'{{status="{status}"}}': count for status, count in sorted(self.answered.items())})
        for name in ("batches", "prompt_tokens", "tokens", "forwards", "head_forwards"):
            add("counter", f"{name}_total", {"": counts[name]})
        add("gauge", "tokens_per_forward", {"": counts["tokens"] / max(counts["forwards"], 1)})
        depths = [depth for depth in range(1, 1 + counts["depth"]) if counts["offered", depth]]
        for name in ("offered", "accepted"):
            add("counter", f"drafts_{name}_total", {f'{{depth="{depth}"}}': counts[name, depth] for depth in depths})
        shares = {f'{{depth="{depth}"}}': counts["accepted", depth] / counts["offered", depth] for depth in depths}
        add("gauge", "draft_acceptance", shares)
        add("gauge", "requests_waiting", {"": self.decoder.waiting + self.reading})
        add("gauge", "requests_running", {"": self.decoder.running})
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    def _of_this_model(self, model: Any) -> None:
        if model not in (None, self.name):
            raise HTTPException(404, f"model is {model!r}: this server has {self.name!r} alone")

    async def _answer(self, request: Request, chat: bool) -> Response:
        body = await _body(request)
        if self.decoder.waiting + self.reading >= _MOST_WAITING:
            raise HTTPException(429, f"{_MOST_WAITING} requests wait already: ask again later", {"Retry-After": "2"})
        self.reading += 1
        try:
            asked = await asyncio.get_running_loop().run_in_executor(self.reader, self._read, body, chat)
        finally:
            self.reading -= 1
        answer = _Answer(self.decoder.add(asked), self.name, self.tokenizer)
        return _Streamed(answer) if asked.stream else await _unless_left(request, answer)

    def _read(self, body: bytes, chat: bool) -> Any:
        try:
            fields = _parsed(body)
            self._of_this_model(fields.get("model"))
            return self.requests.read(fields, chat)
        except RecursionError as error:
            raise ValueError("the request is nested too deeply: give it fewer levels") from error


class _Answer:
    """The answer to a request, in OpenAI's form."""

    def __init__(self, job: Job, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.job, self.asked, self.tokenizer = job, job.asked, tokenizer
        chat, kind = self.asked.chat, "chat.completion" if self.asked.chat else "text_completion"
        kind += ".chunk" if chat and self.asked.stream else ""
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self.envelope = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    async def whole(self) -> Response:
        """Wait for the whole answer."""
        async for _ in self._events():
            pass
        return JSONResponse(
            {**self.envelope, "choices": list(map(self._choice, range(len(self.job.rows)))), "usage": self._usage()}
        )

    async def parts(self) -> AsyncIterator[str]:
        """Send the parts of a stream; an error is its last."""
        try:
            for row in range(len(self.job.rows)) if self.asked.chat else ():
                yield self._part(row, {"delta": {"role": "assistant", "content": ""}})
            async for row, text, last in self._events():
                if text:
                    yield self._part(row, {"delta": {"content": text}} if self.asked.chat else {"text": text})
                if last:
                    yield self._part(row, {"delta": {}} if self.asked.chat else {"text": ""}, self._finish(row))
            if self.asked.usage:
                yield _event({**self.envelope, "choices": [], "usage": self._usage()})
        except HTTPException as error:
            yield _event(_error_of(*_status_of(error)))
        yield "data: [DONE]\n\n"

    async def _events(self) -> AsyncIterator[tuple[int, str, bool]]:
        """Follow the job until all that was asked for is there.

        Raises:
            HTTPException: for what ended the job.
        """
        left = len(self.job.rows) + self.asked.logprobs
        while left:
            event = await self.job.events.get()
            if isinstance(event, Exception):
                raise HTTPException(*_status_of(event)) from event
            if event is not None:
                yield event
            left -= event is None or event[2]

    def _part(self, row: int, content: dict[str, Any], finish: str | None = None) -> str:
        return _event({**self.envelope, "choices": [{"index": row, **content, "logprobs": None, "finish_reason": finish}]})

    def _choice(self, row: int) -> dict[str, Any]:
        text = self._text(row)
        content = {"message": {"role": "assistant", "content": text}} if self.asked.chat else {"text": text}
        logprobs = self._logprobs(row) if self.asked.logprobs else None
        return {"index": row, **content, "logprobs": logprobs, "finish_reason": self._finish(row)}

    def _text(self, row: int) -> str:
        return str(self.tokenizer.decode(self.job.rows[row].ids, skip_special_tokens=True))

    def _finish(self, row: int) -> str:
        ids, config = self.job.rows[row].ids, self.asked.config
        stops = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
        ended = len(ids) < config.max_new_tokens or ids[-1] in config.eos_ids()
        return "stop" if ended or any(stop in self._text(row) for stop in stops) else "length"

    def _logprobs(self, row: int) -> dict[str, Any]:
        tokens, logprobs = list(map(self.tokenizer.decode, self.job.rows[row].ids)), self.job.rows[row].logprobs
        if self.asked.chat:
            pairs = zip(tokens, logprobs, strict=True)
            return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]}
        offsets = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

    def _usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self.asked.prompts)), sum(len(row.ids) for row in self.job.rows)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class _Streamed(StreamingResponse):
    """The stream of an answer, which ends the decoding when its client leaves."""

    def __init__(self, answer: _Answer) -> None:
        super().__init__(answer.parts(), media_type="text/event-stream")
        self.job = answer.job

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.job.gone = True


async def _unless_left(request: Request, answer: _Answer) -> Response:
    """Wait for an answer while its client does."""

    async def left() -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response(status_code=499)

    tasks = [asyncio.create_task(answer.whole()), asyncio.create_task(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[not tasks[0].done()].result()
    finally:
        answer.job.gone = True
        for task in tasks:
            task.cancel()


class _Guard:
    """The application behind checks of who asks; it counts the answers, too.

    Args:
        app: The application.
        loopback: Whether the name in `Host` must be one of this machine's own, so that no website's can stand for it.
        api_key: What clients must send, if anything.
        answered: Where answers are counted, by status.
    """

    def __init__(self, app: Any, loopback: bool, api_key: str | None, answered: Counter[int]) -> None:
        self.app, self.loopback, self.api_key, self.answered = app, loopback, api_key, answered

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.answered[message["status"]] += 1
            await send(message)

        await (self._refusal(Request(scope)) or self.app)(scope, receive, counted)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if self.loopback and not _is_loopback(host):
            return JSONResponse(_error_of(403, f"Host is {host!r}: this server answers to localhost alone"), 403)
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.api_key is not None and request.url.path != "/health" and not hmac.compare_digest(given, self.api_key.encode()):
            return JSONResponse(_error_of(401, "the API key is missing or wrong"), 401, {"WWW-Authenticate": "Bearer"})
        return None


def application(
    name: str, model: Any, tokenizer: PreTrainedTokenizerBase, *, loopback: bool = True, api_key: str | None = None
) -> Starlette:
    """Make the application that answers requests.

    Args:
        name: What clients call the model.
        model: An `MRPForCausalLM`, whose generation config holds for all that a request does not set.
        tokenizer: Its tokenizer.
        loopback: Whether only loopback names are answered.
        api_key: What clients must send, if anything.

    Returns:
        An app with OpenAI's `/v1/chat/completions`, `/v1/completions` and `/v1/models`, `/health`, Prometheus' `/metrics`, and
        `/load_model`, for which `transformers chat` asks first. Errors have OpenAI's form. `app.state.decoder` decodes; `stop`
        it when the server is to end.

    Raises:
        ValueError: for a generation config that `generate` would refuse.
    """
    endpoints = _Application(name, model, tokenizer)

    @asynccontextmanager
    async def lifespan(_app: Any) -> AsyncIterator[None]:
        yield
        endpoints.decoder.stop()
        endpoints.reader.shutdown(wait=False, cancel_futures=True)
        endpoints.decoder.join(_SECONDS_TO_END)  # a process that ends under its thread aborts

    async def failed(_request: Request, error: Exception) -> Response:
        status, message = _status_of(error)
        return JSONResponse(_error_of(status, message), status, getattr(error, "headers", None))

    app = Starlette(
        routes=endpoints.routes(),
        lifespan=lifespan,
        exception_handlers={HTTPException: failed, ValueError: failed, ConnectionAbortedError: failed, Exception: failed},
    )
    app.add_middleware(_Guard, loopback=loopback, api_key=api_key, answered=endpoints.answered)
    app.state.decoder = endpoints.decoder
    return app


class _Server(uvicorn.Server):
    """A server that ends what is decoded before it waits for its answers to be sent."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.decoder.stop()
        await super().shutdown(sockets)


def serve(options: ServeOptions) -> None:
    """Answer requests until the process is told to end. All but the weights is checked before these are read.

    Raises:
        ValueError: for an address that is taken, options that `generate` refuses, or a checkpoint that cannot be loaded.
        OSError: if there is no such checkpoint.
    """
    setting = options.setting()
    with _listener(options.host, options.port) as listener:
        check_setting(setting, load_config(options.model))
        tokenizer = load_tokenizer(options.tokenizer or options.model)
        model: Any = load_model(options.model, options.dtype)
        model = model.to(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model.generation_config = MRPGenerationConfig(**{**model.generation_config.to_dict(), **generate_options(setting)})
        host, port = listener.getsockname()[:2]
        first = tokenizer("Hello", return_tensors="pt").to(model.device)
        model.generate(**first, tokenizer=tokenizer, max_new_tokens=1)  # what the device lacks shows now, not in answers
        app = application(options.model, model, tokenizer, loopback=_is_loopback_address(host), api_key=options.api_key)
        config = uvicorn.Config(app, log_config=_logging(), log_level="info", timeout_graceful_shutdown=_SECONDS_TO_END)
        listener.listen()  # who has read the line below is answered
        print(f"serving {options.model} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        with suppress(KeyboardInterrupt):
            _Server(config).run(sockets=[listener])


def _logging() -> dict[str, Any]:
    """Log requests to stderr, too: a pipe of stdout of which nobody reads more than the first line never fills."""
    said = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    said["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return said


def _listener(host: str, port: int) -> socket.socket:
    """Bind an address, so that one that is taken is found before a model is loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"{host}:{port} cannot be listened at ({error}): give another --port or --host") from error
    return listener


def _is_loopback(host: str) -> bool:
    """Tell if a `Host` header, with its port, names this machine to itself."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or _is_loopback_address(name)


def _is_loopback_address(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


async def _body(request: Request) -> bytes:
    """Read a body.

    Raises:
        HTTPException: 413, for one that is too large; it is read to its end, unless it has none, so that the client reads this.
    """
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= _BODY_BYTES:
            body += chunk
        elif size > 16 * _BODY_BYTES:
            break
    if size > _BODY_BYTES:
        raise HTTPException(413, f"the request has more than {_BODY_BYTES} bytes: shorten it")
    return bytes(body)


def _parsed(body: bytes) -> dict[str, Any]:
    """Read the JSON of an object.

    Raises:
        ValueError: for anything else.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the request is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the request is a {type(found).__name__}: it must be a JSON object")
    return found


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _status_of(error: Exception) -> tuple[int, str]:
    """Choose the status and the message of an error."""
    if isinstance(error, HTTPException):
        return error.status_code, str(error.detail)
    status = 400 if isinstance(error, ValueError) else 503 if isinstance(error, ConnectionAbortedError) else 500
    return status, str(error) or type(error).__name__


def _error_of(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    shown = message if len(message) <= _SHOWN else f"{message[: _SHOWN // 2]} ... {message[-_SHOWN // 2 :]}"
    return {"error": {"message": shown, "type": kind, "param": None, "code": status}}


__all__ = ["application", "serve"]
