"""Requests with settings of their own on the engine: sampled, penalised, with other rules; and all that their answers tell."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from asking import CONCURRENCY, STATES, Asked, Report, sse
from request_kinds import KINDS, as_options

from benchmarks.server import Server
from modeling_mrp import MRPForCausalLM

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
COUNT, NEW = 5 * len(KINDS), 40
# What the session's server decodes where a request says nothing, but for drafts.
USUAL = {"decoding": "dynamic", "target": "dynamic", "confidence_threshold": 0.9, "max_new_tokens": NEW}


def decoded(model: MRPForCausalLM, prompt: list[int], **options: Any) -> Any:
    """What `generate` makes of a prompt."""
    return model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)


def test_requests_of_all_kinds_have_the_text_of_generate(
    server: Server, asked: Asked, tiny_model_float64: MRPForCausalLM, report: Report
) -> None:
    """Sixteen at a time; the model is float32 on the engine, and float64 here."""
    prompts = asked.prompts[-COUNT:]
    sampling = [{**KINDS[at % len(KINDS)], "max_new_tokens": NEW, "sampling_seed": at} for at in range(COUNT)]
    bodies = [{"input_ids": prompt, "sampling_params": given} for prompt, given in zip(prompts, sampling, strict=True)]
    with ThreadPoolExecutor(CONCURRENCY) as clients:
        replies = list(clients.map(lambda body: server.ask("/generate", body)["output_ids"], bodies))
    other = []
    for place, (prompt, reply, given) in enumerate(zip(prompts, replies, sampling, strict=True)):
        options = {**USUAL, "decoding": "mrp_spec", "num_draft_states": STATES, **as_options(given, len(prompt))}
        if reply != decoded(tiny_model_float64, prompt, **options).sequences[0, len(prompt) :].tolist():
            other.append(str(place))
    report(f"requests of {len(KINDS)} kinds: {len(other)} of {COUNT} texts differ from those of generate {', '.join(other)}")
    assert len(other) <= COUNT // 20, "float32 may decide a near tie otherwise"


def test_an_answer_tells_log_probabilities_steps_and_counts(
    server: Server, asked: Asked, tiny_model_float64: MRPForCausalLM
) -> None:
    prompt, told = asked.prompts[0], {"return_reveal_step": True}
    sampling = {"temperature": 1.0, "sampling_seed": 11, "max_new_tokens": NEW, "custom_params": told}
    reply = server.ask("/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
    out = decoded(tiny_model_float64, prompt, **USUAL, do_sample=True, seed=11, top_k=0)
    assert reply["output_ids"] == out.sequences[0, len(prompt) :].tolist()
    meta = reply["meta_info"]
    values, ids, _ = zip(*meta["output_token_logprobs"], strict=True)
    assert list(ids) == reply["output_ids"]
    assert list(values) == pytest.approx(out.token_logprobs[0].tolist(), abs=1e-4)
    assert meta["mrp"]["reveal_step"] == out.reveal_step[0].tolist()
    assert sum(meta["mrp"]["accepted_at_depth"]) == meta["mrp"]["accepted"] > 0
    assert meta["mrp"]["tokens_per_forward"] == len(ids) / meta["mrp"]["forwards"]


def test_a_chat_tells_log_probabilities(server: Server, asked: Asked) -> None:
    """As the native endpoint, in a stream and as a whole."""
    body = {"model": "default", "messages": asked.problems[0].messages(), "max_tokens": 24, "temperature": 0.8, "seed": 4}
    whole = server.ask("/v1/chat/completions", {**body, "logprobs": True})["choices"][0]["logprobs"]["content"]
    with server.open("/v1/chat/completions", {**body, "logprobs": True, "stream": True}) as got:
        events = [choice for data in sse(got) for choice in json.loads(data)["choices"]]
    streamed = [one for event in events if event.get("logprobs") for one in event["logprobs"]["content"]]
    sampling = {"temperature": 0.8, "sampling_seed": 4, "max_new_tokens": 24}
    native = server.ask("/generate", {"input_ids": asked.prompts[0], "sampling_params": sampling, "return_logprob": True})
    values = [value for value, _, _ in native["meta_info"]["output_token_logprobs"]]
    assert [one["logprob"] for one in whole] == [one["logprob"] for one in streamed] == values
    assert len(values) == len(native["output_ids"])


def test_a_stream_shows_what_is_provisional(server: Server, asked: Asked, tiny_tokenizer: Any) -> None:
    """Behind each round the block so far, whose known tokens the text has then."""
    mask = tiny_tokenizer.convert_tokens_to_ids("<|MASK|>")
    sampling = {"temperature": 1.0, "sampling_seed": 2, "max_new_tokens": NEW, "custom_params": {"return_provisional": True}}
    with server.open("/generate", {"input_ids": asked.prompts[1], "sampling_params": sampling, "stream": True}) as got:
        events = [json.loads(data) for data in sse(got)]
    text, part = events[-1]["output_ids"], 0
    for event in events:
        told = event["meta_info"]["mrp"]
        ids, begin = told["provisional_ids"], len(event["output_ids"])
        assert all(one in (token, mask) for one, token in zip(ids, text[begin:], strict=False))
        assert told["provisional_text"] == tiny_tokenizer.decode(ids)
        part += any(one != mask for one in ids)
    assert part > 2
    assert events[-1]["meta_info"]["mrp"]["provisional_ids"] == []
