"""The training runs of `mrp train`: opening a run, training or resuming it, and saving its result;
or only estimating what it needs."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, set_seed
from transformers.trainer import TRAINER_STATE_NAME

from modeling_mrp.model.configuration import MRPConfig, as_block_diffusion, is_autoregressive
from modeling_mrp.model.layouts import stored_json
from modeling_mrp.modeling import MRPForCausalLM

from ..data.sources import DataPath, open_source
from ..doctor.replays import measure_device
from ..evaluate.cost import Deployment, charged_as
from ..heads import with_new_head
from ..loading import tokenizer_of
from ..outputs import OwnFolder, replace_file, report_full_disk
from .arguments import MRPTrainingArguments
from .checkpoints import StopAtInterrupt, checkpoints_in, step_of, under_own_class
from .estimate import estimate_step
from .inputs import as_rows, bare_model, prompts_of
from .measures import LOG_KEYS
from .options import RunOptions
from .settings import RUN_FILE, Settings, read_yaml
from .trainer import MRPTrainer
from .verdict import compare, verdict

_HEAD_MATRICES = r"mrp_head\..*_proj"
_RESTART = "Name another folder, or begin again with --restart"
_FULL_DISK_REMEDY = (
    "free some space and repeat the command, which goes on from the last whole checkpoint"
)


@dataclass(frozen=True)
class OpenRun:
    """A training run whose model and data are loaded and checked. The main process holds a lock on
    the run's folder; the operating system releases the lock if the process is killed.

    Attributes:
        settings: The settings of the run, with the defaults that it uses.
        trainer: Trains the model.
        tokenizer: The model's tokenizer, which is saved with the result.
        lock: The lock on the folder.
        prompts: The ids of each held-out prompt that is decoded at the end of a head's training, to
            compare the speeds with and without the head.
    """

    settings: Settings
    trainer: MRPTrainer
    tokenizer: PreTrainedTokenizerBase
    lock: FileLock
    prompts: Sequence[Sequence[int]] = ()  # prompts of the verdict

    @property
    def folder(self) -> Path:
        """Return the output folder."""
        return Path(self.settings.training["output_dir"])

    def train(self) -> Path:
        """Train, save the result, and return the output folder. If the folder has a complete
        checkpoint, training resumes from the last one. If Ctrl-C ends training early, raise
        `KeyboardInterrupt` after a checkpoint is saved; the result is not saved then."""
        newest = self.trainer.newest_checkpoint()
        if newest is not None and self.trainer.args.process_index == 0:
            print(f"resuming from {newest.name}")
        with report_full_disk(self.folder, _FULL_DISK_REMEDY):
            return self._train(newest)

    def _train(self, newest: Path | None) -> Path:
        checkpoint = None if newest is None else str(newest)
        state = self.trainer.state
        if self.trainer.args.world_size > 1:  # the processes would stop at different steps
            self.trainer.train(resume_from_checkpoint=checkpoint)
        else:
            with StopAtInterrupt() as stop:
                self.trainer.add_callback(stop)
                self.trainer.train(resume_from_checkpoint=checkpoint)
            state = self.trainer.state
            if stop.interrupted and state.global_step < state.max_steps:
                self.lock.release()
                raise KeyboardInterrupt(
                    f"interrupted behind step {state.global_step} of {state.max_steps}, which is "
                    f"saved in {self.folder}: the same command goes on from there"
                )
        state = self.trainer.state
        if (
            newest is not None
            and step_of(newest) == state.global_step
            and self.trainer.args.process_index == 0
        ):
            print(
                f"all {state.global_step} steps of this run are "
                f"done.{_resume_hint(self.folder, self.settings)}"
            )
        evaluated = [line["step"] for line in state.log_history if "eval_loss" in line]
        if self.trainer.eval_dataset is not None and evaluated[-1:] != [state.global_step]:
            self.trainer.evaluate()
        summary = [*closing_lines(state.log_history), *self._verdict()]
        if self.trainer.args.process_index == 0:
            print("\n".join(summary))
        _save(self.trainer, self.settings, self.folder, self.tokenizer)
        self.trainer.accelerator.wait_for_everyone()
        self.lock.release()
        return self.folder

    def _verdict(self) -> list[str]:
        """Decode the held-out prompts without the head and with it, in all processes. Add the
        speeds to the log, and return lines that state whether the head is worth publishing. Return
        no lines if there is no verdict to give."""
        if self.settings.objective != "mrp" or not self.settings.options.verdict_prompts:
            return []
        if not self.prompts:
            return [
                "no verdict: no prompt is held out; give --eval-data with prompts, or ten records "
                "with prompts to train on"
            ]
        trainer = self.trainer
        new_tokens = trainer.args.eval_new_tokens
        with trainer.decoding_model() as model:
            comparisons = compare(model, self.tokenizer, self.prompts, new_tokens)
            deployment = Deployment(charged_as(model.config.hidden_size))
        numbers: dict[str, float] = {"step": trainer.state.global_step}
        for comparison in comparisons:
            numbers |= comparison.as_log()
        trainer.state.log_history.append(numbers)
        return [verdict(comparisons, len(self.prompts), deployment)]


def closing_lines(history: Sequence[dict[str, float]]) -> list[str]:
    """Return lines that show the last values of `loss`, `gap_closed`, `agreement`, `eval_loss` and
    `eval_gap_closed` in a run's log, each with the meaning of its name. Names that the log lacks
    are left out. `history` holds the entries of the log, dicts of values by name."""
    last: dict[str, float] = {}
    for line in history:
        last |= line
    lines = []
    for name in ("loss", "gap_closed", "agreement", "eval_loss", "eval_gap_closed"):
        if name in last:
            held_out = "held-out data: " if name.startswith("eval_") else ""
            meaning = LOG_KEYS[name.removeprefix("eval_")]
            lines.append(f"{name} {last[name]:.4g} ({held_out}{meaning})")
    return lines


def open_run(settings: Settings, restart: bool = False) -> OpenRun:
    """Load the model and data of a run, and write the run's settings to `run.yaml` in its folder.
    With `restart`, the checkpoints in the folder are removed.

    Raises:
        ValueError: if the folder holds a run with other settings or data, or a run that still goes
            on; if there are no data, or a tracker is not installed; or if model, data, tokenizer
            and settings do not fit each other.
        OSError: if a checkpoint that the settings name does not exist.
    """
    options = settings.options
    held_out = None
    if options.eval_data:
        held_out = open_source(options.eval_data, options.eval_split)
    data = open_source(options.data, options.split)
    arguments = settings.arguments()
    folder = Path(settings.training["output_dir"])
    _check_inputs(folder, options)
    OwnFolder(folder).check()
    set_seed(arguments.seed)
    tokenizer = tokenizer_of(options)
    model = load_model(settings)
    count = options.verdict_prompts if settings.objective == "mrp" else 0
    hold_back = 0 if held_out else count
    rows = as_rows(data, "data", model, arguments, tokenizer, hold_back=hold_back)
    trainer = MRPTrainer(model, arguments, rows, held_out, processing_class=tokenizer)
    prompts = prompts_of(trainer.eval_dataset if held_out else rows.held_back, count)
    # as the trainer has fitted them to the data
    settings = settings.with_defaults(arguments, _data_digest(options.data))
    if options.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(options.early_stopping_patience))
    lock = FileLock(folder / ".lock")
    with arguments.main_process_first(desc="the run's folder"):
        if arguments.process_index == 0:  # after all other checks
            _claim_folder(folder, lock, settings, restart)
    return OpenRun(settings, trainer, tokenizer, lock, prompts)


def _check_inputs(folder: Path, options: RunOptions) -> None:
    """Raise `ValueError` if a run's output folder is also the folder of its model, head or
    tokenizer."""
    for name in ("model", "head", "tokenizer"):
        source = getattr(options, name)
        if source is not None and os.path.realpath(source) == os.path.realpath(folder):
            raise ValueError(
                f"output_dir is {folder}, which is also {name}, and would be overwritten: name "
                "another folder"
            )


def _data_digest(paths: Sequence[str]) -> str | None:
    """Return a digest of the data files at `paths`, including the files in folders. Return None if
    a path does not exist on this machine, such as the Hub id of a dataset."""
    places = [DataPath.of(path).path for path in paths]
    if not all(map(os.path.exists, places)):
        return None
    files: set[Path] = set()
    for path in map(Path, places):
        files.update([path] if path.is_file() else path.rglob("*"))
    digests = {}
    for path in sorted(filter(Path.is_file, files)):
        with path.open("rb") as file:
            digests[path.as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:32]


def _claim_folder(folder: Path, lock: FileLock, settings: Settings, restart: bool) -> None:
    """Create a run's folder if it is missing, lock it, and write the run's settings into it. With
    `restart`, remove its checkpoints. `ValueError` if the folder is in use by a run that goes on,
    holds a run with other settings, or holds files that no run here wrote."""
    output = OwnFolder(folder)
    path = folder / RUN_FILE
    checkpoints = checkpoints_in(folder)
    output.check()
    results = ("config.json", "adapter_config.json")
    output.check_free(*results, "model.safetensors", "adapter_model.safetensors")
    finished = any((folder / name).is_file() for name in results)
    if restart and (
        foreign := sorted({checkpoint.name for checkpoint in checkpoints} - {*output.names()})
    ):
        raise ValueError(
            f"{folder} holds {foreign[0]}, which no run here wrote, and so --restart leaves: "
            "remove it"
        )
    if (checkpoints or finished) and not restart:
        if not path.is_file():
            raise ValueError(f"{folder} holds checkpoints and no {RUN_FILE}. {_RESTART}")
        if different := settings.differences(read_yaml(path)):
            hint = _resume_hint(folder, settings) if finished else ""
            raise ValueError(
                f"{folder} holds a run with other settings: {'; '.join(different)}. "
                f"{_RESTART}.{hint}"
            )
    output.claim(Path(lock.lock_file).name, RUN_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"{folder} is held by a run that goes on: wait for it, end it, or name another folder"
        ) from error
    if restart:
        output.remove(*(name for name in output.names() if name.startswith("checkpoint-")))
    replace_file(path, yaml.safe_dump(settings.as_dict(), sort_keys=False).encode())


def _resume_hint(folder: Path, settings: Settings) -> str:
    """Return a hint on how to train the result of a run further. It is a sentence that begins with
    a space, or an empty text for an adapter."""
    if settings.options.lora_rank:
        return ""
    component, flag = ("head", "head") if settings.objective == "mrp" else ("backbone", "model")
    return f" To train its {component} further, give --{flag} {folder} and another --output-dir"


def load_model(settings: Settings) -> Any:
    """Load the model that a run trains. Frozen weights have the dtype of the passes, bfloat16 or
    float32. Trained weights are always float32, since in bfloat16 rounding would discard most
    updates. `ValueError` if an adapter is to be trained and the model has no head."""
    options = settings.options
    hub_options: dict[str, Any] = {}
    if options.revision is not None:
        hub_options["revision"] = options.revision
    if settings.objective == "block_diffusion":
        model = MRPForCausalLM.from_backbone(
            options.model, dtype=torch.float32, **hub_options, **_block_fields(options)
        )
        if model.mrp_head is not None:
            model.detach_head()  # it was trained for the old backbone
        return model
    hub_options["dtype"] = torch.bfloat16 if settings.training.get("bf16") else torch.float32
    if options.lora_rank:
        model = MRPForCausalLM.from_pretrained(options.model, **hub_options)
        if model.mrp_head is None:
            raise ValueError(
                f"lora_rank is {options.lora_rank}, but {options.model} has no MRP head for an "
                "adapter: name a checkpoint of a head as model, or leave lora_rank out"
            )
        if os.path.isdir(options.model):
            # the adapter's config names this path
            model.name_or_path = os.path.abspath(options.model)
        return _with_adapter(model, options)
    model = MRPForCausalLM.from_backbone(options.model, options.head, **hub_options)
    if options.head is None:
        with_new_head(model, options.head_layers, options.head_init)
    model.mrp_head.to(torch.float32)
    return model


def _with_adapter(model: Any, options: RunOptions) -> Any:
    """Wrap a model in a LoRA adapter for the matrices of its head; only the adapter is trained."""
    alpha = 2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
    lora = LoraConfig(
        r=options.lora_rank, lora_alpha=alpha, target_modules=_HEAD_MATRICES, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, lora)


def _block_fields(options: RunOptions) -> dict[str, Any]:
    """Collect the options for block size and mask id that were given. The config of an
    autoregressive checkpoint lacks these fields."""
    fields = {}
    if options.block_size is not None:
        fields["block_size"] = options.block_size
    if options.mask_token_id is not None:
        fields["mask_token_id"] = options.mask_token_id
    return fields


def dry_run(settings: Settings) -> str:
    """Describe what a run needs, in lines of text: parameters, memory of a process, rows per step,
    and FLOPs of a step. No weights are loaded.

    Raises:
        ValueError: if the settings conflict or are out of range, or if a head is to be trained
            further and the checkpoint has none.
        OSError: if a config is neither local nor in the cache.
    """
    arguments = settings.arguments(bf16=False, fp16=False, use_cpu=True)
    model = meta_model(settings)
    parameters = model.num_parameters()
    trained = matrices = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
            if parameter.dim() == 2 and "layers." in name:
                matrices += parameter.numel()
    memory = {"weights": 4 * parameters, "gradients": 4 * trained, "optimizer": 8 * trained}
    if settings.training.get("bf16"):  # autocast copies the trained weights
        memory["weights"] = 2 * (parameters - trained) + 6 * trained
    if arguments.muon_learning_rate is not None:
        memory["optimizer"] -= 4 * matrices
    at_once = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    dtype = torch.bfloat16 if settings.training.get("bf16") else torch.float32
    row = estimate_step(bare_model(model), arguments, dtype)
    size = arguments.per_device_train_batch_size
    memory |= {
        "saved by passes": size * row.saved,
        "of one pass": size * row.transient + row.logits,
    }
    sizes = {**memory, "in all": sum(memory.values())}.items()
    lines = [f"parameters: {parameters:,}, of which {trained:,} train"]
    lines += [f"{name}: {size / 2**30:.4g} GiB" for name, size in sizes]
    noisy, clean = row.columns
    rows = arguments.rows_per_step or at_once
    teraflops = rows * row.flops / 1e12
    lines += [
        "a process; DDP holds gradients twice, FSDP divides weights, gradients and optimizer",
        f"rows per step: {rows}, of at most {noisy:,} noisy and {clean:,} clean columns",
        f"products of a step: {teraflops:.4g} TFLOP, over all devices: {_seconds_of(teraflops)}",
    ]
    if settings.objective == "mrp":
        lines.append(_relative_work(model, arguments))
    return "\n".join(lines)


def _seconds_of(teraflops: float) -> str:
    """Describe how long a device takes for matrix products of `teraflops` TFLOP, at its full rate
    and at 60 % of it, which large products reach. The device is this machine's CUDA device, whose
    rate is measured, or else an H100."""
    name, rate = "an H100's 989 TFLOP/s in bfloat16", 989.0
    if torch.cuda.is_available():
        measured = measure_device(torch.device("cuda"), torch.bfloat16)
        rate = measured.peak / 1e12
        name = f"{measured.name}'s measured {rate:.3g} TFLOP/s in bfloat16"
    return (
        f"{teraflops / rate / 0.6:.3g} s at 60 % of {name}, {teraflops / rate:.3g} s at all of it"
    )


def _relative_work(model: Any, arguments: MRPTrainingArguments) -> str:
    """Describe how much a run computes per token of the data, relative to the published recipe. The
    loss over the vocabulary is not counted."""
    head = sum(weight.numel() for weight in model.get_submodule("mrp_head").parameters())
    backbone = sum(weight.numel() for weight in model.get_submodule("model").parameters())
    backbone -= model.get_input_embeddings().weight.numel()

    def work(copies: int, unroll: int, later_passes: int) -> int:
        # the first pass of each network also covers the clean text; passes of the head are forward
        # and backward
        columns = 1 + copies + copies * later_passes
        return columns * backbone + 3 * (1 + copies * unroll) * head

    copies = arguments.copies(model.config.block_size)
    ratio = work(copies, arguments.unroll, arguments.later_passes) / work(1, 1, 1)
    return f"work per token, without the vocabulary: {ratio:.2g} times the published recipe's"


def meta_model(settings: Settings) -> Any:
    """Make the model that a run would train, on the meta device and from configs only: nothing is
    allocated, downloaded or written. `ValueError` if a head is to be trained further and the
    checkpoint has none; `OSError` if a config is neither local nor in the cache."""
    options = settings.options
    fields = stored_json(options.model, revision=options.revision, local_files_only=True)[0]
    if is_autoregressive(fields):
        fields = as_block_diffusion(fields) | _block_fields(options)
    config = MRPConfig.from_dict(fields)
    if settings.objective == "block_diffusion":
        config.num_nextn_predict_layers = 0
    elif options.head is None and not options.lora_rank:
        config.num_nextn_predict_layers = options.head_layers
    else:
        source = options.head or options.model
        of_head = stored_json(source, local_files_only=True)[0]
        if not MRPConfig.from_dict(of_head).has_head:
            raise ValueError(f"{source} has no MRP head: name a checkpoint that has one")
        config.num_nextn_predict_layers = of_head["num_nextn_predict_layers"]
    with torch.device("meta"):
        model: Any = MRPForCausalLM(config)
    if options.lora_rank:
        return _with_adapter(model, options)
    if settings.objective == "mrp":
        model.requires_grad_(False)
        model.get_submodule("mrp_head").requires_grad_(True)
    return model


def rounded(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a dict with the same names and tensors, but floating-point tensors are cast to
    `dtype`."""
    tensors = {}
    for name, tensor in state.items():
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def _save(
    trainer: MRPTrainer, settings: Settings, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Save the tokenizer, the state of the trainer and, depending on the settings, the adapter, the
    head alone, or the whole model. A head or a model is saved in the dtype of the passes."""
    state = None
    if trainer.is_fsdp_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not trainer.args.should_save:
        return
    if settings.options.lora_rank:
        with OwnFolder(folder).saving() as partial:
            trainer.state.save_to_json(str(partial / TRAINER_STATE_NAME))
            trainer.model.save_pretrained(partial, state_dict=state)
            tokenizer.save_pretrained(partial)
        return
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float32
    if state is None:
        trainer.model.to(dtype)
    else:
        state = rounded(state, dtype)
    head_only = settings.objective == "mrp" and settings.options.save == "head"
    with OwnFolder(folder).saving() as partial, under_own_class(trainer.model):
        trainer.state.save_to_json(str(partial / TRAINER_STATE_NAME))
        trainer.model.save_pretrained(partial, state_dict=state, head_only=head_only)
        tokenizer.save_pretrained(partial)
