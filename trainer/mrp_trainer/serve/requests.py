"""Requests in OpenAI's form, checked, and translated into options of `generate`, before anything is decoded."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.option_table import COUNT, FROM_ZERO, OPTIONS, Option, check_values, closest_name
from modeling_mrp.generate.options import (
    OPTION_NAMES,
    MRPGenerationConfig,
    check_prompt,
    check_rows,
    check_special_ids,
    check_stop_strings,
)

from ..data.records import check_utf8

MOST_ROWS = 16  # texts of one request
_NEW_TOKENS = 1024  # of a text, if neither the request nor the checkpoint says how many
_BYTES_OF_TOKEN = 32  # of a prompt; the longest words have no more
_STOPS = "it must be a text or a list of 4 texts at most, none of them empty or longer than 100 characters"
_FIELDS = (
    Option("temperature", None, int | float, lambda v, _: 0 <= v <= 2, "it must be a number from 0 (greedy) to 2"),
    Option("stream", None, bool, lambda *_: True, "it must be true or false"),
    Option("stream_options", None, dict, lambda *_: True, "it must be an object"),
    Option("max_tokens", None, *COUNT),
    Option("max_completion_tokens", None, *COUNT),
    Option("min_tokens", None, *FROM_ZERO),
    Option("n", None, int, lambda v, _: 1 <= v <= MOST_ROWS, f"it must be an int from 1 to {MOST_ROWS}"),
    Option("logit_bias", None, dict, lambda v, _: len(v) <= 300, "it must be an object of 300 tokens at most"),
    Option("generation_config", None, str, lambda v, _: v != "", "it must be a text, and not empty"),
)
# What one request may ask for, so that it does not hold up the others.
_BOUNDED = (
    Option("num_draft_states", None, int | str, lambda v, _: v == "auto" or v <= 16, "a request may ask for 16 at most"),
    Option("draft_branches", None, int, lambda v, _: v <= 8, "a request may ask for 8 at most"),
    Option("draft_passes", None, int, lambda v, _: v <= 8, "a request may ask for 8 at most"),
    Option("stop_strings", None, str | list, lambda v, _: _few_and_short([v] if isinstance(v, str) else v), _STOPS),
)
_LOGPROBS_ALONE = "generate gives the log-probability of the tokens that it chose alone"
# Values that change nothing, of fields that are not followed; and fields that are for the asker's own books.
_NOTHING: tuple[Any, ...] = (False, 0, "", [], {}, "none", "auto", {"type": "text"}, ["text"])
_NOTES = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"}
# Options of `generate`, for fields that say the same.
_SAME = {"top_p": "top_p", "top_k": "top_k", "seed": "seed", "stop": "stop_strings", "repetition_penalty": "repetition_penalty"}
_SAME |= {"min_tokens": "min_new_tokens", "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
_KNOWN = {"model", "messages", "prompt", "logprobs", *_SAME, *(field.name for field in _FIELDS)}
# What the JSON of a generation config may set, which `transformers chat` sends.
_SETTABLE = {option.name for option in OPTIONS} - {"kernels", "graphs"}
_SETTABLE |= {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
_SETTABLE |= {"max_new_tokens", "min_new_tokens", "stop_strings", "eos_token_id", "repetition_penalty", "no_repeat_ngram_size"}


@dataclass(frozen=True)
class Asked:
    """A request that `generate` can follow.

    Attributes:
        prompts: Ids by row, each prompt `n` times.
        seeds: By row.
        config: All else that `generate` is told. Requests with an equal one can be decoded together.
        chat: Whether it asks for a chat, or for completions.
        stream: Whether the text is wanted in parts.
        usage: Whether a stream is to end with the counts of its tokens.
        logprobs: Whether the log-probabilities of its tokens are wanted.
    """

    prompts: list[list[int]]
    seeds: list[int]
    config: MRPGenerationConfig
    chat: bool
    stream: bool
    usage: bool
    logprobs: bool


class Requests:
    """Checks and translates the requests to one model, by one thread at a time.

    Args:
        model: An `MRPForCausalLM`; its generation config holds for what a request does not set.
        tokenizer: Its tokenizer, used by nobody else meanwhile.

    Raises:
        ValueError: for a generation config that `generate` would refuse.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.served = MRPGenerationConfig(**model.generation_config.to_dict())
        self._check(self.served, 1)
        self.mask = str(tokenizer.convert_ids_to_tokens(model.config.mask_token_id))
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")

    def read(self, body: dict[str, Any], chat: bool) -> Asked:
        """Translate a chat, or a request for completions.

        Raises:
            ValueError: with the reason, for anything that cannot be honoured.
        """
        known = _KNOWN - {"prompt" if chat else "messages"}
        idle = {name for name, value in body.items() if value is None or (name not in known and value in _NOTHING)} | _NOTES
        body = {name: value for name, value in body.items() if name not in idle}
        for name in sorted(body.keys() - known):
            raise ValueError(f"{name} is {body[name]!r}, which is not followed here{closest_name(name, known)}: leave it out")
        for field in _FIELDS:
            field.check(body.get(field.name), 0)
        logprobs = body.get("logprobs", False if chat else None)
        if logprobs not in ((False, True) if chat else (None, 0)) or (not chat and isinstance(logprobs, bool)):
            remedy = "it must be true or false" if chat else f"{_LOGPROBS_ALONE}: give 0"
            raise ValueError(f"logprobs is {logprobs!r}: {remedy}")
        scored = bool(logprobs) if chat else logprobs is not None
        if scored and body.get("stream"):
            raise ValueError("logprobs come with whole answers: leave logprobs out, or stream")
        given = self._given(body)
        prompts = [self._chat_ids(body)] if chat else [self._prompt_ids(one) for one in _prompts_of(body.get("prompt"))]
        return replace(
            self._fitted(given, [ids for ids in prompts for _ in range(body.get("n", 1))]),
            chat=chat,
            stream=body.get("stream", False),
            usage=bool(body.get("stream_options", {}).get("include_usage")),
            logprobs=scored,
        )

    def _fitted(self, given: dict[str, Any], prompts: list[list[int]]) -> Asked:
        """Check the options for their prompts."""
        if len(prompts) > MOST_ROWS:
            raise ValueError(f"the request asks for {len(prompts)} texts: ask for {MOST_ROWS} at most, prompts times n")
        ours, config = self.model.config, copy.deepcopy(self.served)
        config.update(**given)
        longest = max(map(len, prompts))
        room = ours.max_position_embeddings - longest
        if "max_new_tokens" not in given:
            config.max_new_tokens = config.max_new_tokens or _NEW_TOKENS
            if config.max_new_tokens > room:  # a power of two, so that prompts of many lengths are decoded together
                config.max_new_tokens = 1 << max(room.bit_length() - 1, 0)
        check_rows(torch.ones(1, longest, dtype=torch.bool), config.max_new_tokens, ours.max_position_embeddings)
        if (config.min_new_tokens or 0) > config.max_new_tokens:
            raise ValueError(
                f"min_tokens is {config.min_new_tokens}, and at most {config.max_new_tokens} tokens are made: lower it"
            )
        self._check(config, len(prompts))
        seeds, config.seed = config.seeds(len(prompts)), None
        return Asked(prompts, seeds, config, chat=False, stream=False, usage=False, logprobs=False)

    def _chat_ids(self, body: dict[str, Any]) -> list[int]:
        """Tokenize messages as the chat template has them; special tokens within them are text."""
        messages = _checked_messages(body.get("messages"))
        mark, hidden = uuid4().hex, []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match[0])
            return f"{mark}{len(hidden) - 1};"

        for number, message in enumerate(messages):
            if self.mask in message["content"]:
                raise ValueError(
                    f"messages[{number}] holds {self.mask!r}, the mask token, which stands for what is not written yet: "
                    "leave it out, or write it with a space inside"
                )
            message["content"] = self.special.sub(hide, message["content"])
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ValueError(f"messages cannot be made into tokens: {type(error).__name__}: {error}") from error
        ids: list[int] = []
        for place, piece in enumerate(re.split(f"{mark}(\\d+);", self._short_enough(str(text), "messages"))):
            if place % 2:
                piece = hidden[int(piece)]
            ids += self.tokenizer(piece, add_special_tokens=False, split_special_tokens=bool(place % 2))["input_ids"]
        return self._checked_ids(ids)

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._checked_ids(
                self.tokenizer(self._short_enough(prompt, "prompt"), split_special_tokens=False)["input_ids"]
            )
        return self._checked_ids(prompt)

    def _short_enough(self, text: str, source: str) -> str:
        """Return a text that may fit into the model, told by its bytes."""
        check_utf8(text)
        positions, size = self.model.config.max_position_embeddings, len(text.encode())
        if size > _BYTES_OF_TOKEN * positions:
            raise ValueError(
                f"{source}: {size} bytes of text are more than max_position_embeddings={positions} tokens: shorten it"
            )
        return text

    def _checked_ids(self, ids: list[int]) -> list[int]:
        ours = self.model.config
        if len(ids) >= (most := ours.max_position_embeddings):
            raise ValueError(f"a prompt of {len(ids)} tokens and new ones exceeds max_position_embeddings={most}: shorten it")
        if ours.mask_token_id in ids:
            raise ValueError(f"the prompt holds the mask token, {self.mask!r} (id {ours.mask_token_id}): leave it out")
        check_prompt(torch.tensor([ids], dtype=torch.long), None, ours.mask_token_id, ours.vocab_size)
        return ids

    def _given(self, body: dict[str, Any]) -> dict[str, Any]:
        """Collect the options of `generate` that a request sets, each checked by itself."""
        given = _from_json(body["generation_config"]) if "generation_config" in body else {}
        given |= {option: body[name] for name, option in _SAME.items() if name in body}
        if given.get("stop_strings") == []:
            del given["stop_strings"]
        if (temperature := body.get("temperature")) is not None:
            given |= {"do_sample": temperature > 0, "temperature": float(temperature)}
        if given.get("do_sample") is False or given.get("temperature") == 0:
            given |= {"do_sample": False}
            given.pop("temperature", None)
        if body.get("logit_bias"):
            given["sequence_bias"] = self._biases(body["logit_bias"])
        check_values(given, self.model.config.block_size, sampling=True)  # before transformers compares them
        for option in _BOUNDED:
            option.check(given.get(option.name), self.model.config.block_size)
        return given

    def _biases(self, given: Mapping[str, Any]) -> list[list[Any]]:
        """Translate `logit_bias`, {id: bias}, into a `sequence_bias`."""
        for token, bias in given.items():
            known = token.isascii() and token.isdecimal() and len(token) < 10 and int(token) < self.model.config.vocab_size
            if not known or type(bias) not in (int, float) or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias has {token!r}: {bias!r}: give ids of tokens, and numbers from -100 to 100")
        return [[[int(token)], float(bias)] for token, bias in given.items()]

    def _check(self, config: MRPGenerationConfig, rows: int) -> None:
        """Raise `ValueError` for a generation config that `generate` would refuse, or not answer with its ids."""
        ours = self.model.config
        copy.deepcopy(config).check(ours.block_size, ours.has_head)
        if config.return_dict_in_generate or config.num_return_sequences not in (None, 1):
            raise ValueError("return_dict_in_generate, num_return_sequences: the server decides on them, leave them unset")
        config.seeds(rows)
        if config.stop_strings is not None:
            check_stop_strings(config.stop_strings, self.tokenizer)
        check_special_ids(config.eos_ids(), config.pad_token_id or 0, ours.mask_token_id, ours.vocab_size)


def _few_and_short(stops: list[Any]) -> bool:
    return 0 < len(stops) <= 4 and all(isinstance(one, str) and 0 < len(one) <= 100 for one in stops)


def _prompts_of(prompt: Any) -> list[Any]:
    """List the prompts of a request: texts, or lists of ids.

    Raises:
        ValueError: for anything else, and for none or too many.
    """
    one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt))
    prompts = [prompt] if one else prompt
    if isinstance(prompts, list) and 0 < len(prompts) <= MOST_ROWS and all(map(_is_prompt, prompts)):
        return prompts
    raise ValueError(
        f"prompt is {prompt!r}, of type {type(prompt).__name__}: it must be a text, and not empty, a list of ids, or a list of "
        f"{MOST_ROWS} of these at most"
    )


def _is_prompt(prompt: Any) -> bool:
    ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt)
    return bool(prompt) and (isinstance(prompt, str) or ids)


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages with the role and the text of each.

    Raises:
        ValueError: for anything but messages of text.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r}: it must be a list of one message or more, with role and content")
    texts = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}] is {message!r}: it must be an object with role and content")
        role, content = message["role"], message.get("content")
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"messages[{number}] has the role {role!r}: choose one of system, user, assistant")
        for name, value in message.items():
            if name not in ("role", "content") and value not in (None, "", []):
                raise ValueError(f"messages[{number}] has {name}, which this server does not follow: leave it out")
        if isinstance(content, list) and content and all(map(_is_text, content)):
            content = "\n".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ValueError(f"messages[{number}] has the content {content!r}: it must be a text, or a list of parts of text")
        texts.append({"role": role, "content": content})
    return texts


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _from_json(text: str) -> dict[str, Any]:
    """Read a generation config that a request brings.

    Raises:
        ValueError: for anything but the JSON of an object, and options that are the server's, or nobody's.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"generation_config is {text!r}: it must be JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"generation_config is {text!r}: it must be the JSON of an object")
    given = {name: value for name, value in found.items() if value is not None and name != "transformers_version"}
    for name in sorted(given.keys() - _SETTABLE):
        hint = "" if name in OPTION_NAMES else closest_name(name, OPTION_NAMES)
        raise ValueError(f"generation_config has {name}, which no request can set{hint}: leave it out")
    return given


__all__ = ["MOST_ROWS", "Asked", "Requests"]
