"""`score` of given texts: beside a loop of `forward` calls, one for each token."""

import pytest
import torch
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from tests.support.helpers import BLOCK, MASK, close, generate, left_padded, random_ids
from tests.support.random_cases import make_model

pytestmark = pytest.mark.usefixtures("exact_norms")
TEXTS = [random_ids(seed, length).tolist() for seed, length in enumerate((11, 4, 1, 16, 9))]


def slowly(model: MRPForCausalLM, text: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities [length] of a text, and which of its tokens are the likeliest: a forward
    for each token."""
    block, found = model.config.block_size, []
    for at in range(len(text)):
        end = (at // block + 1) * block
        logits = model(torch.tensor([[*text[:at], *[MASK] * (end - at)]])).logits[0, at]
        found.append(
            (logits / temperature).index_fill(0, torch.tensor([MASK]), -torch.inf).log_softmax(-1)
        )
    said = torch.stack(found)
    return said.gather(1, torch.tensor(text)[:, None])[:, 0], said.argmax(-1) == torch.tensor(text)


@pytest.fixture(scope="module")
def models() -> dict[int | str, MRPForCausalLM]:
    """By block size, and of families: one whose hidden states are those of the next position, and
    one with experts."""
    found: dict[int | str, MRPForCausalLM] = {
        block: make_model(block_size=block) for block in (BLOCK, 32)
    }
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return found | {
        "fast_dllm_v2": make_model(family="fast_dllm_v2"),
        "sdar_moe": make_model(family="sdar_moe", **sizes),
    }


@pytest.mark.parametrize(
    ("most", "side", "share"),
    [(1, "left", None), (512, "right", 0.6), (40, "left", 0.3), (9, "left", 0)],
)
@pytest.mark.parametrize("kind", [BLOCK, 32, "fast_dllm_v2", "sdar_moe"])
def test_a_forward_for_each_token_says_the_same(
    models: dict[int | str, MRPForCausalLM],
    kind: int | str,
    most: int,
    side: str,
    share: float | None,
) -> None:
    """Of all tokens, of some and of none, whatever stands in the padding; what is not scored is 0.
    One text is the model's."""
    model, temperature = models[kind], 1.0 if share is None else 0.7
    made = (
        generate(model, TEXTS[2:3], decoding="sequential", max_new_tokens=12).sequences[0].tolist()
    )
    inputs = left_padded(given := [*TEXTS, made], side)
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    scored = real & (
        torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
        < (1 if share is None else share)
    )
    # of what the model made the last token alone
    scored[-1] &= (real[-1].cumsum(0) == len(made)) | (share is None)
    labels = None if share is None else ids.masked_fill(~scored, -100)
    inputs["input_ids"] = ids.masked_fill(~real, -1)
    out = model.score(**inputs, labels=labels, temperature=temperature, tokens_per_forward=most)
    assert out.logprobs.dtype == torch.float64
    assert out.scored.equal(scored)
    assert out.logprobs[~scored].eq(0).all()
    for row, text in enumerate(given):
        slow, likeliest = slowly(model, text, temperature)
        asked = scored[row, real[row]]
        close(out.logprobs[row, real[row]], slow * asked)
        assert out.greedy[row, real[row]].equal(likeliest & asked)
        assert not out.greedy[row, ~real[row]].any()
        close(out.sums[row], slow[asked].sum())
        torch.testing.assert_close(
            out.perplexity[row], (-slow[asked].mean()).exp(), rtol=0, atol=1e-8, equal_nan=True
        )


def test_how_many_forwards_it_takes(models: dict[int | str, MRPForCausalLM]) -> None:
    """The text before the last scored block is read once, a state for each scored token: 16 of the
    longest row."""
    inputs = left_padded(TEXTS, "right")
    for most, forwards in (
        (512, (1, 1)),
        (5 * BLOCK * 4, (1, 4)),
        (5 * BLOCK, (3, 16)),
        (1, (3, 16)),
    ):
        found = models[BLOCK].score(**inputs, tokens_per_forward=most).forwards
        assert (found["prefill"], found["score"]) == forwards
    none = models[BLOCK].score(**inputs, labels=torch.full_like(inputs["input_ids"], -100))
    assert none.forwards == {"prefill": 0, "score": 0}


def test_other_weights() -> None:
    """Of bfloat16 the log-probabilities are float32 of the logits there; what is NaN is told."""
    out = make_model().bfloat16().score(torch.tensor(TEXTS[:1]))
    assert out.logprobs.dtype == torch.float32
    assert out.logprobs.lt(0).all()
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ValueError, match=r"token 0 of row 0 has no log-probability.*Load or train"):
        model.score(torch.tensor([[1, 2, 3]]))


def test_likeliest_tokens_of_each_state() -> None:
    """The likeliest is the scored token where that is `greedy`, and scores are those of texts that
    have the other token."""
    model = make_model()
    ids = torch.tensor([[0, 0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]])
    mask = (ids > 0).long()
    out = model.score(ids, mask, top_tokens=3)
    assert out.top_ids.shape == out.top_logprobs.shape == (2, 7, 3)
    assert ((out.top_ids[..., 0] == ids) & out.scored).equal(out.greedy)
    assert not out.top_logprobs[0, :2].any()
    other = ids.clone()
    other[1, 4] = out.top_ids[1, 4, 1]
    changed = model.score(other).logprobs[1, 4]
    assert torch.isclose(changed, out.top_logprobs[1, 4, 1])
    assert model.score(ids, mask).top_ids is None
    with pytest.raises(ValueError, match="top_tokens is 65: it must be an int from 0 to 64"):
        model.score(ids, mask, top_tokens=65)
