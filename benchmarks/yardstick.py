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
from typing import Any

import torch
from mrp_trainer.data import encode
from mrp_trainer.evaluate import NEW_TOKENS
from mrp_trainer.tasks import FAMILIES, Problem, problems
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.decoding import Counts, Decoder, Rows
from modeling_mrp.generate.generation import MRPGenerationConfig
from modeling_mrp.generate.sampling import Sampler
from modeling_mrp.generate.states import States
from modeling_mrp.generate.strategies import Spec
from modeling_mrp.kernels.round_attention import RoundMask
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.runner.cache import BlockCache

from .bootstrap import Cost
from .common import TINY, emit, header, load
from .measure import Measured, measure


class PublishedDecoder(Decoder):
    """Lockstep speculation with a seed forward and a KV-store forward per block."""

    def run(self) -> tuple[Rows, Counts]:
        """Decodes all rows, block after block."""
        self._store_prompt()
        while bool(self.rows.active.any()):
            hidden = self._forward(self.current().map(lambda t: t[:, None]), "denoise")[:, 0]
            while bool(self._unfinished().any()):
                hidden = self._speculate(hidden)
            self._store_block()
        return self.rows, self.counts

    def _unfinished(self) -> Tensor:
        return self.rows.active & ~self._clean(self.current())

    def _store_prompt(self) -> None:
        """One forward over the prompt's whole blocks."""
        longest = int(self.rows.start.max())
        if longest:
            positions = torch.arange(longest).expand(len(self.rows.start), longest)
            mask = positions[:, None, :] // self.block <= positions[:, :, None] // self.block
            self.cache.target_slots(0, longest)
            self.model.backbone(self.rows.tokens[:, :longest], positions, mask[:, None], self.cache)
            self._count("prefill")

    def _count(self, role: str) -> None:
        self.counts.forwards[role] += 1
        self.counts.row_forwards += self.rows.active

    def _forward(self, states: States, role: str) -> Tensor:
        self._count(role)
        return self._packed_forward(states, None, self.committed, int(self.committed.max()), self.model.backbone)

    def _speculate(self, hidden: Tensor) -> Tensor:
        """Drafts K states, scores them with the known one, and accepts as many as every unfinished row had right."""
        moving = self._unfinished()
        chain = [replace(self.current(), valid=moving)]
        estimate = hidden
        for k in range(self.strategy.width):
            if k > 0:
                estimate = estimate + self._head(chain[-1], estimate)
            chain.append(self._stepped(chain[-1], self.reveal_from(chain[-1], estimate)))
        states = States.stack(chain)
        scored = self._forward(states, "verify")
        width = len(chain)
        reveals = self.reveal_from(states.map(lambda t: t.flatten(0, 1)), scored.flatten(0, 1))
        reveals = reveals.map(lambda t: t.unflatten(0, (len(moving), width)))
        right = (self._stepped(states, reveals).ids[:, :-1] == states.ids[:, 1:]).all(-1) & ~self._clean(states)[:, :-1]
        masks = (states.ids[:, 0] == self.mask_id).sum(-1)
        accepted = right.long().cumprod(1).sum(1)
        common = torch.where(moving & (accepted < masks), accepted, width - 1).min()
        taken = torch.minimum(common.expand_as(masks), masks) * moving
        steps = torch.arange(width - 1)
        self._record(
            states.map(lambda t: t[:, :-1]),
            reveals.map(lambda t: t[:, :-1]),
            steps < taken[:, None],
            steps.expand(len(moving), -1),
        )
        self.rows.clock += taken
        self.rows.step += taken
        self._stop_finished()
        return torch.where(moving[:, None, None], scored[self.all_rows, taken], hidden)

    def _head(self, states: States, hidden: Tensor) -> Tensor:
        """The head without the prefix's KV."""

        def forward(ids: Tensor, positions: Tensor, mask: Tensor | RoundMask, cache: BlockCache) -> Tensor:
            return self.model.residual(ids, hidden, positions, mask, cache)

        self._count_head(states.valid)
        return self._packed_forward(states.map(lambda t: t[:, None]), None, torch.zeros_like(self.committed), 0, forward)[:, 0]

    def _store_block(self) -> None:
        """One more forward over the clean block, for its KV."""
        if not bool(self.rows.active.any()):
            return
        states = self.current()
        self._forward(states.map(lambda t: t[:, None]), "denoise")
        self.cache.commit(torch.zeros_like(states.start), states.start, self.rows.active, self.block, self.backbone_layers)
        self.committed = torch.where(self.rows.active, states.start + self.block, self.committed)
        self.rows.start = torch.where(self.rows.active, self.rows.start + self.block, self.rows.start)
        self.rows.step = torch.where(self.rows.active, 0, self.rows.step)


@torch.inference_mode()
def decode_published(
    model: MRPForCausalLM, prompts: list[list[int]], states: int, new_tokens: int, eos: list[int]
) -> tuple[list[list[int]], list[int], list[int]]:
    """Greedy texts of a batch, and the forwards of backbone and head that each row took part in."""
    schedule = MRPGenerationConfig().schedule(model.config.block_size)
    decoder = PublishedDecoder(
        model,
        Spec(states + 1, 1, states),  # room for the known state
        Sampler(model.lm_head.weight, model.config.mask_token_id),
        [torch.tensor(prompt) for prompt in prompts],
        new_tokens,
        schedule,
        eos,
        torch.zeros(len(prompts), dtype=torch.long),
    )
    decoder.strategy.width = states
    rows, counts = decoder.run()
    texts = [rows.tokens[i, len(prompt) : int(rows.stop[i])].tolist() for i, prompt in enumerate(prompts)]
    return texts, counts.row_forwards.tolist(), counts.row_head_forwards.tolist()


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
