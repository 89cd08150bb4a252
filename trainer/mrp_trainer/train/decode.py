"""Texts that a model writes itself, step by step, as training data for a head: the command `mrp decode`.

A head drafts best when it was trained on the states that decoding meets (see `trajectories`). The command decodes
the prompts of a user's records with `static` and writes lines that `mrp train` reads (see `mrp_trainer.data.records`).
"""

import json
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from modeling_mrp.modeling import MRPForCausalLM

from ..data.chat import RecordEncoder
from ..data.records import FieldError
from ..data.sources import Source, checked, open_source
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


def read_prompts(source: Source, encoder: RecordEncoder, longest: int, limit: int | None = None) -> list[list[int]]:
    """Read the prompts of records as ids.

    Args:
        source: The records.
        encoder: Makes prompts of them.
        longest: Tokens that a prompt may have.
        limit: Only so many of the first; what lies behind them is not looked at.

    Raises:
        RecordError: Records are malformed or too long, or there is none.
    """

    def read(raw: Any) -> list[int]:
        if (length := len(ids := encoder.prompt(raw))) > longest:
            raise FieldError(
                None,
                f"its prompt has {length} tokens, and {longest} leave room for the new ones: shorten it, or ask for fewer",
            )
        return ids

    return [ids for _, ids in islice(checked(source, read, show_progress=True), limit)]


def decode(options: DecodeOptions, state: PartialState | None = None) -> Written | None:
    """Decode and write; run again with the same options, it makes the batches that are not there.

    Under `torchrun` or `accelerate launch` the processes share the prompts, and write the file that one alone would.

    Args:
        options: What, and how.
        state: The processes; None for those that a launcher has started, or this one alone.

    Returns:
        What was written; None in all processes but the first.

    Raises:
        RecordError: Records are malformed, or there is none.
        ValueError: The tokenizer is another model's; the model has no room for a block of new tokens; or the file is there, and
            holds the answers to other prompts or options.
        OSError: There is no such checkpoint.
    """
    if state is None:
        state = PartialState(cpu=options.device == "cpu" or not torch.cuda.is_available(), timeout=_PATIENCE)
    source = open_source(options.data, options.split)
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
    prompts = read_prompts(source, encoder, longest, options.limit)
    decoded_by = {
        "model": options.model,
        "digest": digest(model),
        "block_size": block_size,
        "mask_token_id": model.config.mask_token_id,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": options.seed if options.temperature else None,
    }

    def lines(numbers: range) -> list[str]:
        how: dict[str, Any] = {"do_sample": False}
        if options.temperature:
            seeds = [options.seed + number for number in numbers]
            how = {"do_sample": True, "temperature": options.temperature, "seed": seeds}
        asked, ends = [prompts[number] for number in numbers], list(encoder.end_token_ids)
        how |= {"max_new_tokens": options.max_new_tokens, "eos_token_id": ends}
        return decoded_lines(model, asked, padding_id(tokenizer), decoded_by, **how)

    path = Path(options.output)
    told = json.dumps([prompts, {**decoded_by, "model": None}, options.batch_size])
    write_lines(path, sha256(told.encode()).hexdigest()[:16], lines, len(prompts), options.batch_size, state)
    return _written(path, encoder, prompts, decoded_by) if state.is_main_process else None


def _written(path: Path, encoder: RecordEncoder, prompts: list[list[int]], decoded_by: dict[str, Any]) -> Written:
    """Count what a file holds.

    Raises:
        ValueError: It holds something else than the answers to these prompts.
    """
    cut = texts = 0
    with path.open() as file:
        for texts, (line, prompt) in enumerate(zip_longest(file, prompts), 1):
            try:
                record = json.loads(line)
                same = record["ids"][: record["response_start"]] == prompt
                same &= all(record["decoded_by"][name] == value for name, value in decoded_by.items() if name != "model")
            except (ValueError, KeyError, TypeError):
                same = False
            if not same:
                raise ValueError(
                    f"{path}, line {texts}: not what these prompts and options give: name another file, or remove it"
                )
            cut += record["ids"][-1] not in encoder.end_token_ids
    return Written(path, texts, cut)


__all__ = ["DecodeOptions", "Written", "decode", "read_prompts"]
