"""Bodies that a server of OpenAI's API has to refuse, with the paths that they go to."""

import json
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_HI = [{"role": "user", "content": "hi"}]
_DEEP = "[" * 100_000 + "]" * 100_000

_BYTES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"1",
    b'"hi"',
    b"{}",
    b"\xff\xfe{}",
    b'{"messages": ',
    b'{"messages": [}',
    b'{"messages": NaN}',
    b'{"messages": "hi"',
    b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    f'{{"messages": {_DEEP}}}'.encode(),
    f'{{"messages": {_DEEP[:1800]}}}'.encode(),
    b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}',
    b"x" * (5 << 20),
]
_MESSAGES: list[Any] = [
    None,
    "hi",
    [],
    {},
    [None],
    ["hi"],
    [[]],
    [{}],
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": {}}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "tool", "content": "hi"}],
    [{"role": "nobody", "content": "hi"}],
    [{"role": 5, "content": "hi"}],
    [{"role": "assistant", "content": "hi", "tool_calls": [{}]}],
    [{"role": "assistant", "content": "hi", "audio": {"id": "x"}}],
    [{"role": "user", "content": "<|MASK|>"}],
    [{"role": "user", "content": "long " * 20_000}],
    [{"role": "user", "content": "long " * 700_000}],
    _HI * 5000,
]
_FIELDS: list[dict[str, Any]] = [
    {"model": 5},
    {"model": "gpt-4"},
    {"stream": "yes"},
    {"stream_options": "all"},
    {"stream_options": {"include_usage": 1}},
    {"stream_options": {"other": True}},
    {"n": 0},
    {"n": 17},
    {"n": 1 << 70},
    {"n": "2"},
    {"n": 1.5},
    {"n": True},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "5"},
    {"max_tokens": 1 << 40},
    {"max_completion_tokens": 0},
    {"temperature": -1},
    {"temperature": 2.5},
    {"temperature": "hot"},
    {"temperature": []},
    {"top_p": 0},
    {"top_p": 1.5},
    {"seed": "7"},
    {"seed": 1 << 80},
    {"stop": ""},
    {"stop": [""]},
    {"stop": 5},
    {"stop": ["a"] * 17},
    {"stop": ["a" * 101]},
    {"stop": [["a"]]},
    {"presence_penalty": 3},
    {"frequency_penalty": "x"},
    {"logit_bias": []},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"1": 101}},
    {"logit_bias": {str(token): 1 for token in range(400)}},
    {"logprobs": "yes"},
    {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 2},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "required"},
    {"response_format": {"type": "json"}},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"modalities": ["audio"]},
    {"generation_config": "["},
    {"generation_config": "[]"},
    {"generation_config": f'{{"eos_token_id": {_DEEP}}}'},
    {"generation_config": '{"num_beams": 4}'},
    {"generation_config": 5},
    {"decoding": "beam"},
    {"decoding": 5},
    {"num_draft_states": 256},
    {"num_draft_states": "many"},
    {"denoising_steps": 10**9},
    {"confidence_threshold": "high"},
    {"top_k": "few"},
    {"repetition_penalty": 0},
    {"min_p": 7, "temperature": 1},
    {"kernels": True},
    {"max_token": 5},
    {"guided_json": {}},
]
_PROMPTS: list[Any] = [
    None,
    "",
    [],
    5,
    {},
    [[]],
    [""],
    [True],
    [1, "a"],
    [-1],
    [99_999],
    [1 << 40],
    [3],
    [[1], [99_999]],
    ["a"] * 17,
    "long " * 20_000,
]
_COMPLETION_FIELDS: list[dict[str, Any]] = [
    {"suffix": "x"},
    {"best_of": 2},
    {"echo": "yes"},
    {"logprobs": True},
    {"logprobs": 21},
    {"max_tokens": 0},
]


def bodies() -> list[tuple[str, bytes]]:
    """List paths and bodies."""
    listed = [(CHAT, body) for body in _BYTES]
    listed += [(CHAT, json.dumps({"messages": messages}).encode()) for messages in _MESSAGES]
    listed += [(CHAT, json.dumps({"messages": _HI, **fields}).encode()) for fields in _FIELDS]
    listed += [(COMPLETION, json.dumps({"prompt": prompt}).encode()) for prompt in _PROMPTS]
    listed += [
        (COMPLETION, json.dumps({"prompt": "hi", **fields}).encode())
        for fields in _COMPLETION_FIELDS
    ]
    return listed
