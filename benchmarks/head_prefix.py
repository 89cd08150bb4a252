"""What the head's own keys and values of the text are worth: drafts with them, and with the block alone.

``python -m benchmarks.head_prefix > benchmarks/results/tiny_head_prefix.jsonl`` decodes the same held-out problems with
`mrp_spec` twice: as it is, and with a head that sees only the block it drafts in, as in the released reference, which never
stores them. The head was trained with them.
"""

import argparse
from typing import Any

import torch
from mrp_trainer.decoded import decode_problems
from mrp_trainer.tasks import problems
from torch import Tensor

from modeling_mrp.modeling import MRPForCausalLM

from .bootstrap import Cost, ratio
from .common import TINY, emit, header, load
from .targets import drafted


class BlockOnly(MRPForCausalLM):
    """A model whose head sees nothing before the block."""

    def residual(
        self, input_ids: Tensor, hidden_states: Tensor, position_ids: Tensor, mask: Any, *cache: Any, **options: Any
    ) -> Tensor:
        """As the model's, under a mask without the prefix: neither what is stored nor a clean block in the same pass."""
        block = position_ids // self.config.block_size
        own = torch.zeros_like(mask)
        own[..., -input_ids.shape[1] :] = (block[:, :, None] == block[:, None, :])[:, None]
        return super().residual(input_ids, hidden_states, position_ids, mask & own, *cache, **options)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each family and K."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head_prefix", description=__doc__)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--family", nargs="+", default=["math", "code"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--states", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--batch-size", type=int, default=50)
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("head_prefix", options, model))
    blind = BlockOnly.from_pretrained(options.model).eval()
    for family in options.family:
        asked = problems(family, "heldout", options.count)
        for states in options.states:
            settings = drafted("mrp_spec", "static", states)
            whole, block = (decode_problems(each, tokenizer, asked, options.batch_size, **settings) for each in (model, blind))
            assert whole.ids == block.ids, "drafts never change the text"
            over = ratio(Cost.of(whole), Cost.of(block))
            emit(
                {
                    "family": family,
                    "states": states,
                    "tokens_per_forward": round(whole.tokens_per_forward, 3),
                    "block_only": round(block.tokens_per_forward, 3),
                    "ratio": round(over.value, 3),
                    "ratio_95": over.rounded(),
                }
            )


if __name__ == "__main__":
    main()
