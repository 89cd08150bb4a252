"""How near the expected gain comes to the best fixed number of states: cost of a token by tables of
costs, batches and targets.

    python -m benchmarks.expected_gain --output benchmarks/results/expected_gain.jsonl
    python -m benchmarks.expected_gain --table benchmarks/results/expected_gain.jsonl

Each target is decoded with every fixed number of states, without and with head passes, and with
`num_draft_states="auto"` under each table of costs. A round is charged what its table says of its
states and head passes. So times play no part, and a second run gives the same numbers. The fixed
numbers know the whole run; the best of them is what `auto` is compared with.

Tables, as predicted: the embedded checkpoint on two threads of a CPU; the published 4B on
devices by their data sheets (`benchmarks.cost_model`).
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.cost import costs_of
from mrp_trainer.evaluate.roofline import DEVICES, PUBLISHED

from modeling_mrp.generate.loop import Decoder, Drafting, Mode
from modeling_mrp.generate.option_table import rule_of
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.predicted import CPU_FLOPS, CPU_LAYER, Rates, costs_at
from modeling_mrp.rules.costs import WIDTHS, RoundCosts
from modeling_mrp.rules.draft import BRANCHES, CROWD
from modeling_mrp.rules.gain import Amount, DraftAmount, Drafts, ExpectedGain, Fixed
from modeling_mrp.rules.reveal import RULES

from .common import TINY, emit, encode_prompts, greedy_decode, header, load, parser_of

TARGETS = ("static", "dynamic", "sequential", "entropy_bound")
NEW = 96
SHORTLIST = 16
SIZE = "4B"


@dataclass
class Charged:
    """A `DraftAmount` that notes what rounds consist of.

    Attributes:
        amount: What decides.
        rounds: Of each round: rows of the batch, states of a row, head passes, and the states that
            these were planned for.
    """

    amount: DraftAmount
    rounds: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def outline(self) -> int:
        """See `DraftAmount`."""
        return self.amount.outline

    def plan(self, drafts: Drafts) -> Amount:
        """See `DraftAmount`."""
        return self.amount.plan(drafts)

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """See `DraftAmount`."""
        return self.amount.cut(amount, drafts)

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """Note the round, and let the amount learn."""
        width = max(map(len, drafts))
        self.rounds.append((len(drafts), width, amount.passes, amount.states))
        self.amount.learn(amount, outlines, drafts)


def charge(rounds: Sequence[tuple[int, int, int, int]], costs: RoundCosts) -> float:
    """Add up what rounds cost by a table."""
    total = 0.0
    for rows, width, passes, planned in rounds:
        total += costs.of_round(rows, width, 0) + costs.of_head(rows, planned, passes)
    return total


def tables(model: MRPForCausalLM) -> dict[str, RoundCosts]:
    """Make the tables of costs by name."""
    cpu = Rates(2e10, 2 * CPU_FLOPS, CPU_LAYER)
    created = {"tiny, CPU": costs_at(model.config, cpu, 4)}
    for name in DEVICES:
        costs = costs_of(SIZE, name, PUBLISHED[SIZE].block_size, SHORTLIST)
        created[f"{SIZE}, {name}"] = costs
    return created


@torch.inference_mode()
def rounds_of(
    model: MRPForCausalLM,
    target: str,
    prompts: list[list[int]],
    batch: int,
    passes: int,
    amount: Any,
) -> tuple[list[tuple[int, int, int, int]], list[list[int]]]:
    """Decode prompts greedily in batches, with a `DraftAmount` that `amount` makes for each batch;
    return the rounds and the texts."""
    config = MRPGenerationConfig(decoding=target)
    config.check(model.config.block_size, True)
    rule = rule_of(target, config, model.config.block_size)
    branches = 1 if batch >= CROWD else BRANCHES
    mode = Mode(rule, drafting=Drafting(WIDTHS[-1], branches, passes))
    rounds = []
    texts = []
    for begin in range(0, len(prompts), batch):
        sample = prompts[begin : begin + batch]
        eos = model.generation_config.eos_token_id
        networks, rows = greedy_decode(model, mode, sample, NEW, eos, WIDTHS[-1])
        charged = Charged(amount())
        Decoder(mode, networks, charged).decode(rows, [0] * len(rows))
        rounds += charged.rounds
        texts += [row.text[row.prompt : row.stop] for row in rows]
    return rounds, texts


def measured(model: MRPForCausalLM, prompts: list[list[int]], batch: int, target: str) -> Any:
    """Yield a line for each table of costs."""
    fixed = {}
    texts = None
    for passes in (0, 1):
        for width in WIDTHS[passes:]:
            make = partial(Fixed, width, passes)
            rounds, decoded = rounds_of(model, target, prompts, batch, passes, make)
            assert texts in (None, decoded)
            texts = decoded
            fixed[width, passes] = rounds
    tokens = sum(map(len, texts or []))
    acceptance = RULES[target].stale_acceptance
    for name, costs in tables(model).items():
        for passes, mode in ((0, "self_spec"), (1, "mrp_spec")):
            rounds, decoded = rounds_of(
                model,
                target,
                prompts,
                batch,
                passes,
                partial(ExpectedGain, WIDTHS[-1], passes, costs, acceptance),
            )
            assert decoded == texts
            by_amount = {}
            for amount, fixed_rounds in fixed.items():
                if amount[1] <= passes:
                    by_amount[amount] = charge(fixed_rounds, costs) / tokens
            best = min(by_amount, key=by_amount.__getitem__)
            yield {
                "table": name,
                "batch": batch,
                "target": target,
                "mode": mode,
                "auto": charge(rounds, costs) / tokens,
                "best": by_amount[best],
                "best_states": best[0],
                "best_passes": best[1],
                "alone": by_amount[1, 0],
                "rounds": len(rounds),
            }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Make the table of measured lines."""
    rows = ["| table of costs | batch | mode | " + " | ".join(TARGETS) + " |"]
    rows.append("|" + "---|" * (3 + len(TARGETS)))
    fields: dict[tuple[str, int, str], dict[str, str]] = defaultdict(dict)
    for line in lines:
        share = line["best"] / line["auto"]
        best = f"{line['best_states']}{' + head' * line['best_passes']}"
        gain = line["alone"] / line["auto"]
        fields[line["table"], line["batch"], line["mode"]][line["target"]] = (
            f"{share:.3f} ({gain:.2f}x; {best})"
        )
    for (name, batch, mode), by_target in fields.items():
        values = " | ".join(by_target.get(target, "") for target in TARGETS)
        rows.append(f"| {name} | {batch} | `{mode}` | {values} |")
    shares = sorted(line["best"] / line["auto"] for line in lines)
    rows.append("")
    rows.append(
        f"{len(shares)} cells: least {shares[0]:.3f}, median {shares[len(shares) // 2]:.3f}, "
        f"{sum(share >= 0.97 for share in shares)} of at least 0.97"
    )
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of("expected_gain", __doc__)
    parser.add_argument("--count", type=int, default=24, help="problems")
    parser.add_argument("--split", choices=("tune", "heldout"), default="tune")
    parser.add_argument("--family", default="math")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--output", type=Path, help="a file of results to write")
    parser.add_argument("--table", type=Path, help="print the table of a file of results")
    options = parser.parse_args(arguments)
    if options.table:
        text = options.table.read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        print(table([line for line in lines if "auto" in line]))
        return
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    model.double()  # so that every way comes to one text
    file = options.output.open("w") if options.output else None
    emit(header("expected_gain", options, model), file)
    prompts = encode_prompts(problems(options.family, options.split, options.count), tokenizer)
    lines = []
    for batch in options.batches:
        for target in options.targets:
            for line in measured(model, prompts, batch, target):
                emit(line, file)
                lines.append(line)
    print(table(lines))


if __name__ == "__main__":
    main()
