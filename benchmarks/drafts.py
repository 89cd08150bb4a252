"""Why drafts are wrong: what was expected at each drafted state, and what the backbone did (``python -m benchmarks.drafts``).

For every state of a round that the backbone scored and from which a follower was drafted (a chain, K = 4) it prints, by
family: how often the token expected at the position that the backbone revealed was right, and which place that position
had in the order that was expected.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from mrp_trainer.evaluate import decode_problems
from mrp_trainer.tasks import FAMILIES, problems
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from modeling_mrp.generate.decoding import Decoder
from modeling_mrp.generate.drafting import Lattice
from modeling_mrp.generate.states import Proposal
from modeling_mrp.generate.strategies import ranks
from modeling_mrp.modeling import MRPForCausalLM

TINY = Path(__file__).parent.parent / "hub_configs" / "sdar-tiny-mrp"


class WatchedDecoder(Decoder):
    """Counts, over all calls, what became of each expected reveal."""

    counted: Counter[str] = Counter()
    expected: list[tuple[Tensor, Tensor, Tensor]]

    def draft(self) -> Lattice:
        """Keeps what was expected at each state but the last, from which nothing is drafted."""
        lattice = super().draft()
        self.expected = []
        for slot in range(lattice.width - 1):
            state, valid = lattice.slots[:, slot], lattice.valid[:, slot]
            token, odds = lattice.tells(state, valid)
            candidates = (state[:, : self.block] == self.mask_id) & (odds > -torch.inf)
            told = valid & (state[:, lattice.source] >= 0)
            self.expected.append((told, token, odds.where(candidates, -torch.inf)))
        return lattice

    def walk(self, proposal: Proposal, hidden: Tensor) -> Tensor:
        """Compares it with the backbone's reveal; a drafting step's place in the round is its state's slot."""
        for slot, (valid, token, odds) in enumerate(self.expected):
            states = proposal.states.map(lambda t, slot=slot: t[:, slot])  # type: ignore[misc]
            actual = self.reveal_from(states, hidden[:, slot], behind=proposal.behind()[:, slot])
            row, column = (actual.where & (valid & states.valid)[:, None]).nonzero(as_tuple=True)
            place = ranks(odds, odds > -torch.inf)[row, column]
            right = token[row, column] == actual.token[row, column]
            self.counted["states"] += len(row)
            self.counted["token right"] += int(right.sum())
            self.counted["all right"] += int((right & (place == 0)).sum())
            self.counted["only the order wrong"] += int((right & (place > 0)).sum())
            for n in range(3):
                self.counted[f"position expected in place {n + 1}"] += int((place == n).sum())
        return super().walk(proposal, hidden)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line per family and mode, shares in percent of the states."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--count", type=int, default=96)
    options = parser.parse_args(arguments)
    model = MRPForCausalLM.from_pretrained(options.model).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    with patch("modeling_mrp.generate.generation.Decoder", WatchedDecoder):
        for family in FAMILIES:
            for mode in ("self_spec", "mrp_spec"):
                WatchedDecoder.counted = Counter()
                asked = problems(family, "heldout", options.count)
                decode_problems(model, tokenizer, asked, decoding=mode, num_draft_states=4, draft_branches=1, draft_passes=3)
                states = WatchedDecoder.counted.pop("states")
                shares = {name: round(100 * n / states, 1) for name, n in WatchedDecoder.counted.items()}
                print(json.dumps({"family": family, "mode": mode, "states": states, **shares}), flush=True)


if __name__ == "__main__":
    main()
