"""Preparation of the inputs of `MRPTrainer`: the model, and datasets of records or rows."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from modeling_mrp.modeling import MRPForCausalLM

from ..data.chat import RecordEncoder
from ..data.rows import RecordRows
from ..data.samples import samples_of
from ..data.sources import source_of
from .arguments import MRPTrainingArguments

_DIGESTED = 256  # number of leading values of each tensor in a digest
_LEAST_STEPS = 100  # default number of steps of a run, at least
MAX_LENGTH = 4096  # default of the most tokens of a sample
_HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}

logger = logging.get_logger(__name__)


def bare_model(model: Any) -> MRPForCausalLM:
    """Return the model inside a peft model; return any other model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def prepare_model(model: Any, args: MRPTrainingArguments) -> None:
    """Prepare a model for training, in place.

    In a peft model, the weights that are trainable already are trained. In any other model,
    objective `mrp` freezes all weights but those of the head, and other objectives freeze those of
    the head. Trainable weights in 16 bits are cast to float32, since in bfloat16 rounding would
    discard most updates. With objective `mrp`, the generation config of a model without peft names
    the mode `mrp_spec` afterwards, unless it named a mode before.

    Raises:
        ValueError: if objective `mrp` or `eval_prompts` is given for a model without a head; if
            objective `mrp` is given for a model without peft in bfloat16 or float16 without the
            argument `bf16` or `fp16`, respectively; or if transformers would refuse to save the
            generation config in a checkpoint.
    """
    bare = bare_model(model)
    if args.objective == "mrp" and bare.mrp_head is None:
        raise ValueError(
            "objective 'mrp' needs a model with a head: give it a new one by "
            "mrp_trainer.heads.with_new_head(model), or one that is there by "
            "model.attach_head(head)"
        )
    if args.eval_prompts and bare.mrp_head is None:
        raise ValueError(
            f"eval_prompts is {args.eval_prompts}, but there is no head to decode them with: use 0"
        )
    try:
        bare.generation_config.validate(strict=True)  # every save does the same check
    except ValueError as error:
        raise ValueError(
            f"the model's generation_config could not be saved with a checkpoint ({error}): "
            "correct its fields before training, such as model.generation_config.temperature = None"
        ) from error
    passes = _HALF.get(bare.dtype)
    if (
        args.objective == "mrp"
        and bare is model
        and passes is not None
        and not getattr(args, passes)
    ):
        raise ValueError(
            f"the model is {bare.dtype}: give {passes}=True, or load it with dtype=torch.float32"
        )
    if args.objective == "mrp" and bare is model:
        model.requires_grad_(False)
        bare.get_submodule("mrp_head").requires_grad_(True)
        if getattr(bare.generation_config, "decoding", None) is None:
            bare.generation_config.decoding = "mrp_spec"  # otherwise the head would not be used
    elif bare is model and bare.mrp_head is not None:
        bare.get_submodule("mrp_head").requires_grad_(False)  # DDP would wait for its gradients
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in _HALF:
            parameter.data = parameter.data.float()


def ends_of(model: MRPForCausalLM) -> list[int]:
    """Return the ids of the tokens that end a text, according to the model's generation config."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: MRPForCausalLM) -> None:
    """Raise `ValueError` if the size, the mask token or the eos token of a tokenizer shows that it
    belongs to another model."""
    config = model.config
    ends = ends_of(model)
    mask = tokenizer.mask_token_id
    eos = tokenizer.eos_token_id
    size = len(tokenizer)
    problems = []
    if size > config.vocab_size:
        problems.append(f"it has {size} tokens, and the model's vocabulary {config.vocab_size}")
    if (
        mask is None
        and config.mask_token_id < size
        and config.mask_token_id not in tokenizer.added_tokens_decoder
    ):
        token = tokenizer.convert_ids_to_tokens(config.mask_token_id)
        problems.append(f"the model's mask, id {config.mask_token_id}, is its token {token!r}")
    elif mask not in (None, config.mask_token_id):
        problems.append(f"its mask has the id {mask}, and the model's {config.mask_token_id}")
    if ends and eos is not None and eos not in ends:
        problems.append(
            f"its eos has the id {eos}, and the model's texts end with {', '.join(map(str, ends))}"
        )
    if problems:
        raise ValueError(
            f"the tokenizer does not fit the model: {'; '.join(problems)}. Give the tokenizer that "
            "belongs to the model"
        )


def digest(model: Any) -> str | None:
    """Return a hexadecimal digest of the weights of a model's backbone. It does not depend on the
    dtype in which the weights are loaded. Return None if weights are on the meta device.

    The digest covers the first 256 values of every tensor, rounded to bfloat16. Tensors of adapters
    are left out.
    """
    weights = [weight for name, weight in model.model.named_parameters() if "lora_" not in name]
    if any(weight.is_meta for weight in weights):
        return None
    firsts = [weight.detach().flatten()[:_DIGESTED].to("cpu", torch.bfloat16) for weight in weights]
    return hashlib.sha256(torch.cat(firsts).view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def encoder_of(
    model: Any, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> RecordEncoder:
    """Make the encoder of samples and prompts for a model. By default, `max_length` is 4,096 or the
    model's number of positions, whichever is smaller. `ValueError` if a given `max_length` exceeds
    the number of positions."""
    bare = bare_model(model)
    config = bare.config
    positions = config.max_position_embeddings
    if max_length is not None and max_length > positions:
        raise ValueError(
            f"max_length is {max_length}: the model has {positions} positions "
            "(max_position_embeddings), lower it"
        )
    return RecordEncoder(
        tokenizer,
        config.block_size,
        min(MAX_LENGTH, positions) if max_length is None else max_length,
        config.mask_token_id,
        ends_of(bare),
        config.vocab_size,
        digest(bare),
    )


def as_rows(
    dataset: Any,
    name: str,
    model: Any,
    args: MRPTrainingArguments,
    tokenizer: Any,
    held_out: bool = False,
    hold_back: int = 0,
) -> Any:
    """Return a dataset as rows of training samples.

    Args:
        dataset: Records, in any form that `source_of` accepts; or a dataset of rows, each a
            `Sample` or a list of several; or None. Held-out data may also be a mapping of several
            datasets by name.
        name: The name of the dataset in error messages.
        model: The model for which records are encoded.
        args: The training arguments.
        tokenizer: The tokenizer that encodes records; it may be None if there are no records.
        held_out: Whether the data are held out; held-out records keep their order.
        hold_back: The largest number of samples with a prompt that are kept out of the rows, in
            `RecordRows.held_back`.

    Returns:
        For records, `RecordRows`, in which each record is checked and encoded as in `mrp train`. A
            dataset of rows, or None, is returned unchanged. For a mapping, a dict of the rows of
            each dataset.

    Raises:
        RecordError: if records are malformed, or there are none.
        ValueError: if there are records but no tokenizer, if training data are a mapping, or if all
            records are too long.
    """
    if dataset is None:
        return None
    if isinstance(dataset, Mapping) and held_out:
        rows = {}
        for split, records in dataset.items():
            rows[split] = as_rows(records, f"{name}[{split!r}]", model, args, tokenizer, True)
        return rows
    if isinstance(dataset, Mapping):
        raise ValueError(f"{name} has the splits {', '.join(dataset)}: give one of them")
    source = source_of(dataset, name)
    if source is None:
        return dataset
    if tokenizer is None:
        raise ValueError(
            f"{name} holds records: give processing_class, the tokenizer that encodes them, too"
        )
    encoder = encoder_of(model, tokenizer, args.max_length)
    # the other processes read the samples that the main one encoded
    with args.main_process_first(desc=f"the records of {name}"):
        return RecordRows(
            source,
            replace(encoder, last_turn_only=args.last_turn_only),
            args.packed,
            args.seed,
            shuffle=not held_out,
            fit=args.max_length is None,
            hold_back=hold_back,
            skip_malformed=args.skip_malformed,
            processes=args.dataset_num_proc,
        )


def fit_to_rows(args: MRPTrainingArguments, rows: Any) -> None:
    """Fill in `max_length` and `num_train_epochs` of `args` from the training rows.

    If `max_length` is None and the rows are `RecordRows`, it becomes the largest number of tokens
    that a row may hold. If `num_train_epochs` is None, it becomes the smallest number of epochs
    that makes at least 100 steps, or 1 if the number of rows is unknown. Warn if a step takes more
    rows than there are.
    """
    if isinstance(rows, RecordRows) and args.max_length is None:
        args.max_length = rows.row_length
    epochs = 1
    if hasattr(rows, "__len__"):
        rows_per_step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        epochs = max(1, math.ceil(_LEAST_STEPS / max(1, math.ceil(len(rows) / rows_per_step))))
        if len(rows) < rows_per_step:
            logger.warning_once(
                f"the training data are {len(rows)} rows, fewer than the {rows_per_step} of a "
                "step, so that each step takes some of them again: lower "
                "per_device_train_batch_size (--batch-size), or give more data"
            )
    if args.num_train_epochs is None:
        args.num_train_epochs = epochs


def prompts_of(rows: Any, count: int) -> list[list[int]]:
    """Return up to `count` prompts of rows, each as a list of ids. `rows` is a sequence whose items
    are a `Sample` or a list of several. The prompt of a sample is all tokens before its first
    response token. A sample that begins with a response token has no prompt, and is skipped."""
    prompts: list[list[int]] = []
    for number in range(len(rows)):  # later epochs have larger numbers
        for sample in samples_of(rows[number]):
            prompt = sample.ids[: int(sample.response.argmax())].tolist()
            if prompt and len(prompts) < count:
                prompts.append(prompt)
        if len(prompts) >= count:
            break
    return prompts
