"""Decoding loops beside `generate`, measured as its modes are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import Problem, judge
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from transformers import PreTrainedTokenizerBase

from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.state import Row

from .bootstrap import Cost
from .measure import Measured


@dataclass
class Made:
    """What a loop made of prompts.

    Attributes:
        ids: Generated ids, by prompt.
        forwards: Backbone forwards in which each prompt's row took part.
        head_forwards: The same for the head.
    """

    ids: list[list[int]] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    head_forwards: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Made":
        """Read it from rows at their ends."""
        counts = [row.counts for row in rows]
        texts = [row.text[row.prompt : row.stop] for row in rows]
        return cls(texts, [count.forwards for count in counts], [count.head_forwards for count in counts])

    def __iadd__(self, other: "Made") -> "Made":
        """Add those of more prompts."""
        self.ids += other.ids
        self.forwards += other.forwards
        self.head_forwards += other.head_forwards
        return self


class Loop(Protocol):
    """Decodes a batch of prompts greedily."""

    def __call__(self, model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]) -> Made:
        """Make up to `new_tokens` tokens behind each prompt, to the first of the ids `eos`."""
        ...


def measure_loop(
    loop: Loop, model: MRPForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Problem], batch_size: int
) -> Measured:
    """Decode problems of one family."""
    made, eos = Made(), [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for begin in range(0, len(asked), batch_size):
        part = asked[begin : begin + batch_size]
        prompts = [encode(problem, tokenizer)[0] for problem in part]
        made += loop(model, prompts, NEW_TOKENS[part[0].family], eos)
    texts = [tokenizer.decode([token for token in row if token not in eos]) for row in made.ids]
    cost = Cost([len(row) for row in made.ids], made.forwards, made.head_forwards)
    return Measured(made.ids, cost, {}, right=judge(asked, texts))
