"""`mrp serve` over HTTP, asked by OpenAI's own client: each row of the table in docs/serving.md,
followed or refused."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.commands import mrp
from tests.support.places import TINY

openai: Any = pytest.importorskip("openai", reason="the tests' client")
pytest.importorskip("fastapi", reason="the server")

from tests.support.openai_server import CHAT, MODEL, OPTIONS, PROMPT, Served, served  # noqa: E402

FEW = 16


@pytest.fixture(scope="module")
def server(tiny_model_float64: Any, tiny_tokenizer: Any) -> Iterator[Served]:
    with served(tiny_model_float64, tiny_tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def generate(tiny_model_float64: Any, tiny_tokenizer: Any) -> Any:
    """What the model itself gives, as an output of `generate` and as text."""

    def generated(prompt: Any = None, **options: Any) -> tuple[Any, str]:
        if prompt is None:
            prompt = tiny_tokenizer.apply_chat_template(
                CHAT, add_generation_prompt=True, tokenize=False
            )
        if isinstance(prompt, str):
            prompt = tiny_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        out = tiny_model_float64.generate(
            torch.tensor([prompt]),
            tokenizer=tiny_tokenizer,
            return_dict_in_generate=True,
            **{**OPTIONS, "max_new_tokens": FEW, **options},
        )
        ids = out.sequences[0, len(prompt) :]
        return out, str(tiny_tokenizer.decode(ids, skip_special_tokens=True))

    return generated


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def joined(chunks: Any, index: int = 0) -> str:
    """The text of a stream of a chat."""
    text = ""
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                text += choice.delta.content or ""
    return text


def test_a_chat_and_its_stream_are_what_generate_answers(server: Served, generate: Any) -> None:
    expected = generate(max_new_tokens=64)[1]
    done = server.chat(max_tokens=64)
    assert text_of(done) == expected != generate(max_new_tokens=64, decoding="static")[1]
    assert (done.choices[0].finish_reason, done.model) == ("stop", MODEL)
    usage = done.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == generate(max_new_tokens=64)[0].reveal_step.shape[1]
    options = {"stream": True, "max_completion_tokens": 64}
    *chunks, counted = server.chat(stream_options={"include_usage": True}, **options)
    assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) >= 3
    assert joined(chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert (counted.choices, counted.usage) == ([], usage)
    body = json.dumps({"messages": CHAT, "stream": True, "max_tokens": 2}).encode()
    assert server.post("/v1/chat/completions", body)[1].endswith(b"\n\ndata: [DONE]\n\n")


FOLLOWED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_tokens": ({"max_tokens": 5}, {"max_new_tokens": 5}),
    "seed": ({"temperature": 1.5, "seed": 7}, {"do_sample": True, "temperature": 1.5, "seed": 7}),
    "an integer": (
        {"temperature": 2, "seed": 7},
        {"do_sample": True, "temperature": 2.0, "seed": 7},
    ),
    "top_p": (
        {"temperature": 1.8, "top_p": 0.5, "seed": 1},
        {"do_sample": True, "temperature": 1.8, "top_p": 0.5, "seed": 1},
    ),
    "top_k": (
        {"temperature": 1.8, "extra_body": {"top_k": 2}, "seed": 1},
        {"do_sample": True, "temperature": 1.8, "top_k": 2, "seed": 1},
    ),
    "logit_bias": (
        {"logit_bias": {"0": -100, "2": -100}, "max_tokens": 40},
        {"sequence_bias": {(0,): -100.0, (2,): -100.0}, "max_new_tokens": 40},
    ),
    "decoding": ({"extra_body": {"decoding": "static"}}, {"decoding": "static"}),
    "target": ({"extra_body": {"target": "static", "num_draft_states": 4}}, {"target": "static"}),
    "min_tokens": (
        {"extra_body": {"min_tokens": 40}, "max_tokens": 44},
        {"min_new_tokens": 40, "max_new_tokens": 44},
    ),
    "ignore_eos": (
        {"extra_body": {"ignore_eos": True}, "max_tokens": 40},
        {"eos_token_id": [], "max_new_tokens": 40},
    ),
    "repetition_penalty": (
        {"extra_body": {"repetition_penalty": 3.0}},
        {"repetition_penalty": 3.0},
    ),
    "generation_config": (
        {"extra_body": {"generation_config": '{"decoding": "static", "do_sample": false}'}},
        {"decoding": "static"},
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_request_sets(server: Served, generate: Any, name: str) -> None:
    """A text and its stream; the option changes the text."""
    asked, options = FOLLOWED[name]
    asked = {"max_tokens": FEW, **asked}
    expected = generate(**options)[1]
    plain = generate(max_new_tokens=options.get("max_new_tokens", FEW))[1]
    assert expected != plain or name == "max_tokens"
    assert text_of(server.chat(**asked)) == expected
    assert joined(server.chat(stream=True, **asked)) == expected


def test_greedy_is_temperature_0(server: Served, generate: Any) -> None:
    assert text_of(server.chat(temperature=0, seed=3, max_tokens=FEW)) == generate()[1]


@pytest.mark.parametrize("stops", ["sum", ["sum", "(number):\n"], [" "], ["return sum(5", "zz"]])
def test_a_stop_string_is_no_part_of_a_text_nor_of_a_stream(
    server: Served, generate: Any, stops: Any
) -> None:
    whole = generate(max_new_tokens=64)[1]
    listed = [stops] if isinstance(stops, str) else stops
    expected = whole[: min(whole.index(stop) for stop in listed if stop in whole)]
    done = server.chat(stop=stops, max_tokens=64)
    assert (text_of(done), done.choices[0].finish_reason) == (expected, "stop")
    sent = ""
    for chunk in server.chat(stop=stops, max_tokens=64, stream=True):
        sent += chunk.choices[0].delta.content or ""
        assert expected.startswith(sent)
    assert sent == expected


def test_why_a_text_ends(server: Served, generate: Any) -> None:
    """An eos that is the last token allowed is a `stop`, and so is a stop string there."""
    tokens = generate(max_new_tokens=64)[0].reveal_step.shape[1]
    ends = [
        server.chat(max_tokens=limit).choices[0].finish_reason for limit in (tokens, tokens - 1)
    ]
    assert ends == ["stop", "length"]
    last = server.complete(max_tokens=3, temperature=0, logprobs=0).choices[0]
    stop = last.logprobs.tokens[-1]
    ended = server.complete(max_tokens=3, temperature=0, stop=[stop]).choices[0]
    assert (last.finish_reason, ended.finish_reason) == ("length", "stop")
    assert stop not in ended.text


def test_texts_of_one_request(server: Served, generate: Any, tiny_tokenizer: Any) -> None:
    """`n`, lists of prompts, and prompts of ids; streamed, too."""
    asked = {"temperature": 1.5, "seed": 7, "n": 3, "max_tokens": FEW}
    sampled = {"do_sample": True, "temperature": 1.5}
    expected = [generate(seed=seed, **sampled)[1] for seed in (7, 8, 9)]
    choices = server.chat(**asked).choices
    assert [(one.index, one.message.content) for one in choices] == list(enumerate(expected))
    chunks = list(server.chat(stream=True, **asked))
    assert [joined(chunks, index) for index in range(3)] == expected
    prompts = [PROMPT, "def number(value):\n"]
    ids = [tiny_tokenizer(prompt)["input_ids"] for prompt in prompts]
    expected = [generate(prompt)[1] for prompt in prompts]
    for given in (prompts, ids):
        done = server.complete(prompt=given, max_tokens=FEW)
        assert [choice.text for choice in done.choices] == expected
    assert server.complete(prompt=ids[0], max_tokens=FEW).choices[0].text == expected[0]
    streamed = ["", ""]
    for chunk in server.complete(prompt=prompts, max_tokens=FEW, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_log_probabilities(server: Served, generate: Any) -> None:
    """Those of `generate`, in both forms, whole and streamed."""
    expected = generate(PROMPT, output_scores=True)[0]
    done = server.complete(max_tokens=FEW, logprobs=3).choices[0]
    logprobs = done.logprobs
    assert logprobs.token_logprobs == pytest.approx(expected.token_logprobs[0].tolist(), abs=1e-5)
    assert "".join(logprobs.tokens).startswith(done.text)
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    for top, scores in zip(logprobs.top_logprobs, expected.scores, strict=True):
        best = scores[0].log_softmax(-1).topk(3).values.tolist()
        assert list(top.values()) == pytest.approx(best, abs=1e-5)
    parts = server.complete(max_tokens=FEW, logprobs=3, stream=True)
    tokens = [token for part in parts for token in part.choices[0].logprobs.tokens]
    assert tokens == logprobs.tokens
    chat = server.chat(max_tokens=FEW, logprobs=True, top_logprobs=2).choices[0]
    content = chat.logprobs.content
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert [token.logprob for token in content] == pytest.approx(
        generate()[0].token_logprobs[0].tolist(), abs=1e-5
    )
    stopped = server.chat(max_tokens=64, logprobs=True, stop="sum").choices[0]
    written = "".join(token.token for token in stopped.logprobs.content)
    assert written.startswith(stopped.message.content)
    assert len(stopped.logprobs.content) < 64


def test_a_prompt_is_echoed_with_its_exact_scores(
    server: Served, tiny_model_float64: Any, tiny_tokenizer: Any
) -> None:
    ids = tiny_tokenizer(PROMPT)["input_ids"]
    exact = tiny_model_float64.score(torch.tensor([ids]))
    for limit in (0, 1):
        done = server.complete(prompt=ids, max_tokens=limit, echo=True, logprobs=1).choices[0]
        scores = done.logprobs.token_logprobs
        assert (scores[0], len(scores)) == (None, len(ids) + limit)
        assert scores[1 : len(ids)] == pytest.approx(exact.logprobs[0, 1:].tolist(), abs=1e-9)
        assert done.text.startswith(PROMPT)
        for index in range(1, len(ids)):
            likeliest = max(done.logprobs.top_logprobs[index].values())
            assert (likeliest == scores[index]) == bool(exact.greedy[0, index])
    parts = list(server.complete(max_tokens=2, echo=True, stream=True))
    assert parts[0].choices[0].text == PROMPT


def test_lm_eval_reads_what_its_own_model_computes(
    server: Served, generate: Any, tiny_model_float64: Any, tiny_tokenizer: Any
) -> None:
    """Log-likelihoods and texts of `local-completions`, by lm-eval's own payloads and parsers."""
    models: Any = pytest.importorskip("lm_eval.models.openai_completions")
    api, asking = models.LocalCompletionsAPI, SimpleNamespace(model=MODEL, _max_gen_toks=256)
    pairs = [
        ("Ana has 3 pens.", " Bo gives Ana 4 more."),
        (PROMPT, "    return value"),
        ("f", "or"),
    ]
    prompts, contexts = [], []
    for context, continuation in pairs:
        contexts.append(len(tiny_tokenizer(context)["input_ids"]))
        prompts.append(
            tiny_tokenizer(context)["input_ids"] + tiny_tokenizer(continuation)["input_ids"]
        )
    body = json.dumps(api._create_payload(asking, prompts)).encode()
    answer = json.loads(server.post("/v1/completions", body)[1])
    results = api.parse_logprobs(answer, ctxlens=contexts)
    for ids, context, (total, greedy) in zip(prompts, contexts, results, strict=True):
        labels = torch.tensor([[-100] * context + ids[context:]])
        exact = tiny_model_float64.score(torch.tensor([ids]), labels=labels)
        assert total == pytest.approx(float(exact.sums), abs=1e-6)
        assert greedy == bool((exact.greedy | ~exact.scored).all())
    until = {"until": ["return", "zz"], "max_gen_toks": 64, "do_sample": False}
    payload = api._create_payload(
        asking, [PROMPT], generate=True, gen_kwargs=until, eos="<|im_end|>"
    )
    answer = json.loads(server.post("/v1/completions", json.dumps(payload).encode())[1])
    expected = generate(PROMPT, max_new_tokens=64)[1].partition("return")[0]
    assert api.parse_generations(answer) == [expected]


def test_penalties_of_what_the_text_has(server: Served) -> None:
    own = {"ignore_eos": True, "decoding": "sequential"}
    endless: dict[str, Any] = {"extra_body": own, "max_tokens": 40}
    plain = server.complete(**endless, logprobs=0).choices[0].logprobs.tokens
    for penalty in ("presence_penalty", "frequency_penalty"):
        varied = server.complete(**endless, logprobs=0, **{penalty: 2.0}).choices[0].logprobs.tokens
        assert len(set(varied)) > len(set(plain))


def test_what_speculation_did(server: Served, generate: Any) -> None:
    """Under SGLang's and vLLM's names, and under ours."""
    before = server.metrics()
    choice = server.chat(max_tokens=64).choices[0]
    stats = generate(max_new_tokens=64)[0].stats
    info = choice.meta_info
    assert info["mrp"]["forwards"] == int(stats.row_forwards)
    assert info["mrp"]["accepted"] == info["spec_accept_token_num"] == int(stats.accepted)
    assert info["spec_verify_ct"] == int(stats.row_forwards) - 1  # all but the prefill
    assert info["spec_accept_length"] > 2
    after = server.metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["mrp_accepted_total"] == int(stats.accepted)
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == int(stats.accepted)
    assert grown["vllm:generation_tokens_total"] == grown["mrp_tokens_total"]
    assert after["sglang:spec_accept_length"] > 1


def test_models_health_and_who_may_ask(
    server: Served, tiny_model_float64: Any, tiny_tokenizer: Any
) -> None:
    assert [model.id for model in server.client.models.list()] == [MODEL]
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="this server has 'sdar-tiny-mrp' alone"):
        server.client.models.retrieve("org/other")
    ready = server.post("/load_model", json.dumps({"model": MODEL}).encode())
    assert b'"ready"' in ready[1]
    assert server.post("/load_model", b'{"model": "org/other"}')[0] == 404
    assert server.post("/health", b"", {"Host": "evil.example"})[0] == 400
    for path in ("/reset", "/v1/responses", "/docs"):
        assert server.post(path, b"{}")[0] == 404
    with served(tiny_model_float64, tiny_tokenizer, api_key="secret") as closed:
        assert text_of(closed.chat(max_tokens=2))
        closed.client.api_key = "wrong"
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            closed.chat()
        with pytest.raises(openai.AuthenticationError):
            closed.client.models.list()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ({"model": "gpt-4"}, 404, "the model 'gpt-4' does not exist"),
        ({"messages": [{"role": "user", "content": "<|MASK|>"}]}, 400, "hold the mask id"),
        ({"max_tokens": 2000}, 400, "max_position_embeddings"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.function: Field required"),
        ({"response_format": {"type": "xml"}}, 400, "response_format is"),
        ({"extra_body": {"max_token": 1}}, 400, "did you mean max_tokens"),
        ({"extra_body": {"decoding": "beam"}}, 400, "decoding is 'beam'"),
        ({"extra_body": {"generation_config": '{"decodin": "x"}'}}, 400, "no such option"),
        ({"extra_body": {"num_draft_states": 256}}, 400, "a request may ask for 16 at most"),
        ({"extra_body": {"min_tokens": 40}, "max_tokens": 30}, 400, "40 new tokens"),
        ({"n": 17}, 400, "n: Input should be less than or equal to 16"),
        ({"logit_bias": {"1280": 1}}, 400, "logit_bias has '1280': give ids of tokens"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
            400,
            "messages.1.tool_calls.0.id: Field required",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    server: Served, asked: dict[str, Any], status: int, message: str, stream: bool
) -> None:
    """Before the first byte of a stream, too, in OpenAI's form."""
    with pytest.raises(openai.APIStatusError, match=message) as error:
        server.chat(stream=stream, **asked)
    assert error.value.status_code == status
    assert error.value.type == "invalid_request_error"


def test_requests_decode_together_and_each_has_its_text(server: Served, generate: Any) -> None:
    """Of equal and of different settings, six at once."""
    chats = [[{"role": "user", "content": f"Add {number} to each number."}] for number in range(6)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 2}, {"stop": ["return"]}]
    calls = [{"messages": chat, "max_tokens": FEW, **kinds[i % 3]} for i, chat in enumerate(chats)]
    alone = [text_of(server.chat(**call)) for call in calls]
    with ThreadPoolExecutor(6) as clients:
        assert list(clients.map(lambda call: text_of(server.chat(**call)), calls)) == alone


def test_how_a_process_ends(tmp_path: Any) -> None:
    """SIGTERM ends streams with an error, within five seconds; a second one ends at once."""
    command = [sys.executable, "-m", "mrp_trainer.cli", "serve", str(TINY), "--port", "0"]
    command += ["--served-model-name", MODEL]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, stdout=output)
    try:
        until = time.monotonic() + 120
        while "running on http" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        url = log.read_text().split("running on ")[1].split()[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        endless = {"extra_body": {"ignore_eos": True}, "max_tokens": 990, "stream": True}
        stream = client.chat.completions.create(model=MODEL, messages=CHAT, **endless)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        process.wait(10)
        assert time.monotonic() - begun < 5
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


def test_options_that_cannot_be_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = " ".join(mrp("serve", str(TINY), "--port", port, fails=True).split())
    assert f"127.0.0.1:{port} cannot be listened at" in told
    assert "--set blok: generate has no such option" in mrp(
        "serve", str(TINY), "--set", "blok=3", fails=True
    )


def test_decisions_are_refused_by_name(server: Served) -> None:
    status, content, _ = server.post("/v1/systemone", b"{}")
    assert status == 501
    assert "model.decide" in str(content)
