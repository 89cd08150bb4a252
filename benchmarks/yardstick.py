"""The published speculative decoding as a yardstick, on the same model, cache and picks as the package's own modes.

``python -m benchmarks.yardstick`` prints tokens per forward of `static`, the published algorithm, `self_spec` and `mrp_spec` on
the same prompts, their ratios with 95 % intervals (a paired bootstrap over problems; `over_batch_1` is the same mode alone in
its batch), and the share of texts that equal those of `static`.

The published algorithm, from the method alone: a forward at the start of a block seeds the head; then each verify scores the
state already known and K drafted ones, and the batch moves on by what its slowest row had right; a last forward stores the
clean block's KV. The head sees its own block only. For CPU.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from mrp_trainer.data import encode
from mrp_trainer.evaluate import NEW_TOKENS
from mrp_trainer.tasks import FAMILIES, Problem, problems
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.decode_state import Text, finished, first_state
from modeling_mrp.generate.loop import Task
from modeling_mrp.generate.modes import Drafting, Mode
from modeling_mrp.model.diffusion import block_causal_mask
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.revealing import Static
from modeling_mrp.rules.rules import stepped
from modeling_mrp.rules.states import States
from modeling_mrp.runner.runner import Held, Runner, Scratch

from .bootstrap import Cost
from .common import TINY, emit, greedy_decode, header, load, tokens_of
from .measure import Measured, measure


class Published:
    """Lockstep speculation with a seed forward and a KV-store forward per block, from the engine's own parts.

    Args:
        task: Which mode's rule and reader are used.
        runner: Runs the model.
        text: The rows' texts, laid out.
        current: [rows] their first states.
        drafts: K, the states drafted for a verify.
    """

    def __init__(self, task: Task, runner: Runner, text: Text, current: States, drafts: int) -> None:
        self.task, self.runner, self.text, self.current, self.drafts = task, runner, text, current, drafts
        self.held = runner.start(current.start)
        self.rows = torch.arange(len(current.start))

    def run(self) -> tuple[Text, Held]:
        """Decode all rows, block after block."""
        self._store_prompt()
        while bool(self.current.valid.any()):
            hidden = self._score(self.current.map(lambda t: t[:, None])).hidden[:, 0]
            while bool(self._unfinished().any()):
                hidden = self._speculate(hidden)
            self._store_block()
        return self.text, self.held

    def _unfinished(self) -> Tensor:
        return self.current.valid & self.current.masked(self.task.mask_token_id).any(-1)

    def _store_prompt(self) -> None:
        """One forward over the prompt's whole blocks."""
        longest = int(self.current.start.max())
        if longest:
            positions = torch.arange(longest).expand(len(self.rows), longest)
            mask = block_causal_mask(positions, positions, torch.ones_like(positions).bool(), self.task.block_size)
            self.runner.cache.target_slots(0, longest)
            self.runner.model.backbone(self.text.tokens[:, :longest], positions, mask, self.runner.cache)
            self.held.row_forwards += self.current.valid

    def _score(self, states: States) -> Scratch:
        scratch, self.held = self.runner.score(states, self.held, int(self.held.committed.max()), self.current.valid)
        return scratch

    def _head(self, states: States, hidden: Tensor) -> Tensor:
        """The head without the prefix's KV."""
        blind = replace(self.held, head_committed=torch.zeros_like(self.held.head_committed))
        residual, after = self.runner.head_pass(states.map(lambda t: t[:, None]), hidden[:, None], blind, 0, late=False)
        self.held = replace(self.held, row_head_forwards=after.row_head_forwards)
        return residual[:, 0]

    def _speculate(self, hidden: Tensor) -> Tensor:
        """Draft K states, score them with the known one, and accept as many as every unfinished row had right."""
        reader, eos, mask_id = self.task.reader, self.task.reader.request.eos, self.task.mask_token_id
        moving = self._unfinished()
        chain = [self.current.only(moving).map(lambda t: t[:, None])]
        estimate = hidden
        for k in range(self.drafts):
            if k > 0:
                estimate = estimate + self._head(chain[-1].map(lambda t: t[:, 0]), estimate)
            chain.append(stepped(chain[-1], reader.reveal(chain[-1], estimate[:, None], self.text), eos))
        states = reduce(States.cat, chain)
        scored = self._score(states).hidden
        reveals = reader.reveal(states, scored, self.text)
        masked = states.masked(mask_id)
        right = (stepped(states, reveals, eos).ids[:, :-1] == states.ids[:, 1:]).all(-1) & masked[:, :-1].any(-1)
        masks = masked[:, 0].sum(-1)
        accepted = right.long().cumprod(1).sum(1)
        common = torch.where(moving & (accepted < masks), accepted, self.drafts).min()
        taken = torch.minimum(common.expand_as(masks), masks) * moving
        steps = torch.arange(self.drafts).expand(len(moving), -1)
        before = states.map(lambda t: t[:, :-1]), reveals.map(lambda t: t[:, :-1])
        self.text.write(*before, steps < taken[:, None], self.text.total_steps[:, None] + steps)
        self.text.total_steps += taken
        table = torch.where(moving[:, None], states.table[self.rows, taken], self.current.table)
        end, done = finished(replace(self.current, table=table), reader.request, mask_id)
        self.text.stop = torch.where(self.current.valid & done, end, self.text.stop)
        self.current = States(table, self.current.valid & ~done)
        return torch.where(moving[:, None, None], scored[self.rows, taken], hidden)

    def _store_block(self) -> None:
        """One more forward over the clean block, for its KV."""
        active = self.current.valid
        if not bool(active.any()):
            return
        scratch = self._score(self.current.map(lambda t: t[:, None]))
        self.held = self.runner.commit_clean(scratch, torch.where(active, 0, -1), self.held)
        after = first_state(self.text, self.current.start + self.task.block_size, self.task.block_size)
        self.current = replace(self.current, table=torch.where(active[:, None], after.table, self.current.table))


@torch.inference_mode()
def decode_published(
    model: MRPForCausalLM, prompts: list[list[int]], states: int, new_tokens: int, eos: list[int]
) -> tuple[list[list[int]], list[int], list[int]]:
    """Greedy texts of a batch, and the forwards of backbone and head that each row took part in."""
    mode = Mode(Static(), drafting=Drafting(states, 1, states))
    decode = greedy_decode(model, mode, prompts, new_tokens, eos, states + 1)  # room for the known state
    text, held = Published(*decode, drafts=states).run()
    return tokens_of(text, prompts), held.row_forwards.tolist(), held.row_head_forwards.tolist()


def measure_published(
    model: MRPForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Problem], batch_size: int, states: int
) -> Measured:
    """The published algorithm on problems of one family, with `states` drafted ones a verify."""
    ids: list[list[int]] = []
    forwards: list[int] = []
    head: list[int] = []
    eos = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for begin in range(0, len(asked), batch_size):
        part = asked[begin : begin + batch_size]
        prompts = [encode(problem, tokenizer)[0] for problem in part]
        made = decode_published(model, prompts, states, NEW_TOKENS[part[0].family], eos)
        for kept, new in zip((ids, forwards, head), made, strict=True):
            kept += new  # type: ignore[operator]
    return Measured(ids, Cost([len(row) for row in ids], forwards, head), {})


def compare(
    model: MRPForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: list[Problem], batch_size: int, states: list[int]
) -> Iterator[tuple[str, Measured, dict[str, Any]]]:
    """Every mode on the same problems: its name, what it measured, and ratios to the modes it is compared with."""
    static = measure(model, tokenizer, asked, batch_size, decoding="static")
    yield "static", static, {}
    for k in states:
        published = measure_published(model, tokenizer, asked, batch_size, k)
        yield f"published K={k}", published, published.over(static=static)
        own: Measured | None = None
        for name, drafted in variants(k).items():
            measured = measure(model, tokenizer, asked, batch_size, num_draft_states=k, **drafted)
            own = measured if name == f"self_spec K={k}" else own
            against = {"self_spec": own} if drafted["decoding"] == "mrp_spec" else {}
            yield name, measured, measured.over(published=published, static=static, **against)


def variants(states: int) -> dict[str, dict[str, Any]]:
    """The modes that draft, by name: as they are by default, as the simple chain, and with a head pass for every draft."""
    chain, each = {"draft_branches": 1}, {"draft_passes": max(1, states - 1)}
    return {
        f"self_spec K={states} chain": {"decoding": "self_spec", **chain},
        f"self_spec K={states}": {"decoding": "self_spec"},
        f"mrp_spec K={states} chain, {states - 1} head passes": {"decoding": "mrp_spec", **chain, **each},
        f"mrp_spec K={states}, {states - 1} head passes": {"decoding": "mrp_spec", **each},
        f"mrp_spec K={states}": {"decoding": "mrp_spec"},
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line per family, batch size and mode."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yardstick", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--states", nargs="+", type=int, default=[4, 8])
    options = parser.parse_args(arguments)
    emit(header("yardstick", options))
    model, tokenizer = load(options.model)
    for family in options.family:
        asked = problems(family, "heldout", options.count)
        alone: dict[str, Measured] = {}
        for batch_size in options.batch_size:
            static: Measured | None = None
            for name, measured, ratios in compare(model, tokenizer, asked, batch_size, options.states):
                static = static or measured
                if batch_size == 1:
                    alone[name] = measured
                else:
                    ratios |= measured.over(batch_1=alone.get(name))
                line = {"family": family, "batch_size": batch_size, "mode": name, **measured.line(), **ratios}
                emit({**line, "same": measured.same(static)})


if __name__ == "__main__":
    main()
