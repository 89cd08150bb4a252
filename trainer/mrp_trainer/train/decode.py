"""Texts that a model writes itself, step by step, as training data for a head: the command `mrp decode`.

A head drafts best when it was trained on the states that decoding meets (see `trajectories`). The command decodes
the prompts of a user's records with `static` and writes lines that `mrp train` reads (see `mrp_trainer.data.records`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from modeling_mrp.modeling import MRPForCausalLM

from ..data.chat import RecordEncoder
from ..data.records import FieldError
from ..data.sources import Places, Stream, TableSource, checked, open_source
from ..evaluate.decoded import padding_id
from .decode_options import DecodeOptions
from .inputs import check_tokenizer, encoder_of
from .options import TrainerFlags
from .runs import run_tokenizer
from .settings import RunOptions
from .trajectories import decoded_lines, digest, write_lines

# Processes that are done wait for the others, longer than what communicates would have it.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class Written:
    """What `decode` wrote.

    Attributes:
        path: The file.
        texts: How many lines it has.
        cut: How many of them ran into the limit: training takes these to their last whole block.
    """

    path: Path
    texts: int
    cut: int


class Prompts:
    """Prompts of records as ids, each encoded when it is asked for.

    Args:
        source: The records.
        encoder: Makes prompts of them.
        longest: Tokens that a prompt may have.
        limit: Only so many of the first; what lies behind them is not looked at.

    Raises:
        RecordError: Records are malformed or too long, or there is none.
    """

    def __init__(self, source: TableSource, encoder: RecordEncoder, longest: int, limit: int | None = None) -> None:
        self.source, self.encoder, self.longest = source, encoder, longest
        self._places = Places()
        for place, _ in islice(checked(source, self._check, show_progress=True), limit):
            self._places.append(place)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> list[int]:
        return self.encoder.prompt(self.source.at(self._places[number]))

    def _check(self, raw: Any) -> None:
        length = len(self.encoder.prompt(raw))
        if length > self.longest:
            raise FieldError(
                None,
                f"its prompt has {length} tokens, and {self.longest} leave room for the new ones: shorten it, or ask for fewer",
            )


def decode(options: DecodeOptions, state: PartialState | None = None) -> Written | None:
    """Decodes and writes; run again, it goes on behind the last batch that was written whole.

    Under `torchrun` or `accelerate launch` the processes share the prompts, and write the file that one alone would.

    Args:
        options: What, and how.
        state: The processes; None for those that a launcher has started, or this one alone.

    Returns:
        What was written; None in all processes but the first.

    Raises:
        RecordError: Records are malformed, or there is none.
        ValueError: Data come in order only; the tokenizer is another model's; the model has no room for a block of new tokens;
            the file holds something else, or the answers to other prompts or options.
        OSError: There is no such checkpoint.
    """
    if state is None:
        state = PartialState(cpu=options.device == "cpu" or not torch.cuda.is_available(), timeout=_PATIENCE)
    source = open_source(options.data, options.split)
    if isinstance(source, Stream):
        raise ValueError(f"{source.names[0]} comes in order only: write it to a .jsonl file")
    run = RunOptions(options.model, options.revision, options.tokenizer)
    tokenizer = run_tokenizer(run)
    where = {name: value for name, value in (("dtype", options.dtype), ("revision", options.revision)) if value is not None}
    model = MRPForCausalLM.from_pretrained(run.model, **where).eval()
    check_tokenizer(tokenizer, model)
    model.to(options.device or state.device)
    block_size, longest = model.config.block_size, model.config.max_position_embeddings - options.max_new_tokens
    if options.max_new_tokens < block_size:
        raise ValueError(
            f"max_new_tokens is {options.max_new_tokens}: training takes whole blocks, give at least {block_size}, one of them"
        )
    encoder = encoder_of(model, tokenizer, TrainerFlags.max_length)
    prompts = Prompts(source, encoder, longest, options.limit)
    decoder = _Decoder(model, encoder, prompts, options)
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, decoder.lines, len(prompts), options.batch_size, state, decoder.check)
    return _written(path, encoder) if state.process_index == 0 else None


class _Decoder:
    """Lines of prompts by their numbers, and whether a line is one of them."""

    def __init__(self, model: Any, encoder: RecordEncoder, prompts: Prompts, options: DecodeOptions) -> None:
        self.model, self.encoder, self.prompts, self.options = model, encoder, prompts, options
        self.decoded_by = {
            "model": options.model,
            "digest": digest(model),
            "block_size": model.config.block_size,
            "mask_token_id": model.config.mask_token_id,
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "seed": options.seed if options.temperature else None,
        }

    def lines(self, numbers: range) -> Iterator[list[str]]:
        how: dict[str, Any] = {"do_sample": False}
        if self.options.temperature:
            seeds = [self.options.seed + number for number in numbers]
            how = {"do_sample": True, "temperature": self.options.temperature, "seed": seeds}
        yield decoded_lines(
            self.model,
            [self.prompts[number] for number in numbers],
            padding_id(self.encoder.tokenizer),
            self.decoded_by,
            max_new_tokens=self.options.max_new_tokens,
            eos_token_id=list(self.encoder.end_token_ids),
            **how,
        )

    def check(self, number: int, line: str) -> None:
        """Raises `ValueError` for a line that this run would not have written."""
        path, remedy = self.options.output, "name another file, or remove it"
        try:
            record = json.loads(line)
            prompt, decoded_by = record["ids"][: record["response_start"]], record["decoded_by"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number + 1}: not what mrp decode writes: {remedy}") from error
        for name, value in self.decoded_by.items():
            if name != "model" and decoded_by.get(name) != value:  # a checkpoint may be named in several ways
                raise ValueError(
                    f"{path}, line {number + 1}: its {name} was {decoded_by.get(name)!r} and is {value!r}: {remedy}"
                )
        if prompt != self.prompts[number]:
            raise ValueError(f"{path}, line {number + 1}: it answers another prompt than the data have there: {remedy}")


def _written(path: Path, encoder: RecordEncoder) -> Written:
    with path.open() as file:
        ended = [json.loads(line)["ids"][-1] in encoder.end_token_ids for line in file]
    return Written(path, len(ended), ended.count(False))


__all__ = ["DecodeOptions", "Prompts", "Written", "decode"]
