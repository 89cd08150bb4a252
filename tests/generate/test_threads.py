"""Eight threads over all that is kept between calls: each gets what it gets alone."""

import ast
import copy
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from modeling_mrp import MRPForCausalLM
from modeling_mrp.constraints import languages
from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import Dispatch, Kernel, failed_kernels
from modeling_mrp.networks import graphs
from modeling_mrp.networks.layers import pack, packed_weight
from tests.support.helpers import LIVELY, generate, random_ids
from tests.support.places import ROOT
from tests.support.random_cases import dampened, make_model
from tests.support.tape import tapes

__all__ = ["tapes"]  # a fixture

THREADS, CALLS = 8, 16
OPTIONS: dict[str, Any] = {
    **LIVELY,
    "max_new_tokens": 12,
    "eos_token_id": [3, 9],
    "pad_token_id": 0,
}


def in_threads(function: Callable[[int], Any], count: int = CALLS) -> list[Any]:
    """Call a function of a number in eight threads that begin together; return the results by
    number, or raise an error."""
    together = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        if number < THREADS:
            together.wait(60)
        return function(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(count)))


def prompts(number: int) -> list[list[int]]:
    """Make a batch of 1, 3 or 5 prompts of 5 to 9 tokens."""
    return random_ids(number, (1, 3, 5)[number % 3], 5 + number % 5).tolist()


def model_of_test() -> MRPForCausalLM:
    return dampened(make_model(3), 0.3)


def same_texts(outputs: Sequence[Any], expected: Sequence[Any]) -> None:
    for got, right in zip(outputs, expected, strict=True):
        assert got.sequences.equal(right.sequences)
        torch.testing.assert_close(got.token_logprobs, right.token_logprobs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", ["static", "dynamic", "sequential"])
def test_expected_gain(target: str) -> None:
    """Of the default, `auto`: texts and counts are those of a call alone."""
    model = model_of_test()
    options = OPTIONS | {"decoding": "mrp_spec", "target": target}
    alone = [generate(model, prompts(n), seed=n, **options) for n in range(CALLS)]
    together = in_threads(lambda n: generate(model, prompts(n), seed=n, **options))
    same_texts(together, alone)
    for output, expected in zip(together, alone, strict=True):
        assert output.stats.row_forwards.equal(expected.stats.row_forwards)
        assert output.stats.drafted.equal(expected.stats.drafted)


@pytest.mark.parametrize("mode", ["static", "self_spec", "mrp_spec", "mrp_remask"])
def test_graphs_and_their_cache(mode: str, tapes: Any) -> None:
    """One call at a time has the recordings. Callers go on from caches that share their memory,
    recorded or not."""
    model = model_of_test()
    given = (
        OPTIONS | {"decoding": mode} | ({"num_draft_states": 3} if mode.endswith("spec") else {})
    )

    def chat(n: int, graphs: tuple[bool, ...]) -> Any:
        """Three calls, each of which goes on from the one before."""
        ids, out, past = prompts(n), None, None
        for turn, recorded in enumerate(graphs):
            out = generate(
                model, ids, seed=n + turn, graphs=recorded, past_key_values=past, **given
            )
            ids, past = [[*row, 7, 8] for row in out.sequences.tolist()], out.past_key_values
        return out

    alone = [chat(n, (False,) * 3) for n in range(CALLS)]
    same_texts(
        in_threads(
            lambda n: chat(n, ((True, False, True), (True, True, True), (True, True, False))[n % 3])
        ),
        alone,
    )
    assert tapes.replays > 0
    assert not graphs._KEPT[model].busy
    assert not graphs._IN_USE


def test_a_cache_serves_one_call_at_a_time() -> None:
    """Another one that comes meanwhile is refused, and has no effect."""
    model, ids = model_of_test(), prompts(1)
    options = OPTIONS | {"decoding": "mrp_spec", "num_draft_states": 3}
    first = generate(model, ids, seed=1, **options)
    longer = [[*row, 7, 8] for row in first.sequences.tolist()]
    right = generate(model, longer, seed=2, **options)

    def once(n: int) -> Any:
        try:
            return generate(model, longer, seed=2, past_key_values=first.past_key_values, **options)
        except ValueError as error:
            return str(error)

    outputs = in_threads(once)
    texts = [output for output in outputs if not isinstance(output, str)]
    same_texts(texts, [right] * len(texts))
    assert texts
    assert {output for output in outputs if isinstance(output, str)} <= {
        "past_key_values are in use by another call, which overwrites them: wait until it returns, "
        "or give each call a copy.deepcopy of them"
    }

    def inside(ids: Any, scores: Any, **_: Any) -> torch.Tensor:
        with pytest.raises(ValueError, match=r"in use by another call.*copy\.deepcopy"):
            generate(model, longer, past_key_values=first.past_key_values, **options)
        return torch.zeros(len(ids), dtype=torch.bool)

    past = {"past_key_values": first.past_key_values}
    same_texts(
        [generate(model, longer, seed=2, stopping_criteria=[inside], **past, **options)], [right]
    )
    same_texts([generate(model, longer, seed=2, **past, **options)], [right])


def test_first_uses_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right ones are compared with their twins; a wrong one is told once, and not used by any
    thread."""
    monkeypatch.setattr(dispatch, "_obstacle", lambda *_, **__: None)
    monkeypatch.setattr(dispatch, "CHECKED_ON", {"cpu"})
    monkeypatch.setattr(dispatch, "_failed", set())
    monkeypatch.setattr(dispatch, "_checked", set())
    kernels = [Kernel(f"right {n}", lambda x: 2 * x, lambda x: 2 * x) for n in range(40)]
    kernels += [Kernel(f"wrong {n}", lambda x: 3 * x, lambda x: 2 * x) for n in range(40)]

    def run(n: int) -> list[list[float]]:
        results = [Dispatch().run(kernel, torch.full((2,), n + 1.0)).tolist() for kernel in kernels]
        assert all(name.startswith("wrong") for name in failed_kernels())
        return results

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = in_threads(run)
    assert results == [[[2.0 * n + 2.0] * 2] * 80 for n in range(CALLS)]
    assert len(failed_kernels()) == len(caught) == 40


def test_weights_are_packed_once() -> None:
    """Two threads that packed at once would move weights below caches of other calls."""
    model = model_of_test()
    before = [weight.detach().clone() for weight in model.parameters()]

    def places(n: int) -> list[int]:
        pack(model)
        return [weight.data_ptr() for weight in model.parameters()]

    assert len({tuple(where) for where in in_threads(places)}) == 1
    assert all(ours.equal(theirs) for ours, theirs in zip(model.parameters(), before, strict=True))
    attention: Any = model.model.layers[0].self_attn
    assert packed_weight([attention.q_proj, attention.k_proj, attention.v_proj]) is not None


def test_a_stock_model_gets_one_head(tmp_path: Any) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    stock = Qwen3ForCausalLM(
        Qwen3Config(**{**model.config.to_dict(), "model_type": "qwen3"})
    ).double()
    made = in_threads(lambda n: MRPForCausalLM.from_stock_model(stock, str(tmp_path)), THREADS)
    assert len(set(map(id, made))) == 1


def test_options_of_calls_and_of_the_model() -> None:
    """Each call has its own; the model's own config is as before, and idle options are told."""
    model = model_of_test()
    model.generation_config.update(decoding="mrp_spec", num_draft_states=3, **OPTIONS)
    before = copy.deepcopy(model.generation_config.to_dict())
    calls = [
        {"decoding": mode, "temperature": t}
        for mode in ("static", "dynamic", "mrp_spec")
        for t in (0.5, 1.0)
    ]
    calls += [{"do_sample": False}, {"decoding": "sequential", "draft_passes": 2}]
    given = [calls[n % len(calls)] | {"seed": n} for n in range(CALLS)]
    alone = [generate(model, prompts(n), **given[n]) for n in range(CALLS)]
    same_texts(in_threads(lambda n: generate(model, prompts(n), **given[n])), alone)
    assert model.generation_config.to_dict() == before


def test_texts_of_languages() -> None:
    """More than are kept, so that they leave and come back meanwhile."""
    for name in ("llguidance", "outlines_core"):
        pytest.importorskip(name)
    from tests.support.languages import EOS, letters_tokenizer

    model, tokenizer = make_model(3), letters_tokenizer()
    options = {"max_new_tokens": 12, "eos_token_id": EOS, "tokenizer": tokenizer}

    def decode(n: int) -> Any:
        length = n % (languages._KEPT_AUTOMATA + 2) + 1
        return generate(model, prompts(n), regex=f"[a-c]{{{length}}}", seed=n, **OPTIONS | options)

    alone = [decode(n) for n in range(CALLS)]
    same_texts(in_threads(decode), alone)


# What modules keep between calls, and the test above that has it in eight threads; None: filled by
# imports, or one entry at a time with values that follow from their keys alone.
KEPT: dict[str, Any] = {
    "model/loading.py _SHARED_MODELS": test_a_stock_model_gets_one_head,
    "model/families/sdar.py FAMILIES": None,
    "rules/reveal.py RULES": None,
    "networks/inspection.py _SETTINGS_READERS": None,
    "networks/inspection.py _DECISIONS": test_options_of_calls_and_of_the_model,
    "networks/graphs.py _KEPT": test_graphs_and_their_cache,
    "networks/graphs.py _IN_USE": test_a_cache_serves_one_call_at_a_time,
    "kernels/dispatch.py _failed": test_first_uses_of_kernels,
    "kernels/dispatch.py _checked": test_first_uses_of_kernels,
    "constraints/languages.py _OF_TOKENIZERS": test_texts_of_languages,
}
EMPTY = {"{}", "[]", "set()", "dict()", "OrderedDict()", "defaultdict()"}


def test_all_that_is_kept_between_calls_is_tried_in_threads() -> None:
    package = ROOT / "modeling_mrp"
    kept = set()
    for path in package.rglob("*.py"):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value:
                value = ast.unparse(statement.value)
                if value in EMPTY or value.startswith("weakref."):
                    target = getattr(statement, "target", None) or statement.targets[0]  # type: ignore[union-attr]
                    kept.add(f"{path.relative_to(package)} {ast.unparse(target)}")
    assert kept == {*KEPT}
