"""Where `static` and `dynamic` depart from SDAR's own script, and what that changes: ``python -m benchmarks.departures``.

SDAR's `generate.py` (github JetAstra/SDAR, commit 59549b1) was read; this is written from what it does. It differs from this
package's targets in four ways, each a switch of `Script` here; without any the texts and forwards are those of `generate`:

1. `truncated`: confidence is the token's probability after top-k and top-p, not before.
2. `behind_eos`: positions behind an eos are revealed as all others, and a text ends with its block.
3. `mask_inside`: the mask id is one more token of the softmax.
4. `quota`: where fewer positions pass tau than a step's quota, `dynamic` reveals the quota's most confident ones, not what
   passes or one.

Not followed are its forward more a block for keys and values; that it writes over given or revealed tokens where a quota is
larger than what is left (so that a prompt can change); and that it fails once its steps are spent on masks: here a step that
picks nothing else picks again without the mask, and `stuck` counts them. What ties is taken from the left here and left open
there.

A line has accuracy and tokens per forward of one way, and `texts_that_differ` from the same way without departures. What is
greedy here has top_k 1, which the script has in place of greedy decoding; what is sampled has the same noise in both.
"""

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from mrp_trainer.intervals import wilson
from mrp_trainer.tasks import Family, Problem, problems
from torch import Tensor
from transformers.generation import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from modeling_mrp.generate.decode_state import Request, Text
from modeling_mrp.generate.loop import begin, decode
from modeling_mrp.generate.modes import Amount, Mode
from modeling_mrp.generate.pace import Fixed
from modeling_mrp.generate.sampling import Context, Picks, Sampler
from modeling_mrp.generate.scoring import Reader
from modeling_mrp.generate.stopping import Stopping
from modeling_mrp.kernels.unembedding import log_odds
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.revealing import Candidates, Dynamic, RevealRule, Static, logit, reveal_schedule, top_by
from modeling_mrp.rules.states import Reveal, States

from .common import TINY, emit, greedy_decode, header, load
from .loops import Made, measure_loop
from .measure import Measured

FAMILIES: tuple[Family, ...] = ("math", "code")  # those with right answers
SWITCHES = ("truncated", "behind_eos", "mask_inside", "quota")


@dataclass(frozen=True)
class Quota(Dynamic):
    """Reveal every position whose confidence exceeds tau, or, where these are fewer, the step's quota of the most confident."""

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        above = scored.where & (scored.confidence > self.threshold)
        enough = above.sum(-1, keepdim=True) >= scored.quota[..., None]
        return torch.where(enough, above, top_by(scored.confidence, scored.where, scored.quota))


@dataclass(frozen=True)
class Truncated(Sampler):
    """The picks of a sampler, with confidences under what its truncation leaves; that of a token left alone is infinite."""

    def __call__(
        self,
        hidden: Tensor,
        keys: Tensor,
        context: Context | None = None,
        no_eos: Tensor | None = None,
        active: Tensor | None = None,
    ) -> Picks:
        """See `Sampler.__call__`."""
        picks = super().__call__(hidden, keys, context, no_eos, active)
        if not self.truncation or not len(hidden):
            return picks
        scores = self.truncation(keys[:, None], self.unembedding.tempered(self.unembedding.logits(hidden), None))
        return Picks(picks.token, *log_odds(scores, picks.token, picked=True), picks.entropy)


@dataclass(frozen=True)
class MaskStays(Reader):
    """Reads reveals of which those that picked the mask itself reveal nothing.

    Attributes:
        without: Picks in place of `sampler` where nothing else was picked: the next step would be the same.
        stuck: Has a number for each round with such states, how many they were.
    """

    without: Sampler
    stuck: list[int]

    def reveal(self, states: States, hidden: Tensor, text: Text, count: Tensor | None = None) -> Reveal:
        """See `Reader.reveal`."""
        said = super().reveal(states, hidden, text, count)
        kept = said.only(said.where & (said.token != self.mask_token_id))
        stuck = said.where.any(-1) & ~kept.where.any(-1)
        if not bool(stuck.any()):
            return kept
        self.stuck.append(int(stuck.sum()))
        plain = Reader.reveal(replace(self, sampler=self.without), states, hidden, text, count)
        pairs = ((getattr(plain, name), getattr(kept, name)) for name in vars(kept))
        return Reveal(*(torch.where(stuck[..., None], *pair) for pair in pairs))


class WholeBlocks(Stopping):
    """Ends a text that has an eos once the block of its first one is whole, as a stopping criterion of the loop.

    Args:
        eos: Ids that end a text.
        block_size: Tokens of a block.
        mask_id: The mask's id.
    """

    def __init__(self, eos: list[int], block_size: int, mask_id: int) -> None:
        self.eos, self.block_size, self.mask_id = torch.tensor(eos, dtype=torch.long), block_size, mask_id

    def ask(self, text: Text, request: Request, active: Tensor, end: Tensor, done: Tensor) -> None:
        """See `Stopping.ask`."""
        tokens, position = text.tokens, torch.arange(text.tokens.shape[1])
        own = (position >= request.prompt_length[:, None]) & (position < request.limit[:, None])
        ends = torch.isin(tokens, self.eos) & own
        first = ends.int().argmax(1)
        behind = (first // self.block_size + 1) * self.block_size
        whole = ends.any(1) & ~((tokens == self.mask_id) & own & (position < behind[:, None])).any(1)
        end[whole], done[whole] = first[whole] + 1, True


@dataclass(frozen=True)
class Script:
    """SDAR's script as a `Loop`, as far as its switches say.

    Attributes:
        threshold: tau of `dynamic`, a probability; None: `static`.
        denoising_steps: Of a block; None: as many as it has tokens.
        seed: Row i of a batch is sampled with that + i; None: picks are greedy.
        top_k: Of a truncation, 0 for none,
        top_p: and 1 for none.
        truncated, behind_eos, mask_inside, quota: See the module.
        stuck: Gets numbers of states at which nothing but masks was picked.
    """

    threshold: float | None = None
    denoising_steps: int | None = None
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    truncated: bool = False
    behind_eos: bool = False
    mask_inside: bool = False
    quota: bool = False
    stuck: list[int] = field(default_factory=list)

    @property
    def rule(self) -> RevealRule:
        """What a step reveals."""
        if self.threshold is None:
            return Static()
        return (Quota if self.quota else Dynamic)(logit(self.threshold))

    @torch.inference_mode()
    def __call__(self, model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]) -> Made:
        """See `Loop`; sampled where there is a seed."""
        task, runner, text, current = greedy_decode(model, Mode(self.rule), prompts, new_tokens, eos, 2)
        size, mask_id, reader = task.block_size, task.mask_token_id, task.reader
        # Without masks that are picked, a block never has more steps than these.
        changed: dict[str, Any] = {"schedule": reveal_schedule(size, self.denoising_steps).clamp(min=1)}
        if self.seed is not None:
            changed["seed"] = self.seed + torch.arange(len(prompts))
        if self.behind_eos:
            task = replace(task, stopping=WholeBlocks(eos, size, mask_id))
            changed["eos"] = torch.empty(0, dtype=torch.long)
        sampler = replace(reader.sampler, sample=self.seed is not None, truncation=self._truncation())
        sampler = Truncated(**vars(sampler)) if self.truncated else sampler
        reader = replace(reader, sampler=sampler, drafter=sampler, request=replace(reader.request, **changed))
        if self.mask_inside:
            inside = replace(sampler, token_ids=torch.arange(model.config.vocab_size))
            reader = MaskStays(**{**vars(reader), "sampler": inside}, without=sampler, stuck=self.stuck)
        task = replace(task, reader=reader)
        state = begin(task, runner, text, current, torch.zeros_like(current.start))
        decoded = decode(task, runner, state, Fixed(Amount()))
        return Made.of(decoded.state.text, decoded.state.held, prompts)

    def _truncation(self) -> LogitsProcessorList:
        warpers = [TopKLogitsWarper(self.top_k)] if self.top_k else []
        return LogitsProcessorList([*warpers, *([TopPLogitsWarper(self.top_p)] if self.top_p < 1 else [])])


GREEDY: dict[str, Any] = {"seed": 0, "top_k": 1}
SAMPLED: dict[str, Any] = {"seed": 0, "top_p": 0.9}


def ways(block_size: int, threshold: float) -> list[tuple[dict[str, Any], list[tuple[str, ...]]]]:
    """List the options of each way to decode, and the departures that are measured there: alone, then all together."""
    half = {"denoising_steps": block_size // 2}
    dynamic = {"threshold": threshold}
    alone: list[tuple[str, ...]] = [(switch,) for switch in SWITCHES[:3]]
    return [
        (GREEDY, alone),
        (GREEDY | half, alone),
        (GREEDY | dynamic | half, [*alone, ("quota",), SWITCHES[1:], SWITCHES]),
        (SAMPLED, alone),
        (SAMPLED | dynamic | half, [*alone, ("quota",), SWITCHES]),
    ]


def line(measured: Measured, without: Measured) -> dict[str, Any]:
    """Accuracy and tokens per forward with intervals, and the texts that differ from those without departures."""
    right = wilson(sum(map(bool, measured.right)), len(measured.right))
    return {
        "accuracy": round(100 * right.value, 1),
        "accuracy_95": [round(100 * right.low, 1), round(100 * right.high, 1)],
        **measured.line(),
        "texts": len(measured.ids),
        "texts_that_differ": sum(a != b for a, b in zip(measured.ids, without.ids, strict=True)),
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each family, way to decode, and departure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.departures", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--split", default="heldout", choices=("heldout", "tune"))
    parser.add_argument("--count", type=int, default=200, help="problems of a family")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--threshold", type=float, default=0.9, help="tau of dynamic")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("departures", options, model))
    model = model.to(getattr(torch, options.dtype))

    def measured(asked: list[Problem], script: Script) -> Measured:
        return measure_loop(script, model, tokenizer, asked, options.batch_size)

    for family in options.family:
        asked = problems(family, options.split, options.count)
        for way, each in ways(model.config.block_size, options.threshold):
            without = measured(asked, Script(**way))
            for departures in ((), *each):
                switched: dict[str, Any] = dict.fromkeys(departures, True)
                script = Script(**way, **switched)
                found = measured(asked, script) if departures else without
                where = {"family": family, "dtype": options.dtype, **way, "departures": departures}
                stuck = {"stuck": sum(script.stuck)} if script.mask_inside else {}
                emit({**where, **line(found, without), **stuck})


if __name__ == "__main__":
    main()
