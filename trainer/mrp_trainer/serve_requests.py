"""Requests in OpenAI's form, checked, and translated into options of `generate`.

What a request sets goes to transformers as one generation config, whole and checked, so that nothing is refused when an answer
has begun to stream.
"""

import copy
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import BaseHandler, Modality

from modeling_mrp.generate.option_table import COUNT, OPTIONS, Option
from modeling_mrp.generate.options import OPTION_NAMES, MRPGenerationConfig, check_values, did_you_mean
from modeling_mrp.generate.prompts import check_prompt, check_rows, check_special_ids, check_stop_strings

_NEW_TOKENS = 1024  # of an answer at most, if neither the request nor the checkpoint says how many
_TEXT: Any = (str, lambda v, _: v != "", "it must be a text, and not empty")
_FLAG: Any = (bool, lambda *_: True, "it must be true or false")
_OBJECT: Any = (dict, lambda *_: True, "it must be an object")
_SAMPLING = Option("temperature", None, int | float, lambda v, _: 0 <= v <= 2, "it must be a number from 0 (greedy) to 2")
_FIELDS = (
    _SAMPLING,
    Option("stream", None, *_FLAG),
    Option("max_tokens", None, *COUNT),
    Option("max_completion_tokens", None, *COUNT),
    Option("frequency_penalty", None, int | float, lambda v, _: -1 < v <= 2, "it must be above -1, and 2 at most"),
    Option("logit_bias", None, *_OBJECT),
    Option("generation_config", None, *_TEXT),
)
# Fields that transformers accepts and does not follow, and the values of which that changes nothing.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False,), "top_logprobs": (0,), "presence_penalty": (0,)},
    **{"suffix": ("",), "response_format": ({"type": "text"},), "modalities": (["text"],), "tool_choice": ("none", "auto")},
    **dict.fromkeys(("audio", "function_call", "functions", "prediction", "web_search_options"), ()),
}
# Our options of `generate`, for fields that say the same.
_SAME = {"top_p": "top_p", "seed": "seed", "stop": "stop_strings"}
_SAME |= {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
# What the JSON of a generation config may set, which `transformers chat` sends.
_SETTABLE = {option.name for option in OPTIONS} - {"kernels", "graphs"}
_SETTABLE |= {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
_SETTABLE |= {"max_new_tokens", "min_new_tokens", "stop_strings", "eos_token_id", "repetition_penalty", "no_repeat_ngram_size"}


class Requests:
    """Checks and translates the requests to one model.

    Args:
        model: An `MRPForCausalLM`; its generation config holds for what a request does not set.
        tokenizer: Its tokenizer.

    Raises:
        ValueError: for a generation config that `generate` would refuse.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.served = MRPGenerationConfig(**model.generation_config.to_dict())
        self._check(self.served)

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Translate a chat.

        Returns:
            The request for transformers' `ChatCompletionHandler`, whose `generation_config` is all that it sets.

        Raises:
            ValueError: with the reason, for anything that cannot be honoured.
        """
        body = {**body, "messages": _checked_messages(body.get("messages"))}
        Option("chat_template_kwargs", None, *_OBJECT).check(body.get("chat_template_kwargs"), 0)
        template = body.get("chat_template_kwargs") or {}
        if taken := sorted(template.keys() & inspect.signature(self.tokenizer.apply_chat_template).parameters.keys()):
            raise ValueError(f"chat_template_kwargs holds {', '.join(taken)}: only variables of the template can be set")

        def ids() -> list[int]:
            messages = BaseHandler.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
            options: dict[str, Any] = {"tools": body.get("tools"), "add_generation_prompt": True, **template}
            return list(self.tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])

        return self._translated(body, "messages", ids)

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        """Translate a text to go on from, for transformers' `CompletionHandler`; otherwise as `chat`."""
        Option("prompt", "", *_TEXT).check(body.get("prompt"), 0)
        return self._translated(body, "prompt", lambda: self.tokenizer(body["prompt"])["input_ids"])

    def _translated(self, body: dict[str, Any], source: str, ids: Callable[[], list[int]]) -> dict[str, Any]:
        for field in _FIELDS:
            field.check(body.get(field.name), 0)
        for name, without_effect in _NOT_FOLLOWED.items():
            if (value := body.get(name)) is not None and value not in without_effect:
                raise ValueError(f"{name} is {value!r}: this server does not follow it. Leave it out")
        given = self._given(body)
        config = copy.deepcopy(self.served)
        check_values(given, self.model.config.block_size, sampling=True)  # before transformers compares them
        config.update(**given)
        try:
            prompt = torch.tensor([ids()])
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"{source} cannot be made into tokens: {type(error).__name__}: {error}") from error
        check_prompt(prompt, None, self.model.config.mask_token_id, self.model.config.vocab_size)
        positions = self.model.config.max_position_embeddings
        if "max_new_tokens" not in given:
            config.max_new_tokens = max(1, min(config.max_new_tokens or _NEW_TOKENS, positions - prompt.shape[1]))
        check_rows(torch.ones_like(prompt, dtype=torch.bool), config.max_new_tokens, positions)
        self._check(config)
        rest = {name: value for name, value in body.items() if name not in _TRANSLATED and value is not None}
        return {**rest, "generation_config": config.to_json_string()}

    def _given(self, body: dict[str, Any]) -> dict[str, Any]:
        """Collect the options of `generate` that a request sets."""
        given = _from_json(body["generation_config"]) if body.get("generation_config") is not None else {}
        given |= {option: body[name] for name, option in _SAME.items() if body.get(name) is not None}
        if body.get("stop") == []:
            del given["stop_strings"]
        if (temperature := body.get("temperature")) is not None:
            given |= {"do_sample": temperature > 0, "temperature": temperature}
        if given.get("do_sample") is False or given.get("temperature") == 0:
            given |= {"do_sample": False}
            given.pop("temperature", None)
        if body.get("frequency_penalty"):
            given["repetition_penalty"] = 1.0 + body["frequency_penalty"]  # as transformers reads it
        if body.get("logit_bias"):
            given["sequence_bias"] = self._biases(body["logit_bias"])
        return given

    def _biases(self, given: dict[str, Any]) -> list[list[Any]]:
        """Translate `logit_bias`, {id: bias}, into a `sequence_bias`."""
        for token, bias in given.items():
            known = token.isdecimal() and int(token) < self.model.config.vocab_size
            if not known or type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias has {token!r}: {bias!r}: give ids of tokens, and numbers from -100 to 100")
        return [[[int(token)], float(bias)] for token, bias in given.items()]

    def _check(self, config: MRPGenerationConfig) -> None:
        """Raise `ValueError` for a generation config that `generate` would refuse of one row, or not answer with its ids."""
        copy.deepcopy(config).check(self.model.config.block_size, self.model.config.has_head)
        if config.return_dict_in_generate or config.num_return_sequences not in (None, 1):
            raise ValueError("return_dict_in_generate, num_return_sequences: the server decides on them, leave them unset")
        config.seeds(1)
        if config.stop_strings is not None:
            check_stop_strings(config.stop_strings, self.tokenizer)
        check_special_ids(
            config.eos_ids(), config.pad_token_id or 0, self.model.config.mask_token_id, self.model.config.vocab_size
        )


_TRANSLATED = {*_SAME, "temperature", "frequency_penalty", "logit_bias", "generation_config"}


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages without the fields that are null.

    Raises:
        ValueError: for anything but messages of text.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r}: it must be a list of one message or more, with role and content")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}] is {message!r}: it must be an object with role and content")
        content = message.get("content")
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            continue
        if not isinstance(content, list) or not all(map(_is_text, content)):
            raise ValueError(f"messages[{number}] has the content {content!r}: it must be a text, or a list of parts of text")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _from_json(text: str) -> dict[str, Any]:
    """Read a generation config that a request brings.

    Raises:
        ValueError: for anything but the JSON of an object, and options that are the server's, or nobody's.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"generation_config is {text!r}: it must be JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"generation_config is {text!r}: it must be the JSON of an object")
    given = {name: value for name, value in found.items() if value is not None and name != "transformers_version"}
    for name in sorted(given.keys() - _SETTABLE):
        hint = "" if name in OPTION_NAMES else did_you_mean(name)
        raise ValueError(f"generation_config has {name}, which no request can set{hint}: leave it out")
    return given


__all__ = ["Requests"]
