"""Tokens a second of `score`: all states of a text side by side, beside one forward for each token, in turns.

    python -m benchmarks.score > benchmarks/results/score.jsonl

`packed` is `score` as it comes. `one by one` is the same with one state a row in a forward, which looks at the same keys and
values: so a token is a forward, and has the width of a block. Both read the text once before that.

Rows are held-out problems of math with their answers, one text of 384 tokens behind another where they are to be long. All
tokens are scored, in float32. Times are CPU time of this process, or with `--clock wall` wall clock. Ratios are over the turns:
the median, the least and most, and the quartiles.
"""

from typing import Any

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.decoded import pad_left

from .common import TINY, emit, header, load, parser_of
from .turns import CLOCKS, faster, spread, take_turns


def texts_of(tokenizer: Any, rows: int, length: int) -> list[list[int]]:
    """Texts of so many tokens each: problems and answers, one behind the other."""
    found: list[list[int]] = [[]]
    for problem in problems("math", "heldout", 12 * rows):
        prompt, answer = encode(problem, tokenizer)
        found[-1] += prompt + answer
        if len(found[-1]) >= length:
            found[-1] = found[-1][:length]
            found.append([])
    return found[:rows]


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line for each number of rows and way."""
    parser = parser_of("score", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="rows of a batch")
    parser.add_argument("--length", type=int, default=384, help="tokens of a row")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=list(CLOCKS), default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    model.to(options.device)
    emit(header("score", options, model))
    for rows in options.rows:
        inputs = {
            name: part.to(options.device) for name, part in pad_left(texts_of(tokenizer, rows, options.length), 0).items()
        }
        widths = {"packed": {}, "one by one": {"tokens_per_forward": rows * model.config.block_size}}
        outputs: dict[str, Any] = {}

        def way(name: str, inputs: Any = inputs, widths: Any = widths, outputs: Any = outputs) -> Any:
            def timed(_: int) -> float:
                begun = CLOCKS[options.clock](model.device)
                outputs[name] = model.score(**inputs, **widths[name])
                return CLOCKS[options.clock](model.device) - begun

            return timed

        taken = take_turns({name: way(name) for name in widths}, options.turns)
        tokens = int(inputs["attention_mask"].sum())
        furthest = (outputs["packed"].logprobs - outputs["one by one"].logprobs).abs().max().item()
        for name, seconds in taken.items():
            line: dict[str, Any] = {"rows": rows, "way": name, "tokens": tokens, "forwards": outputs[name].forwards}
            line |= {"tokens_per_second": spread([tokens / one for one in seconds], 0)}
            line |= {"faster": faster(seconds, taken["one by one"]), "furthest": furthest} if name == "packed" else {}
            emit(line)


if __name__ == "__main__":
    main()
