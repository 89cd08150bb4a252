"""The premise of the method: logits of nearby steps are alike, and the head's estimates even more.

    python -m benchmarks.premise --count 10
    python -m benchmarks.premise --model FOLDER --head HEAD --prompts heldout.jsonl --count 6 \
        --targets sequential --dtype bfloat16 --next

Decodes tuning problems of math and code, or chat prompts of a file (`benchmarks.prompts`), with
each target alone, greedily, and prints a table. At each state, the backbone's logits at its masked
positions are compared with two guesses made from its output some steps before: that output itself
(*stale*), and one pass of the head over all tokens revealed since. KL is that from the backbone to
the guess, in nats, a mean over positions. With `--next`, only the leftmost masked position counts:
all that the next step of `sequential` depends on.

A head pass can choose among the m likeliest stale tokens only (`draft_shortlist`). *Missed*: the
backbone's likeliest token is not one of these. *Lost*: nor is it, and the head, choosing among all
tokens, would have had it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from mrp_trainer.publish.card import markdown_table
from torch import Tensor
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.generate.loop import Decoder, Drafting, Mode
from modeling_mrp.generate.option_table import rule_of
from modeling_mrp.kernels.pick import upcast
from modeling_mrp.networks.networks import Networks
from modeling_mrp.networks.sampler import Hidden, gather_blocks
from modeling_mrp.rules.gain import Fixed
from modeling_mrp.rules.state import Row

from .common import TINY, emit, encode_prompts, greedy_decode, header, parser_of
from .frontier import JUDGED
from .opened import chat_ids, prompts_of
from .targets import TARGETS

APART = (1, 2, 4, 7)  # steps; drafts of eight states reach seven
LISTED = (16, 64, 256, 1024, 4096)


@dataclass
class Sums:
    """Sums over the positions at which guesses of a certain age were compared.

    Attributes:
        positions: The number of positions.
        stale_kl, head_kl: KL from the backbone to stale logits, and to the head's estimates.
        stale_same, head_same: How often the likeliest token was the same.
        missed, lost: For each of `LISTED`, how often a list of that length missed the backbone's
            likeliest token, and how often it did where the head had it.
    """

    positions: int = 0
    stale_kl: float = 0.0
    head_kl: float = 0.0
    stale_same: int = 0
    head_same: int = 0
    missed: list[int] = field(default_factory=lambda: [0] * len(LISTED))
    lost: list[int] = field(default_factory=lambda: [0] * len(LISTED))

    def add(self, actual: Tensor, stale: Tensor, head: Tensor) -> None:
        """Add n positions, given three log-probabilities [n, vocab] of the next token: those of the
        backbone, and of both guesses."""
        self.positions += len(actual)
        self.stale_kl += float((actual.exp() * (actual - stale)).sum())
        self.head_kl += float((actual.exp() * (actual - head)).sum())
        token = actual.argmax(-1)
        head_has_it = head.argmax(-1) == token
        self.stale_same += int((stale.argmax(-1) == token).sum())
        self.head_same += int(head_has_it.sum())
        rank = (stale > stale.gather(1, token[:, None])).sum(-1)
        for index, count in enumerate(LISTED):
            self.missed[index] += int((rank >= count).sum())
            self.lost[index] += int(((rank >= count) & head_has_it).sum())


class Compared:
    """Compares guesses of the backbone's logits with what it computes, round after round of a
    decode without drafts.

    Args:
        networks: Backbone and head.
        only_next: Whether only the leftmost masked position of a state counts.

    Attributes:
        sums: The comparisons, by the number of steps between guess and state.
    """

    def __init__(self, networks: Networks, only_next: bool) -> None:
        self.networks = networks
        self.only_next = only_next
        self.sums: dict[int, Sums] = defaultdict(Sums)
        # by row, the start of its block and the hidden states of its states so far, newest first
        self.past: dict[int, tuple[int, list[Hidden]]] = {}
        # by row, columns of its next state, and both guesses there for each of its past states
        self.guesses: dict[int, tuple[list[int], list[tuple[Hidden, Hidden]]]] = {}

    def note(self, rows: Sequence[Row]) -> None:
        """Compare the last round's guesses with what was computed, and make the next guesses."""
        queries: list[list[Any]] = []
        for row in rows:
            scored = None if row.source is None else row.source.hidden
            if scored is not None and row.place in self.guesses:
                self.compare(scored, *self.guesses.pop(row.place))
            start, past = self.past.pop(row.place, (-1, []))
            queries.append([])
            if scored is not None and row.stop is None and row.state.free:
                past = [scored, *(past if start == row.state.start else [])][: APART[-1]]
                self.past[row.place] = row.state.start, past
                queries[-1] = [(row.state, hidden) for hidden in past]
        if not self.past:
            return
        for row, estimates in zip(rows, self.networks.head(rows, queries), strict=True):
            if estimates:
                columns = list(row.state.free)[: 1 if self.only_next else None]
                pairs = list(zip(self.past[row.place][1], estimates, strict=True))
                self.guesses[row.place] = columns, pairs

    def compare(
        self, scored: Hidden, columns: list[int], guesses: Sequence[tuple[Hidden, Hidden]]
    ) -> None:
        """Compare guesses at some columns of a state with its hidden states, which the backbone has
        computed."""
        actual = self.log_probabilities(scored, columns)
        for steps in APART:
            if steps <= len(guesses):
                stale, head = guesses[steps - 1]
                self.sums[steps].add(
                    actual,
                    self.log_probabilities(stale, columns),
                    self.log_probabilities(head, columns),
                )

    def log_probabilities(self, hidden: Hidden, columns: list[int]) -> Tensor:
        """Compute log-probabilities [n, vocab] of all tokens at n columns of a block; that of the
        mask is the least finite number."""
        logits = self.networks.picker.unembedding.logits(gather_blocks([hidden])[0, columns])
        log_probabilities = upcast(logits).log_softmax(-1)
        return log_probabilities.clamp(min=torch.finfo(log_probabilities.dtype).min)


@torch.inference_mode()
def compared(
    model: MRPForCausalLM, target: str, prompts: list[list[int]], new: int, only_next: bool
) -> dict[int, Sums]:
    """Decode prompts with a target, and return the comparisons by steps."""
    config = MRPGenerationConfig(decoding=target)
    config.check(model.config.block_size, True)
    mode = Mode(rule_of(target, config, model.config.block_size), drafting=Drafting(2, 1, 1))
    eos: Any = model.generation_config.eos_token_id
    networks, rows = greedy_decode(model, mode, prompts, new, eos, APART[-1] + 1)
    watch = Compared(networks, only_next)
    Decoder(mode, networks, Fixed(), [watch.note], len(rows)).decode(rows, [0] * len(rows))
    return watch.sums


def prompts_by_kind(options: Any, tokenizer: Any) -> Iterator[tuple[str, list[list[int]], int]]:
    """Yield kinds of prompts: the name, the prompts' ids, and the number of new tokens."""
    if options.prompts is None:
        for family in JUDGED:
            chosen = problems(family, "tune", options.count)
            yield family, encode_prompts(chosen, tokenizer), NEW_TOKENS[family]
        return
    for kind, prompts in prompts_of(options.prompts, options.count).items():
        yield kind, [chat_ids(tokenizer, prompt) for prompt in prompts], options.tokens


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Tabulate lines as Markdown, shares in percent."""
    rows = []
    for line in lines:
        count = line["positions"]
        row = [line["kind"], f"`{line['target']}`", str(line["steps"]), str(count)]
        row += [f"{line[name] / count:.2f}" for name in ("stale_kl", "head_kl")]
        row += [f"{100 * line[name] / count:.1f}" for name in ("stale_same", "head_same")]
        for name in ("missed", "lost"):
            row.append(", ".join(f"{100 * number / count:.1f}" for number in line[name]))
        rows.append(row)
    lists = ", ".join(map(str, LISTED))
    titles = ["texts", "target", "steps apart", "positions", "KL: stale", "KL: head"]
    titles += ["same token, %: stale", "same token, %: head"]
    titles += [f"missed by {lists} tokens, %", "lost, %"]
    return markdown_table(titles, rows)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of("premise", __doc__ or "")
    parser.add_argument("--model", default=str(TINY), help="a checkpoint, or a backbone")
    parser.add_argument("--head", help="a head that was trained for the backbone")
    parser.add_argument("--prompts", help="file of `benchmarks.prompts`")
    parser.add_argument("--count", type=int, default=40, help="problems or prompts of a kind")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a prompt, at most")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--next", action="store_true", help="leftmost masked positions only")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float64")
    parser.add_argument("--output", type=Path, help="also write the lines to this file")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    if options.head is None:
        model = MRPForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    else:
        model = MRPForCausalLM.from_backbone(options.model, head=options.head, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model, config=model.config)
    lines = []
    file = options.output.open("w", encoding="utf-8") if options.output else None
    emit(header("premise", options, model), file)
    for kind, prompts, new in prompts_by_kind(options, tokenizer):
        for target in options.targets:
            sums = compared(model, target, prompts, new, options.next)
            for steps, of_steps in sorted(sums.items()):
                line = {"kind": kind, "target": target, "steps": steps, **vars(of_steps)}
                emit(line, file)
                lines.append(line)
    print(table(lines))


if __name__ == "__main__":
    main()
