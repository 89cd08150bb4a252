"""`mrp serve`: one model behind OpenAI's API on one machine.

Answers and streams come from the server of transformers, which runs requests one after the other. Here is what it lacks for a
model that it does not know: the model, and requests that are checked before it sees them (see `serve_requests`).
"""

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

try:
    import openai  # noqa: F401  transformers takes the types of answers from it
    import uvicorn
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.exceptions import HTTPException
except ImportError as error:
    raise ImportError(f"mrp serve needs what transformers[serving] installs: pip install '.[serve]' ({error})") from error

import torch
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerationState

from modeling_mrp.generate.options import MRPGenerationConfig

from .evaluate import check_setting
from .evaluate_options import generate_options
from .loading import load_config, load_model, load_tokenizer
from .serve_options import ServeOptions
from .serve_requests import Requests

_SECONDS_TO_END = 3  # that running streams are given when the server is told to end


class OneModel(ModelManager):
    """A loaded model and its tokenizer, as the handlers of transformers ask for them. Nothing else is ever loaded.

    Args:
        name: What clients call it.
        model: An `MRPForCausalLM`.
        tokenizer: Its tokenizer.
    """

    def __init__(self, name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pair = model, tokenizer
        super().__init__(force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name as it is, without a revision behind it."""
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, PreTrainedTokenizerBase]:
        """Return model and tokenizer."""
        return self.pair


def application(name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> FastAPI:
    """Make the application that answers requests.

    Args:
        name: What clients call the model.
        model: An `MRPForCausalLM`, whose generation config holds for all that a request does not set.
        tokenizer: Its tokenizer.

    Returns:
        An app with OpenAI's `/v1/chat/completions`, `/v1/completions` and `/v1/models`, `/health`, and `/load_model`, for which
        `transformers chat` asks first. Errors have OpenAI's form; requests that `Requests` refuses have status 400.

    Raises:
        ValueError: for a generation config that `generate` would refuse.
    """
    requests, manager, state = Requests(model, tokenizer), OneModel(name, model, tokenizer), GenerationState()
    chats, completions = ChatCompletionHandler(manager, state), CompletionHandler(manager, state)
    served = {"id": name, "object": "model", "created": int(time.time()), "owned_by": name.partition("/")[0]}

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await state.get_manager(name).async_submit(lambda: None)  # a process that ends under its thread aborts

    app = FastAPI(title="mrp serve", openapi_url=None, lifespan=lifespan)

    @app.exception_handler(ValueError)
    async def refused(_request: Any, error: ValueError) -> JSONResponse:
        return _error(400, str(error))

    @app.exception_handler(HTTPException)
    async def failed(_request: Any, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def malformed(_request: Any, error: RequestValidationError) -> JSONResponse:
        return _error(400, "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()))

    def of_this_model(body: dict[str, Any]) -> dict[str, Any]:
        if body.get("model", name) != name:
            raise HTTPException(404, f"model is {body['model']!r}: this server has {name!r} alone")
        return body

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        return await chats.handle_request(requests.chat(of_this_model(body)), f"chatcmpl-{uuid4().hex}")

    @app.post("/v1/completions")
    async def complete(body: dict[str, Any]) -> Any:
        return await completions.handle_request(requests.completion(of_this_model(body)), f"cmpl-{uuid4().hex}")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        of_this_model({"model": model_id})
        return served

    @app.post("/load_model")
    async def load(body: dict[str, Any]) -> StreamingResponse:
        of_this_model(body)
        return StreamingResponse(iter(['data: {"status": "ready", "cached": true}\n\n']), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


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
        app = application(options.model, model, tokenizer)
        first = tokenizer("Hello", return_tensors="pt").to(model.device)
        model.generate(**first, tokenizer=tokenizer, max_new_tokens=1)  # what the device lacks shows now, not in answers
        config = uvicorn.Config(app, log_level="info", timeout_graceful_shutdown=_SECONDS_TO_END)
        listener.listen()  # who has read the line below is answered
        host, port = listener.getsockname()[:2]
        print(f"serving {options.model} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


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


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


__all__ = ["OneModel", "application", "serve"]
