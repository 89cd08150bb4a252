"""Texts that a model writes itself, step by step, as training data for a head: the command `mrp decode`.

A head drafts best when it was trained on the states that decoding meets (see `trajectories`). The command decodes
the prompts of a user's records with `static` and writes lines that `mrp train` reads (see `mrp_trainer.data.records`).
"""

import json
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from itertools import islice
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
    """Decode and write; run again with the same options, an interrupted call makes the batches that are not there.

    Under `torchrun` or `accelerate launch` the processes share the prompts, and write the file that one alone would.

    Args:
        options: What, and how.
        state: The processes; None for those that a launcher has started, or this one alone.

    Returns:
        What was written; None in all processes but the first.

    Raises:
        RecordError: Records are malformed, or there is none.
        ValueError: The file is there already; the tokenizer is another model's; or the model has no room for a block of new
            tokens.
        OSError: There is no such checkpoint.
    """
    if state is None:
        state = PartialState(cpu=options.device == "cpu" or not torch.cuda.is_available(), timeout=_PATIENCE)
    path = Path(options.output)
    if path.exists():
        raise ValueError(f"{path} is there already: name another file, or remove it")
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

    told = json.dumps([prompts, {**decoded_by, "model": None}, options.batch_size])
    write_lines(path, sha256(told.encode()).hexdigest()[:16], lines, len(prompts), options.batch_size, state)
    if not state.is_main_process:
        return None
    with path.open() as file:
        cut = sum(json.loads(line)["ids"][-1] not in encoder.end_token_ids for line in file)
    return Written(path, len(prompts), cut)
