"""`output_scores` and `output_logits`: of each new token what it was drawn from; `test_fuzz` compares it with the reference."""

from typing import Any

import pytest
import torch
from helpers import LIVELY, MASK, MODES, PROMPTS, VOCAB, close, generate

from modeling_mrp import MRPForCausalLM

BOTH = {"output_scores": True, "output_logits": True}
INFILL = torch.tensor([[MASK, 9, MASK, MASK, MASK, 7, MASK], [5, 6, 7, 8, 9, MASK, MASK], [MASK] * 7])
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {**LIVELY, "temperature": 0.7},
    "processed": {**LIVELY, "repetition_penalty": 1.5, "suppress_tokens": [3], "min_new_tokens": 4},
    "banned": {**LIVELY, "bad_words_ids": [[i, j] for i in range(1, 8) for j in range(8)], "no_repeat_ngram_size": 2},
    "given": {**LIVELY, "infill_ids": INFILL, "no_repeat_ngram_size": 1},
    "truncated": {**LIVELY, "top_k": 5, "typical_p": 0.7},
}


@pytest.mark.parametrize(("case", "mode"), [(case, MODES[-1 - place]) for place, case in enumerate(CASES)])
def test_a_score_for_each_new_token(random_model: MRPForCausalLM, case: str, mode: str) -> None:
    """Normalized they are the log-probabilities of `token_logprobs`; what stands in padding or was given is certain."""
    options = {"decoding": mode, "max_new_tokens": 11, "seed": 3, "eos_token_id": [*range(1, 12)], **CASES[case]}
    out = generate(random_model, PROMPTS, pad_token_id=55, **options, **BOTH)
    new = out.sequences[:, 10:]
    for given in (out.scores, out.logits):
        assert isinstance(given, tuple)
        assert [part.shape for part in given] == [(3, VOCAB)] * new.shape[1]
        assert torch.stack(given)[..., MASK].eq(-torch.inf).all()
    if case != "truncated":  # which the log-probabilities are before
        drawn = random_model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        close(drawn.float(), out.token_logprobs, 1e-6)
    told = out.reveal_step < 0
    scores = torch.stack(out.scores, 1)
    assert scores[told].exp().sum(-1).eq(1).all()
    assert scores[told].argmax(-1).equal(new[told])
    assert scores.isfinite().sum(-1).amax() <= (options.get("top_k") or VOCAB - 1)
    assert torch.stack(out.logits, 1)[~told].isfinite().sum(-1).eq(VOCAB - 1).all()
    if not options.get("do_sample"):
        assert scores.argmax(-1).equal(new)
    if case in ("greedy", "sampled"):
        close(scores[~told], torch.stack(out.logits, 1)[~told] / options.get("temperature", 1.0))
    plain = generate(random_model, PROMPTS, pad_token_id=55, **options)
    assert plain.sequences.equal(out.sequences)
    assert plain.scores is plain.logits is None


def test_scores_and_logits_by_hand(random_model: MRPForCausalLM) -> None:
    """Of the token that the first step reveals, from `forward` at the prompt's state."""
    out = generate(random_model, PROMPTS[:1], max_new_tokens=3, do_sample=True, temperature=0.5, top_k=2, seed=1, **BOTH)
    first = int(out.reveal_step[0].argmin())
    logits = random_model(torch.tensor([PROMPTS[0] + [MASK] * 3])).logits[0, len(PROMPTS[0]) + first]
    logits[MASK] = -torch.inf
    close(out.logits[first][0], logits)
    close(out.scores[first][0], (logits / 0.5).masked_fill(logits < logits.topk(2).values[1], -torch.inf))


def test_one_of_them_and_none_to_be_drawn(random_model: MRPForCausalLM) -> None:
    out = generate(random_model, PROMPTS, max_new_tokens=3, output_logits=True)
    assert out.scores is None
    assert len(out.logits) == 3
    given = torch.tensor([[5, 6, 7]])
    out = generate(random_model, [[1, 2, 3]], infill_ids=given, **BOTH)
    assert torch.stack(out.scores, 1).argmax(-1).equal(given)
    assert torch.stack(out.logits, 1).isfinite().sum() == 3
