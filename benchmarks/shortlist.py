"""How many tokens of a position the head's drafts have to choose among.

``python -m benchmarks.shortlist --count 40`` decodes tuning problems of each family, batch 1, greedily in float64, drafted by
one head pass: tokens a forward of every target with the whole vocabulary, and with each position's m likeliest stale tokens.
`missed` is how often the head's own best token of the whole vocabulary is not among them.
"""

from dataclasses import dataclass, field, replace

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from torch import Tensor

from modeling_mrp.generate.budget import Amount, Fixed
from modeling_mrp.generate.loop import Decoder, Drafting, Mode
from modeling_mrp.generate.option_table import ids_of
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.picker import Picker, Picks, Spots

from .common import TINY, emit, greedy_decode, header, load, parser_of
from .frontier import JUDGED
from .targets import TARGETS


@dataclass(frozen=True)
class Watched(Picker):
    """Picks among a few tokens, and counts how often all of them would have given another one.

    Attributes:
        seen: Picks, and those of another token.
    """

    seen: list[int] = field(default_factory=lambda: [0, 0], kw_only=True)

    def among(self, hidden: Tensor, shortlist: Tensor, spots: Spots) -> Picks:
        """See `Picker.among`."""
        made, best = super().among(hidden, shortlist, spots), self(hidden, spots).token
        self.seen[0] += len(best)
        self.seen[1] += int((best[:, None] != shortlist[:, : shortlist.shape[1] // 2].long()).all(1).sum())
        return made


def decoded(
    model: MRPForCausalLM, target: str, prompt: list[int], states: int, size: int, new: int
) -> tuple[int, int, list[int]]:
    """Decode a prompt: its tokens and forwards, and the counts of `Watched`; `size` tokens of a position, 0: all."""
    options = MRPGenerationConfig(decoding="mrp_spec", target=target, num_draft_states=states, **TARGETS[target])
    options.check(model.config.block_size, has_head=True)
    mode = Mode(options.mode(model.config.block_size).rule, drafting=Drafting(states, 3, 1))
    networks, rows = greedy_decode(model, mode, [prompt], new, ids_of(model.generation_config.eos_token_id), max(2, states))
    watched = Watched(**{name: getattr(networks.picker, name) for name in Picker.__dataclass_fields__})
    networks.picker, networks.drafter = replace(networks.picker, shortlist=size), replace(watched, entropy=False)
    Decoder(mode, networks, Fixed(Amount(states, 1))).decode(rows, [0])
    (row,) = rows
    return (row.stop or row.limit) - row.prompt, row.counts.forwards, networks.drafter.seen


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line for each family, target, number of states and size of the list."""
    parser = parser_of("shortlist", __doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--states", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 16, 8, 4])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    emit(header("shortlist", options))
    model, tokenizer = load(TINY)
    model = model.double()
    for family in JUDGED:
        asked = [encode(problem, tokenizer)[0] for problem in problems(family, "tune", options.count)]
        for target in TARGETS:
            for states in options.states:
                for size in options.sizes:
                    with torch.inference_mode():
                        found = [decoded(model, target, prompt, states, size, NEW_TOKENS[family]) for prompt in asked]
                    tokens, forwards, seen = zip(*found, strict=True)
                    line = {"family": family, "target": target, "states": states, "size": size}
                    speed = round(sum(tokens) / sum(forwards), 3)
                    missed = {"missed": round(sum(one[1] for one in seen) / sum(one[0] for one in seen), 5)} if size else {}
                    emit({**line, "tokens_per_forward": speed, **missed})


if __name__ == "__main__":
    main()
