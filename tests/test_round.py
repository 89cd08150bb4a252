"""Rounds on a model made up of a table: what they reveal, draft, commit and cost, with numbers derived by hand.

The model knows one text. At a masked position it says that text's token, surest in column 1 of a block, then 3, 0 and 2; a
table of exceptions says what else it says at which state of a block. Its keys are ids and positions, so that the cache shows
what it holds, and the model whether a state sees its row's text, whole and nothing else.
"""

from dataclasses import dataclass, field
from math import exp, log1p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_mrp.generate.decode_state import DecodeState, Request, RoundPlan, laid_out, summary
from modeling_mrp.generate.loop import Task, begin, decode, decode_round
from modeling_mrp.generate.modes import Amount, Direct, Drafting, Mode, ThresholdRemask
from modeling_mrp.generate.pace import Fixed
from modeling_mrp.generate.sampling import Sampler
from modeling_mrp.generate.scoring import Reader
from modeling_mrp.kernels.dispatch import PYTORCH
from modeling_mrp.rules.revealing import Dynamic, Static, reveal_schedule
from modeling_mrp.rules.states import States
from modeling_mrp.runner.cache import BlockCache
from modeling_mrp.runner.protocol import BlockDiffusionModel
from modeling_mrp.runner.runner import Held, Runner

BLOCK, VOCAB, M = 4, 10, 9
TEXT = [1, 4, 7, 2, 5, 0, 3, 6, 1, 4, 7, 2]
LOGITS = [2.0, 4.0, 1.0, 3.0]  # of the token in each column; all others have 0
PROMPT = TEXT[:4]
Exceptions = dict[tuple[int, ...], dict[int, tuple[int, float]]]  # by a block's ids: column, token and its logit
CPU = torch.device("cpu")


@dataclass
class TableModel:
    """Says what the table says; its head estimates what a table of its own says."""

    exceptions: Exceptions = field(default_factory=dict)
    head_exceptions: Exceptions = field(default_factory=dict)
    head_saw: list[list[int]] = field(default_factory=list)
    dtype: torch.dtype = torch.float64
    config: Any = field(
        default_factory=lambda: SimpleNamespace(
            block_size=BLOCK, mask_token_id=M, hidden_size=VOCAB, num_hidden_layers=1, num_nextn_predict_layers=1
        )
    )

    def backbone(
        self, input_ids: Tensor, position_ids: Tensor, mask: Any, past_key_values: Any = None, compiled: bool = True
    ) -> Tensor:
        for place, seen in zip(
            position_ids.flatten().tolist(), looked(input_ids, position_ids, mask, past_key_values, 0), strict=True
        ):
            assert seen == list(range(place // BLOCK * BLOCK + BLOCK)), "its row's text and its own block, each once"
        return logits(input_ids, position_ids, self.exceptions)

    def residual(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        mask: Any,
        past_key_values: Any = None,
        compiled: bool = True,
    ) -> Tensor:
        self.head_saw = looked(input_ids, position_ids, mask, past_key_values, 1)
        return logits(input_ids, position_ids, self.head_exceptions) - hidden_states

    def block_cache(self, batch_size: int, capacity: int, scratch: int, with_head: bool) -> BlockCache:
        return BlockCache(batch_size, 1, 2, [CPU] * (1 + with_head), capacity, scratch, self.dtype, int(with_head))


def looked(ids: Tensor, positions: Tensor, mask: Tensor, cache: BlockCache, layer: int) -> list[list[int]]:
    """The positions that each of a forward's sees, those of its own block as they are in this state."""
    key = torch.stack([ids, positions], -1).double()[:, None]
    seen, _ = cache.update(key, key, layer)
    found = []
    for row, column in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        visible = sorted((int(p), int(i)) for i, p in seen[row, 0][mask[row, 0, column]].tolist())
        first = column // BLOCK * BLOCK
        assert [token for _, token in visible[-BLOCK:]] == ids[row, first : first + BLOCK].tolist()
        found.append([place for place, _ in visible])
    return found


def logits(ids: Tensor, positions: Tensor, exceptions: Exceptions) -> Tensor:
    said = torch.zeros(*ids.shape, VOCAB, dtype=torch.float64)
    for row, first in torch.cartesian_prod(torch.arange(len(ids)), torch.arange(0, ids.shape[1], BLOCK)).tolist():
        odd = exceptions.get(tuple(ids[row, first : first + BLOCK].tolist()), {})
        for column in range(BLOCK):
            place = int(positions[row, first + column])
            token, logit = odd.get(column, (TEXT[place % len(TEXT)], LOGITS[column]))
            said[row, first + column, token] = logit
    return said


@dataclass
class Case:
    """One decode."""

    task: Task
    runner: Runner
    state: DecodeState

    @property
    def amount(self) -> Amount:
        drafting = self.task.mode.drafting
        return Amount(drafting.states, drafting.passes) if drafting else Amount()

    def plan(self) -> RoundPlan:
        drafting = self.task.mode.drafting
        branches = drafting.branches if drafting else 1
        return RoundPlan.read(summary(self.state, M).tolist(), len(self.state.has_seed)).with_slots(self.amount, branches)

    def round(self) -> None:
        self.state, _ = decode_round(self.task, self.runner, self.state, self.plan())

    def run(self) -> None:
        self.state = decode(self.task, self.runner, self.state, Fixed(self.amount)).state

    @property
    def text(self) -> list[list[int]]:
        text = self.state.text
        return [row[:stop].tolist() for row, stop in zip(text.tokens, text.stop, strict=True)]

    @property
    def current(self) -> list[int]:
        """The next state of a single row."""
        return self.state.current.ids[0].tolist()

    @property
    def forwards(self) -> tuple[int, int, int]:
        ran = self.runner.forwards
        return ran["prefill"], ran["denoise"], ran["head"]

    def kept(self, layer: int, count: int, row: int = 0) -> list[list[int]]:
        """Id and position in the first committed slots of a layer."""
        cache = self.runner.cache
        cache.target_slots(cache.capacity, 0)
        return cache.read(layer)[0][row, 0, :count].long().tolist()


def texts_keys(count: int) -> list[list[int]]:
    return [[token, place] for place, token in enumerate(TEXT[:count])]


def case(
    mode: Mode,
    new: int,
    prompts: list[list[int]] | None = None,
    model: BlockDiffusionModel | None = None,
    eos: int | None = None,
    steps: int | None = None,
    infill: list[int] | None = None,
) -> Case:
    """Behind prefill and the first reveals."""
    model = model or TableModel()
    given = None if infill is None else torch.tensor([infill])
    text, ends, current = laid_out([torch.tensor(ids) for ids in prompts or [PROMPT]], given, new, BLOCK, M, CPU)
    rows = len(text.tokens)
    request = Request(
        **ends,
        no_eos_before=ends["prompt_length"],
        seed=torch.zeros(rows, dtype=torch.long),
        schedule=reveal_schedule(BLOCK, steps),
        eos=torch.tensor([] if eos is None else [eos], dtype=torch.long),
    )
    picker = Sampler(torch.eye(VOCAB, dtype=model.dtype), M, entropy=mode.rule.needs_entropy, dispatch=PYTORCH)
    reader = Reader(mode.rule, picker, picker, request, M, seeks=True, bars_eos=False)
    task = Task(mode, reader, BLOCK, M)
    cache = model.block_cache(rows, text.capacity, mode.width * BLOCK, mode.uses_head)
    runner = Runner(model, cache, mode.uses_head, PYTORCH, with_round_masks=False, device=CPU)
    return Case(task, runner, begin(task, runner, text, current, torch.zeros(rows, dtype=torch.long)))


STATIC = Mode(Static())

# ------------------------------------------------------------------------------------------------ a step of the backbone


def test_a_static_step_reveals_the_surest_position() -> None:
    """A logit of 4 among nine tokens, the mask not counted: p = e^4 / (e^4 + 8)."""
    each = case(STATIC, new=4)
    assert each.current == [M, 0, M, M]
    assert each.forwards == (1, 0, 0)
    each.round()
    assert each.current == [M, 0, M, 6]
    text = each.state.text
    assert text.tokens[0, :8].tolist() == [*PROMPT, M, 0, M, 6]
    assert text.reveal_step[0, :8].tolist() == [-1] * 5 + [0, -1, 1]
    assert text.logprob[0, 5].item() == pytest.approx(-log1p(8 * exp(-4)))
    assert text.logprob[0, 7].item() == pytest.approx(-log1p(8 * exp(-3)))
    assert text.total_steps.tolist() == [2]
    each.run()
    assert each.text == [TEXT[:8]]
    assert each.state.text.reveal_step[0, 4:8].tolist() == [2, 0, 3, 1]
    assert each.forwards == (1, 3, 0)
    assert each.state.held.row_forwards.tolist() == [4]
    assert each.state.counts.accepted_lengths.tolist() == [[0, 3, 0]]


def test_a_step_reveals_what_the_schedule_says() -> None:
    """4 positions in 3 steps: columns 1 and 3, then 0, then 2."""
    each = case(STATIC, new=4, steps=3)
    assert each.current == [M, 0, M, 6]
    each.run()
    assert each.state.text.reveal_step[0, 4:8].tolist() == [1, 0, 2, 0]
    assert each.forwards == (1, 2, 0)


def test_an_eos_ends_the_text_where_it_stands() -> None:
    """Token 0 in column 1 is revealed first; column 0 is all that lies before it."""
    each = case(STATIC, new=8, eos=0)
    assert each.state.current.end.tolist() == [1]
    each.run()
    assert each.text == [TEXT[:6]]
    assert each.forwards == (1, 1, 0)


def test_a_clean_block_commits_and_its_successor_rides_along() -> None:
    each = case(STATIC, new=8)
    for _ in range(3):
        assert each.plan().room == 1
        each.round()
    assert each.current == TEXT[4:8]
    assert each.state.held.committed.tolist() == [4]
    assert (each.plan().clean, each.plan().room) == (1, 2)
    each.round()
    assert each.state.held.committed.tolist() == [8]
    assert each.kept(0, 8) == texts_keys(8)
    assert (each.current, each.state.current.start.tolist()) == ([M, 4, M, M], [8])
    assert each.state.text.reveal_step[0, 4:12].tolist() == [2, 0, 3, 1, -1, 4, -1, -1]
    each.run()
    assert each.text == [TEXT]
    assert each.forwards == (1, 7, 0)


def test_rows_do_not_wait_for_each_other() -> None:
    """Row 0 begins inside its first block, whose two masks take prefill and a round; then columns 1, 3 and 0 of the next, of
    which 3 lies behind its limit of 6. Row 1's block is clean behind prefill; its limit of 11 takes all four columns."""
    each = case(STATIC, new=4, prompts=[TEXT[:2], TEXT[:7]])
    assert each.state.current.ids.tolist() == [[1, 4, M, 2], [5, 0, 3, 6]]
    each.round()
    assert each.state.current.ids.tolist() == [[1, 4, 7, 2], [M, 4, M, M]]
    assert each.state.held.committed.tolist() == [0, 8]
    each.run()
    assert each.text == [TEXT[:6], TEXT[:11]]
    assert each.state.text.reveal_step[0, :6].tolist() == [-1, -1, 1, 0, 4, 2]
    assert each.state.text.reveal_step[1, 4:11].tolist() == [-1, -1, -1, 0, 3, 1, 4]
    assert each.forwards == (1, 4, 0)
    assert each.state.held.row_forwards.tolist() == [5, 5]
    assert each.kept(0, 4, row=0) == texts_keys(4)
    assert each.kept(0, 8, row=1) == texts_keys(8)


# ------------------------------------------------------------------------------------------------ drafts

# Behind its first reveal the backbone thinks otherwise of column 3 than before, and behind that of column 0.
SURPRISES: Exceptions = {(M, 0, M, M): {3: (2, 3.0)}, (M, 0, M, 2): {0: (8, 2.0)}}


def test_a_right_draft_saves_a_forward() -> None:
    """Prefill says 0 in column 1 and 6 in column 3: the state behind both is scored beside the one behind the first. What
    that reveals makes the text, so that three reveals behind prefill take two forwards, and nothing is left to draft."""
    each = case(Mode(Static(), drafting=Drafting(2, 1)), new=4)
    each.round()
    assert each.current == [5, 0, M, 6]
    each.run()
    assert each.text == [TEXT[:8]]
    assert each.state.text.reveal_step[0, 4:8].tolist() == [2, 0, 3, 1]
    assert each.forwards == (1, 2, 0)
    counts = each.state.counts
    assert (counts.drafted.tolist(), counts.accepted.tolist(), counts.verified.item()) == ([1], [1], 1)
    assert counts.accepted_lengths[0, :3].tolist() == [0, 1, 1]
    assert counts.offered_at_depth[0].tolist() == counts.accepted_at_depth[0].tolist() == [1, 0, 0]


def test_a_wrong_draft_costs_no_forward() -> None:
    each, plain = (case(mode, 4, model=TableModel(SURPRISES)) for mode in (Mode(Static(), drafting=Drafting(2, 1)), STATIC))
    each.round()
    assert each.current == [M, 0, M, 2]
    memory = each.state.memory.scored.states
    assert memory.ids[0, memory.valid[0]].tolist() == [[M, 0, M, M], [M, 0, M, 6]]
    each.run()
    plain.run()
    assert each.text == plain.text == [[*PROMPT, 8, 0, 3, 2]]
    assert torch.equal(each.state.text.reveal_step, plain.state.text.reveal_step)
    assert torch.equal(each.state.text.logprob, plain.state.text.logprob)
    assert each.forwards == plain.forwards == (1, 3, 0)
    counts = each.state.counts
    assert (counts.drafted.tolist(), counts.accepted.tolist(), counts.verified.item()) == ([2], [0], 2)
    assert (counts.offered_at_depth[0].tolist(), counts.accepted_at_depth[0].tolist()) == ([2, 0, 0], [0, 0, 0])


def test_drafts_lead_through_a_clean_block() -> None:
    """Five states: 1, 2 and 3 masks gone, none left, and the next block behind that; then three that end the text."""
    each = case(Mode(Static(), drafting=Drafting(5, 1)), new=8)
    each.round()
    assert each.state.held.committed.tolist() == [8]
    assert each.kept(0, 8) == texts_keys(8)
    assert (each.current, each.state.current.start.tolist()) == ([M, 4, M, M], [8])
    each.run()
    assert each.text == [TEXT]
    assert each.state.text.reveal_step[0, 4:12].tolist() == [2, 0, 3, 1, 6, 4, 7, 5]
    assert each.forwards == (1, 2, 0)
    counts = each.state.counts
    assert (counts.drafted.tolist(), counts.accepted.tolist()) == ([5], [5]), "the next block's masks are no guess"
    assert counts.accepted_lengths[0].nonzero()[:, 0].tolist() == [3, 5]


def test_a_clean_block_that_was_a_wrong_draft_is_not_committed() -> None:
    """Column 2 of the drafted block is not what the backbone says behind the other three."""
    each = case(Mode(Static(), drafting=Drafting(5, 1)), new=8, model=TableModel({(5, 0, M, 6): {2: (8, 1.0)}}))
    each.round()
    assert each.current == [5, 0, 8, 6]
    assert each.state.held.committed.tolist() == [4]
    each.run()
    assert each.text == [[*PROMPT, 5, 0, 8, 6, *TEXT[8:]]]


def test_the_head_foresees_what_stale_logits_do_not() -> None:
    """With the head's table that of the backbone, drafts are right where those of the backbone's own logits were wrong."""
    model = TableModel(SURPRISES, SURPRISES)
    each = case(Mode(Static(), drafting=Drafting(2, 1, passes=1)), new=4, model=model)
    each.round()
    assert each.current == [8, 0, M, 2]
    each.run()
    assert each.text == [[*PROMPT, 8, 0, 3, 2]]
    assert each.forwards == (1, 2, 3), "the head reads the prompt, and a draft a round"
    assert each.state.counts.accepted.tolist() == each.state.counts.drafted.tolist() == [1]


def test_the_head_catches_up_before_a_second_block_is_committed() -> None:
    """Three blocks with a mask each, which nothing is drafted for: the round that commits the second one, whose mask was
    revealed beside the first, brings the head's keys of the first. Those of the second are not needed any more."""
    mode = Mode(Static(), drafting=Drafting(2, 1, passes=1))
    each = case(mode, new=12, infill=[5, 0, M, 6, 1, M, 7, 2, 1, 4, M, 2])
    each.round()
    held = each.state.held
    assert (held.committed.tolist(), held.head_committed.tolist(), held.late.tolist()) == ([8], [4], [True])
    assert (each.plan().drafting, each.plan().blocked) == (False, True)
    each.run()
    held = each.state.held
    assert (held.committed.tolist(), held.head_committed.tolist(), held.late.tolist()) == ([12], [8], [False])
    assert each.kept(0, 12) == texts_keys(12)
    assert each.kept(1, 8) == texts_keys(8)
    assert each.text == [TEXT + TEXT[:4]]
    assert each.forwards == (1, 2, 2)


# ------------------------------------------------------------------------------------------------ refinements


def test_the_head_reveals_one_more() -> None:
    each = case(Mode(Static(), refine=Direct(1)), new=4, model=TableModel(head_exceptions={(M, 0, M, M): {0: (8, 9.0)}}))
    assert each.current == [8, 0, M, M]
    each.run()
    assert each.text == [[*PROMPT, 8, 0, 3, 6]]
    assert each.state.text.reveal_step[0, 4:8].tolist() == [0, 0, 1, 1]
    assert each.forwards == (1, 1, 3)


def test_the_head_reveals_nothing_behind_an_eos() -> None:
    """Token 0 in column 1 ends the text: the head goes on with column 0, though column 3 is surer."""
    each = case(Mode(Static(), refine=Direct(1)), new=8, eos=0)
    assert each.current == [5, 0, M, M]
    assert each.text == [TEXT[:6]]
    assert each.forwards == (1, 0, 2)


def test_what_the_head_takes_back_is_a_mask_again() -> None:
    """Log-odds are logits minus log 8: those of columns 1 and 3 are above 0. Shown both, the head is sure of another token in
    column 3, which therefore goes; shown 0 and 2 in their places, it agrees."""
    mode = Mode(Dynamic(0.0), refine=ThresholdRemask(0.0))
    each = case(mode, new=4, model=TableModel({(M, 0, M, M): {3: (2, 3.0)}}, {(M, 0, M, 6): {3: (2, 5.0)}}))
    assert each.current == [M, 0, M, M]
    assert each.state.counts.revoked.tolist() == [1]
    assert each.state.remasked.where.tolist() == [[False, False, False, True]]
    assert each.state.remasked.token[0, 3].item() == 6
    assert each.state.text.tokens[0, 4:8].tolist() == [M, 0, M, M]
    each.run()
    assert each.text == [[*PROMPT, 5, 0, 3, 2]]
    assert each.state.counts.revoked.tolist() == [1]


# ------------------------------------------------------------------------------------------------ the runner


def block_states(*states: tuple[list[int], int, int]) -> States:
    """States of one row, from ids, start and parent."""
    table = torch.tensor([[[*ids, start, parent, 0, BLOCK] for ids, start, parent in states]])
    return States(table, torch.ones(table.shape[:2], dtype=torch.bool))


def prefilled(width: int) -> tuple[Runner, Held]:
    """Behind a prompt of a block."""
    model = TableModel()
    runner = Runner(model, model.block_cache(1, 12, width * BLOCK, True), True, PYTORCH, False, CPU)
    start = torch.tensor([4])
    _, held = runner.prefill(torch.tensor([[*PROMPT, M, M, M, M]]), start, torch.zeros(1).long(), runner.start(start))
    return runner, held


CLEAN = block_states((TEXT[4:8], 4, -1), ([M] * 4, 8, 0))
ROW = torch.tensor([True])
FIRST = torch.tensor([0])


def test_late_keys_of_the_head_come_with_its_next_pass() -> None:
    runner, held = prefilled(3)
    scratch, held = runner.score(CLEAN, held, 4, ROW)
    held = runner.commit_clean(scratch, FIRST, held)
    assert (held.committed.tolist(), held.head_committed.tolist(), held.late.tolist()) == ([8], [4], [True])
    assert held.late_ids.tolist() == [TEXT[4:8]]
    assert torch.equal(held.late_hidden, scratch.hidden[:, 0])
    each = Case(None, runner, None)  # type: ignore[arg-type]
    assert each.kept(0, 8) == texts_keys(8)
    assert each.kept(1, 8) == texts_keys(4) + [[M, place] for place in range(4, 8)], "those of prefill"
    behind = block_states(([M, 4, M, M], 8, -1))
    told, held = runner.head_pass(behind, scratch.hidden[:, 1:], held, 4, late=True)
    assert (held.committed.tolist(), held.head_committed.tolist(), held.late.tolist()) == ([8], [8], [False])
    assert each.kept(1, 8) == texts_keys(8)
    assert runner.model.head_saw == [list(range(8))] * 4 + [list(range(12))] * 4
    again, held = runner.head_pass(behind, scratch.hidden[:, 1:], held, 8, late=False)
    assert torch.equal(again, told)
    assert runner.forwards == {"prefill": 1, "denoise": 1, "head": 3}
    assert (held.row_forwards.tolist(), held.row_head_forwards.tolist()) == ([2], [3])


def test_a_row_without_states_catches_up_where_it_blocks() -> None:
    """As in the round before another block is committed: no state of the row is valid, and it still takes part."""
    runner, held = prefilled(3)
    scratch, held = runner.score(CLEAN, held, 4, ROW)
    held = runner.commit_clean(scratch, FIRST, held)
    nothing = block_states(([M] * 4, 8, -1)).only(torch.tensor([[False]]))
    _, waits = runner.head_pass(nothing, scratch.hidden[:, 1:], held, 4, late=True)
    assert (waits.head_committed.tolist(), waits.late.tolist(), waits.row_head_forwards.tolist()) == ([4], [True], [1])
    _, held = runner.head_pass(nothing, scratch.hidden[:, 1:], held, 4, late=True, blocked=ROW)
    assert (held.head_committed.tolist(), held.late.tolist(), held.row_head_forwards.tolist()) == ([8], [False], [2])


def test_what_was_overwritten_cannot_be_committed() -> None:
    """A forward of the backbone overwrites what the one before scored; one of the head does not."""
    runner, held = prefilled(3)
    old, held = runner.score(CLEAN, held, 4, ROW)
    _, held = runner.head_pass(CLEAN, old.hidden, held, 4, late=False)
    runner.commit(old, FIRST, torch.tensor([4]), ROW)
    new, held = runner.score(CLEAN, held, 4, ROW)
    with pytest.raises(RuntimeError, match="overwritten by a later forward: commit before the next one"):
        runner.commit(old, FIRST, torch.tensor([4]), ROW)
    assert runner.commit_clean(new, FIRST, held).committed.tolist() == [8]


def test_prefill_in_chunks_and_behind_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one block: three of them; with the first block's keys there already, two."""
    monkeypatch.setattr("modeling_mrp.runner.runner.PREFILL_CHUNK", 5)
    each = case(STATIC, new=4, prompts=[TEXT[:8]])
    assert each.forwards == (3, 0, 0)
    assert each.current == [M, 4, M, M]
    assert each.kept(0, 8) == texts_keys(8)
    held = each.runner.start(torch.tensor([8]))
    first, held = each.runner.prefill(each.state.text.tokens, torch.tensor([8]), torch.tensor([4]), held)
    assert each.forwards == (5, 0, 0)
    assert held.row_forwards.tolist() == [2]
    assert first.argmax(-1).tolist() == [TEXT[8:12]]


def test_the_mask_is_never_picked() -> None:
    """However sure the model is of it: column 1 is then the least sure of all."""
    model = TableModel({(M, M, M, M): {1: (M, 99.0)}})
    each = case(STATIC, new=4, model=model)
    assert each.current == [M, M, M, 6]
