"""The command `mrp decode`, which makes training data for a head: texts that a model decodes
itself, with the order of their reveals.

Random masks show a head states that decoding does not reach. Decoding reveals the most confident
positions first, so the positions that are still masked are those that the backbone cannot know yet;
and the text is the backbone's own. The command decodes the prompts of a user's records with the
target `static`, or with another target, and writes lines that `mrp train` reads (see
`mrp_trainer.data.records`). A server returns only text (`endpoint.py`), so its lines are chats
without reveals.
"""

import json
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from tqdm.auto import tqdm
from transformers.generation import ContinuousBatchingConfig

from modeling_mrp.generate.batching import ContinuousBatchingManager
from modeling_mrp.generate.request import RequestOutput

from ..data.records import FieldError
from ..data.sources import Source, checked, open_source
from ..evaluate.command import check_setting
from ..evaluate.options import generate_options
from ..loading import load_model, tokenizer_of
from ..outputs import OwnFolder, check_output
from .data_card import write_data_card
from .endpoint import EndpointDecoder
from .inputs import check_tokenizer, digest, encoder_of
from .options import DecodeOptions

# The longest time that finished processes wait for the others, in place of the short default of
# torch.distributed.
_PATIENCE = timedelta(days=30)


class TextMaker(Protocol):
    """The interface of a class that makes a text for each prompt: with a model on this machine
    (`ModelDecoder`), or by a server (`EndpointDecoder`).

    Attributes:
        decoded_by: The origin of the texts, by name: the model and the settings of decoding. It is
            written into each line.
        fingerprint: Everything that determines the texts, except the prompts, by name. Lines of an
            interrupted call are used again only if it is the same.
    """

    decoded_by: dict[str, Any]
    fingerprint: dict[str, Any]

    @property
    def prompts(self) -> Sequence[Any]:
        """Return the prompts in a form that JSON can represent: for a model, the ids of each; for a
        server, the messages, tools and template variables of each."""
        ...

    def batches(self, begins: Sequence[int], count: int) -> Iterator[tuple[int, list[str]]]:
        """Make the JSON lines for batches of `count` prompts each; the last batch may have fewer.
        `begins` holds the index of the first prompt of each batch to make. For each of these
        batches, in any order, yield this index and the batch's lines."""
        ...

    def note(self, lines: Sequence[str]) -> str:
        """Return a remark for the user about the JSON lines `lines`, which have been written, or an
        empty text. It is appended to the message that says how many were written."""
        ...


def decode(options: DecodeOptions) -> str | None:
    """Decode the prompts of records, and write the texts and their reveal steps as JSON lines.

    If a call was interrupted, a call with the same options decodes only the missing batches.
    Several processes (`torchrun`, `accelerate launch`) share the batches, and write the same file
    as one process would. Each batch is first written to a file of its own,
    `OUTPUT.part/KEY-BEGIN.jsonl`, where KEY is a digest of prompts and options, and BEGIN is the
    index of the batch's first prompt. At the end the main process joins these files.

    Returns:
        A message about the written file; None in every process but the main one.

    Raises:
        RecordError: if a record is malformed, a prompt is too long, or there are no records.
        ValueError: if the output or its card exists already, the tokenizer belongs to another
            model, `max_new_tokens` is less than a block, or `generate` refuses an option.
        OSError: if the checkpoint does not exist, or a server cannot be reached or refuses a
            request.
    """
    state = PartialState(
        cpu=options.device == "cpu" or not torch.accelerator.is_available(), timeout=_PATIENCE
    )
    path = Path(options.output)
    folder = OwnFolder(f"{options.output}.part")
    _check_free(path)
    if options.card is not None:
        _check_free(Path(options.card))
    folder.check()
    source = open_source(options.data, options.split)
    maker: TextMaker
    if options.endpoint is None:
        maker = ModelDecoder(options, source, options.device or str(state.device))
    else:
        maker = EndpointDecoder(options, source)
    fingerprint = json.dumps([maker.prompts, maker.fingerprint, options.batch_size])
    key = sha256(fingerprint.encode()).hexdigest()[:16]
    batches = {}
    names = ["whole"]
    for begin in range(0, len(maker.prompts), options.batch_size):
        batches[begin] = folder.path / f"{key}-{begin}.jsonl"
        names += [f"{key}-{begin}.jsonl", f"{key}-{begin}.partial"]
    folder.claim(*names)
    missing = []
    for begin in list(batches)[state.process_index :: state.num_processes]:
        if not batches[begin].exists():
            missing.append(begin)
    made = maker.batches(missing, options.batch_size)
    for begin, batch_lines in tqdm(made, "decoding", total=len(missing)):
        partial = batches[begin].with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in batch_lines))
        partial.replace(batches[begin])
    state.wait_for_everyone()
    if not state.is_main_process:
        return None
    lines: list[str] = []
    for batch in batches.values():
        lines += batch.read_text().splitlines()
    (folder.path / "whole").write_text("".join(f"{line}\n" for line in lines))
    _check_free(path)  # meanwhile another process may have written the output
    (folder.path / "whole").replace(os.path.realpath(path))
    folder.give_up()
    message = f"wrote {len(lines)} texts to {path}{maker.note(lines)}"
    if options.card is not None:
        write_data_card(options, maker.decoded_by, lines)
        message += f"\nwrote their card to {options.card}"
    return message


def _check_free(path: Path) -> None:
    """Raise `ValueError` if the file `path` exists already or cannot be written."""
    check_output(path)
    if path.exists():
        raise ValueError(f"{path} is there already: name another file, or remove it")


class ModelDecoder:
    """A `TextMaker` that decodes prompts with a model on this machine. Creating it loads the model
    and the tokenizer, and encodes the prompts. As soon as a text ends, the next prompt starts, even
    if it belongs to another batch. The JSON line of a text holds its ids, the length of its prompt,
    its reveal steps and `decoded_by`.

    Args:
        options: The options of `mrp decode`, which name the model and the options of decoding. If
            texts are sampled, prompt i, counted from 0, has the seed s + i, where s is the option
            `seed`, by default 0.
        source: The records that hold the prompts; at most `options.limit` of them are used.
        device: The device of the model, such as "cuda:0".

    Raises:
        RecordError: if a record is malformed, a prompt is too long, or there are no records.
        ValueError: if the tokenizer belongs to another model, `max_new_tokens` is less than a
            block, or `generate` refuses an option.
        OSError: if the checkpoint does not exist.
    """

    def __init__(self, options: DecodeOptions, source: Source, device: str) -> None:
        tokenizer = tokenizer_of(options)
        model = load_model(options.model, options.dtype, device, options.revision, options.backbone)
        check_tokenizer(tokenizer, model)
        config = model.config
        if options.max_new_tokens < config.block_size:
            raise ValueError(
                f"max_new_tokens is {options.max_new_tokens}: training takes whole blocks, give at "
                f"least {config.block_size}, one of them"
            )
        setting = {"decoding": options.target or "static", "set": options.extra()}
        check_setting(setting, config)
        self.encoder = encoder_of(model, tokenizer, None)
        self.longest = config.max_position_embeddings - options.max_new_tokens
        self.prompts = [ids for _, ids in islice(checked(source, self.prompt), options.limit)]
        self.model: Any = model
        self.options = {
            "do_sample": False,
            "max_new_tokens": options.max_new_tokens,
            "eos_token_id": list(self.encoder.end_token_ids),
            **generate_options(setting),
        }
        chosen = {"target": setting["decoding"]} if options.target else {}
        if setting["set"]:
            chosen["options"] = setting["set"]
        self.decoded_by: dict[str, Any] = {
            "model": options.model,
            "digest": digest(model),
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "max_new_tokens": options.max_new_tokens,
            **chosen,
        }
        self.fingerprint = {**self.decoded_by, "model": None}

    def prompt(self, row: Any) -> list[int]:
        """Encode the prompt of a record as ids. `FieldError` if the record is malformed, or if the
        prompt and `max_new_tokens` new tokens exceed the model's positions."""
        ids = self.encoder.prompt(row)
        if len(ids) > self.longest:
            fitting = f"{self.longest} leave room for the new ones: shorten it, or ask for fewer"
            raise FieldError(None, f"its prompt has {len(ids)} tokens, and {fitting}")
        return ids

    def batches(self, begins: Sequence[int], count: int) -> Iterator[tuple[int, list[str]]]:
        """Decode batches of `count` prompts each; the last batch may have fewer. Up to `count`
        prompts are decoded at the same time. `begins` holds the index of the first prompt of each
        batch to decode. For each batch, once all of its texts have ended, yield this index and a
        JSON line for each prompt, in the order of the prompts. `ValueError` if a text cannot be
        decoded."""
        limits = ContinuousBatchingConfig(max_requests_per_batch=count)
        manager = self.model.init_continuous_batching(continuous_batching_config=limits)
        indices: list[int] = []
        missing = {}
        for begin in begins:
            members = range(begin, min(begin + count, len(self.prompts)))
            indices += members
            missing[begin] = len(members)
        lines: dict[int, str] = {}
        manager.start()
        try:
            for output in self._results(manager, indices, count):
                index = int(output.request_id)
                if output.error is not None:
                    raise ValueError(f"the text of prompt {index}: {output.error}")
                lines[index] = self._line(output)
                begin = index // count * count
                missing[begin] -= 1
                if not missing[begin]:
                    members = range(begin, min(begin + count, len(self.prompts)))
                    yield begin, [lines.pop(member) for member in members]
        finally:
            manager.stop(hard_stop=True)

    def _results(
        self, manager: ContinuousBatchingManager, indices: Sequence[int], waiting: int
    ) -> Iterator[RequestOutput]:
        """Submit the prompts with the given `indices`, and yield results in the order in which they
        arrive. A prompt is submitted when fewer than `waiting` prompts wait in the manager."""
        asked = ended = 0
        while ended < len(indices):
            while asked < len(indices) and manager.waiting < waiting:
                index = indices[asked]
                options = dict(self.options)
                if options["do_sample"]:
                    options["seed"] = options.get("seed", 0) + index
                manager.add_request(self.prompts[index], str(index), **options)
                asked += 1
            output = manager.get_result()
            if output is None:
                raise RuntimeError("decoding has ended") from manager.fatal_error
            ended += 1
            yield output

    def _line(self, output: RequestOutput) -> str:
        """Format a decoded text as a JSON line of training data."""
        line = {
            "ids": output.prompt_ids + output.generated_tokens,
            "response_start": len(output.prompt_ids),
            "reveal_step": output.reveal_step,
        }
        return json.dumps({**line, "decoded_by": self.decoded_by})

    def note(self, lines: Sequence[str]) -> str:
        """Return a remark on how many of the texts in the JSON lines `lines` do not end with an end
        token, or an empty text if all do."""
        cut = sum(json.loads(line)["ids"][-1] not in self.encoder.end_token_ids for line in lines)
        return (
            f", {cut} of them without an end (of these training takes whole blocks)" if cut else ""
        )
