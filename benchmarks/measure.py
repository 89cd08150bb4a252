"""The decode of a list of problems in one way: texts, cost by problem, and a line of results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mrp_trainer.data.tasks import Problem, judge
from mrp_trainer.evaluate.decoded import NEW_TOKENS, decode_problems
from mrp_trainer.evaluate.intervals import (
    RESAMPLES,
    Interval,
    percentiles,
    ratio_of_sums,
    resampled_sums,
    wilson,
)
from transformers import PreTrainedTokenizerBase

from modeling_mrp.generate.loop import Decoder, Drafting, Mode
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Networks
from modeling_mrp.rules.gain import Fixed
from modeling_mrp.rules.reveal import RevealRule
from modeling_mrp.rules.state import Row

from .common import encode_prompts, greedy_decode

SAMPLE = 4
# Decodes greedily: (model, ids by prompt, limit of new tokens, ids that end a text) -> texts and
# costs.
Loop = Callable[[MRPForCausalLM, list[list[int]], int, list[int]], "Measured"]


@dataclass(frozen=True)
class Measured:
    """The texts of problems, and their cost.

    Attributes:
        ids: Generated ids, by problem.
        forwards: Backbone forwards in which each problem's row took part.
        head_forwards: Head forwards in which each problem's row took part.
        states: States that each problem's backbone forwards scored; a prompt's counts as one.
        right: Whether each text is judged right; None where there is no right answer.
    """

    ids: list[list[int]]
    forwards: list[int]
    head_forwards: list[int]
    states: list[int]
    right: list[bool | None] = field(default_factory=list)

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> "Measured":
        """Collect texts and counts from rows that have ended."""
        measured = cls([], [], [], [])
        for row in rows:
            measured.ids.append(row.text[row.prompt : row.stop])
            measured.forwards.append(row.counts.forwards)
            measured.head_forwards.append(row.counts.head_forwards)
            measured.states.append(row.counts.states + 1)  # the prompt
        return measured

    @property
    def tokens(self) -> list[int]:
        """Numbers of generated tokens, by problem."""
        return list(map(len, self.ids))

    @property
    def speed(self) -> Interval:
        """Tokens per forward over all problems, with a bootstrap interval."""
        ratio = ratio_of_sums(self.tokens, self.forwards)
        assert ratio is not None, "every prompt takes a forward"
        return ratio

    def line(self) -> dict[str, Any]:
        """Make a line of results: accuracy and tokens per forward with intervals, the head's cost,
        and some exact counts."""
        line: dict[str, Any] = {}
        if judged := [is_right for is_right in self.right if is_right is not None]:
            share = wilson(sum(judged), len(judged))
            line |= {"accuracy": round(100 * share.value, 1), "accuracy_95": share.rounded(1, 100)}
        line |= {
            "tokens_per_forward": round(self.speed.value, 3),
            "tokens_per_forward_95": self.speed.rounded(),
            "head_per_token": round(sum(self.head_forwards) / sum(self.tokens), 3),
            "states_per_forward": round(sum(self.states) / sum(self.forwards), 3),
        }
        return line | {"sample": self.sample()}

    def sample(self) -> dict[str, list[int]]:
        """Return the exact counts of the first problems, few enough to decode again as a check."""
        return {
            "tokens": self.tokens[:SAMPLE],
            "forwards": self.forwards[:SAMPLE],
            "head_forwards": self.head_forwards[:SAMPLE],
        }

    def over(self, **baselines: "Measured") -> dict[str, Any]:
        """Return `over_NAME`, tokens per forward over those of `others[NAME]` on the same problems,
        and `over_NAME_95`.

        The interval is a paired bootstrap's: a resample draws a problem's counts from both sides,
        so its difficulty cancels.

        Raises:
            ValueError: if the numbers of problems differ.
        """
        fields: dict[str, Any] = {}
        for name, baseline in baselines.items():
            columns = np.stack([self.tokens, self.forwards, baseline.tokens, baseline.forwards], 1)
            sums = np.concatenate([resampled_sums(columns, RESAMPLES, 0), columns.sum(0)[None]])
            ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
            interval = percentiles(float(ratios[-1]), ratios[:-1])
            fields |= {
                f"over_{name}": round(interval.value, 3),
                f"over_{name}_95": interval.rounded(),
            }
        return fields

    def differ(self, reference: "Measured") -> int:
        """Count the texts that differ from those of `reference`, measured on the same problems."""
        return sum(a != b for a, b in zip(self.ids, reference.ids, strict=True))


def measure(
    model: MRPForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problem_set: Sequence[Problem],
    batch_size: int,
    **options: Any,
) -> Measured:
    """Decode problems of one family by `generate` with `options`; return texts and costs."""
    decoded = decode_problems(model, tokenizer, problem_set, batch_size, **options)
    return Measured(
        decoded.ids,
        decoded.row_forwards,
        decoded.row_head_forwards,
        decoded.row_states,
        decoded.verdicts,
    )


def loop_of(
    rule: RevealRule, states: int, decoder: Callable[[Mode, Networks, Fixed], Decoder]
) -> Loop:
    """Make a `Loop` that decodes by a `Decoder` with drafts of its own.

    Args:
        rule: The target's reveal rule.
        states: K, the row's next state included.
        decoder: Function of a mode, networks and an amount of drafting that makes the decoder.
    """

    @torch.inference_mode()
    def loop(
        model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]
    ) -> Measured:
        mode = Mode(rule, drafting=Drafting(states, 1))
        networks, rows = greedy_decode(model, mode, prompts, new_tokens, eos, max(2, states))
        decoder(mode, networks, Fixed(states)).decode(rows, [0] * len(rows))
        return Measured.of_rows(rows)

    return loop


def measure_loop(
    loop: Loop,
    model: MRPForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problem_set: Sequence[Problem],
    batch_size: int,
) -> Measured:
    """Decode problems of one family by `loop`, in place of `generate`; return texts and costs."""
    ids: list[list[int]] = []
    forwards: list[int] = []
    head_forwards: list[int] = []
    states: list[int] = []
    eos = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    for begin in range(0, len(problem_set), batch_size):
        prompts = encode_prompts(problem_set[begin : begin + batch_size], tokenizer)
        measured = loop(model, prompts, NEW_TOKENS[problem_set[0].family], eos)
        ids += measured.ids
        forwards += measured.forwards
        head_forwards += measured.head_forwards
        states += measured.states
    texts = []
    for row in ids:
        texts.append(tokenizer.decode([token for token in row if token not in eos]))
    return Measured(ids, forwards, head_forwards, states, judge(problem_set, texts))
