"""Random decodes: texts, steps, log-probabilities and counts are those of the slow reference, whatever the batch and the mode.

In float64 two tokens or positions whose scores agree to the last bits do not come up, so there is no false alarm: a
difference is a bug.
"""

import random
from typing import Any

import pytest
import torch
from helpers import StopAfter, close
from reference import Row, reference_decode
from torch import Tensor

from benchmarks.random_cases import decode_rows, random_case_model, random_drafting, random_infill, random_options
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS, DRAFTING, TARGETS
from modeling_mrp.networks import networks

SEEDS, CASES = 64, 6


def prompts_of(rng: random.Random, count: int, block: int) -> list[list[int]]:
    return [[rng.randrange(1, 50) for _ in range(rng.randint(1, 2 * block + 3))] for _ in range(count)]


COUNTS = ("row_forwards", "row_head_forwards", "drafted", "accepted", "revoked")
TABLES = ("accepted_lengths", "offered_at_depth", "accepted_at_depth")


def assert_same_counts(out: Any, place: int, told: Row, case: Any) -> None:
    """What a row cost, and by depth what its drafts came to."""
    expected = (told.row_forwards, told.row_head_forwards, told.drafted, told.accepted, len(told.revocations))
    assert [getattr(out.stats, name)[place].item() for name in COUNTS] == [*expected], case
    if not told.lengths:
        return
    lengths, offered, accepted = (getattr(out.stats, name)[place].tolist() for name in TABLES)
    assert lengths == [told.lengths.count(length) for length in range(len(lengths))], case
    assert offered == [sum(most > k for most, _ in told.depths) for k in range(len(offered))], case
    assert accepted == [sum(depth > k for _, depth in told.depths) for k in range(len(accepted))], case


def compare(
    model: MRPForCausalLM,
    rng: random.Random,
    prompts: list[list[int]],
    infill: Tensor | None,
    options: dict[str, Any],
    counted: bool,
    **others: Any,
) -> Any:
    """Decodes the batch fast and each row slowly; returns the output and the texts."""
    side, seeds = rng.choice(("left", "right")), [rng.randrange(1 << 62) for _ in prompts]
    case = (prompts, infill, options, model.config.block_size)
    criteria: dict[str, Any] = {}
    if (stop := options.pop("stop_behind", None)) is not None:
        criteria = {"stopping_criteria": [StopAfter(stop)]}
        options = {**options, "stop": lambda ids: ids[-1] == stop}
    fast = {name: value for name, value in options.items() if name != "stop"}
    rows, out = decode_rows(
        model, prompts, side, infill, seed=seeds, pad_token_id=0, output_scores=True, **fast, **criteria, **others
    )
    texts = []
    for place, (row, prompt, seed) in enumerate(zip(rows, prompts, seeds, strict=True)):
        slow = options | {"num_draft_states": 4} if options.get("num_draft_states") == "auto" else options
        told = reference_decode(model, prompt, () if infill is None else infill[place].tolist(), seed=seed, **slow)
        count = len(told.tokens)
        assert row["tokens"][:count] == told.tokens, (place, case)
        assert row["steps"][:count] == told.reveal_step, (place, case)
        assert set(row["steps"][count:]) <= {-1}, (place, case)
        torch.testing.assert_close(row["logprobs"][:count].double(), torch.tensor(told.logprobs).double(), rtol=0, atol=1e-5)
        for column, step in enumerate(told.reveal_step):
            if step >= 0:
                close(out.scores[column][place], told.drawn[len(prompt) + column], 1e-9)
        if counted:
            assert_same_counts(out, place, told, (place, case))
            revoked = [(column, token) for row, column, token in out.stats.revocations.tolist() if row == place]
            assert revoked == told.revocations, (place, case)
        texts.append(told.tokens)
    return out, texts


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_decodes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    model = random_case_model(rng)
    block = model.config.block_size
    chunk = rng.choice((8, networks.PREFILL_CHUNK))
    monkeypatch.setattr(networks, "PREFILL_CHUNK", chunk)
    for trial in range(CASES if block < 32 else CASES // 3):
        mode = DECODINGS[(seed + trial) % len(DECODINGS)]
        options = {"decoding": mode, **random_options(rng, block, sampled=rng.random() < 0.5)}
        if mode in DRAFTING:
            options |= {"target": rng.choice(TARGETS), **random_drafting(rng)}
        if rng.random() < 0.2:
            options["stop_behind"] = rng.randrange(1, 50)
        prompts = prompts_of(rng, rng.randint(1, 4), block)
        infill = random_infill(rng, len(prompts), options["max_new_tokens"])
        counted = chunk > 8 and options.get("num_draft_states") != "auto"
        out, texts = compare(model, rng, prompts, infill, dict(options), counted)
        if rng.random() < 0.5:  # go on behind the answers, some of which are cut
            said = [
                prompt + text[: rng.randint(0, len(text))] + prompts_of(rng, 1, 4)[0]
                for prompt, text in zip(prompts, texts, strict=True)
            ]
            other = {"decoding": rng.choice((mode, *DECODINGS)), **({} if mode in DRAFTING else random_drafting(rng))}
            infill = random_infill(rng, len(prompts), options["max_new_tokens"])
            compare(model, rng, said, infill, options | other, False, past_key_values=out.past_key_values)
