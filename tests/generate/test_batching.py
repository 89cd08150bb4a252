"""`init_continuous_batching`: requests of all kinds, in any order of arrival and beside any others,
have the texts that `generate` gives each alone; and what becomes of those that wait, are cancelled,
fail, or are too many."""

import asyncio
import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation import ContinuousBatchingConfig

from modeling_mrp.generate import batching
from modeling_mrp.generate.batching import ContinuousBatchingManager
from modeling_mrp.generate.request import RequestOutput
from modeling_mrp.model.compat import PAGE_SIZE_NAME
from tests.support.batching_cases import random_request
from tests.support.random_cases import make_model


@contextmanager
def running(
    model: Any,
    texts: int | None = None,
    tokens: int | None = None,
    waiting: int = 0,
    prompt_tokens: int | None = None,
) -> Iterator[ContinuousBatchingManager]:
    """A manager that decodes while the context is open."""
    limits = ContinuousBatchingConfig(
        max_requests_per_batch=texts,
        num_blocks=tokens,
        **{PAGE_SIZE_NAME: 256 if tokens is None else 1},
        max_queue_size=waiting,
        max_batch_tokens=prompt_tokens,
    )
    manager = model.init_continuous_batching(continuous_batching_config=limits)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True, timeout=60)
        assert not manager.is_running()


def last(manager: ContinuousBatchingManager, name: str) -> RequestOutput:
    """The last result of a request."""
    *_, output = manager.request_id_iter(name)
    return output


def assert_alone(model: Any, prompt: list[int], options: dict[str, Any], output: Any) -> None:
    """A text is what `generate` gives for its prompt alone, with its steps and probabilities."""
    alone = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options)
    assert output.error is None, output.error
    assert prompt + output.generated_tokens == alone.sequences[0].tolist(), options
    assert output.reveal_step == alone.reveal_step[0].tolist(), options
    assert output.logprobs == pytest.approx(alone.token_logprobs[0].tolist(), abs=1e-5)
    assert output.prompt_ids == prompt


@pytest.mark.parametrize(
    ("seed", "texts", "count", "prompt_tokens"),
    [(1, 1, 8, 1), (2, 3, 20, None), (3, 16, 30, 16), (4, 5, 20, 9)],
)
def test_texts_are_those_of_generate_alone(
    seed: int, texts: int, count: int, prompt_tokens: int | None
) -> None:
    """Whatever else is decoded, comes meanwhile, or is cancelled, and in whatever parts prompts are
    computed."""
    rng, model = random.Random(seed), make_model(seed)
    cases: dict[str, tuple[list[int], dict[str, Any]]] = {}
    outputs: dict[str, RequestOutput] = {}
    cancelled = set()
    with running(model, texts, prompt_tokens=prompt_tokens) as manager:
        while len(cases) < count:
            prompt, options = random_request(rng)
            name = manager.add_request(prompt, streaming=rng.random() < 0.5, **options)
            cases[name] = prompt, options
            if rng.random() < 0.15:
                cancelled.add(dropped := rng.choice(list(cases)))
                manager.cancel_request(dropped)
            if rng.random() < 0.3:  # others come while these are decoded
                output = manager.get_result(timeout=rng.choice((0, 0.05)))
                outputs |= {output.request_id: output} if output else {}
        while sum(output.is_finished() for output in outputs.values()) < count:
            output = manager.get_result(timeout=60)
            assert output is not None, manager.fatal_error
            earlier = outputs.get(output.request_id)
            if earlier is not None:
                told = earlier.generated_tokens
                assert not earlier.is_finished()
                assert output.generated_tokens[: len(told)] == told
            outputs[output.request_id] = output
        assert (manager.running, manager.waiting) == (0, 0)
    whole = [name for name, output in outputs.items() if output.error is None]
    assert set(cases) - set(whole) <= cancelled
    for name in whole:
        prompt, options = cases[name]
        assert_alone(model, prompt, options, outputs[name])


ENDLESS: dict[str, Any] = {"eos_token_id": [], "max_new_tokens": 400, "decoding": "sequential"}


class Counts(StoppingCriteria):
    """Ends nothing, and counts the tokens it sees."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        self.tokens += 1
        return False


def test_a_cancelled_request_leaves_before_its_next_round() -> None:
    """One that has the only place makes room; one that waits is told so at once."""
    model, seen = make_model(), Counts()
    with running(model, 1) as manager:
        first = manager.add_request([1, 2], streaming=True, stopping_criteria=[seen], **ENDLESS)
        second = manager.add_request([3], max_new_tokens=4, eos_token_id=[])
        third = manager.add_request([4], max_new_tokens=4, eos_token_id=[])
        assert next(manager.request_id_iter(first)).generated_tokens
        assert (manager.running, manager.waiting) == (1, 2)
        manager.cancel_request(third)
        manager.cancel_request(first)
        ended = last(manager, first)
        assert (ended.error, ended.is_finished()) == ("it was cancelled", True)
        assert len(last(manager, second).generated_tokens) == 4
        assert last(manager, third).error == "it was cancelled"
    assert seen.tokens < 300


@pytest.mark.parametrize("decoding", ["sequential", "mrp_spec", "mrp_direct"])
def test_a_long_prompt_keeps_nobody_from_the_next_round(decoding: str) -> None:
    """Of a prompt of 200 tokens, 8 are computed between two rounds of a text that is decoded. One
    that is cancelled meanwhile leaves nothing behind."""
    model = make_model()
    options = {**ENDLESS, "decoding": decoding, "max_new_tokens": 200}
    if decoding == "mrp_spec":
        options |= {"target": "sequential", "num_draft_states": 3}
    with running(model, prompt_tokens=8) as manager:
        first = manager.add_request([1], streaming=True, **options)
        assert manager.get_result() is not None
        long = {**options, "max_new_tokens": 9}
        with manager.pause():
            names = [manager.add_request([*prompt, *[2] * 199], **long) for prompt in ([3], [4])]
        for _ in range(12):  # rounds in which the first of both is read
            assert getattr(manager.get_result(), "request_id", None) == first
        manager.cancel_request(names[0])
        outputs = []
        while not outputs or outputs[-1].request_id != names[1]:
            output = manager.get_result(timeout=60)
            assert output is not None
            outputs.append(output)
        assert [output.error for output in outputs if output.request_id == names[0]] == [
            "it was cancelled"
        ]
        assert len(outputs) > 200 // 8 // 2  # not every round ends a block
        assert_alone(model, [4, *[2] * 199], long, outputs[-1])
        assert_alone(model, [1], options, last(manager, first))


def test_a_batch_keeps_the_place_of_a_prompt_that_is_read() -> None:
    """While seven of eight rows end, which halves the batch otherwise."""
    model, options = make_model(), {"decoding": "mrp_direct", "seed": 1}
    with running(model, prompt_tokens=4) as manager:
        with manager.pause():
            prompts = [[number] for number in range(1, 8)] + [[8, *[2] * 99]]
            names = []
            for prompt in prompts:
                limit = 9 if len(prompt) > 1 else prompt[0]
                more = {"max_new_tokens": limit, "eos_token_id": [], **options}
                names.append((manager.add_request(prompt, **more), prompt, more))
        for name, prompt, more in names:
            assert_alone(model, prompt, more, last(manager, name))


def test_one_request_that_fails_leaves_the_others_their_texts() -> None:
    """A prompt whose scores are NaN, a criterion that raises, and a batch of which a processor
    does."""
    model = make_model(4)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan

    def fails(*_: Any) -> Any:
        raise RuntimeError("as asked")

    def fails_later(input_ids: Any, scores: Any) -> Any:
        return scores if input_ids.shape[1] < 6 else fails()

    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": [], "suppress_tokens": [7]}
    prompts = [[1, 2, 3], [9, 9], [8, 7, 8, 8, 8, 8], [1, 5]]
    with running(model) as manager:
        names = manager.add_requests(prompts, streaming=True, **options)
        by_criterion = manager.add_request([4], stopping_criteria=[fails], **options)
        by_processor = manager.add_request([4], logits_processor=[fails_later], **options)
        outputs = [last(manager, name) for name in names]
        assert "no token with a finite score at position" in str(outputs[2].error)
        for index in (0, 1, 3):
            assert_alone(model, prompts[index], options, outputs[index])
        for name in (by_criterion, by_processor):
            assert last(manager, name).error == "RuntimeError: as asked"
        assert_alone(model, [6], options, last(manager, manager.add_request([6], **options)))


def test_admission_waits_for_memory() -> None:
    """Room for two texts of 64 slots: others wait for it, of other settings
    too, and what never has room is refused."""
    model, options = make_model(), {"max_new_tokens": 50, "eos_token_id": []}
    with running(model, 4, tokens=2 * 64) as manager:
        prompts = [[1 + index] * 10 for index in range(4)]
        names = [
            manager.add_request(
                prompt,
                decoding="dynamic",
                confidence_threshold=0.0,
                temperature=1.0 + index % 2,
                do_sample=True,
                seed=1,
                **options,
            )
            for index, prompt in enumerate(prompts)
        ]
        most = 0
        for index, name in enumerate(names):
            most = max(most, manager.running)
            sampled = {
                "decoding": "dynamic",
                "confidence_threshold": 0.0,
                "temperature": 1.0 + index % 2,
                "do_sample": True,
            }
            output = last(manager, name)
            assert_alone(model, prompts[index], {**options, **sampled, "seed": 1}, output)
        assert most <= 2
        with pytest.raises(
            ValueError, match="a prompt of 100 tokens and its text take 152 slots, and"
        ):
            manager.add_request([1] * 100, **options)


def test_a_queue_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_QUEUE_SECONDS", 0.05)
    with running(make_model(), 1, waiting=2) as manager:
        first = manager.add_request([1], streaming=True, **ENDLESS)
        next(manager.request_id_iter(first))
        waiting = [manager.add_request([1], max_new_tokens=1) for _ in range(2)]
        with pytest.raises(queue.Full, match="2 requests wait already"):
            manager.add_request([1], max_new_tokens=1)
        manager.cancel_request(first)
        assert all(last(manager, name).error is None for name in waiting)


def test_the_end_of_a_manager() -> None:
    """Once all texts are whole, at once, and by transformers' own context."""
    model, options = make_model(), {"max_new_tokens": 40, "eos_token_id": []}
    manager = model.init_continuous_batching({"decoding": "sequential"})
    name = manager.add_request([1, 2], **options)  # before the start, too
    manager.start()
    manager.start()
    manager.stop()
    output = manager.get_result()
    assert_alone(model, [1, 2], {**options, "decoding": "sequential"}, output)
    assert (output.request_id, manager.get_result(timeout=1)) == (name, None)
    with pytest.raises(RuntimeError, match="the manager has stopped"):
        manager.add_request([1])
    with running(model, 1) as manager:
        names = [manager.add_request([1], streaming=True, **ENDLESS) for _ in range(2)]
        next(manager.request_id_iter(names[0]))
        manager.stop(hard_stop=True)
        assert [last(manager, name).error for name in names] == ["the manager has stopped"] * 2
    with model.continuous_batching_context_manager() as manager:
        manager.add_requests([[1], [2]], max_new_tokens=3)
        ends = [output.is_finished() for _, output in zip(range(2), manager, strict=False)]
        assert ends == [True, True]


def test_results_for_an_event_loop_further_texts_and_times() -> None:
    model = make_model()

    async def ask(manager: ContinuousBatchingManager) -> list[RequestOutput]:
        results: asyncio.Queue[RequestOutput] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        manager.register_result_handler(
            "mine", lambda output: loop.call_soon_threadsafe(results.put_nowait, output)
        )
        manager.add_request(
            [1, 2], "mine", 12, streaming=True, record_timestamps=True, eos_token_id=[]
        )
        outputs = [await asyncio.wait_for(results.get(), 60)]
        while not outputs[-1].is_finished():
            outputs.append(await asyncio.wait_for(results.get(), 60))
        return outputs

    with running(model) as manager:
        *parts, whole = asyncio.run(ask(manager))
        assert len(parts) >= 2
        assert len(whole.timestamps or []) == len(whole.generated_tokens) == 12
        assert whole.lifespan[0] <= whole.timestamps[0] <= whole.timestamps[-1] <= whole.lifespan[1]
        sampled = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8}
        name = manager.add_request([5], seed=4, **sampled)
        texts = [last(manager, name + child).generated_tokens for child in ("", "__child#1")]
        alone = model.generate(torch.tensor([[5]]), seed=4, **sampled)
        assert [[5, *text] for text in texts] == alone[:2].tolist()


def test_likeliest_tokens() -> None:
    """Those of the scores that a token was picked from."""
    model = make_model()
    options = {"decoding": "mrp_spec", "num_draft_states": 4, "max_new_tokens": 17}
    options |= {"eos_token_id": [], "repetition_penalty": 1.3}
    with running(model) as manager:
        output = last(manager, manager.add_request([1, 2, 3], top_logprobs=4, **options))
    alone: Any = model.generate(
        torch.tensor([[1, 2, 3]]), output_scores=True, return_dict_in_generate=True, **options
    )
    assert len(output.top_logprobs) == 17
    for column, likeliest in enumerate(output.top_logprobs):
        best = alone.scores[column][0].log_softmax(-1).topk(4)
        assert list(likeliest) == best.indices.tolist()
        assert list(likeliest.values()) == pytest.approx(best.values.tolist(), abs=1e-9)
        assert output.logprobs[column] == pytest.approx(max(likeliest.values()))


def test_a_pause_holds_rounds_back() -> None:
    model = make_model()
    with running(model) as manager:
        name = manager.add_request([1], streaming=True, **ENDLESS)
        results = manager.request_id_iter(name)
        next(results)
        with manager.pause():
            while manager.get_result(name, timeout=0) is not None:
                pass
            assert manager.get_result(name, timeout=0.2) is None
        assert next(results).generated_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decodin": "static"}, "decodin.*did you mean decoding"),
        ({"top_logprobs": 21}, "top_logprobs is 21: it must be an int from 0 to 20"),
        ({"infill_ids": [1]}, "infill_ids: a request cannot have it, pass it to generate"),
        ({"output_scores": True}, "output_scores: a request cannot have it"),
        ({"input_ids": [60]}, "input_ids hold the mask id"),
        ({"max_new_tokens": 600}, "exceeds max_position_embeddings"),
        ({"request_id": "taken"}, "request_id 'taken' is in use: give another"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    manager = make_model().init_continuous_batching()
    manager.add_request([1], "taken")
    with pytest.raises(ValueError, match=message):
        manager.add_request(**{"input_ids": [1], **options})
    assert manager.waiting == 1


def test_fields_of_a_config_that_are_not_followed() -> None:
    config = ContinuousBatchingConfig(safety_margin=0.5)
    with pytest.raises(ValueError, match=r"safety_margin=0.5, which is not followed here"):
        make_model().init_continuous_batching(continuous_batching_config=config)
    with pytest.raises(ValueError, match="decoding is 'beam'"):
        make_model().init_continuous_batching({"decoding": "beam"})
