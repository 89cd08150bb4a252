"""Accuracy and cost of decoding modes on the synthetic problems.

``python -m trainer.evaluate --model FOLDER --decoding static mrp_spec --count 500`` prints one line per family and mode.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .data import encode
from .tasks import FAMILIES, SPLITS, Family, Problem, Split, judge, problems

NEW_TOKENS: dict[Family, int] = {"math": 64, "code": 80, "source": 64}


@dataclass
class Decoded:
    """What one mode made of a list of problems.

    Attributes:
        texts: The decoded answers.
        ids: The generated ids, padding removed.
        right: Whether the judge accepts each.
        tokens_per_forward: Generated tokens over backbone forwards, each row counting its own, all rows together.
        head_forwards_per_token: The same for the head's forwards.
        row_forwards: Backbone forwards that each problem's row took part in.
        seconds: Wall clock of decoding.
        forwards: Forwards of the batches by role, and drafts, accepted drafts and revoked reveals.
    """

    texts: list[str]
    ids: list[list[int]]
    right: list[bool]
    tokens_per_forward: float
    head_forwards_per_token: float
    row_forwards: list[int]
    seconds: float
    forwards: dict[str, int]

    @property
    def accuracy(self) -> float:
        """Share of problems solved, in percent."""
        return 100 * sum(self.right) / len(self.right)

    def identical(self, other: "Decoded") -> float:
        """Share of outputs with the same tokens, in percent."""
        return 100 * sum(a == b for a, b in zip(self.ids, other.ids, strict=True)) / len(self.ids)


def pad_left(rows: Sequence[list[int]], pad_token_id: int) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` of prompts of different length."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def decode_problems(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Problem],
    batch_size: int = 32,
    on_batch: Callable[[int], None] | None = None,
    **options: Any,
) -> Decoded:
    """Decodes problems of one family with one set of `generate` options and judges the answers.

    Args:
        model: An `MRPForCausalLM`.
        tokenizer: Its tokenizer.
        asked: Problems of one family.
        batch_size: Prompts per `generate`.
        on_batch: Called with the number of problems after each batch.
        options: For `generate`.
    """
    eos = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    pad = tokenizer.pad_token_id
    all_ids: list[list[int]] = []
    row_forwards: list[int] = []
    tokens = head = 0
    counted: dict[str, int] = {}
    started = time.perf_counter()
    for begin in range(0, len(asked), batch_size):
        part = asked[begin : begin + batch_size]
        inputs = pad_left([encode(problem, tokenizer)[0] for problem in part], pad)
        with torch.inference_mode():
            out = model.generate(
                **{name: value.to(model.device) for name, value in inputs.items()},
                max_new_tokens=NEW_TOKENS[part[0].family],
                return_dict_in_generate=True,
                **options,
            )
        lengths = (out.reveal_step >= 0).sum(1).tolist()
        generated = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        all_ids += [row[:length] for row, length in zip(generated, lengths, strict=True)]
        tokens += sum(lengths)
        row_forwards += out.stats.row_forwards.tolist()
        head += int(out.stats.row_head_forwards.sum())
        for name, value in {
            **out.stats.forwards,
            **{name: int(getattr(out.stats, name).sum()) for name in ("drafted", "accepted", "revoked")},
        }.items():
            counted[name] = counted.get(name, 0) + value
        if on_batch is not None:
            on_batch(len(part))
    seconds = time.perf_counter() - started
    texts = [tokenizer.decode([i for i in ids if i not in eos]) for ids in all_ids]
    right = [judge(problem, text) for problem, text in zip(asked, texts, strict=True)]
    return Decoded(texts, all_ids, right, tokens / sum(row_forwards), head / tokens, row_forwards, seconds, counted)


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line per family and mode."""
    parser = argparse.ArgumentParser(prog="python -m trainer.evaluate", description=main.__doc__)
    parser.add_argument("--model", default="hub_configs/sdar-tiny-mrp")
    parser.add_argument("--tokenizer", help="the model's own by default")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=["math", "code"])
    parser.add_argument("--split", choices=SPLITS, default="heldout")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--decoding", nargs="+", default=["static"])
    parser.add_argument("--tau", nargs="+", type=float, default=[0.9], help="confidence thresholds for dynamic and mrp_remask")
    parser.add_argument("--states", nargs="+", type=int, default=[4], help="num_draft_states for mrp_spec and self_spec")
    parser.add_argument("--branches", nargs="+", type=int, default=[3], help="draft_branches for mrp_spec and self_spec")
    parser.add_argument("--show", type=int, default=0, help="answers to print")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count is {options.count}: at least 1 problem")
    model = AutoModelForCausalLM.from_pretrained(options.model, trust_remote_code=True).eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model, trust_remote_code=True)
    report(model, tokenizer, options)


def report(model: Any, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
    """Prints the measurements that the command line asks for."""
    for family in options.family:
        asked = problems(family, options.split, options.count)
        reference: Decoded | None = None
        for settings in _settings(options.decoding, options.tau, options.states, options.branches):
            decoded = decode_problems(model, tokenizer, asked, options.batch_size, **settings)
            reference = reference if reference is not None else decoded
            line = {
                "family": family,
                **settings,
                "accuracy": round(decoded.accuracy, 1),
                "tokens_per_forward": round(decoded.tokens_per_forward, 3),
                "head_per_token": round(decoded.head_forwards_per_token, 3),
                "identical_to_first": round(decoded.identical(reference), 1),
                "seconds": round(decoded.seconds, 1),
                **decoded.forwards,
            }
            print(json.dumps(line), flush=True)
            for problem, text, right in list(zip(asked, decoded.texts, decoded.right, strict=True))[: options.show]:
                print(f"--- {problem.prompt}\n{text}\n[{'right' if right else 'wrong'}]")


def _settings(decodings: list[str], taus: list[float], states: list[int], branches: list[int]) -> list[dict[str, Any]]:
    settings: list[dict[str, Any]] = []
    for decoding in decodings:
        if decoding in ("dynamic", "mrp_remask"):
            settings += [{"decoding": decoding, "confidence_threshold": tau} for tau in taus]
        elif decoding in ("mrp_spec", "self_spec"):
            settings += [{"decoding": decoding, "num_draft_states": k, "draft_branches": b} for k in states for b in branches]
        else:
            settings.append({"decoding": decoding})
    return settings


__all__ = ["Decoded", "Family", "Split", "decode_problems", "pad_left"]

if __name__ == "__main__":
    main()
