"""Count what drafts that go on into the next block save: tokens a forward with and without
`draft_next_block`.

    python -m benchmarks.next_block --count 24

Held-out problems of the embedded checkpoint, one at a time, greedy, in float64, decoded in blocks
of other sizes, too; each text is compared with its target's. A forward is one of the backbone. The
result is a table of Markdown; a ratio's interval is of 95 %, over problems (bootstrap).
"""

from collections.abc import Sequence
from typing import Any

import torch
from mrp_trainer.data.tasks import Family
from mrp_trainer.evaluate.problem_sets import family_set

from modeling_mrp import MRPForCausalLM

from .common import TINY, deciding, load, parser_of
from .lookup import interval

FAMILIES: tuple[Family, ...] = ("math", "code")
TARGETS = ("static", "dynamic", "sequential")
COLUMNS = ("block", "drafts", "K", *TARGETS)


def forwards_of(
    model: MRPForCausalLM, prompt: Sequence[int], **options: Any
) -> tuple[torch.Tensor, int]:
    """Decode a prompt; return its ids and the forwards that they took."""
    ids = torch.tensor([prompt])
    out: Any = model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options
    )
    return out.sequences, int(out.stats.row_forwards.sum())


def cell_of(
    model: MRPForCausalLM, prompts: Sequence[Sequence[int]], target: str, mode: str, states: int
) -> str:
    """Decode prompts in both ways; return tokens a forward in each, and the ratio."""
    pairs: list[tuple[int, int]] = []
    tokens = 0
    for prompt in prompts:
        text, _ = forwards_of(model, prompt, decoding=target, max_new_tokens=64)
        forwards = []
        for next_block in (False, True):
            ids, count = forwards_of(
                model,
                prompt,
                decoding=mode,
                target=target,
                num_draft_states=states,
                draft_next_block=next_block,
                max_new_tokens=64,
            )
            if not ids.equal(text):
                raise AssertionError(f"{mode} K={states} gave another text than {target}")
            forwards.append(count)
        tokens += text.shape[1] - len(prompt)
        pairs.append((forwards[0], forwards[1]))
    plain = sum(first for first, _ in pairs)
    ahead = sum(second for _, second in pairs)
    low, high = interval(pairs)
    return (
        f"{tokens / plain:.2f} to {tokens / ahead:.2f}: {plain / ahead:.3f} ({low:.3f}-{high:.3f})"
    )


def main() -> None:
    """Print the table."""
    parser = parser_of("next_block", __doc__ or "")
    parser.add_argument("--count", type=int, default=24, help="problems of each family")
    parser.add_argument("--states", type=int, nargs="+", default=[4, 8], help="values of K")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--split", choices=("tune", "heldout"), default="heldout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    model.double()
    prompts: list[Any] = []
    for family in FAMILIES:
        prompts += family_set(family, options.split, tokenizer, options.count).prompts
    print(f"deciding code {deciding()}, {len(prompts)} problems\n")
    print("| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS), sep="\n")
    for block in options.blocks:
        model.config.block_size = block
        for mode in ("self_spec", "mrp_spec"):
            for states in options.states:
                fields = [cell_of(model, prompts, target, mode, states) for target in TARGETS]
                row = [str(block), f"`{mode}`", str(states), *fields]
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
