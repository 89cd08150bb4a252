"""Count what prompt lookup saves: tokens a forward of `sequential`, drafted with and without it.

    python -m benchmarks.lookup --count 100

Held-out problems of the embedded checkpoint, one at a time, greedy, in float64; each text is
compared with its target's. A forward is one of the backbone; head passes have a column. The result
is a table of Markdown; a ratio's interval is of 95 %, over problems (bootstrap).
"""

import random
from collections.abc import Sequence
from typing import Any

import torch
from mrp_trainer.data.tasks import Family
from mrp_trainer.evaluate.problem_sets import family_set

from modeling_mrp import MRPForCausalLM

from .common import TINY, deciding, load, parser_of

FAMILIES: tuple[Family, ...] = ("source", "code", "math")
COLUMNS = ("texts", "drafts", "K", "without", "with lookup", "ratio", "head passes a token")


def decode(model: MRPForCausalLM, prompt: Sequence[int], **options: Any) -> tuple[Any, Any]:
    """Decode a prompt; return its ids and the call's stats."""
    ids = torch.tensor([prompt])
    out: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        target="sequential" if "num_draft_states" in options else None,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, out.stats


def interval(pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Estimate the 95 % interval of the ratio of two sums over problems, by bootstrap."""
    draw = random.Random(0)
    ratios = []
    for _ in range(1000):
        sample = draw.choices(pairs, k=len(pairs))
        ratios.append(sum(first for first, _ in sample) / sum(second for _, second in sample))
    ratios.sort()
    return ratios[25], ratios[974]


def row_of(
    model: MRPForCausalLM, prompts: Sequence[Sequence[int]], new_tokens: int, mode: str, states: int
) -> list[str]:
    """Decode prompts with and without lookup; return the cells behind the name of the texts."""
    pairs: list[tuple[int, int]] = []
    tokens = 0
    passes = 0
    for prompt in prompts:
        target, _ = decode(model, prompt, decoding="sequential", max_new_tokens=new_tokens)
        forwards = []
        for lookup in (0, 10):
            ids, stats = decode(
                model,
                prompt,
                decoding=mode,
                num_draft_states=states,
                max_new_tokens=new_tokens,
                prompt_lookup_num_tokens=lookup,
            )
            if not ids.equal(target):
                raise AssertionError(f"{mode} K={states} gave another text than its target")
            forwards.append(int(stats.row_forwards.sum()))
        passes += int(stats.row_head_forwards.sum())  # of the last one, with lookup
        tokens += target.shape[1] - len(prompt)
        pairs.append((forwards[0], forwards[1]))
    plain = sum(first for first, _ in pairs)
    with_lookup = sum(second for _, second in pairs)
    low, high = interval(pairs)
    return [
        mode,
        str(states),
        f"{tokens / plain:.2f}",
        f"{tokens / with_lookup:.2f}",
        f"{plain / with_lookup:.3f} ({low:.3f}-{high:.3f})",
        f"{passes / tokens:.2f}",
    ]


def main() -> None:
    """Print the table."""
    parser = parser_of("lookup", __doc__ or "")
    parser.add_argument("--count", type=int, default=100, help="problems of each family")
    parser.add_argument("--states", type=int, nargs="+", default=[4, 8], help="values of K")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    model.double()
    print(f"deciding code {deciding()}, {options.count} problems of each family\n")
    print("| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n")
    for family in FAMILIES:
        problems = family_set(family, "heldout", tokenizer, options.count)
        for mode in ("self_spec", "mrp_spec"):
            for states in options.states:
                fields = row_of(model, problems.prompts, problems.max_new_tokens, mode, states)
                print("| " + " | ".join([family, *fields]) + " |", flush=True)


if __name__ == "__main__":
    main()
