"""`score` of given texts: beside a loop of `forward` calls, one for each token, and beside what `generate` says of its text."""

import pytest
import torch
from conftest import make_model
from helpers import BLOCK, MASK, PROMPTS, close, generate, left_padded, random_ids
from refusals import rejected
from torch import Tensor

from modeling_mrp import MRPForCausalLM, MRPScoreOutput

pytestmark = pytest.mark.usefixtures("exact_norms")
TEXTS = [random_ids(seed, length).tolist() for seed, length in enumerate((11, 4, 1, 16, 9))]


def said(model: MRPForCausalLM, text: list[int], at: int, shown: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities [vocab] of the token at a position, whose block shows some positions: one call of `forward`."""
    block = model.config.block_size
    end = (at // block + 1) * block
    ids = [text[i] if i < end - block or i in shown else MASK for i in range(end)]
    logits = model(torch.tensor([ids])).logits[0, at].clone()
    logits[MASK] = -torch.inf
    return (logits / temperature).log_softmax(-1)


def slowly(model: MRPForCausalLM, text: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probabilities [length] of a text, a forward for each token."""
    return torch.stack([said(model, text, at, list(range(at)), temperature)[one] for at, one in enumerate(text)])


def batch(texts: list[list[int]], side: str, prompts: list[int] | None = None) -> dict[str, Tensor]:
    """Inputs of `score`, of which so many first tokens are not scored."""
    inputs = left_padded(texts, side)
    labels = inputs["input_ids"].clone()
    for row, (text, length) in enumerate(zip(texts, prompts or [0] * len(texts), strict=True)):
        begin = labels.shape[1] - len(text) if side == "left" else 0
        labels[row, begin : begin + length] = -100
    return inputs if prompts is None else {**inputs, "labels": labels}


@pytest.fixture(scope="module")
def models() -> dict[int | str, MRPForCausalLM]:
    """By block size, and of families: one whose hidden states are those of the next position, and one with experts."""
    found: dict[int | str, MRPForCausalLM] = {block: make_model(block_size=block) for block in (BLOCK, 32)}
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return found | {"fast_dllm_v2": make_model(family="fast_dllm_v2"), "sdar_moe": make_model(family="sdar_moe", **sizes)}


@pytest.mark.parametrize(("most", "side"), [(1, "left"), (512, "right")])
@pytest.mark.parametrize("kind", [BLOCK, 32, "fast_dllm_v2", "sdar_moe"])
def test_a_forward_for_each_token_says_the_same(
    models: dict[int | str, MRPForCausalLM], kind: int | str, most: int, side: str
) -> None:
    model, inputs = models[kind], batch(TEXTS, side)
    out = model.score(**inputs, tokens_per_forward=most)
    real = inputs["attention_mask"].bool()
    assert out.logprobs.dtype == torch.float64
    assert out.scored.equal(real)
    assert out.logprobs[~real].eq(0).all()
    for row, text in enumerate(TEXTS):
        slow = slowly(model, text)
        close(out.logprobs[row, real[row]], slow)
        close(out.sums[row], slow.sum())
        close(out.perplexity[row], (-slow.mean()).exp(), 1e-8)


def test_how_many_forwards_it_takes(models: dict[int | str, MRPForCausalLM]) -> None:
    """The text before the last scored block is read once, a state for each scored token: 16 of the longest row."""
    inputs = batch(TEXTS, "right")
    for most, forwards in ((512, (1, 1)), (5 * BLOCK * 4, (1, 4)), (5 * BLOCK, (3, 16)), (1, (3, 16))):
        found = models[BLOCK].score(**inputs, tokens_per_forward=most).forwards
        assert (found["prefill"], found["score"]) == forwards
    inputs = batch(TEXTS[:1], "right", [9])
    assert models[BLOCK].score(**inputs, tokens_per_forward=1).forwards == {"prefill": 2, "score": 2}


@pytest.mark.parametrize(
    ("attention", "decoding", "temperature"),
    [("eager", "sequential", 0.7), ("sdpa", "sequential", 1.0), ("sdpa", "mrp_spec", 0.7)],
)
def test_what_generate_reports_of_its_text(attention: str, decoding: str, temperature: float) -> None:
    """Of sampled texts behind prompts of three lengths, some with an end within a block."""
    model = make_model()
    model.set_attn_implementation(attention)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": 5, "eos_token_id": [*range(1, 12)]}
    target = {} if decoding == "sequential" else {"target": "sequential", "num_draft_states": 3}
    made = generate(
        model, PROMPTS, decoding=decoding, max_new_tokens=13, pad_token_id=0, output_scores=True, **target, **sampling
    )
    new = (made.reveal_step >= 0).sum(1).tolist()
    assert len(set(new)) > 1
    width = left_padded(PROMPTS)["input_ids"].shape[1]
    real = torch.cat([left_padded(PROMPTS)["attention_mask"], (made.reveal_step >= 0).long()], 1)
    labels = made.sequences.masked_fill(torch.arange(made.sequences.shape[1]) < width, -100)
    out = model.score(made.sequences, real, labels, temperature=temperature)
    close(out.logprobs[:, width:].float(), made.token_logprobs, 1e-6)
    told = model.compute_transition_scores(made.sequences, made.scores, normalize_logits=True)
    close(out.logprobs[:, width:], told, 1e-10 if attention == "sdpa" else 1e-6)  # eager attention has a softmax in float32


def test_greedy_texts_are_the_likeliest_token_by_token(models: dict[int | str, MRPForCausalLM]) -> None:
    model = models[BLOCK]
    made = generate(model, PROMPTS, decoding="sequential", max_new_tokens=9)
    real = torch.cat([left_padded(PROMPTS)["attention_mask"], torch.ones(3, 9, dtype=torch.long)], 1)
    labels = made.sequences.masked_fill(torch.arange(19) < 10, -100)
    assert model.score(made.sequences, real, labels).greedy[:, 10:].all()
    other = made.sequences.clone()
    other[0, 14] = 1 + other[0, 14] % 40
    out = model.score(other, real, labels.where(labels == -100, other))
    assert out.greedy[1:, 10:].all()
    assert not out.greedy[0, 14]
    assert not out.greedy[:, :10].any()
    labels = made.sequences.clone()
    labels[0, :-1] = -100  # of the others more are scored
    assert model.score(made.sequences, real, labels.where(real == 1, -100)).greedy[0].nonzero().tolist() == [[18]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_is_not_scored_changes_nothing(models: dict[int | str, MRPForCausalLM], side: str) -> None:
    """Prompts, and tokens between the scored ones: the others have what they have without labels, 0 stands there."""
    whole = models[BLOCK].score(**batch(TEXTS, side)).logprobs
    part = models[BLOCK].score(**batch(TEXTS, side, [6, 0, 1, 15, 3]))
    assert part.scored.sum(1).tolist() == [5, 4, 0, 1, 6]
    close(part.logprobs, whole * part.scored)
    assert part.sums[2] == 0
    assert part.perplexity[2].isnan()
    inputs = batch(TEXTS, side)
    inputs["labels"] = inputs["input_ids"].masked_fill(torch.arange(16) % 3 == 1, -100)
    holes = models[BLOCK].score(**inputs)
    close(holes.logprobs, whole * holes.scored)
    whole, inputs["labels"] = models[BLOCK].score(**batch(TEXTS, side)), inputs["input_ids"].clone()
    inputs["labels"][tuple(whole.greedy.nonzero()[0])] = -100
    but_one = models[BLOCK].score(**inputs)
    assert but_one.greedy.sum() == whole.greedy.sum() - 1
    none = models[BLOCK].score(inputs["input_ids"], labels=torch.full((5, 16), -100))
    assert not none.scored.any()
    assert none.logprobs.eq(0).all()
    assert none.forwards == {"prefill": 0, "score": 0}


def test_a_row_does_not_depend_on_its_neighbours(models: dict[int | str, MRPForCausalLM]) -> None:
    inputs = batch(TEXTS, "left")
    inputs["input_ids"].masked_fill_(inputs["attention_mask"] == 0, -1)
    together = models[BLOCK].score(**inputs)
    for row, text in enumerate(TEXTS):
        padded = torch.tensor([[55] * 3 + text + [-1] * 2])  # on both sides, whatever stands there
        real = torch.tensor([[0] * 3 + [1] * len(text) + [0] * 2])
        alone = models[BLOCK].score(padded, real)
        close(alone.logprobs[0, 3:-2], together.logprobs[row, -len(text) :])
        assert alone.logprobs[~real.bool()].eq(0).all()


def test_other_weights() -> None:
    """Of bfloat16 the log-probabilities are float32 of the logits there; what is NaN is told."""
    out = make_model().bfloat16().score(torch.tensor(TEXTS[:1]))
    assert isinstance(out, MRPScoreOutput)
    assert out.logprobs.dtype == torch.float32
    assert out.logprobs.lt(0).all()
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    rejected(lambda: model.score(torch.tensor([[1, 2, 3]])), "token 0 of row 0 has no log-probability", "Load or train")
