"""The premise of the method: logits of nearby steps are alike, and the head's estimates even more alike.

    python -m benchmarks.premise > benchmarks/results/tiny_premise.jsonl

decodes 40 tuning problems of each family with each target alone, greedily in float64. At each state, the backbone's logits at
masked positions are compared with two guesses made from its output n steps before: `stale`, that output itself; `head`, one
pass of the head over all tokens revealed since. `kl` is KL(backbone || guess) in nats, a mean over positions; `same` is the
share of positions with the same likeliest token; `missed` is how often the head's likeliest token is not among the 16 likeliest
stale ones. `python -m benchmarks.tables premise` prints the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from torch import Tensor

from modeling_mrp.generate.budget import Amount, Fixed
from modeling_mrp.generate.loop import Decoder, Drafting, Mode
from modeling_mrp.generate.option_table import ids_of
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Hidden, Networks, gather_blocks
from modeling_mrp.networks.picker import SHORTLIST
from modeling_mrp.rules.state import Row

from .common import TINY, emit, greedy_decode, header, load, parser_of
from .frontier import JUDGED, rule_of
from .targets import TARGETS

APART = (1, 2, 4, 7)  # steps; drafts of eight states reach seven
GUESSES = ("stale", "head")


@dataclass
class Watched:
    """Compares guesses of the backbone's logits with what it computes, round after round of a plain decode.

    Attributes:
        networks: Backbone and head on the device.
        sums: By steps apart: positions, divergences of the guesses, same tokens, and tokens that a shortlist misses.
        past: By row, the start of its block and the hidden states of its states so far, newest first.
        guessed: By row, the columns and hidden states of the guesses at its next state, newest first.
    """

    networks: Networks
    sums: dict[int, Tensor] = field(default_factory=lambda: {steps: torch.zeros(6, dtype=torch.float64) for steps in APART})
    past: dict[int, tuple[int, list[Hidden]]] = field(default_factory=dict)
    guessed: dict[int, tuple[tuple[int, ...], list[tuple[Hidden, Hidden]]]] = field(default_factory=dict)

    def note(self, rows: Sequence[Row]) -> None:
        """Compare the last round's guesses with what was computed, and make the next guesses."""
        asked: list[list[Any]] = []
        for row in rows:
            said = None if row.source is None else row.source.hidden
            if said is not None and row.place in self.guessed:
                self.compare(said, *self.guessed.pop(row.place))
            start, past = self.past.pop(row.place, (-1, []))
            if said is not None and row.stop is None and row.state.free:
                past = [said, *(past if start == row.state.start else [])][: APART[-1]]
                self.past[row.place] = row.state.start, past
            asked.append([(row.state, one) for one in past] if row.place in self.past else [])
        if not self.past:
            return
        for row, made in zip(rows, self.networks.head(rows, asked), strict=True):
            if made:
                self.guessed[row.place] = row.state.free, list(zip(self.past[row.place][1], made, strict=True))

    def compare(self, told: Hidden, free: Sequence[int], guesses: Sequence[tuple[Hidden, Hidden]]) -> None:
        """Add the differences between guesses and the computed hidden states at the free columns of a state."""
        said = self.logp(told, free)
        for steps in APART:
            if steps <= len(guesses):
                logp = [self.logp(one, free) for one in guesses[steps - 1]]
                apart = [(said.exp() * (said - one)).sum() for one in logp]
                same = [(said.argmax(-1) == one.argmax(-1)).sum() for one in logp]
                few = logp[0].topk(SHORTLIST).indices
                missed = (few != logp[1].argmax(-1)[:, None]).all(-1).sum()
                self.sums[steps] += torch.tensor([len(free), *apart, *same, missed], dtype=torch.float64)

    def logp(self, hidden: Hidden, free: Sequence[int]) -> Tensor:
        """Compute log-probabilities [n, vocab - 1] of all tokens but the mask at some columns."""
        logits = gather_blocks([hidden])[0, list(free)] @ self.networks.picker.lm_head_weight.T
        keep = [one for one in range(logits.shape[-1]) if one != self.networks.mask_id]
        return logits[:, keep].log_softmax(-1)


@torch.inference_mode()
def measured(model: MRPForCausalLM, target: str, prompts: list[list[int]], new: int) -> dict[int, Tensor]:
    """Decode prompts with a target, and return `Watched.sums`."""
    rule = rule_of(target)
    mode, eos = Mode(rule, drafting=Drafting(2, 1, 1)), ids_of(model.generation_config.eos_token_id)
    networks, rows = greedy_decode(model, mode, prompts, new, eos, APART[-1] + 1)
    watched = Watched(networks)
    Decoder(mode, networks, Fixed(Amount()), [watched.note], len(rows)).decode(rows, [0] * len(rows))
    return watched.sums


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line for each family, target and number of steps apart."""
    parser = parser_of("premise", __doc__)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    emit(header("premise", options, model))
    model = model.double()
    for family in JUDGED:
        asked = [encode(problem, tokenizer)[0] for problem in problems(family, "tune", options.count)]
        for target in TARGETS:
            for steps, sums in measured(model, target, asked, NEW_TOKENS[family]).items():
                count, *means = (sums / torch.tensor([1.0, *[float(sums[0])] * 5])).tolist()
                line = {"family": family, "target": target, "steps": steps, "positions": int(count)}
                line |= {"kl": {name: round(one, 5) for name, one in zip(GUESSES, means[:2], strict=True)}}
                line |= {"same": {name: round(one, 5) for name, one in zip(GUESSES, means[2:4], strict=True)}}
                emit({**line, "missed": round(means[4], 5)})


if __name__ == "__main__":
    main()
