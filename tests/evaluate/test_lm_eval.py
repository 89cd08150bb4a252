"""lm-eval runs the checkpoint unchanged through its `hf` backend, offline, from a task file; and
with the model `mrp`."""

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import decode_prompts
from mrp_trainer.evaluate.problem_sets import JUDGES, family_set

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.loop import RoundDecoder
from tests.support.places import TINY

lm_eval: Any = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
COUNT, NEW_TOKENS = 5, 64
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["<|im_end|>", "How many"]
  do_sample: false
  temperature: 0.0
  max_gen_toks: 64
filter_list:
  - name: last
    filter:
      - {function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}
      - {function: take_first}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
# Contexts of several lengths and an empty one, continued by one and by several tokens.
PAIRS = [
    *(("Ana has 3 pens.", choice) for choice in (" Bo gives Ana 4 more.", " 7", " Ana loses")),
    *(("", "n = 4"), ("def f(x):\n    return x +", " 1")),
]
TEXTS = ["Ana has 3 pens.", "def f(x):\n    return x + 1\n", "for"]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a task, of which one problem has a wrong answer."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    sums = [
        {"prompt": problem.prompt, "answer": str(problem.number)}
        for problem in problems("math", "heldout", COUNT)
    ]
    sums[1]["answer"] = "1234"
    (tmp_path / "sums.yaml").write_text(TASK)
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    return tmp_path


def asked(*arguments: tuple[str, ...]) -> list[Any]:
    """Requests for log-likelihoods."""
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, one, number) for number, one in enumerate(arguments)]


def evaluated(folder: Path, model: Any, **options: Any) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=["sums"], task_manager=manager, bootstrap_iters=0, **options
    )


def test_lm_eval_scores_as_we_do(
    task: Path, tiny_model: MRPForCausalLM, tiny_tokenizer: Any
) -> None:
    """With prompts of different length in a batch: both modes give the texts that `generate` gives
    here, and the score that our judge gives them. By lm-eval's own way to load, or our model by its
    name, where `auto` is a number of rows."""
    from lm_eval.models.huggingface import HFLM

    remote = HFLM(pretrained=str(TINY), trust_remote_code=True, device="cpu", batch_size=3)
    assert isinstance(remote.model, MRPForCausalLM)
    importlib.import_module("mrp_trainer.evaluate.lm_eval")
    prompts = family_set("math", "heldout", tiny_tokenizer, COUNT).prompts
    ours = decode_prompts(
        tiny_model, tiny_tokenizer, prompts, None, NEW_TOKENS, decoding="sequential"
    )
    sums = [json.loads(line) for line in (task / "sums.jsonl").read_text().splitlines()]
    right = [
        JUDGES["last_number"](one["answer"], text)
        for one, text in zip(sums, ours.texts, strict=True)
    ]
    assert 0 < sum(right) < COUNT
    by_name = {
        "model_args": f"pretrained={TINY},trust_remote_code=True",
        "batch_size": "auto",
        "device": "cpu",
    }
    for mode, model, given in (("sequential", "mrp", by_name), ("mrp_spec", remote, {})):
        ran = evaluated(
            task, model, gen_kwargs=f"decoding={mode}", apply_chat_template=True, **given
        )
        said = {sample["doc"]["prompt"]: sample["resps"][0][0] for sample in ran["samples"]["sums"]}
        assert said == {one["prompt"]: text for one, text in zip(sums, ours.texts, strict=True)}
        assert ran["results"]["sums"]["exact_match,last"] == pytest.approx(sum(right) / COUNT)


def test_log_likelihoods_are_warned_of_once(
    tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Several batches of them; generating, and asking what stands at a mask, say nothing."""
    from lm_eval.models.huggingface import HFLM

    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # transformers adds it
    model = MRPForCausalLM.from_pretrained(TINY).eval()
    ids = tiny_tokenizer("def f(x):", return_tensors="pt")["input_ids"]
    model.generate(ids, max_new_tokens=4)
    model(torch.cat([ids, torch.full((1, 1), model.config.mask_token_id)], 1))
    assert "log-likelihoods" not in caplog.text
    HFLM(pretrained=model, tokenizer=tiny_tokenizer, batch_size=2).loglikelihood(asked(*PAIRS))
    assert caplog.text.count("log-likelihoods made of them") == 1


def test_its_log_likelihoods_are_scores(
    tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Choices, in batches, also in windows of 8 tokens, and whole texts; behind the eos where there
    is no context."""
    from mrp_trainer.evaluate.lm_eval import MRPLM

    model, encode = tiny_model_float64, tiny_tokenizer.encode
    prefix = [tiny_tokenizer.bos_token_id or tiny_tokenizer.eos_token_id]

    def expected(context: str, rest: str, most: int = 1000) -> tuple[Any, bool]:
        before, whole = encode(context), encode(context + rest)
        ids, count = [*([] if before else prefix), *whole][-most:], len(whole) - len(before)
        out = model.score(
            torch.tensor([ids]), labels=torch.tensor([[-100] * (len(ids) - count) + ids[-count:]])
        )
        return pytest.approx(out.sums.item(), abs=1e-9), bool(out.greedy[0, -count:].all())

    judged, short = (
        MRPLM(pretrained=model, tokenizer=tiny_tokenizer, batch_size=2, max_length=most)
        for most in (None, 8)
    )
    assert judged.loglikelihood(asked(*PAIRS)) == [expected(*pair) for pair in PAIRS]
    assert judged.loglikelihood_rolling(asked(*((text,) for text in TEXTS))) == [
        expected("", text)[0] for text in TEXTS
    ]
    assert "longer than 8 tokens" not in caplog.text
    assert short.loglikelihood(asked(*PAIRS)) == [expected(*pair, 8) for pair in PAIRS]
    assert "longer than 8 tokens" in caplog.text


def written(*arguments: tuple[str, dict[str, Any]]) -> list[Any]:
    """Requests for texts."""
    from lm_eval.api.instance import Instance

    requests = []
    for number, argument in enumerate(arguments):
        requests.append(Instance("generate_until", {}, argument, number))
    return requests


def judged_by(model: MRPForCausalLM, tokenizer: Any, batch_size: int, **options: Any) -> Any:
    """lm-eval's model `mrp`."""
    from mrp_trainer.evaluate.lm_eval import MRPLM

    return MRPLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **options)


@pytest.mark.parametrize("thinking", [None, "=", 7])
def test_texts_that_join_a_batch_are_those_of_hf(
    tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any, thinking: Any
) -> None:
    """Contexts of different length and an empty one, four sets of options, stop strings that end
    in the middle of a token, and what comes behind the end of thinking."""
    from lm_eval.models.huggingface import HFLM

    if thinking == 7:
        thinking = tiny_tokenizer.encode("=")[0]
    usual = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 24}
    other = {"until": "ore", "max_gen_toks": 40, "decoding": "mrp_spec", "num_draft_states": 4}
    short = {"until": [], "max_gen_toks": 3, "decoding": "dynamic"}
    none = {"max_length": 60}
    arguments = []
    for index, problem in enumerate(problems("math", "heldout", 8)):
        arguments.append((problem.prompt, (usual, other, short, none)[index % 4]))
    arguments += [("def f(x):", usual), ("Ana has 3 pens.", other)]
    same = {"max_length": 400, "think_end_token": thinking}
    hf = HFLM(pretrained=tiny_model_float64, tokenizer=tiny_tokenizer, batch_size=1, **same)
    expected = hf.generate_until(written(*arguments), disable_tqdm=True)
    assert len(set(expected)) > 5
    for batch_size in (1, 3, 16):
        ours = judged_by(tiny_model_float64, tiny_tokenizer, batch_size, **same)
        assert ours.generate_until(written(*arguments), disable_tqdm=True) == expected


def test_no_text_waits_for_others(
    tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nine texts, one long, two are decoded at once; places are idle only at the end."""
    running = []
    run_round = RoundDecoder.round

    def watched(self: RoundDecoder, rows: Any, plan: Any) -> None:
        running.append(sum(row.stop is None for row in rows))
        run_round(self, rows, plan)

    monkeypatch.setattr(RoundDecoder, "round", watched)
    usual = {"until": [], "decoding": "sequential"}
    long = ("Ana has 3 pens.", {"max_gen_toks": 64, "min_new_tokens": 64, **usual})
    short = ("for x in", {"max_gen_toks": 8, "min_new_tokens": 8, **usual})
    ours = judged_by(tiny_model_float64, tiny_tokenizer, 2)
    texts = ours.generate_until(written(long, *8 * [short]), disable_tqdm=True)
    assert len(set(texts[1:])) == 1
    assert running.count(2) >= 8 * 7  # beside each short one runs the long one, a token a round
    assert len(running) < 80  # of 128 if they came one by one


def test_sampled_texts_are_each_of_its_seed(
    tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any
) -> None:
    sampling = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 16, "until": []}
    requests = written(*4 * [("Ana has 3 pens.", {**sampling, "seed": 5})])
    texts = judged_by(tiny_model_float64, tiny_tokenizer, 2).generate_until(requests)
    assert len(set(texts)) == 4
    assert judged_by(tiny_model_float64, tiny_tokenizer, 16).generate_until(requests) == texts
    ids = tiny_tokenizer("Ana has 3 pens.", return_tensors="pt")["input_ids"]
    for index, text in enumerate(texts):
        out: Any = tiny_model_float64.generate(
            ids, do_sample=True, max_new_tokens=16, seed=5 + index
        )
        assert tiny_tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"decoding": "evil"}, ValueError, "evil"),
        ({"max_gen_toks": 400}, ValueError, "max_gen_toks is 400"),
        ({"suppress_tokens": "all"}, RuntimeError, "no token with a finite score"),
    ],
)
def test_what_is_refused_ends_the_evaluation(
    tiny_model_float64: MRPForCausalLM,
    tiny_tokenizer: Any,
    given: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """At once, though another text is long; what was whole before is kept for another try."""
    if "suppress_tokens" in given:
        given = {"suppress_tokens": list(range(tiny_model_float64.config.vocab_size))}
    ours = judged_by(tiny_model_float64, tiny_tokenizer, 2, max_length=400)
    kept = []
    ours.cache_hook.add_partial = lambda *what: kept.append(what)
    whole = ("Ana has 3 pens. Bo gives Ana 4 more.", {"max_gen_toks": 4, "until": []})
    with pytest.raises(error, match=message):
        ours.generate_until(written(("x", given), whole), disable_tqdm=True)
    if error is RuntimeError:
        (what,) = kept
        assert what[:2] == ("generate_until", whole)
    ours.generate_until(written(whole), disable_tqdm=True)
