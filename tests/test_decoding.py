"""The loop against the slow reference decoder, against itself at other batch sizes, and speculation against `static`."""

import itertools
import random
from typing import Any

import pytest
import torch
from conftest import make_model
from reference import reference_decode

from benchmarks.random_cases import batch_of, dampened
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import REMASK_RULES

BACKBONE_MODES = ("static", "dynamic", "sequential", "entropy_bound")
ALL_MODES = (*BACKBONE_MODES, "self_spec", "mrp_direct", "mrp_spec", "mrp_remask")
COSTS = ("row_forwards", "row_head_forwards", "drafted", "accepted", "revoked", "accepted_lengths")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 0},
    {"do_sample": True, "temperature": 1.0, "top_k": 5},
    {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.8},
)


def decode(
    model: MRPForCausalLM, prompts: list[list[int]], side: str = "left", **options: Any
) -> list[tuple[list[int], list[int], list[float], list[Any]]]:
    """(tokens, reveal steps, log-probabilities, what it cost) of every row."""
    inputs = batch_of(prompts, side)
    out = model.generate(**inputs, return_dict_in_generate=True, **options)
    generated = out.sequences[:, inputs["input_ids"].shape[1] :]
    rows = []
    costs = zip(*(getattr(out.stats, name).tolist() for name in COSTS), strict=True)
    for tokens, steps, logprobs, cost in zip(generated, out.reveal_step, out.token_logprobs, costs, strict=True):
        n = int((steps >= 0).sum())
        rows.append((tokens[:n].tolist(), steps[:n].tolist(), logprobs[:n].tolist(), list(cost)))
    return rows


def random_prompts(rng: random.Random, count: int, longest: int = 23) -> list[list[int]]:
    return [[rng.randrange(1, 50) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def reference_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("eos_token_id", "max_new_tokens", "decoding")}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=("greedy", "sampled", "top_k", "top_p"))
@pytest.mark.parametrize("mode", [*BACKBONE_MODES, "mrp_direct", *(f"mrp_remask-{rule}" for rule in REMASK_RULES)])
def test_equals_the_reference(mode: str, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modeling_mrp.runner.runner.PREFILL_CHUNK", 9)  # no multiple of a block
    rng = random.Random(f"{mode}{sampling}")
    for trial, block in enumerate((4, 8, 16)):
        model = make_model(trial, block_size=block)
        decoding, _, rule = mode.partition("-")
        options: dict[str, Any] = {
            "decoding": decoding,
            "max_new_tokens": rng.randint(1, 30),
            "denoising_steps": rng.choice((None, None, 1, 3, block)),
            "confidence_threshold": rng.choice((0.02, 0.1, 0.5)),
            "entropy_threshold": rng.choice((1.0, 6.0)),
            "mrp_steps": rng.choice((1, 2, 3)),
            "remask_rule": rule or "reread",
            "residual_delta": rng.choice((0.2, 1.0)),
            **sampling,
        }
        eos = rng.choice(([], [7, 11, 13], list(range(1, 20))))
        prompts = random_prompts(rng, 3)
        got = decode(model, prompts, rng.choice(("left", "right")), eos_token_id=eos or None, seed=trial, **options)
        for row, prompt in enumerate(prompts):
            expected = reference_decode(
                model, prompt, decoding, options["max_new_tokens"], eos_ids=eos, seed=trial + row, **reference_options(options)
            )
            assert got[row][0] == expected.tokens, (trial, row, options)
            assert got[row][1] == expected.reveal_step
            assert got[row][2] == pytest.approx(expected.logprobs, abs=1e-5)
            assert got[row][3][COSTS.index("revoked")] == expected.revoked


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=("greedy", "sampled", "top_k", "top_p"))
@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_speculation_is_lossless_on_random_weights(mode: str, sampling: dict[str, Any]) -> None:
    """Nearly every draft is wrong, or, where tokens look at each other but a little, about every other one; tokens, steps and
    log-probabilities must still be those of `static`. Every block size with both kinds of weights; `test_fuzz.py` has more."""
    rng = random.Random(f"{mode}{sampling}")
    for trial, (block, factor) in enumerate(itertools.product((4, 8, 16, 32), (1.0, rng.choice((0.3, 0.05))))):
        model = dampened(make_model(trial, block_size=block, hidden_size=16, num_hidden_layers=1), factor)
        options: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 40),
            "denoising_steps": rng.choice((None, None, 1, 2, 3)),
            "eos_token_id": rng.choice((None, [3, 5], list(range(1, 12)))),
            "seed": trial,
            **sampling,
        }
        prompts = random_prompts(rng, rng.choice((1, 3, 8)), 40)
        static = decode(model, prompts, "left", decoding="static", **options)
        side = rng.choice(("left", "right"))
        options |= {"num_draft_states": rng.randint(1, 8), "draft_branches": rng.choice((1, 2, 3, 5))}
        drafted = decode(model, prompts, side, decoding=mode, **options)
        for a, b in zip(static, drafted, strict=True):
            assert a[:2] == b[:2], (trial, options)
            assert a[2] == pytest.approx(b[2], abs=1e-5)


@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_exact_ties_may_swap_in_order_only(mode: str) -> None:
    """Where attention adds nothing all masks are equal, and a product's last bits order them, which depend on its shape: the
    limit of "lossless" (README). The tokens are the same, and so are their log-probabilities."""
    for trial, block in enumerate((4, 8, 16)):
        model = dampened(make_model(trial + 4, block_size=block), 0.0)
        prompts = random_prompts(random.Random(trial), 6)
        static, drafted = (
            decode(model, prompts, decoding=decoding, max_new_tokens=30, eos_token_id=None, num_draft_states=5)
            for decoding in ("static", mode)
        )
        for a, b in zip(static, drafted, strict=True):
            assert a[0] == b[0]
            assert a[2] == pytest.approx(b[2], abs=1e-12)


@pytest.mark.parametrize("chunk", [8, 2048])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_batch_invariance(mode: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row gets and what it cost do not depend on its neighbours, their order or the padding; in small and large chunks
    of the prompt."""
    monkeypatch.setattr("modeling_mrp.runner.runner.PREFILL_CHUNK", chunk)
    rng = random.Random(mode)
    for trial, sampling in enumerate(SAMPLINGS):
        model = dampened(make_model(trial), (1.0, 0.3)[trial % 2])
        prompts = random_prompts(rng, 8, 30)
        options = {
            "decoding": mode,
            "max_new_tokens": 19,
            "confidence_threshold": 0.06,
            "entropy_threshold": 4.0,
            "eos_token_id": [9],
            **sampling,
        }
        together = decode(model, prompts, "left", seed=list(range(8)), **options)
        order = rng.sample(range(8), 8)
        shuffled = decode(model, [prompts[i] for i in order], "right", seed=order, **options)
        for place, row in enumerate(order):
            assert shuffled[place][:2] == together[row][:2]
            assert shuffled[place][3] == together[row][3]
        for row in order[:3]:
            alone = decode(model, [prompts[row]], seed=row, **options)[0]
            assert alone[:2] == together[row][:2]
            assert alone[3] == together[row][3]


def test_shorter_limits_give_prefixes(random_model: MRPForCausalLM) -> None:
    prompts = random_prompts(random.Random(0), 4)
    longest = decode(random_model, prompts, decoding="static", max_new_tokens=21)
    for limit in (1, 2, 5, 8, 13):
        for shorter, longer in zip(
            decode(random_model, prompts, decoding="mrp_spec", max_new_tokens=limit), longest, strict=True
        ):
            assert shorter[0] == longer[0][:limit]


def test_static_costs_one_forward_a_token(random_model: MRPForCausalLM) -> None:
    """Prefill scores the first state, a clean block's KV rides with the next block's first state: no forward is extra."""
    ids = torch.arange(1, 9)[None]
    out = random_model.generate(ids, decoding="static", max_new_tokens=12, return_dict_in_generate=True)
    assert out.stats.forwards == {"prefill": 1, "denoise": 11, "verify": 0, "head": 0}
    assert out.tokens_per_forward.tolist() == [1.0]
    assert sorted(out.reveal_step[0].tolist()) == list(range(12))


def test_a_perfect_drafter_accepts_everything() -> None:
    """With one layer of attention off and a head that adds nothing, stale logits are right wherever masks do not interact."""
    model = make_model()
    for layer in model.model.layers:  # positions no longer look at each other, so a reveal changes nothing
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    out = model.generate(
        torch.tensor([[1, 2, 3, 4]]),
        decoding="self_spec",
        num_draft_states=5,
        draft_branches=1,
        max_new_tokens=12,
        return_dict_in_generate=True,
    )
    # Block 4, K = 5: prefill sees all masks; then [1, 2, 3 masks gone, clean, next all-mask] in one forward per block;
    # the last block needs 3 states before its text is known.
    assert out.stats.forwards == {"prefill": 1, "denoise": 0, "verify": 3, "head": 0}
    assert out.stats.accepted_lengths[:, :6].tolist() == [[0, 0, 0, 1, 0, 2]]
    assert out.stats.drafted.tolist() == [3 + 3 + 2] == out.stats.accepted.tolist()
    assert out.tokens_per_forward.tolist() == [3.0]


def test_the_mask_id_is_never_emitted() -> None:
    model = make_model()
    with torch.no_grad():  # make the mask id the favourite everywhere
        model.lm_head.weight[60] = 50 * model.lm_head.weight.abs().mean(0)
    for mode in ALL_MODES:
        for sampling in SAMPLINGS:
            tokens = model.generate(torch.tensor([[1, 2, 3]]), decoding=mode, max_new_tokens=9, **sampling)
            assert 60 not in tokens[0].tolist()


def test_the_model_keeps_nothing_of_a_call(random_model: MRPForCausalLM) -> None:
    before = set(vars(random_model)) | set(vars(random_model.generation_config))
    config = random_model.generation_config.to_dict()
    random_model.generate(torch.tensor([[1, 2]]), decoding="mrp_spec", max_new_tokens=5, do_sample=True, temperature=0.5)
    assert set(vars(random_model)) | set(vars(random_model.generation_config)) == before
    assert random_model.generation_config.to_dict() == config


@pytest.mark.parametrize("mode", ALL_MODES)
def test_processors_see_the_committed_blocks(mode: str, random_model: MRPForCausalLM) -> None:
    """Every set of ids a logits processor sees is a prefix of some row's text, cut at a block (or a draft of it)."""
    seen: list[list[int]] = []

    def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(input_ids) == len(scores)
        seen.extend(input_ids.unique(dim=0).tolist())
        return scores

    prompts = random_prompts(random.Random(5), 3)
    rows = decode(random_model, prompts, decoding=mode, max_new_tokens=17, confidence_threshold=0.1, logits_processor=[record])
    texts = [prompt + tokens for prompt, (tokens, *_) in zip(prompts, rows, strict=True)]
    for ids in seen:
        assert len(ids) % 4 == 0
        assert 60 not in ids
        assert any(text[: len(ids)] == ids for text in texts) or mode in ("mrp_spec", "self_spec")
    assert max(map(len, seen)) >= max(map(len, texts)) - 4


def test_speculation_with_processors_is_lossless(random_model: MRPForCausalLM) -> None:
    prompts = random_prompts(random.Random(6), 4)
    options = {"max_new_tokens": 25, "repetition_penalty": 1.3, "bad_words_ids": [[7], [9]]}
    static = decode(random_model, prompts, decoding="static", **options)
    assert [row[:2] for row in decode(random_model, prompts, decoding="mrp_spec", num_draft_states=5, **options)] == [
        row[:2] for row in static
    ]
    assert static != decode(random_model, prompts, decoding="static", max_new_tokens=25)
