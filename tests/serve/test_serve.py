"""`mrp serve`: transformers' server with our model, asked in this process by OpenAI's own
client."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from commands import mrp
from conftest import TINY

openai: Any = pytest.importorskip("openai", reason="the tests' client")
pytest.importorskip("fastapi", reason="the server")

from fastapi.testclient import TestClient  # noqa: E402
from mrp_trainer.serve.server import application  # noqa: E402

MODEL = "sdar-tiny-mrp"
CHAT = [{"role": "user", "content": "Sum the numbers of a list that are even, each plus 5."}]
PROMPT = "def change(value):\n"
OPTIONS = {"decoding": "mrp_spec", "target": "sequential", "num_draft_states": 8}


@pytest.fixture(scope="module")
def http(tiny_model: Any, tiny_tokenizer: Any) -> Iterator[Any]:
    model = copy.copy(tiny_model)
    model.generation_config = copy.deepcopy(tiny_model.generation_config)
    model.generation_config.update(**OPTIONS)
    with TestClient(
        application(MODEL, model, tiny_tokenizer), base_url="http://localhost"
    ) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: Any) -> Any:
    return openai.OpenAI(
        base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
    )


@pytest.fixture
def answer(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    """What the model itself answers."""
    shown = tiny_tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)

    def answered(prompt: str = shown, **options: Any) -> str:
        inputs = tiny_tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        ids = tiny_model.generate(
            **inputs, tokenizer=tiny_tokenizer, **{**OPTIONS, "max_new_tokens": 64, **options}
        )
        return str(
            tiny_tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )

    return answered


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": CHAT, **options})


def test_a_chat_and_its_stream_are_what_generate_answers(client: Any, answer: Any) -> None:
    done = chat(client)
    assert done.choices[0].message.content == answer() != answer(decoding="static")
    assert (done.choices[0].finish_reason, done.model) == ("stop", MODEL)
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    *chunks, last = chat(client, stream=True)
    texts = [one.choices[0].delta.content for one in chunks if one.choices[0].delta.content]
    assert len(texts) >= 3
    assert "".join(texts) == answer()
    assert (last.choices[0].finish_reason, last.usage) == ("stop", done.usage)


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"stop": ["sum"]}, {"stop_strings": ["sum"]}),
        ({"temperature": 1.5, "seed": 7}, {"do_sample": True, "temperature": 1.5, "seed": 7}),
        (
            {"logit_bias": {"0": -100, "2": -100}, "max_tokens": 40},
            {"sequence_bias": {(0,): -100.0, (2,): -100.0}},
        ),
    ],
)
def test_what_a_request_sets(
    client: Any, answer: Any, asked: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = answer(**{"max_new_tokens": asked.get("max_tokens", 64), **options})
    assert expected != answer(), "the option changes the text"
    assert chat(client, **asked).choices[0].message.content == expected


def test_options_of_generate_in_a_request(client: Any, answer: Any) -> None:
    own = {"decoding": "static", "max_new_tokens": 64, "do_sample": False}
    asked = {"extra_body": {"generation_config": json.dumps(own)}}
    assert chat(client, **asked).choices[0].message.content == answer(**own) != answer()
    completed = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0
    ).choices[0]
    assert (completed.text, completed.finish_reason) == (answer(PROMPT, max_new_tokens=8), "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"model": "gpt-4"}, "pinned to 'sdar-tiny-mrp'; requested 'gpt-4'"),
        ({"n": 2}, "n is 2, which is not followed here"),
        ({"messages": [{"role": "user", "content": "<|MASK|>"}]}, "input_ids hold the mask id"),
        ({"max_tokens": 2000}, "max_position_embeddings"),
        (
            {"extra_body": {"generation_config": '{"decodin": "static"}'}},
            "decodin: generate has no such option",
        ),
        ({"extra_body": {"generation_config": '{"decoding": "beam"}'}}, "decoding is 'beam'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    client: Any, asked: dict[str, Any], message: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(client, stream=stream, **asked)


def test_one_model_is_there_and_no_other_name_is_answered(http: Any, client: Any) -> None:
    assert [one.id for one in client.models.list()] == [MODEL]
    assert '"ready"' in http.post("/load_model", json={"model": MODEL}).text
    assert (
        "this server has 'sdar-tiny-mrp' alone"
        in http.post("/load_model", json={"model": "org/other"}).text
    )
    assert http.get("/health", headers={"host": "evil.example"}).status_code == 400
    for path in ("/reset", "/v1/responses", "/docs"):
        assert http.post(path).status_code == 404
    assert "--set blok: generate has no such option" in mrp(
        "serve", str(TINY), "--set", "blok=3", fails=True
    )
