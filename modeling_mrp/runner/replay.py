"""Rounds that are replayed: what a round reads and writes, in registers, and what else it depends on, in its key.

A round is a function of tensors (what is known of the rows, what was scored last, ...) and of a few numbers: those of the
`Outlook`, what the strategy and the picker were made with, and shapes. The tensors lie in `Registers`; a *whole* round, from
drafting to the numbers that the host reads, is one recording for each set of numbers. They are made fewer:

- how many committed slots are read comes in steps (`recorded_caches_mrp.bucket`), for backbone and head the same ones;
- a round that drafts always has room for all of its states, though few masks may not let them be filled: what nobody fills is
  not valid. Below the compute-bound limit a forward takes no longer for it;
- a head pass of such a round always has room for a clean block whose keys and values are late.

So for each batch size and step of the prefix there are, at most: in `static` and the like, rounds with a clean block and
without; in speculation, these two for rows that cannot draft, one in which a late block catches up alone, and the drafting
round, once more for several head passes where at most one mask is left, and with `compute_bound_tokens` for each number of
states that is chosen.

Not replayed as a whole are calls with logits processors or stopping criteria, which are the user's code, with truncation
other than top-k, top-p and min-p, and the remasking rule `reread`, which asks the device as it goes. Their forwards are
recorded one by one, and the rest of the round runs as it is.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..generate.rows import SUMMARY, Outlook
from ..generate.states import Memory
from .graphs import described, fixed_copy, leaves, refilled
from .recorded import RecordedCache

if TYPE_CHECKING:
    from ..generate.decoding import Decoder

# Attributes of the decoder: what a round changes, and what it only reads.
_CHANGES = (
    "rows",
    "counts",
    "verified",
    "committed",
    "head_committed",
    "pending",
    "blocked",
    "pending_ids",
    "pending_hidden",
    "seed",
    "has_seed",
    "memory",
    "latest",
)
_READS = ("schedule", "eos", "no_eos_before", "offsets", "all_rows")
# Warpers that are tensor code from end to end, and numbers.
_REPLAYED_WARPERS = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def replayable(decoder: "Decoder") -> bool:
    """Whether a whole round of this decode is tensor code and depends on nothing but its registers and key."""
    picker = decoder.picker
    return (
        not decoder.strategy.looks
        and decoder.stopping is None
        and picker.processors is None
        and all(type(warper) in _REPLAYED_WARPERS for warper in picker.truncation or [])
    )


class Replay:
    """The rounds of one decode behind its prefill, recorded or replayed.

    Args:
        decoder: Whose attributes are put into registers, until `end`.
        recorded: Where its cache is.
    """

    def __init__(self, decoder: "Decoder", recorded: RecordedCache) -> None:
        self.decoder = decoder
        # The draft vocabulary's rows of lm_head are copied anew for each call.
        drafts_from_copy = decoder.drafter.lm_head_weight is not decoder.picker.lm_head_weight
        self.names = (*_CHANGES, *_READS, *(["drafter"] if drafts_from_copy else []))
        plain = (replace(picker, lm_head_weight=picker.lm_head_weight[:0]) for picker in (decoder.picker, decoder.drafter))
        made_with = (decoder.strategy, *plain, decoder.one_at_a_time, decoder.bars_eos, decoder.width, decoder.block)
        if decoder.strategy.drafts:  # the prefill remembers nothing; what is to be remembered has the seed's dtypes
            nothing = replace(decoder.seed.states, valid=torch.zeros_like(decoder.seed.states.valid))
            decoder.memory = Memory.empty(replace(decoder.seed, states=nothing))
        decoder.pending_hidden = decoder.pending_hidden.to(decoder.seed.hidden.dtype)
        self.registers = recorded.registers_for(described(made_with), self._parts())
        self.template = self.registers.read(self._parts())
        if self.registers.numbers is None:
            self.registers.numbers = fixed_copy(torch.zeros(SUMMARY + decoder.width, dtype=torch.long, device=decoder.device))
        self._load()

    def _parts(self) -> list[Any]:
        parts = {name: getattr(self.decoder, name) for name in self.names}
        if self.decoder.strategy.drafts:
            parts["memory"] = parts["memory"].padded(self.decoder.width)
        return list(parts.values())

    def _load(self) -> None:
        for name, part in zip(self.names, self.registers.read(self.template), strict=True):
            setattr(self.decoder, name, part)

    def round(self) -> list[int]:
        """One round; returns what `Decoder.summary` stacked, and possibly more."""
        decoder, registers = self.decoder, self.registers
        outlook, per_row = self._coarse(), decoder.slots().per_row
        forwards = decoder.counts.forwards
        before = dict(forwards)
        assert registers.numbers is not None
        numbers = registers.numbers

        def step() -> None:
            decoder.outlook = replace(outlook)
            self._load()
            seen = decoder.summary(decoder.round())
            numbers[: len(seen)] = seen
            registers.write(self._parts())
            self._load()

        key = described(outlook), per_row
        registers.graphs.run(key, step)
        ran = registers.host.setdefault(key, {name: count - before[name] for name, count in forwards.items()})
        forwards |= {name: count + ran[name] for name, count in before.items()}
        return numbers.tolist()

    def _coarse(self) -> Outlook:
        """The outlook as far as a recording depends on it."""
        decoder, outlook = self.decoder, self.decoder.outlook
        drafting = decoder.slots().per_row > 1
        one_pass = drafting and decoder.strategy.passes > 1 and outlook.masks <= 1
        return Outlook(
            active=1,
            used=outlook.used,
            head_used=outlook.used,
            clean=min(outlook.clean, 1) if not drafting else 0,
            masks=1 if one_pass else decoder.block,
            drafting=drafting,
            pending=bool(decoder.head_layers) if drafting else outlook.pending,
            blocked=outlook.blocked and not drafting,
            passed=[],
        )

    def end(self) -> None:
        """Leaves the decoder with tensors of its own: the next call writes to the registers."""
        for name in self.names:
            part = getattr(self.decoder, name)
            setattr(self.decoder, name, refilled(part, iter([leaf.clone() for leaf in leaves(part)])))


__all__ = ["Replay", "replayable"]
