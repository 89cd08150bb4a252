"""The command `mrp serve`: one model behind transformers' own server, with this package's options
of `generate`."""

import copy
import json
import time
from typing import Any

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.middleware.trustedhost import TrustedHostMiddleware
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import BaseHandler, GenerateManager, GenerationState
except ImportError as error:
    raise ImportError(
        f"mrp serve needs the server of transformers: pip install 'modeling-mrp[serve]' ({error})"
    ) from error

import torch
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.options import MRPGenerationConfig, check_ids, check_rows

from ..evaluate.command import check_setting
from ..evaluate.options import generate_options
from ..loading import load_config, load_model, tokenizer_of
from .options import ServeOptions

_NEW_TOKENS = 1024  # per text, if neither the request nor the checkpoint sets a limit
_LOOPBACK = ["127.0.0.1", "localhost"]
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/load_model", "/health")
# Options of `generate` by the request field of the same meaning.
_OPTIONS_BY_FIELD = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop_strings",
}
_OPTIONS_BY_FIELD |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
# Request fields that transformers' server ignores, each with a value that asks for nothing; other
# values are refused.
_IDLE: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "echo": False,
    "suffix": "",
}
_IDLE |= dict.fromkeys(("logprobs", "top_logprobs", "presence_penalty", "frequency_penalty"), 0)


class OneModel(ModelManager):
    """A model manager that serves one loaded model and its tokenizer as `name`, whatever model a
    request names."""

    def __init__(self, name: str, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.loaded = (model, tokenizer)
        self.listed = {"id": name, "object": "model", "created": int(time.time())}
        super().__init__(force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name without adding a revision, as folders have none."""
        return model_id

    def load_model_and_processor(
        self, model_id_and_revision: str, progress_callback: Any = None, **others: Any
    ) -> Any:
        """Return the model and its tokenizer; `ValueError` if the name is another model's."""
        if model_id_and_revision != self.force_model:
            raise ValueError(
                f"model is {model_id_and_revision!r}: this server has {self.force_model!r} alone"
            )
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": self.force_model, "cached": True})
        return self.loaded

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """List the one model, for `/v1/models`."""
        return [{**self.listed, "owned_by": "mrp"}]


class _BoundedManager(GenerateManager):
    """The thread that decodes, one request at a time, each within the model's positions."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **others: Any
    ) -> Any:
        """Check prompt and options, and stream a text; without the check, errors would appear
        inside the stream."""
        _check_request(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **others)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **others: Any
    ) -> Any:
        """Check prompt and options, and decode a text."""
        _check_request(model, inputs, gen_config)
        return await super().generate_non_streaming(
            model, processor, inputs, gen_config, *args, **others
        )


def _check_request(model: Any, inputs: Any, config: MRPGenerationConfig) -> None:
    """Check that a prompt, [1, length] long, and its answer fit the model, or else raise
    `ValueError`; set the limit of new tokens if there is none."""
    ids = inputs["input_ids"]
    positions = model.config.max_position_embeddings
    check_ids(ids, None, model.config)
    if config.max_new_tokens is None:
        config.max_new_tokens = max(1, min(_NEW_TOKENS, positions - ids.shape[1]))
    check_rows(torch.ones_like(ids, dtype=torch.bool), config.max_new_tokens, positions)


class _State(GenerationState):
    """The state of the server: one thread for all requests, so that texts are decoded one after the
    other."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = _BoundedManager()

    def get_manager(self, model_id: str, use_cb: bool = False) -> GenerateManager:
        """Return the one decoding thread."""
        return self.manager


class _Options(BaseHandler):
    """A handler that takes the options of `generate` from requests."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        for name, idle in _IDLE.items():
            if body.get(name) not in (None, False, idle):
                raise HTTPException(
                    400, f"{name} is {body[name]!r}, which is not followed here: leave it out"
                )

    def _build_generation_config(
        self, body: dict[str, Any], model_generation_config: Any, use_cb: bool = False
    ) -> Any:
        """Return the model's generation config with a request's options; `ValueError` for options
        that `generate` refuses."""
        model, _ = self.model_manager.loaded
        options = json.loads(body.get("generation_config") or "{}")
        options.pop("transformers_version", None)
        for name, option in _OPTIONS_BY_FIELD.items():
            if body.get(name) is not None:
                options[option] = body[name]
        if "temperature" in options:
            options["do_sample"] = options["temperature"] > 0
            if not options["do_sample"]:
                options["temperature"] = 1.0
        if body.get("logit_bias"):
            biases = body["logit_bias"].items()
            options["sequence_bias"] = {(int(token),): float(bias) for token, bias in biases}
        check_setting({"set": options}, model.config)
        config = copy.deepcopy(model_generation_config)
        config.update(**options)
        return config


class _Chats(_Options, ChatCompletionHandler):
    """The handler of chat completions."""


class _Completions(_Options, CompletionHandler):
    """The handler of text completions."""


def application(
    name: str, model: Any, tokenizer: PreTrainedTokenizerBase, *, loopback: bool = True
) -> FastAPI:
    """Make the application that answers requests: OpenAI's `/v1/chat/completions`,
    `/v1/completions` and `/v1/models`, `/health`, and `/load_model`, which `transformers chat`
    calls first.

    Args:
        name: The model's name for clients.
        model: An `MRPForCausalLM`; its generation config holds for all options that a request does
            not set.
        tokenizer: Its tokenizer.
        loopback: Whether only requests to a loopback name are answered, which keeps out requests of
            websites.
    """
    manager = OneModel(name, model, tokenizer)
    state = _State()
    handlers = _Chats(manager, state), _Completions(manager, state)
    unused: Any = None
    app = build_server(manager, *handlers, unused, unused, unused, state)
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", None) in _PATHS
    ]

    async def refused(_request: Request, error: Exception) -> JSONResponse:
        status = 400
        message = str(error)
        if isinstance(error, HTTPException):
            status = error.status_code
            message = error.detail
        return JSONResponse(
            {"error": {"message": message, "type": "invalid_request_error", "code": status}}, status
        )

    for kind in (ValueError, HTTPException):
        app.add_exception_handler(kind, refused)
    if loopback:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK)
    return app


def serve(options: ServeOptions) -> None:
    """Serve requests until the process ends. Everything else is checked before the weights are
    read: `ValueError` for options that `generate` refuses and for damaged files, `OSError` if there
    is no such checkpoint."""
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
    # a device that cannot decode fails now, not in an answer
    model.generate(**first, tokenizer=tokenizer, max_new_tokens=1)
    app = application(options.model, model, tokenizer, loopback=options.host in _LOOPBACK)
    uvicorn.run(app, host=options.host, port=options.port)
