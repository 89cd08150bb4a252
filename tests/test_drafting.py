"""Which states a round submits: the frontier and the memory by hand, and what a whole decode never does."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_model
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.decoding_mrp import ORDER_SHARPNESS, Decoder
from modeling_mrp.states_mrp import Frontier, Memory, Proposal, Reveal, Scored, States
from trainer.data import encode
from trainer.evaluate import pad_left
from trainer.tasks import make_problem

M = 60  # the mask of make_model


def states(*ids: list[int], start: int = 0, valid: list[bool] | None = None) -> States:
    """One state per row."""
    n = len(ids)
    return States(
        torch.tensor(ids),
        torch.full((n,), start),
        torch.tensor([len(i) - i.count(M) for i in ids]),
        torch.arange(n),
        torch.tensor(valid or [True] * n),
    )


def chances(*values: float) -> Tensor:
    return torch.tensor(values)


def test_the_frontier_gives_the_likeliest_first_and_adds_up_what_meets() -> None:
    """Row 0: a 0.6, then from it c 0.5 (0.3); b 0.4 reaches c too (0.2 of its own): c is worth 0.5 and comes before d.
    Row 1 has one follower only."""
    a, b = states([1, M, M, M], [1, M, M, M]), states([M, 1, M, M], [M, 1, M, M], valid=[True, False])
    c, d = states([1, 1, M, M], [1, 1, M, M], valid=[True, False]), states([1, M, 1, M], [1, M, 1, M], valid=[True, False])
    base = torch.tensor([3, 4])
    frontier = Frontier(a, 6)
    frontier.add(b, chances(0.4, 0.4), base)
    frontier.add(a, chances(0.6, 0.2), base + 2)
    assert frontier.open.tolist() == [[True, True, False, False, False, False], [False, True, False, False, False, False]]
    first, parent, origin = frontier.best()
    assert first.ids.tolist() == a.ids.tolist()
    assert (first.valid.tolist(), parent.tolist(), origin.tolist()) == ([True, True], [-1, -1], [5, 6])
    frontier.add(d, chances(0.5, 1.0), base)  # 0.6 * 0.5
    frontier.add(c, chances(0.49, 1.0), base)  # 0.6 * 0.49
    second, _, _ = frontier.best()
    assert second.ids[0].tolist() == [M, 1, M, M]  # 0.4 > 0.3
    assert second.valid.tolist() == [True, False]
    frontier.add(c, chances(0.5, 1.0), base)  # + 0.4 * 0.5
    third, _, _ = frontier.best()
    assert third.ids[0].tolist() == [1, 1, M, M]
    fourth, _, _ = frontier.best()
    assert fourth.ids[0].tolist() == [1, M, 1, M]
    empty, parent, origin = frontier.best()
    assert (empty.valid.tolist(), parent.tolist(), origin.tolist()) == ([False, False], [-1, -1], [-1, -1])


def test_blocks_behind_two_clean_states_stay_apart() -> None:
    """The same all-mask state behind another clean block is another state."""
    rider = states([M] * 4, start=4)
    frontier = Frontier(rider, 3)
    none = torch.tensor([-1])
    for parent, chance in ((1, 0.3), (2, 0.2), (1, 0.1)):
        frontier.add(rider, chances(chance), none, parent=parent)
    taken = [frontier.best() for _ in range(3)]
    assert [int(parent) for _, parent, _ in taken] == [1, 2, -1]
    assert frontier.chance[0, :2].tolist() == pytest.approx([0.4, 0.2])


def chain(*ids: list[int], valid: list[bool] | None = None) -> Memory:
    """A memory of one row in which each state reveals what makes the next one; the last of `ids` is not scored."""
    line = states(*ids, valid=[*(valid or [True] * (len(ids) - 1)), True])
    scored, follower = line.map(lambda t: t[None, :-1]), line.map(lambda t: t[None, 1:])
    where = scored.ids != follower.ids
    reveal = Reveal(where, follower.ids, where.float(), where.float())
    return Memory(Scored(scored, torch.full_like(scored.start, -1), reveal, where[..., None].double()), follower)


def test_memory_skips_to_what_is_not_scored() -> None:
    line = [[i + 1 if i < n else M for i in range(8)] for n in range(1, 9)]
    memory = chain(*line)
    for place in range(7):
        ahead, base = memory.skip(states(line[place]), 9)
        assert (ahead.ids[0].tolist(), int(ahead.step), base.tolist()) == (line[7], 8, [1 + 6])
    for stranger in (states([1, M, 3, M, M, M, M, M]), states(line[1], start=8), states(line[7])):
        ahead, base = memory.skip(stranger, 9)
        assert (ahead.ids.tolist(), base.tolist()) == (stranger.ids.tolist(), [9])
    broken = chain(*line, valid=[True, False, *[True] * 5])  # the second is not remembered
    ahead, base = broken.skip(states(line[0]), 9)
    assert (ahead.ids[0].tolist(), base.tolist()) == (line[1], [1])


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


@torch.no_grad()
def test_branches_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-odds 0, 1, 0.5, -1 and a revealed position; two reveals a step: the best one and, for the second, the next three.
    With one candidate for two reveals that one is certain."""
    model = make_model(block_size=5)
    prompt = torch.tensor([[1, 2, 3, 4, 5]] * 2)
    made: list[tuple[Frontier, States, Reveal]] = []
    branch = Decoder._branch

    def looked_at(self: Decoder, frontier: Frontier, at: States, reveal: Reveal, estimate: int) -> None:
        if not made:
            odds = torch.tensor([[0, 1, 0.5, -1, -torch.inf], [-torch.inf] * 3 + [torch.inf, -torch.inf]])
            at = replace(at, ids=torch.tensor([[M, M, M, M, 9], [9, 9, 9, M, 9]]))
            chosen = Reveal(odds > -torch.inf, torch.tensor([[10, 11, 12, 13, 14]] * 2), odds, odds)
            ours = Frontier(at, 3)
            self.schedule = torch.tensor([2, 2, 1, 0, 0])
            branch(self, ours, at, chosen, estimate)
            made.append((ours, at, chosen))
        branch(self, frontier, at, reveal, estimate)

    monkeypatch.setattr(Decoder, "_branch", looked_at)
    model.generate(prompt, decoding="self_spec", max_new_tokens=5, denoising_steps=3, draft_branches=3, eos_token_id=None)
    (frontier, _, _) = made[0]
    assert frontier.states.ids[0].tolist() == [[M, 11, 12, M, 9], [10, 11, M, M, 9], [M, 11, M, 13, 9]]
    weight = (ORDER_SHARPNESS * torch.tensor([0.5, 0.0, -1.0])).exp()
    torch.testing.assert_close(frontier.chance[0], weight / weight.sum())
    assert frontier.states.valid.tolist() == [[True] * 3, [False] * 3]  # row 1 would be done
    assert frontier.states.ids[1, 0].tolist() == [9, 9, 9, 13, 9]
    assert frontier.chance[1].tolist() == [1, 0, 0]


@torch.no_grad()
def test_a_chain_accumulates_the_heads_residuals(random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """acc_0 is what the backbone said at the last accepted state, acc_k = acc_{k-1} + Head(x^(k), acc_{k-1})."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    rounds: list[int] = []
    head_hidden, propose = Decoder.head_hidden, Decoder.propose

    def called(self: Decoder, at: States, hidden: Tensor) -> Tensor:
        residual = head_hidden(self, at, hidden)
        calls.append((at.ids, hidden, residual))
        return residual

    def proposed(self: Decoder) -> Proposal:
        begun = len(calls)
        proposal = propose(self)
        made = calls[begun:]
        for k, (ids, hidden, residual) in enumerate(made):
            assert torch.equal(ids, proposal.states.ids[:, k])
            assert residual.abs().max() > 1e-3
            expected = self.seed_hidden if k == 0 else made[k - 1][1] + made[k - 1][2]
            torch.testing.assert_close(hidden, expected)
        rounds.append(len(made))
        return proposal

    monkeypatch.setattr(Decoder, "head_hidden", called)
    monkeypatch.setattr(Decoder, "propose", proposed)
    options = {"num_draft_states": 4, "draft_branches": 1, "max_new_tokens": 14, "eos_token_id": None}
    random_model.generate(torch.tensor([[1, 2, 3, 4]]), decoding="mrp_spec", **options)
    assert max(rounds) == 3


class Watched(Decoder):
    """A decoder that checks each proposal."""

    proposals: list[tuple[Proposal, Tensor]]

    def score(self, proposal: Proposal) -> Tensor:
        self.proposals.append((proposal, self.rows.active.clone()))
        return super().score(proposal)


@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
@pytest.mark.parametrize("branches", [1, 3])
def test_no_state_is_scored_twice_in_neighbouring_rounds(mode: str, branches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what could not be kept: clean states, whose KV is gone, and blocks behind a clean state."""
    monkeypatch.setattr("modeling_mrp.generation_mrp.Decoder", Watched)
    rng = random.Random(mode)
    wide = 0
    for trial in range(6):
        Watched.proposals = []
        model = make_model(trial, block_size=8)
        ids = torch.tensor([[rng.randrange(1, 50) for _ in range(11)] for _ in range(3)])
        options: dict[str, Any] = {"num_draft_states": 5, "draft_branches": branches, "max_new_tokens": 30}
        model.generate(ids, decoding=mode, seed=trial, do_sample=trial % 2 == 1, eos_token_id=None, **options)
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


def test_a_chain_that_is_always_right_is_the_fewest_forwards() -> None:
    """Tokens do not look at each other here, so stale logits are right about every token and every order."""
    model = make_model(block_size=8)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    prompt = torch.tensor([[1] * 8])
    forwards = {}
    for branches in (1, 3):
        options = {"num_draft_states": 3, "draft_branches": branches, "max_new_tokens": 16, "eos_token_id": None}
        out = model.generate(prompt, decoding="self_spec", return_dict_in_generate=True, **options)
        forwards[branches] = out.stats.forwards["verify"] + out.stats.forwards["denoise"]
        assert int(out.stats.accepted_lengths.sum()) == forwards[branches]
    # Behind prefill 8 states of the first block and the next one's first, then 7, the last of which needs no forward.
    assert forwards[1] == (8 + 1) // 3 + 3
    assert forwards[1] <= forwards[3] < 8 + 7


@torch.no_grad()
def test_decoding_walks_through_what_it_remembers(
    tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained model wants the drafted tokens in another order; what was scored in vain is used a round later."""
    model = tiny_model_float64
    prompts = pad_left([encode(make_problem("math", "tune", i), tiny_tokenizer)[0] for i in range(4)], 0)
    static = model.generate(**prompts, decoding="static", max_new_tokens=64)
    skipped = []
    skip = Memory.skip

    def counted(self: Memory, state: States, base: int) -> tuple[States, Tensor]:
        ahead, origin = skip(self, state, base)
        skipped.append(bool(((origin != base) & state.valid).any()))
        return ahead, origin

    monkeypatch.setattr(Memory, "skip", counted)
    for branches in (1, 3):
        options = {"num_draft_states": 6, "draft_branches": branches, "max_new_tokens": 64}
        assert torch.equal(static, model.generate(**prompts, decoding="mrp_spec", **options))
    assert sum(skipped) > 3


def test_draft_branches_is_checked(random_model: MRPForCausalLM) -> None:
    with pytest.raises(ValueError, match="draft_branches is 0: it must be an int of 1 or more"):
        random_model.generate(torch.tensor([[1, 2]]), decoding="self_spec", draft_branches=0)


def test_drafted_marks_guesses_only() -> None:
    line = states([1, M], [1, 2], [M, M], [3, M]).map(lambda t: t[None])
    proposal = Proposal(replace(line, valid=torch.tensor([[True, True, True, False]])), torch.tensor([[-1, -1, 1, -1]]))
    assert proposal.drafted.tolist() == [[False, True, False, False]]
    assert proposal.behind().tolist() == [[[1, M], [1, 2], [1, 2], [3, M]]]
