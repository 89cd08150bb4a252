"""What drafting comes to in whole decodes: what it costs, the head's chain, and what never happens."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import MASK
from mrp_trainer.data import encode
from mrp_trainer.evaluate import pad_left
from mrp_trainer.tasks import make_problem
from test_decoding import dampened, decode, random_prompts
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate import generation, loop
from modeling_mrp.generate.decode_state import DecodeState, RoundPlan
from modeling_mrp.kernels.grow import DraftTable
from modeling_mrp.rules import drafting
from modeling_mrp.rules.drafting import DRAFT_STEP, Draft
from modeling_mrp.rules.states import Memory, Scored, States


def test_one_draft_state_drafts_nothing(random_model: MRPForCausalLM) -> None:
    """Whatever the other rows do, also where a neighbour's clean block makes the round two states wide."""
    prompts = random_prompts(random.Random(0), 4)
    for mode in ("mrp_spec", "self_spec"):
        rows = decode(random_model, prompts, decoding=mode, num_draft_states=1, max_new_tokens=21, eos_token_id=None)
        static = decode(random_model, prompts, decoding="static", max_new_tokens=21, eos_token_id=None)
        assert [row[3][:4] for row in rows] == [row[3][:4] for row in static]


Round = tuple[DecodeState, RoundPlan, Draft, int]  # where it begins, its plan, its draft, and the head passes that took


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes decodes remember nothing of the last round."""
    memory_of = loop.memory_of

    def nothing(scored: Scored, keep: Tensor, ahead: Tensor) -> Memory:
        return memory_of(scored, torch.zeros_like(keep), ahead)

    return lambda: monkeypatch.setattr(loop, "memory_of", nothing)


@torch.no_grad()
@pytest.mark.parametrize("states_at_most", [2, 4])
def test_a_chain_accumulates_the_heads_residuals(
    states_at_most: int, random_model: MRPForCausalLM, forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K - 1 passes acc_0 is what the backbone said at the last accepted state, acc_k = acc_{k-1} + Head(x^(k), acc_{k-1}),
    and x^(k+1) is drafted from acc_k. No remembered state leads further here."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    rounds: list[int] = []
    draft_states = loop.draft_states

    class Noted(loop.HeadPasses):
        def __call__(self, states: States, hidden: Tensor, blocked: Tensor | None = None) -> Tensor:
            residual = super().__call__(states, hidden, blocked)
            calls.append((states.ids[0], hidden[0], residual[0]))
            return residual

    def drafted(task: loop.Task, head: loop.HeadPasses, state: DecodeState, successor: States, plan: RoundPlan) -> Draft:
        begun = len(calls)
        draft = draft_states(task, head, state, successor, plan)
        made = calls[begun:] if plan.drafting else []
        for k, (ids, hidden, residual) in enumerate(made):
            expected = state.seed.hidden[0] if k == 0 else made[k - 1][1][-1] + made[k - 1][2][-1]
            torch.testing.assert_close(hidden[-1], expected)
            if plan.masks > 1 and MASK in ids[-1] and k + 1 < draft.valid.shape[1]:
                after = draft.states.map(lambda t, k=k: t[:, k : k + 1])  # type: ignore[misc]
                assert torch.equal(ids[-1], after.ids[0, 0])
                token, odds = task.reader.estimates(after, (hidden + residual)[-1][None, None], state.text)
                best = torch.arange(task.block_size) == odds.argmax()
                token = token[..., 0]
                if bool(draft.valid[0, k + 1]):
                    assert torch.equal(torch.where(best, token, after.ids)[0, 0], draft.states.ids[0, k + 1])
            assert residual.abs().max() > 1e-3
        rounds.append(len(made))
        return draft

    forgetful()
    monkeypatch.setattr(loop, "HeadPasses", Noted)
    monkeypatch.setattr(loop, "draft_states", drafted)
    options = {"num_draft_states": states_at_most, "draft_passes": states_at_most - 1, "max_new_tokens": 14}
    random_model.generate(torch.tensor([[1, 2, 3, 4]]), decoding="mrp_spec", draft_branches=1, eos_token_id=None, **options)
    assert max(rounds) == states_at_most - 1
    assert rounds.count(states_at_most - 1) > 3


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Every round from now on."""
    noted: list[Round] = []
    draft_states = loop.draft_states

    def drafted(task: loop.Task, head: loop.HeadPasses, state: DecodeState, successor: States, plan: RoundPlan) -> Draft:
        before = head.runner.forwards["head"]
        draft = draft_states(task, head, state, successor, plan)
        noted.append((state, plan, draft, head.runner.forwards["head"] - before))
        return draft

    monkeypatch.setattr(loop, "draft_states", drafted)
    monkeypatch.setattr(generation, "fewest_rows", lambda model, recorded, rows: rows)  # every row keeps its place
    return noted


@pytest.mark.parametrize(("mode", "passes"), [("self_spec", 1), ("mrp_spec", 1), ("mrp_spec", 4)])
@pytest.mark.parametrize("branches", [1, 3])
def test_no_state_is_scored_twice_in_neighbouring_rounds(mode: str, passes: int, branches: int, drafts: list[Round]) -> None:
    """But for what could not be kept: clean states, whose KV is gone, and blocks behind a clean state."""
    rng = random.Random(mode)
    wide = 0
    for trial in range(4):
        drafts.clear()
        model = dampened(make_model(trial, block_size=8), (1.0, 0.3)[trial % 2])
        ids = torch.tensor([[rng.randrange(1, 50) for _ in range(11)] for _ in range(3)])
        options: dict[str, Any] = {"num_draft_states": 5, "draft_branches": branches, "draft_passes": passes}
        options |= {"seed": trial, "do_sample": trial % 3 == 1, "eos_token_id": None, "max_new_tokens": 22}
        model.generate(ids, decoding=mode, **options)
        before: list[set[Any]] = [set(), set(), set()]
        for state, _, draft, _ in drafts:
            for row in range(3):
                now = [tuple(name) for name in draft.states.name[row, draft.valid[row]].tolist()]  # ids, start, parent
                assert bool(state.current.valid[row]) == bool(now)
                assert len(set(now)) == len(now)
                assert not set(now) & before[row]
                behind_none = [name for name in now if name[-1] == -1]
                before[row] = {name for name in behind_none if MASK in name[:-2]}
                left = [name[:-2].count(MASK) for name in behind_none]
                wide += len(set(left)) < len(left)  # two states with as many masks: not a chain
    assert (wide > 0) == (branches > 1)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 0, "seed": 5}], ids=["greedy", "sampled"])
def test_a_chain_that_is_always_right_is_the_fewest_forwards(sampling: dict[str, Any]) -> None:
    """Tokens do not look at each other here, so stale logits are right about every token and every order; where tokens are
    sampled, the noise of a draft is that of its own state."""
    model = make_model(block_size=8)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    prompt = torch.tensor([[1] * 8])
    forwards = {}
    for branches in (1, 3):
        options = {"num_draft_states": 3, "draft_branches": branches, "max_new_tokens": 16, "eos_token_id": None, **sampling}
        out = model.generate(prompt, decoding="self_spec", return_dict_in_generate=True, **options)
        forwards[branches] = out.stats.forwards["verify"] + out.stats.forwards["denoise"]
        assert int(out.stats.accepted_lengths.sum()) == forwards[branches]
    # Behind prefill 8 states of the first block and the next one's first, then 7, the last of which needs no forward.
    assert forwards[1] == (8 + 1) // 3 + 3
    assert forwards[1] <= forwards[3] < 8 + 7


@torch.no_grad()
@pytest.mark.parametrize("branches", [1, 3])
def test_decoding_walks_through_what_it_remembers(
    branches: int,
    tiny_model_float64: MRPForCausalLM,
    tiny_tokenizer: Any,
    forgetful: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A trained model wants the drafted tokens in another order; what was scored in vain is used a round later. A decoder
    that forgets it takes more rounds for the same text."""
    model = tiny_model_float64
    prompts = pad_left([encode(make_problem("math", "tune", i), tiny_tokenizer)[0] for i in range(4)], 0)
    options: dict[str, Any] = {"max_new_tokens": 64, "return_dict_in_generate": True}
    static = model.generate(**prompts, decoding="static", **options)
    options |= {"decoding": "mrp_spec", "target": "static", "num_draft_states": 6, "draft_branches": branches}
    skipped = []
    led_ahead = drafting.led_ahead

    def counted(table: DraftTable, made: Tensor) -> Tensor:
        ahead = led_ahead(table, made)
        skipped.append(bool((ahead[..., DRAFT_STEP] > made[..., DRAFT_STEP]).any()))
        return ahead

    monkeypatch.setattr(drafting, "led_ahead", counted)
    remembering = model.generate(**prompts, **options)
    assert sum(skipped) > 3
    forgetful()
    forgetting = model.generate(**prompts, **options)
    for out in (remembering, forgetting):
        assert torch.equal(static.sequences, out.sequences)
        assert torch.equal(static.reveal_step, out.reveal_step)
    assert remembering.stats.row_forwards.sum() < forgetting.stats.row_forwards.sum()


@pytest.mark.parametrize(
    ("mode", "passes"), [("mrp_spec", 1), ("mrp_spec", 2), ("mrp_spec", 4), ("mrp_spec", 9), ("self_spec", 3), ("static", 3)]
)
def test_head_passes_of_a_round(mode: str, passes: int, drafts: list[Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """`draft_passes` of them where a row drafts, K - 1 at most, and one where all have but a mask left; one where none drafts
    and a clean block waits for the head's keys and values; else none. All are counted, as is prefill's."""
    model = dampened(make_model(2), 0.3)
    residual = model.residual
    ran: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        ran.append(1)
        return residual(*args, **kwargs)

    monkeypatch.setattr(model, "residual", counted)
    options: dict[str, Any] = {"num_draft_states": 5, "draft_passes": passes, "max_new_tokens": 30, "eos_token_id": None}
    ids = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [1, 2, 1, 2, 1]])
    out = model.generate(ids, decoding=mode, return_dict_in_generate=True, **options)
    for _, plan, _, took in drafts:
        waits = (min(passes, 4) if plan.masks > 1 else 1) if plan.drafting else int(plan.late)
        assert took == (waits if mode == "mrp_spec" else 0)
    took_in_all = [took for *_, took in drafts]
    assert out.stats.forwards["head"] == len(ran) == sum(took_in_all) + (mode == "mrp_spec")
    if mode == "mrp_spec":
        assert min(passes, 4) in took_in_all


@pytest.mark.parametrize("name", ["draft_branches", "draft_passes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_options_are_checked(name: str, value: Any, random_model: MRPForCausalLM) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}(, of type \w+)?: it must be an int of 1 or more"):
        random_model.generate(torch.tensor([[1, 2]]), decoding="self_spec", **{name: value})
