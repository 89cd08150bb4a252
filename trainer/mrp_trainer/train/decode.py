"""The command `mrp decode`: texts that a model decodes itself, with the order of their reveals, as
training data for its head.

Random masks show a head states that decoding does not reach. Decoding reveals the most confident
positions first, so that what is still masked is what the backbone cannot know yet, and the text is
the backbone's own. The command decodes the prompts of a user's records with `static` and writes
lines that `mrp train` reads (see `mrp_trainer.data.records`).
"""

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm.auto import tqdm

from ..data.records import FieldError
from ..data.sources import checked, open_source
from ..evaluate.decoded import pad_left, padding_id
from ..loading import load_model, tokenizer_of
from ..outputs import OwnFolder, check_output
from .inputs import check_tokenizer, digest, encoder_of
from .options import DecodeOptions

# How long finished processes wait for the others, in place of the short default of
# torch.distributed.
_PATIENCE = timedelta(days=30)


def decode(options: DecodeOptions) -> str | None:
    """Decode the prompts of records, and write texts and reveal steps as JSON lines.

    An interrupted call, repeated with the same options, decodes only the missing batches. Several
    processes (`torchrun`, `accelerate launch`) share the batches and write the same file as one
    process: each batch is first a file of its own, `OUTPUT.part/KEY-BEGIN.jsonl`, and the main
    process joins them.

    Returns:
        A message about the written file; None in all processes but the main one.

    Raises:
        RecordError: if a record is malformed, its prompt is too long, or there is none.
        ValueError: if the output exists, the tokenizer is another model's, or `max_new_tokens` is
            less than a block.
        OSError: if there is no such checkpoint.
    """
    state = PartialState(
        cpu=options.device == "cpu" or not torch.accelerator.is_available(), timeout=_PATIENCE
    )
    path = Path(options.output)
    folder = OwnFolder(f"{options.output}.part")
    _check_free(path)
    folder.check()
    source = open_source(options.data, options.split)
    tokenizer = tokenizer_of(options)
    device = options.device or str(state.device)
    model = load_model(options.model, options.dtype, device, options.revision, options.backbone)
    check_tokenizer(tokenizer, model)
    block_size = model.config.block_size
    longest = model.config.max_position_embeddings - options.max_new_tokens
    if options.max_new_tokens < block_size:
        raise ValueError(
            f"max_new_tokens is {options.max_new_tokens}: training takes whole blocks, give at "
            f"least {block_size}, one of them"
        )
    encoder = encoder_of(model, tokenizer, None)

    def read(row: Any) -> list[int]:
        if (length := len(ids := encoder.prompt(row))) > longest:
            fitting = f"{longest} leave room for the new ones: shorten it, or ask for fewer"
            raise FieldError(None, f"its prompt has {length} tokens, and {fitting}")
        return ids

    prompts = [ids for _, ids in islice(checked(source, read), options.limit)]
    decoded_by = {
        "model": options.model,
        "digest": digest(model),
        "block_size": block_size,
        "mask_token_id": model.config.mask_token_id,
        "max_new_tokens": options.max_new_tokens,
    }
    fingerprint = json.dumps([prompts, {**decoded_by, "model": None}, options.batch_size])
    key = sha256(fingerprint.encode()).hexdigest()[:16]
    batches = {}
    names = ["whole"]
    for begin in range(0, len(prompts), options.batch_size):
        batches[begin] = folder.path / f"{key}-{begin}.jsonl"
        names += [f"{key}-{begin}.jsonl", f"{key}-{begin}.partial"]
    folder.claim(*names)
    for begin, batch in tqdm(
        list(batches.items())[state.process_index :: state.num_processes], "decoding"
    ):
        if not batch.exists():
            inputs = pad_left(prompts[begin : begin + options.batch_size], padding_id(tokenizer))
            limits = {
                "max_new_tokens": options.max_new_tokens,
                "eos_token_id": list(encoder.end_token_ids),
            }
            batch_lines = _decoded_lines(model, inputs, decoded_by, **limits)
            partial = batch.with_suffix(".partial")
            partial.write_text("".join(f"{line}\n" for line in batch_lines))
            partial.replace(batch)
    state.wait_for_everyone()
    if not state.is_main_process:
        return None
    lines: list[str] = []
    for batch in batches.values():
        lines += batch.read_text().splitlines()
    (folder.path / "whole").write_text("".join(f"{line}\n" for line in lines))
    _check_free(path)  # others had time to write it, meanwhile
    (folder.path / "whole").replace(os.path.realpath(path))
    folder.give_up()
    cut = sum(json.loads(line)["ids"][-1] not in encoder.end_token_ids for line in lines)
    message = f"wrote {len(lines)} texts to {path}"
    if cut:
        message += f", {cut} of them without an end (of these training takes whole blocks)"
    return message


def _check_free(path: Path) -> None:
    """Raise `ValueError` if an output is there, or cannot be written."""
    check_output(path)
    if path.exists():
        raise ValueError(f"{path} is there already: name another file, or remove it")


def _decoded_lines(
    model: Any, inputs: dict[str, Tensor], decoded_by: Mapping[str, Any], **options: Any
) -> list[str]:
    """Decode padded prompts, `inputs` [rows, length] long, greedily; return a JSON line that
    training reads for each prompt."""
    tensors = {name: value.to(model.device) for name, value in inputs.items()}
    with torch.inference_mode():
        out = model.generate(
            **tensors, decoding="static", do_sample=False, return_dict_in_generate=True, **options
        )
    lines = []
    width = inputs["input_ids"].shape[1]
    lengths = inputs["attention_mask"].sum(1)
    for ids, real, steps in zip(
        out.sequences.tolist(), lengths.tolist(), out.reveal_step.tolist(), strict=True
    ):
        length = sum(step >= 0 for step in steps)
        line = {
            "ids": ids[width - real : width + length],
            "response_start": real,
            "reveal_step": steps[:length],
        }
        lines.append(json.dumps({**line, "decoded_by": decoded_by}))
    return lines
