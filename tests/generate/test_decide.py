"""`decide`: typed answers by the probabilities of labels, beside a forward for each state; and what
reads next tokens where none are predicted is refused."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from tests.support.languages import EOS, TEXTS, letters_tokenizer
from tests.support.random_cases import make_model

TOKENIZER = letters_tokenizer()
MODELS = {
    4: make_model(4, block_size=4),
    16: make_model(16, block_size=16),
    "fast_dllm_v2": make_model(family="fast_dllm_v2"),
}
for deciding_model in MODELS.values():
    deciding_model.generation_config.eos_token_id = EOS


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def log_probs_at(model: MRPForCausalLM, text: list[int], position: int) -> Tensor:
    """The log-probabilities [vocab] at a masked position of a text: one forward, to the block's
    end."""
    block, mask = model.config.block_size, model.config.mask_token_id
    text = text[: (position // block + 1) * block]
    text = text + [mask] * (-len(text) % block)
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, position]
    logits[mask] = -torch.inf
    return logits.log_softmax(-1)


def slowly(model: MRPForCausalLM, text: list[int], start: int, label: list[int]) -> float:
    """The log-probability of a label at a place, whose masks are in the text: a forward for each
    token."""
    total = 0.0
    text = list(text)
    for index, token in enumerate(label):
        total += log_probs_at(model, text, start + index)[token].item()
        text[start + index] = token
    return total


def checked(shares: dict[Any, float], log_probs: dict[Any, float], mass: float) -> None:
    """Compare probabilities of answers, and their sum, to log-probabilities of their labels."""
    total = sum(math.exp(value) for value in log_probs.values())
    assert mass == pytest.approx(total, rel=1e-9)
    for answer, value in log_probs.items():
        assert shares[answer] == pytest.approx(math.exp(value) / total, rel=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [4, 16, "fast_dllm_v2"])
def test_a_forward_for_each_state_says_the_same(kind: int | str, side: str) -> None:
    """Two questions, in one block or in two, of prompts of several lengths; labels of one token and
    of two; the text behind a place is shown."""
    model = MODELS[kind]
    block, mask = model.config.block_size, model.config.mask_token_id
    prompts = [ids_of("ab-"), ids_of("c0"), ids_of("9-a-b9-a-c0")]
    width = max(map(len, prompts))
    padded, real = [], []
    for prompt in prompts:
        fill = [7] * (width - len(prompt))
        padded.append(fill + prompt if side == "left" else prompt + fill)
        ones, zeros = [1] * len(prompt), [0] * len(fill)
        real.append(zeros + ones if side == "left" else ones + zeros)
    questions = {"one": ["a", "b", "0"], "two": ["ee", "fd", "de", "ff"]}
    form = "-{one}+{two}g"
    out = model.decide(
        torch.tensor(padded),
        torch.tensor(real),
        questions=questions,
        form=form,
        tokenizer=TOKENIZER,
    )
    forwards = []
    for row, prompt in enumerate(prompts):
        first = len(prompt) + 1
        second = first + 2
        text = [*prompt, *ids_of("-"), mask, *ids_of("+"), mask, mask, *ids_of("g")]
        log_probs: dict[Any, float] = {}
        for answer in questions["one"]:
            log_probs[answer] = slowly(model, text, first, ids_of(answer))
        checked(out.probabilities[row]["one"], log_probs, out.mass[row]["one"])
        assert out.answers[row]["one"] == max(log_probs, key=log_probs.__getitem__)
        together = first // block == (second + 1) // block
        forwards.append(1 if together else 2)
        if not together:  # behind the first answer
            text[first] = ids_of(out.answers[row]["one"])[0]
        log_probs = {}
        for answer in questions["two"]:
            log_probs[answer] = slowly(model, text, second, ids_of(answer))
        checked(out.probabilities[row]["two"], log_probs, out.mass[row]["two"])
    assert out.forwards == max(forwards)
    assert kind == 16 or len(set(forwards)) == 2


def test_answers_have_types() -> None:
    """Yes or no, a digit, two digits; of unequal lengths at the end of a form, with an eos."""
    model = MODELS[16]
    prompt = torch.tensor([ids_of("ab")])
    out = model.decide(prompt, questions={"count": range(10)}, tokenizer=TOKENIZER)
    assert out.answers[0]["count"] in range(10)
    assert sum(out.probabilities[0]["count"].values()) == pytest.approx(1)
    pairs = model.decide(prompt, questions={"count": range(30, 40)}, tokenizer=TOKENIZER)
    assert pairs.answers[0]["count"] in range(30, 40)
    mask = model.config.mask_token_id
    text = [*ids_of("ab"), mask, mask, mask]
    numbers = model.decide(prompt, questions={"n": range(8, 12)}, tokenizer=TOKENIZER)
    log_probs: dict[Any, float] = {}
    for number in range(8, 12):
        label = [*ids_of(str(number)), EOS][:3]
        label += [EOS] * (3 - len(label))
        log_probs[number] = slowly(model, text, 2, label)
    checked(numbers.probabilities[0]["n"], log_probs, numbers.mass[0]["n"])
    assert numbers.forwards == 1


def test_yes_or_no(tiny_model: MRPForCausalLM, tiny_tokenizer: Any) -> None:
    prompt = tiny_tokenizer("Ana has 3 pens. Bo has 2 pens. Is it so?", return_tensors="pt")
    out = tiny_model.decide(
        **prompt, questions={"so": bool}, form=" {so}", tokenizer=tiny_tokenizer
    )
    assert out.answers[0]["so"] in (True, False)
    assert set(out.probabilities[0]["so"]) == {True, False}


def test_the_embedded_checkpoint_answers_four_questions(
    tiny_model: MRPForCausalLM, tiny_tokenizer: Any
) -> None:
    task = "Ana has 3 pens. Bo gives Ana 4 more. Ana loses 2. How many pens does Ana have?"
    inputs = tiny_tokenizer.apply_chat_template(
        [{"role": "user", "content": task}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    form = "The pens are n.\nn = 3 + 4 = {a}\nn = {b} - 2 = {c}\n#### {d}"
    out = tiny_model.decide(
        **inputs,
        questions={name: range(10) for name in "abcd"},
        form=form,
        tokenizer=tiny_tokenizer,
    )
    assert out.answers == [{"a": 7, "b": 7, "c": 5, "d": 5}]
    assert min(max(shares.values()) for shares in out.probabilities[0].values()) > 0.99
    assert out.forwards == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"questions": {"a": "ab"}}, "questions has 'ab' for 'a': give a list"),
    ({"questions": {"a": int}}, "give a list of texts, bool for yes or no, or a range"),
    ({"questions": {"a": []}}, "give texts, all different"),
    ({"questions": {"a": ["a", "a"]}}, "give texts, all different"),
    ({"questions": {"a": ["a"], "b": ["b"]}}, "without a form: pass form="),
    ({"questions": {"a": ["a"]}, "form": "{b}"}, r"places for \['b'\] and questions are \['a'\]"),
    ({"questions": {"a": ["a", "-b-"]}, "form": "{a}."}, "from 1 to 3 tokens"),
    ({"questions": {"a": range(1000, 10000)}}, "beginnings, each a state"),
    ({"questions": {"a": ["a"]}, "temperature": 0}, "temperature is 0"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_questions_that_cannot_be_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MODELS[16].decide(torch.tensor([[5, 6, 7]]), tokenizer=TOKENIZER, **options)


def test_a_model_in_training_does_not_decide() -> None:
    model = make_model()
    model.train()
    with pytest.raises(ValueError, match="training mode"):
        model.decide(torch.tensor([[5]]), questions={"a": ["a"]}, tokenizer=TOKENIZER)


def test_weights_that_are_not_numbers() -> None:
    model = make_model(block_size=4)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="have no probability"):
        model.decide(torch.tensor([[5]]), questions={"a": TEXTS[:3]}, tokenizer=TOKENIZER)


def test_transformers_own_pipeline_is_refused(
    tiny_model: MRPForCausalLM, tiny_tokenizer: Any
) -> None:
    """It reads the logits of the last token of a prompt as those of the next one. Its server's
    /v1/systemone calls it."""
    decision = pytest.importorskip("transformers.pipelines.decision", reason="a newer transformers")
    # which adds tokens to its tokenizer
    tokenizer = copy.deepcopy(tiny_tokenizer)
    decide = decision.DecisionPipeline(model=tiny_model, tokenizer=tokenizer)
    questions = {"many": {"type": "noul", "instructions": "Are there more than 3?"}}
    labels = {"noul": ["A", "B"]}
    decide.decision_config.labels = labels
    with pytest.raises(ValueError, match=r"pipeline\('decision'\).*call model\.decide"):
        decide({"state": "Ana has 4 pens.", "questions": questions})
