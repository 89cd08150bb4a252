"""Count what drafts save on the weights of a real autoregressive model, opened as a shifted
block-diffusion backbone: tokens per forward and per predicted millisecond of `sequential` in small
blocks.

    python -m benchmarks.opened FOLDER_OR_ID [--gguf model.gguf] [--show]
    python -m benchmarks.opened FOLDER --head HEAD --prompts heldout.jsonl --output opened.jsonl
    python -m benchmarks.opened --table opened.jsonl

Prompts of three kinds in the checkpoint's chat template, one at a time: chats, code to write, and
texts to edit or copy; nine of them, or those of a file of `benchmarks.prompts`. Drafts are stale
scores alone, with prompt lookup, with drafts that go on into the next block, and, with `--head`,
the same with a head that makes one pass a round, and as many as there are drafted states. K `auto`
goes by the costs of the predicted device. Each text is compared with its target's; below float64 a
near-tie may fall otherwise, which is counted. `token by token` is the same model in blocks of one
token, which is its autoregressive decoding; its texts are its own.

A predicted millisecond is that of a round at the shape of SDAR-4B with these blocks and head
layers, in bfloat16 on one H200 at batch 1: weights, products, launches and the host's time for each
drafted state (`modeling_mrp.networks.predicted`). The prompt is charged as one state, each round
for the states that it scored, and each head pass for K states (8 for `auto`) over the whole
vocabulary, or over `--shortlist` tokens where that is given: of an untrained model's stale scores,
few lists hold the next token. Seconds are wall clock of this machine. `--show` prints the texts of
the targets.
"""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.evaluate.cost import CHARGED, costs_of
from mrp_trainer.evaluate.intervals import ratio_of_sums
from mrp_trainer.publish.card import markdown_table
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.rules.costs import WIDTHS, RoundCosts, interpolated

from .common import emit, header, parser_of
from .measure import Measured

PROMPTS = {
    "chat": [
        "Why is the sky blue? Answer in two sentences.",
        "Name three uses of a paper clip, one per line.",
        "What does an operating system do? Answer briefly.",
    ],
    "code": [
        "Write a Python function that returns the n-th Fibonacci number.",
        "Write a Python function that tells if a word is a palindrome.",
        "Write a SQL query that counts the orders of each customer.",
    ],
    "edit": [
        "Rename the variable x to total and print only the code:\n"
        "x = 0\nfor value in values:\n    x = x + value\nprint(x)",
        "Print this list again with the second item removed:\n- apples from the north\n"
        "- pears from the south\n- plums from the east\n- cherries from the west",
        "Correct the spelling and print the sentence only: The quick brown fox jumpd over the lazy "
        "dog and ran into the deep forrest.",
    ],
}
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 10}
NEXT: dict[str, Any] = {**LOOKUP, "draft_next_block": True}
DRAFTS: dict[str, dict[str, Any]] = {
    "stale scores": {},
    "lookup": LOOKUP,
    "lookup, next block": NEXT,
}
ALONE, ONE = "alone", "token by token"


def ways_of(
    block: int, states: int | str, costs: RoundCosts, shortlist: int
) -> dict[str, dict[str, Any]]:
    """Return the options of each way to draft with K = `states`, by name. A head, if `costs` has
    one, makes one pass, or one for every state that a draft can have in a block. Drafts go on into
    the next block where K is more than a block has tokens. `auto` goes by `costs`."""
    common: dict[str, Any] = {"num_draft_states": states}
    if states == "auto":
        common["round_costs"] = costs.to_dict()
    most = WIDTHS[-1] if isinstance(states, str) else states
    passes = sorted({1, max(1, min(most, block) - 1)}) if costs.head else []
    ways = {}
    for name, drafts in DRAFTS.items():
        if "draft_next_block" in drafts and not (most > block and states != "auto"):
            continue
        ways[name] = {"decoding": "self_spec", **drafts, **common}
        for count in passes:
            head = "head" if count == 1 else f"head {count} passes"
            named = f"{head}, {name}".removesuffix(", stale scores")
            of_head = {"draft_passes": count, "draft_shortlist": shortlist}
            ways[named] = {"decoding": "mrp_spec", **drafts, **common, **of_head}
    return ways


def decode(model: MRPForCausalLM, ids: torch.Tensor, **options: Any) -> tuple[Any, float]:
    """Decode a prompt; return the output with its stats, and the seconds that it took."""
    begin = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
        **options,
    )
    return output, time.perf_counter() - begin


def line_of(
    outputs: Sequence[tuple[Any, float]],
    inputs: Sequence[torch.Tensor],
    reference: Measured | None,
    costs: RoundCosts,
    states: int,
) -> tuple[Measured, dict[str, Any]]:
    """Return texts and costs of decodes, and their line of results."""
    measured = Measured([], [], [], [])
    milliseconds = []
    offered: list[int] = []
    accepted: list[int] = []
    for (output, _), ids in zip(outputs, inputs, strict=True):
        stats = output.stats
        measured.ids.append(output.sequences[0, ids.shape[1] :].tolist())
        measured.forwards.append(int(stats.row_forwards))
        measured.head_forwards.append(int(stats.row_head_forwards))
        measured.states.append(int(stats.row_states))
        cost = costs.of_round(1, 1, 0)  # the prompt, whose forward is counted, too
        for drafted in stats.rounds["drafted"][:, 0].diff().tolist():
            cost += costs.of_round(1, 1 + drafted, 0)
        if costs.head:
            cost += measured.head_forwards[-1] * interpolated(costs.states, costs.head, states)
        milliseconds.append(1e3 * cost)
        for totals, counts in (
            (offered, stats.offered_at_depth[0].tolist()),
            (accepted, stats.accepted_at_depth[0].tolist()),
        ):
            totals += [0] * (len(counts) - len(totals))
            for depth, count in enumerate(counts):
                totals[depth] += count
    line = {
        "tokens": measured.tokens,
        "forwards": measured.forwards,
        "head_forwards": measured.head_forwards,
        "milliseconds": [round(value, 4) for value in milliseconds],
        "seconds": [round(seconds, 3) for _, seconds in outputs],
        "offered": offered,
        "accepted": accepted,
    }
    if reference is not None:
        line["differ"] = measured.differ(reference)
    return measured, line


def prompts_of(path: str | None, count: int) -> dict[str, list[str]]:
    """Read the first `count` prompts of each kind from a file; the nine of this module if it is
    None."""
    if path is None:
        chosen = {}
        for kind, all_prompts in PROMPTS.items():
            chosen[kind] = all_prompts[:count]
        return chosen
    prompts: dict[str, list[str]] = defaultdict(list)
    for row in map(json.loads, Path(path).read_text().splitlines()):
        if len(prompts[row["kind"]]) < count:
            prompts[row["kind"]].append(row["messages"][0]["content"])
    return dict(sorted(prompts.items()))


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Encode a prompt as the first turn of a chat, up to where its answer begins."""
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def measure(model: MRPForCausalLM, tokenizer: Any, options: Any, emit_line: Any) -> None:
    """Decode all prompts in each way, and emit a line for each kind, block size, temperature, K and
    way."""
    layers = model.config.num_nextn_predict_layers or 0
    for kind, prompts in prompts_of(options.prompts, options.count).items():
        inputs = []
        for prompt in prompts:
            inputs.append(torch.tensor([chat_ids(tokenizer, prompt)]))
        for temperature in options.temperatures:
            sampling: dict[str, Any] = {"do_sample": False}
            if temperature:
                sampling = {"do_sample": True, "temperature": temperature, "seed": options.seed}
                sampling |= {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
            common = {"max_new_tokens": options.tokens, **sampling}
            for block in (1, *options.blocks):
                model.config.block_size = block
                deployment = CHARGED.shape, CHARGED.device
                costs = costs_of(*deployment, block, options.shortlist, layers)
                ways: list[tuple[int | str, str, dict[str, Any]]] = []
                if block > 1:
                    for states in options.states:
                        of_states = ways_of(block, states, costs, options.shortlist)
                        for name, way in of_states.items():
                            ways.append((states, name, way))
                targets = []
                drafted: list[list[Any]] = [[] for _ in ways]
                for ids in inputs:  # the ways take turns
                    targets.append(decode(model, ids, decoding="sequential", **common))
                    if options.show and block > 1:
                        text = targets[-1][0].sequences[0, ids.shape[1] :]
                        print(f"\n[{kind}, block {block}]\n{tokenizer.decode(text)}\n", flush=True)
                    for index, (_, _, way) in enumerate(ways):
                        drafted[index].append(
                            decode(model, ids, target="sequential", **way, **common)
                        )
                cell = {"kind": kind, "block": block, "temperature": temperature}
                reference, line = line_of(targets, inputs, None, costs, 1)
                emit_line({**cell, "states": 1, "way": ONE if block == 1 else ALONE, **line})
                for (states, name, _), outputs in zip(ways, drafted, strict=True):
                    most = WIDTHS[-1] if isinstance(states, str) else states
                    _, line = line_of(outputs, inputs, reference, costs, most)
                    emit_line({**cell, "states": states, "way": name, **line})


def states_of(text: str) -> int | str:
    """Read a number of states, or `auto`."""
    return text if text == "auto" else int(text)


def ratio(line: dict[str, Any], per: str) -> float:
    """Return tokens per `per` (forwards, milliseconds or seconds) of a line."""
    return float(sum(line["tokens"]) / sum(line[per]))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Tabulate lines as Markdown: tokens per forward with intervals, acceptance by depth, and
    tokens per predicted millisecond and per second over those of the target alone."""
    rows = []
    alone: dict[str, Any] = {}
    for line in lines:
        if line["way"] in (ALONE, ONE):
            alone = line
        interval = ratio_of_sums(line["tokens"], line["forwards"])
        assert interval is not None, "every prompt takes a forward"
        depths = []
        for accepted, offered in zip(line["accepted"], line["offered"], strict=True):
            if offered:
                depths.append(f"{100 * accepted / offered:.0f}")
        rows.append(
            [
                line["kind"],
                f"{line['temperature']:g}",
                str(line["block"]),
                str(line["states"]),
                line["way"],
                f"{interval.value:.2f} ({interval.low:.2f}-{interval.high:.2f})",
                ", ".join(depths[:4]),
                f"{ratio(line, 'milliseconds'):.3f}",
                f"{ratio(line, 'milliseconds') / ratio(alone, 'milliseconds'):.2f}x",
                f"{ratio(line, 'seconds') / ratio(alone, 'seconds'):.2f}x",
                str(line.get("differ", "")),
            ]
        )
    titles = ["texts", "T", "block", "K", "drafts", "tokens / forward", "accepted by depth, %"]
    titles += ["tokens / predicted ms", "over alone", "wall clock over alone", "differ"]
    return markdown_table(titles, rows)


def gains(lines: Sequence[dict[str, Any]]) -> str:
    """Tabulate, by texts and K, what the best drafts with a head make of the best ones without it,
    per forward and per predicted millisecond. Without a head, not to draft is a way, too."""
    titles = ["texts", "T", "block", "K", "tokens / forward", "tokens / predicted ms"]
    titles += ["best without a head", "best with it"]
    cells: dict[tuple[tuple[str, ...], str], list[dict[str, Any]]] = defaultdict(list)
    alone: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in lines:
        key = (line["kind"], f"{line['temperature']:g}", str(line["block"]))
        if line["way"] in (ALONE, ONE):
            alone[key] = line
        else:
            cells[key, str(line["states"])].append(line)
    rows = []
    for (texts, states), ways in cells.items():
        with_head: list[dict[str, Any]] = []
        without = [alone[texts]]
        for line in ways:
            (with_head if line["way"].startswith("head") else without).append(line)
        if not with_head:
            continue
        row = [*texts, states]
        for per in ("forwards", "milliseconds"):
            per_unit = partial(ratio, per=per)
            row.append(f"{max(map(per_unit, with_head)) / max(map(per_unit, without)):.2f}x")
        for of_ways in (without, with_head):
            row.append(max(of_ways, key=partial(ratio, per="milliseconds"))["way"])
        rows.append(row)
    return markdown_table(titles, rows)


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of lines and, where a head was measured, that of its gains."""
    headed = any(line["way"].startswith("head") for line in lines)
    return f"{table(lines)}\n\n{gains(lines)}" if headed else table(lines)


def main() -> None:
    """Print the table, or write the lines."""
    parser = parser_of("opened", __doc__ or "")
    parser.add_argument(
        "model", nargs="?", help="folder or id of an autoregressive checkpoint, or a saved one"
    )
    parser.add_argument("--gguf", help="a GGUF file in it")
    parser.add_argument("--head", help="a head that was trained for it")
    parser.add_argument("--shortlist", type=int, default=0, help="tokens of a head pass; 0: all")
    parser.add_argument("--prompts", help="file of `benchmarks.prompts`")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a prompt, at most")
    parser.add_argument("--count", type=int, default=3, help="prompts of a kind")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8])
    parser.add_argument(
        "--states", type=states_of, nargs="+", default=[4, 8, "auto"], help="values of K, or auto"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--seed", type=int, default=0, help="of sampled texts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--mask-token-id", type=int, default=151665)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--output", help="also write the lines to this file")
    parser.add_argument("--table", help="print the lines of a file as a table")
    options = parser.parse_args()
    if options.table:
        lines = map(json.loads, Path(options.table).read_text().splitlines())
        print(tables([line for line in lines if "benchmark" not in line]))
        return
    gguf = {} if options.gguf is None else {"gguf_file": options.gguf}
    given = {"block_size": options.blocks[0], "mask_token_id": options.mask_token_id}
    if options.head is not None:
        given["head"] = options.head
    model = MRPForCausalLM.from_backbone(
        options.model, dtype=getattr(torch, options.dtype), **given, **gguf
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, config=model.config, **gguf)
    collected: list[dict[str, Any]] = []
    file = open(options.output, "w", encoding="utf-8") if options.output else None  # noqa: SIM115
    emit(header("opened", options, model), file)

    def emit_line(line: dict[str, Any]) -> None:
        emit(line, file)
        collected.append(line)

    measure(model, tokenizer, options, emit_line)
    print(tables(collected))


if __name__ == "__main__":
    main()
