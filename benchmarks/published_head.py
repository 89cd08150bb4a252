"""What of the gain over the released reference is the loop, and what the head.

``torchrun --nproc-per-node 2 -m benchmarks.published_head --work runs/published`` trains a head on the embedded backbone by
the published recipe (`train/recipes`): problems' own answers masked at random, one true token of each block revealed,
nothing but the divergence of one step, random matrices to begin with. Steps, batches and the optimizer are those of the
embedded head. Then it decodes held-out problems with both heads in both loops, greedily in float64: the released
reference (`benchmarks.released`), row by row, and `mrp_spec` of `static`. Every text is that of `static`;
`texts_that_differ` counts those that are not.

Training goes on from the last checkpoint in `--work`; of several processes the first one decodes.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from accelerate import PartialState
from mrp_trainer.data.problems import TaskDataset
from mrp_trainer.data.tasks import Problem, problems
from mrp_trainer.evaluate.provenance import digests
from mrp_trainer.train.settings import RECIPES, read_yaml
from mrp_trainer.train.tiny import BLOCK_SIZE, FAMILIES, TinyOptions, train_head
from transformers import PreTrainedTokenizerFast

from modeling_mrp.modeling import MRPForCausalLM

from .common import RESULTS, TINY, emit, header, load, parser_of
from .frontier import JUDGED, RELEASED, STATES, Decoder
from .measure import Measured
from .targets import alone, drafted

# What the recipe says of states and losses.
_LEARNED = ("noisy_copies", "noise_per", "inverse_level", "reveal_rule", "head_loss", "unroll", "order_weight", "reread_weight")


def train_published(work: Path, steps: int) -> Path:
    """Train a head on the embedded backbone by the published recipe, as far as `work` does not hold it; return its folder.

    Problems are drawn with the seed of the embedded head's, another for every sample.
    """
    recipe = read_yaml(RECIPES / "sdar-1.7b-mrp.yaml")
    start = {name: recipe[name] for name in ("head_layers", "head_init")}
    options = TinyOptions(work=work, head_name="published", head_steps=steps, **start)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    dataset = TaskDataset(tokenizer, steps * options.head_batch_size, FAMILIES, "train", BLOCK_SIZE, seed=1)
    return train_head(options, dataset, **{name: recipe[name] for name in _LEARNED})


def lines(decoders: dict[str, Decoder], asked: list[Problem], states: int, static: Measured) -> Iterator[dict[str, Any]]:
    """Measure both heads in both loops on problems of one family. The first line is as published: `over_published` is over it.

    Args:
        decoders: By head, the published one first.
        asked: The problems.
        states: K.
        static: What `static` made of them.
    """
    released = drafted(RELEASED, "static", states, head_prefix=False)
    ours = drafted("mrp_spec", "static", states, draft_passes=1)
    first = None
    for (head, decoder), setting in product(decoders.items(), (released, ours)):
        measured = decoder.decoded(setting, asked)
        first = first or measured
        line = {"family": asked[0].family, "head": head, **setting, **measured.line(), **measured.over(published=first)}
        yield {**line, "texts_that_differ": measured.differ(static)}


def main(arguments: list[str] | None = None) -> None:
    """Command line: trains the head, then writes a JSON line for each family, K, head and loop."""
    parser = parser_of("published_head", __doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/published"), help="the head and its checkpoints")
    parser.add_argument("--output", type=Path, default=RESULTS / "tiny_published_head.jsonl")
    parser.add_argument("--steps", type=int, default=TinyOptions.head_steps)
    parser.add_argument("--count", type=int, default=200, help="held-out problems a family")
    parser.add_argument("--states", nargs="+", type=int, default=list(STATES))
    parser.add_argument("--batch-size", type=int, default=50, help="problems at once, outside of the released reference")
    options = parser.parse_args(arguments)
    folder = train_published(options.work, options.steps)
    if not PartialState().is_main_process:
        return
    embedded, tokenizer = load(TINY)
    published = MRPForCausalLM.from_pretrained(folder).eval()
    named = argparse.Namespace(**{**vars(options), "work": options.work.name})
    first = {**header("published_head", named, embedded), "published_head": digests(published)["head"]}
    models = {"published": published, "embedded": embedded}
    decoders = {head: Decoder(model.double(), tokenizer, options.batch_size) for head, model in models.items()}
    with options.output.open("w") as file:
        emit(first, file)
        for family in JUDGED:
            asked = problems(family, "heldout", options.count)
            static = decoders["embedded"].decoded(alone("static"), asked)
            for states in options.states:
                for line in lines(decoders, asked, states, static):
                    emit(line, file)


if __name__ == "__main__":
    main()
