"""What is drafted: sizes, memory and budget by hand, the head's chain, and what a whole decode never does."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import make_model
from mrp_trainer.data import encode
from mrp_trainer.evaluate import pad_left
from mrp_trainer.tasks import make_problem
from test_decoding import dampened, decode, random_prompts
from test_lattice import M, drafting_decoder, remember, states
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.decoding import Decoder
from modeling_mrp.generate.drafting import Budget, Lattice, growth, reachable
from modeling_mrp.generate.states import Memory, Proposal, Reveal, Scored, States, follow

# ------------------------------------------------------------------------------------------------ sizes and memory


@pytest.mark.parametrize(
    ("width", "passes", "sizes"),
    [
        (8, 1, [7]),
        (8, 2, [4, 7]),
        (8, 3, [3, 5, 7]),
        (8, 7, [1, 2, 3, 4, 5, 6, 7]),
        (8, 20, [1, 2, 3, 4, 5, 6, 7]),
        (8, 0, []),
        (1, 1, []),
        (1, 5, []),
        (2, 1, [1]),
        (2, 5, [1]),
        (3, 5, [1, 2]),
    ],
)
def test_growth(width: int, passes: int, sizes: list[int]) -> None:
    """Even steps up to all states but the last, which no estimate of its own would change; never the same size twice."""
    assert growth(width, passes) == sizes


def test_reachable() -> None:
    """One mask: the state, the clean one, the next block's. Two: the state and two ways on, each with three."""
    assert [reachable(n, 5, 1000) for n in range(4)] == [2, 3, 1 + 2 * 3, 1 + 3 * 7]
    assert [reachable(n, 1, 1000) for n in range(4)] == [2, 3, 4, 5]
    assert reachable(3, 2, 1000) == 1 + 2 * 7
    assert [reachable(3, 3, enough) for enough in (1, 8, 22, 23)] == [1, 8, 22, 22]
    assert reachable(64, 64, 7) == 7


def test_follow() -> None:
    onward = torch.tensor([[2, -1, 3, 1], [-1, 0, 1, 2], [1, 2, 3, -1]])
    assert follow(onward).tolist() == [[0, 2, 3, 1], [0, 0, 0, 0], [0, 1, 2, 3]]


def chain(*ids: list[int], lost: Sequence[int] = ()) -> Memory:
    """A memory of one row in which each state reveals what makes the next one; the last of `ids` is not scored."""
    decoder = drafting_decoder([([0] * len(ids[0]), [0.0] * len(ids[0]))])
    said = ([0] * len(ids[0]), [0.0] * len(ids[0]))
    remember(decoder, [(here, after, said) for here, after in pairwise(ids)], lost)
    return decoder.memory


@pytest.mark.parametrize("scored", [1, 2, 3, 7])
def test_the_memory_leads_to_what_is_not_scored(scored: int) -> None:
    line = [[i + 1 if i < n else M for i in range(8)] for n in range(1, scored + 2)]
    memory = chain(*line)
    assert memory.end.tolist() == [[scored - 1] * scored]
    assert memory.exit.ids.tolist() == [[line[-1]] * scored]
    assert memory.exit.step.tolist() == [[scored + 1] * scored]


def test_the_memory_has_gaps() -> None:
    """The third is not remembered: what comes before leads up to it, what comes behind goes on. A way that leads out of these
    places, to what an older round scored, ends there too."""
    line = [[i + 1 if i < n else M for i in range(8)] for n in range(1, 7)]
    memory = chain(*line, lost=[2])
    assert memory.end.tolist() == [[1, 1, 4, 4, 4]]
    assert memory.exit.ids[0].tolist() == [line[2], line[2], line[5], line[5], line[5]]
    scored, follower = chain(*line[:3]).scored, states(*line[1:3]).map(lambda t: t[None])
    assert Memory(scored, follower, torch.tensor([[7, -1]])).end.tolist() == [[0, 1]]


def test_a_state_that_looked_at_a_clean_one_is_not_remembered() -> None:
    """Nor is what the caller leaves out. And behind a clean state comes its own rider only."""
    line = states([1, M], [1, 2], [M, M], [3, 2], [M, M]).map(lambda t: t[None])
    line.start = torch.tensor([[0, 0, 2, 0, 2]])
    parent = torch.tensor([[-1, -1, 3, -1, 1]])  # the block behind slot 3 comes before the one behind slot 1
    nothing = line.ids.bool()
    scored = Scored(line, parent, Reveal(nothing, line.ids, nothing.float(), nothing.float()), line.ids[..., None].double())
    clean = torch.tensor([[False, True, False, True, False]])
    assert scored.kept(~clean).states.valid.tolist() == [[True, False, False, False, False]]
    assert line.valid.all()
    follower = states([1, 2], [M, M], [M, 5], [M, M], [M, 5]).map(lambda t: t[None])
    follower.start = torch.tensor([[0, 2, 2, 2, 2]])
    assert scored.edges(follower, clean).tolist() == [[1, 4, -1, 2, -1]]
    scored.states.valid[0, 4] = False
    assert scored.edges(follower, clean).tolist() == [[1, -1, -1, 2, -1]]


def test_drafted_marks_guesses_only() -> None:
    line = states([1, M], [1, 2], [M, M], [3, M], valid=[True, True, True, False]).map(lambda t: t[None])
    proposal = Proposal(line, torch.tensor([[-1, -1, 1, -1]]))
    assert proposal.drafted.tolist() == [[False, True, False, False]]
    assert proposal.behind().tolist() == [[[1, M], [1, 2], [1, 2], [3, M]]]


# ------------------------------------------------------------------------------------------------ the budget


def budget(right: list[float], bound: int | None, head_cost: float = 0.0, state_tokens: int = 10) -> Budget:
    made = Budget(len(right), state_tokens, bound, head_cost)
    made.right = right
    return made


@pytest.mark.parametrize(
    ("right", "bound", "head_cost", "width"),
    [
        ([1.0, 0.0, 0.0], None, 5.0, 3),  # time does not grow
        ([1.0, 0.1, 0.1], 30, 0.0, 3),  # three states fit
        ([1.0, 0.1, 0.1], 27, 0.0, 2),  # 1.1 of two in one unit, 1.2 of three in 30/27
        ([1.0, 0.9, 0.9], 20, 0.0, 2),  # 1.9, but 2.8 / 1.5
        ([1.0, 1.0, 1.0], 20, 0.0, 2),  # 2 either way: the fewer
        ([1.0, 0.6, 0.1], 15, 0.0, 2),  # 1, 1.6 / (4/3), 1.7 / 2
        ([1.0, 0.3, 0.1], 15, 0.0, 1),  # 1, 1.3 / (4/3)
        ([1.0, 0.2, 0.9], 15, 0.0, 3),  # 1, 0.9, 2.1 / 2
        ([1.0, 0.5, 0.4], 30, 1.0, 1),  # head passes cost as much: 1, 0.75, 0.95
        ([1.0, 0.8, 0.4], 30, 1.0, 3),  # 1.1
        ([1.0, 0.99, 0.99], 5, 0.0, 1),  # one state fills the device
        ([1.0], 5, 0.0, 1),
        ([1.0], None, 0.0, 1),
    ],
)
def test_width(right: list[float], bound: int | None, head_cost: float, width: int) -> None:
    """States of 10 tokens, by the chance that each is come by."""
    assert budget(right, bound, head_cost).width() == width


def test_a_full_device_takes_no_state_more_whatever_the_rounding() -> None:
    """Beyond what fills the device, drafts that are all right are worth the same however many there are: the fewest."""
    for tokens in range(1, 40):
        for bound in range(1, 9 * tokens + 1):
            assert budget([1.0] * 9, bound, state_tokens=tokens).width() == -(-bound // tokens)


def test_a_budget_learns_and_hopes() -> None:
    """A tenth of the way to what was seen of slots that were submitted; a hundredth of the way to 1 for the others."""
    it = budget([1.0, 0.5, 0.5, 0.5], 30)
    it.learn([4, 3, 0], 4)
    assert it.right == pytest.approx([1.0, 0.5 + 0.1 * 0.25, 0.5 - 0.1 * 0.5, 0.5 + 0.01 * 0.5])
    it.learn([2], 2)
    assert it.right == pytest.approx([1.0, 0.525 + 0.01 * 0.475, 0.45 + 0.01 * 0.55, 0.505 + 0.01 * 0.495])


def test_hope_brings_a_width_back() -> None:
    """Two states for 3/2 units: drafts that are always wrong are given up after 0.9^n < 1/2, n = 7 rounds, and are tried again
    when 1 - 0.522 * 0.99^n > 1/2, n = 5 rounds later; one wrong round more is enough then."""
    it = Budget(2, 15, 20, 0.0)
    widths = []
    for _ in range(20):
        widths.append(it.width())
        it.learn([1, 0][: widths[-1]], 1)
    assert widths == [2] * 7 + [1] * 5 + [2] + [1] * 7


BOUNDS: list[tuple[int | None, str]] = [(1, "none"), (12, "none"), (1 << 40, "all")]


@pytest.mark.parametrize(("bound", "drafts"), BOUNDS)
@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_what_the_budget_does_to_a_decode(mode: str, bound: int, drafts: str) -> None:
    """Three rows of blocks of 4: 12 tokens fill the device with one state each. Then nothing is drafted, and it costs what
    `static` costs; where everything fits it costs what it costs without a bound."""
    model = dampened(make_model(3), 0.1)
    prompts = random_prompts(random.Random(mode), 3)
    options: dict[str, Any] = {"max_new_tokens": 21, "eos_token_id": None, "return_dict_in_generate": True, "seed": 1}
    options |= {"do_sample": True, "top_k": 0, "num_draft_states": 5}
    inputs = pad_left(prompts, 0)
    static = model.generate(**inputs, decoding="static", **options)
    bounded = model.generate(**inputs, decoding=mode, compute_bound_tokens=bound, **options)
    free = model.generate(**inputs, decoding=mode, **options)
    assert torch.equal(static.sequences, bounded.sequences)
    assert torch.equal(static.sequences, free.sequences)
    assert free.stats.drafted.min() > 0
    assert free.stats.row_forwards.sum() < static.stats.row_forwards.sum()
    if drafts == "none":
        assert bounded.stats.drafted.tolist() == [0, 0, 0]
        assert bounded.stats.row_forwards.tolist() == static.stats.row_forwards.tolist()
        assert bounded.stats.forwards["denoise"] == static.stats.forwards["denoise"]
        assert bounded.stats.forwards["verify"] == 0
    else:
        assert bounded.stats.forwards == free.stats.forwards
        for name in ("drafted", "accepted", "row_forwards", "row_head_forwards", "accepted_lengths"):
            assert torch.equal(getattr(bounded.stats, name), getattr(free.stats, name))


def test_one_draft_state_drafts_nothing(random_model: MRPForCausalLM) -> None:
    """Whatever the other rows do, also where a neighbour's clean block makes the round two states wide."""
    prompts = random_prompts(random.Random(0), 4)
    for mode in ("mrp_spec", "self_spec"):
        rows = decode(random_model, prompts, decoding=mode, num_draft_states=1, max_new_tokens=21, eos_token_id=None)
        static = decode(random_model, prompts, decoding="static", max_new_tokens=21, eos_token_id=None)
        assert [row[3][:4] for row in rows] == [row[3][:4] for row in static]


# ------------------------------------------------------------------------------------------------ whole decodes


def forgotten(self: Scored, which: Tensor) -> Scored:
    """For `Scored.kept`: nothing is remembered."""
    return replace(self, states=replace(self.states, valid=torch.zeros_like(which)))


@torch.no_grad()
@pytest.mark.parametrize("states_at_most", [2, 4])
def test_a_chain_accumulates_the_heads_residuals(
    states_at_most: int, random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K - 1 passes acc_0 is what the backbone said at the last accepted state, acc_k = acc_{k-1} + Head(x^(k), acc_{k-1}),
    and x^(k+1) is drafted from acc_k. No remembered state leads further here."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    rounds: list[int] = []
    head_pass, propose = Decoder.head_pass, Decoder.propose

    def called(self: Decoder, at: States, hidden: Tensor) -> Tensor:
        residual = head_pass(self, at, hidden)
        calls.append((at.ids[0], hidden[0], residual[0]))
        return residual

    def proposed(self: Decoder) -> Proposal:
        begun, drafting = len(calls), self.outlook.drafting
        proposal = propose(self)
        made = calls[begun:] if drafting else []
        for k, (ids, hidden, residual) in enumerate(made):
            expected = self.seed.hidden[0] if k == 0 else made[k - 1][1][-1] + made[k - 1][2][-1]
            torch.testing.assert_close(hidden[-1], expected)
            if self.outlook.masks > 1 and M in ids[-1] and k + 1 < proposal.parent.shape[1]:
                assert torch.equal(ids[-1], proposal.states.ids[0, k])
                after = proposal.states.map(lambda t, k=k: t[:, k])  # type: ignore[misc]
                told = self.reveal_from(after, (hidden + residual)[-1][None], drafting=True)
                best = told.confidence.argmax()
                drafted = torch.where(told.where & (torch.arange(self.block) == best), told.token, after.ids)
                if bool(proposal.states.valid[0, k + 1]):
                    assert torch.equal(drafted[0], proposal.states.ids[0, k + 1])
            assert residual.abs().max() > 1e-3
        rounds.append(len(made))
        return proposal

    monkeypatch.setattr(Scored, "kept", forgotten)
    monkeypatch.setattr(Decoder, "head_pass", called)
    monkeypatch.setattr(Decoder, "propose", proposed)
    options = {"num_draft_states": states_at_most, "draft_passes": states_at_most - 1, "max_new_tokens": 14}
    random_model.generate(torch.tensor([[1, 2, 3, 4]]), decoding="mrp_spec", draft_branches=1, eos_token_id=None, **options)
    assert max(rounds) == states_at_most - 1
    assert rounds.count(states_at_most - 1) > 3


class Watched(Decoder):
    """A decoder that checks each proposal."""

    proposals: list[tuple[Proposal, Tensor]]

    def score(self, proposal: Proposal) -> Tensor:
        self.proposals.append((proposal, self.rows.active.clone()))
        return super().score(proposal)


DRAFTERS = [("self_spec", 1), ("mrp_spec", 1), ("mrp_spec", 2), ("mrp_spec", 4)]


@pytest.mark.parametrize(("mode", "passes"), DRAFTERS)
@pytest.mark.parametrize("branches", [1, 3])
def test_no_state_is_scored_twice_in_neighbouring_rounds(
    mode: str, passes: int, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what could not be kept: clean states, whose KV is gone, and blocks behind a clean state."""
    monkeypatch.setattr("modeling_mrp.generate.generation.Decoder", Watched)
    rng = random.Random(mode)
    wide = 0
    for trial in range(4):
        Watched.proposals = []
        model = dampened(make_model(trial, block_size=8), (1.0, 0.3)[trial % 2])
        ids = torch.tensor([[rng.randrange(1, 50) for _ in range(11)] for _ in range(3)])
        options: dict[str, Any] = {"num_draft_states": 5, "draft_branches": branches, "draft_passes": passes}
        options |= {"seed": trial, "do_sample": trial % 3 == 1, "eos_token_id": None, "max_new_tokens": 22}
        model.generate(ids, decoding=mode, **options)
        before: list[set[Any]] = [set(), set(), set()]
        for proposal, active in Watched.proposals:
            for row in range(3):
                now = []
                for slot in range(proposal.parent.shape[1]):
                    state, parent = proposal.states.map(lambda t, at=(row, slot): t[at]), int(proposal.parent[row, slot])  # type: ignore[misc]
                    if bool(state.valid):
                        now.append((int(state.start), tuple(state.ids.tolist()), parent))
                assert bool(active[row]) == bool(now)
                assert len(set(now)) == len(now)
                assert not set(now) & before[row]
                before[row] = {entry for entry in now if entry[2] == -1 and M in entry[1]}
                starts = sorted(len([i for i in entry[1] if i == M]) for entry in now if entry[2] == -1)
                wide += len(set(starts)) < len(starts)  # two states with as many masks: not a chain
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
    branches: int, tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained model wants the drafted tokens in another order; what was scored in vain is used a round later. A decoder
    that forgets it takes more rounds for the same text."""
    model = tiny_model_float64
    prompts = pad_left([encode(make_problem("math", "tune", i), tiny_tokenizer)[0] for i in range(4)], 0)
    options: dict[str, Any] = {"max_new_tokens": 64, "return_dict_in_generate": True}
    static = model.generate(**prompts, decoding="static", **options)
    options |= {"decoding": "mrp_spec", "num_draft_states": 6, "draft_branches": branches}
    skipped = []
    looked_up = Lattice._looked_up

    def counted(self: Lattice, made: Tensor) -> Tensor:
        ahead = looked_up(self, made)
        skipped.append(bool((ahead[..., self.step] > made[..., self.step]).any()))
        return ahead

    monkeypatch.setattr(Lattice, "_looked_up", counted)
    remembering = model.generate(**prompts, **options)
    assert sum(skipped) > 3
    monkeypatch.setattr(Scored, "kept", forgotten)
    forgetting = model.generate(**prompts, **options)
    for out in (remembering, forgetting):
        assert torch.equal(static.sequences, out.sequences)
        assert torch.equal(static.reveal_step, out.reveal_step)
    assert remembering.stats.row_forwards.sum() < forgetting.stats.row_forwards.sum()


@pytest.mark.parametrize("passes", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec", "static"])
def test_head_passes_of_a_round(mode: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`draft_passes` of them where a row drafts, K - 1 at most, and one where all have but a mask left; one where none drafts
    and a clean block waits for the head's keys and values; else none. All are counted, as is prefill's."""
    model = dampened(make_model(2), 0.3)
    draft, residual = Decoder.draft, model.residual
    per_round: list[tuple[int, int]] = []
    ran: list[int] = []

    def drafted(self: Decoder) -> Lattice:
        expected = 0
        if mode == "mrp_spec":
            drafts = self.outlook.drafting
            expected = (min(passes, 4) if self.outlook.masks > 1 else 1) if drafts else int(self.outlook.pending)
        before = self.counts.forwards["head"]
        lattice = draft(self)
        per_round.append((self.counts.forwards["head"] - before, expected))
        return lattice

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        ran.append(1)
        return residual(*args, **kwargs)

    monkeypatch.setattr(Decoder, "draft", drafted)
    monkeypatch.setattr(model, "residual", counted)
    options: dict[str, Any] = {"num_draft_states": 5, "draft_passes": passes, "max_new_tokens": 30, "eos_token_id": None}
    ids = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [1, 2, 1, 2, 1]])
    out = model.generate(ids, decoding=mode, return_dict_in_generate=True, **options)
    assert all(got == expected for got, expected in per_round)
    assert out.stats.forwards["head"] == len(ran) == sum(got for got, _ in per_round) + (mode == "mrp_spec")
    if mode == "mrp_spec":
        assert {got for got, _ in per_round} >= {min(passes, 4)}


@pytest.mark.parametrize("name", ["num_draft_states", "draft_branches", "draft_passes", "compute_bound_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_options_are_checked(name: str, value: Any, random_model: MRPForCausalLM) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}(, of type \w+)?: it must be an int of 1 or more"):
        random_model.generate(torch.tensor([[1, 2]]), decoding="self_spec", **{name: value})


def test_a_budget_is_not_taught_by_rows_that_cannot_draft(
    random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a clean block comes by the next one's first state in any case: it says nothing about drafts."""
    taught: list[tuple[list[int], int, int]] = []
    learn = Budget.learn

    def noted(self: Budget, passed: list[int], rows: int) -> None:
        taught.append((passed, rows, self.width()))
        learn(self, passed, rows)

    monkeypatch.setattr(Budget, "learn", noted)
    for bound in (1, None):
        taught.clear()
        options: dict[str, Any] = {"num_draft_states": 3, "compute_bound_tokens": bound, "max_new_tokens": 14}
        prompts = torch.tensor([[1, 2, 3, 4, 5, 6], [9, 8, 7, 0, 0, 0]])
        random_model.generate(prompts, attention_mask=(prompts > 0).long(), decoding="self_spec", eos_token_id=None, **options)
        assert any(rows < 2 for _, rows, _ in taught), "rows stand at clean blocks in different rounds"
        assert all(max(passed, default=0) <= rows for passed, rows, _ in taught)
        assert all(len(passed) <= width for passed, _, width in taught)
        if bound == 1:
            assert all(len(passed) == 1 for passed, _, _ in taught)
