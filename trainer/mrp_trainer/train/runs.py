"""Training runs as the command line describes them: carried out, resumed, or only estimated."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, PreTrainedConfig, PreTrainedTokenizerBase, set_seed
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.layouts import stored_json
from modeling_mrp.modeling import MRPForCausalLM

from ..data.sources import check_paths, open_source
from ..heads import with_new_head
from ..loading import WITHOUT_WEIGHTS, load_tokenizer
from .arguments import MRPTrainingArguments
from .checkpoints import last_whole_checkpoint, step_of, under_own_class
from .inputs import bare_model
from .run_folder import check_folder, hold, how_to_go_on, take_over
from .settings import RunOptions, Settings
from .trainer import MRPTrainer

_LAYER = r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
# The matrices that an adapter changes, by objective.
LORA_TARGETS = {"mrp": rf"mrp_head\.(eh_proj|{_LAYER})", "block_diffusion": rf"model\.{_LAYER}"}


@dataclass(frozen=True)
class OpenRun:
    """A run whose model and data are loaded and checked.

    Attributes:
        settings: The run.
        trainer: Its trainer.
        tokenizer: Saved with what was trained.
        lock: What the folder is held by, until the run is done.
    """

    settings: Settings
    trainer: MRPTrainer
    tokenizer: PreTrainedTokenizerBase
    lock: ExitStack

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return Path(self.settings.training["output_dir"])

    def train(self) -> Path:
        """Trains from the last whole checkpoint on, and saves what came out; gives the folder."""
        with self.lock:
            newest = last_whole_checkpoint(self.folder)
            if newest is not None and self.trainer.args.process_index == 0:
                print(f"resuming from {newest.name}")
            self.trainer.train(resume_from_checkpoint=True)
            state = self.trainer.state
            if newest is not None and step_of(newest) == state.global_step and self.trainer.args.process_index == 0:
                print(f"all {state.global_step} steps of this run are done.{how_to_go_on(self.folder, self.settings)}")
            evaluated = [line["step"] for line in state.log_history if "eval_loss" in line]
            if self.trainer.eval_dataset is not None and evaluated[-1:] != [state.global_step]:
                self.trainer.evaluate()
            _save(self.trainer, self.settings, self.folder)
            if self.trainer.args.should_save:
                self.tokenizer.save_pretrained(self.folder)
            self.trainer.accelerator.wait_for_everyone()
        return self.folder


def open_run(settings: Settings, restart: bool = False) -> OpenRun:
    """Loads what a run needs, and writes its settings to `run.yaml` in its folder.

    Args:
        settings: The run.
        restart: Whether to begin again, and remove the checkpoints of the folder.

    Raises:
        ValueError: if the folder holds a run with other settings or data, or one that goes on; there is no data; what the
            settings name does not go together, the tokenizer included; or DeepSpeed's config would leave nothing to save.
        OSError: if a checkpoint is not there.
    """
    _check_given(settings)
    settings = replace(settings, data_digest=_data_digest(settings.options.data))
    arguments = settings.arguments()
    folder = Path(settings.training["output_dir"])
    if not restart:
        check_folder(folder, settings)
    _check_sharding(arguments)
    set_seed(arguments.seed)
    tokenizer = run_tokenizer(settings.options)
    with _undivided(arguments):
        model = load_model(settings)
    trainer = _make_trainer(settings, arguments, model, tokenizer)
    with ExitStack() as lock, arguments.main_process_first(desc="the run's folder"):
        if arguments.process_index == 0:
            lock.enter_context(hold(folder))  # now that nothing is wrong
            if not restart:
                check_folder(folder, settings)  # another run may have come and gone
            take_over(folder, settings, restart)
        return OpenRun(settings, trainer, tokenizer, lock.pop_all())


def _check_given(settings: Settings) -> None:
    """Refuse data that are not there before anything is loaded."""
    if not settings.options.data:
        raise ValueError("no data: give --data, or data in the YAML file")
    check_paths([*settings.options.data, *settings.options.eval_data])


def _data_digest(paths: Sequence[str]) -> str | None:
    """What tells data from others; None of a dataset on the Hub."""
    if not all(map(os.path.exists, paths)):
        return None
    files = {file for path in map(Path, paths) for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()}
    digests = {}
    for path in sorted(files):
        with path.open("rb") as file:
            digests[path.as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:32]


def _make_trainer(
    settings: Settings, arguments: MRPTrainingArguments, model: Any, tokenizer: PreTrainedTokenizerBase
) -> MRPTrainer:
    """The trainer of a run, its data open."""
    options = settings.options
    held_out = open_source(options.eval_data, options.eval_split) if options.eval_data else None
    trainer = MRPTrainer(model, arguments, open_source(options.data, options.split), held_out, processing_class=tokenizer)
    if options.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(options.early_stopping_patience))
    return trainer


def run_tokenizer(options: RunOptions) -> PreTrainedTokenizerBase:
    """The tokenizer of a run.

    Raises:
        ValueError: if there is none, or it cannot be read.
        OSError: if there is no such model.
    """
    stored_json(options.model, revision=options.revision)  # or a model that is nowhere would be told of as a tokenizer
    revision = None if options.tokenizer else options.revision
    return load_tokenizer(options.tokenizer or options.model, revision)


def load_model(settings: Settings) -> Any:
    """The model that a run trains.

    What is frozen has the type of the passes, bfloat16 or float32; what trains is always float32: in bfloat16 most updates
    would be rounded away.

    Raises:
        ValueError: if what the settings name does not go together, or an adapter of a head is asked for and there is none.
    """
    options = settings.options
    frozen = torch.bfloat16 if settings.training.get("bf16") else torch.float32
    whole = torch.float32 if settings.objective == "block_diffusion" and not options.lora_rank else frozen
    where: dict[str, Any] = {"dtype": whole, **({} if options.revision is None else {"revision": options.revision})}
    if settings.objective == "block_diffusion":
        given = {name: getattr(options, name) for name in ("block_size", "mask_token_id")}
        where |= {name: value for name, value in given.items() if value is not None}
        model = MRPForCausalLM.from_backbone(options.model, **where)
        if model.mrp_head is not None:
            model.detach_head()  # it belongs to the backbone as it was
    elif options.lora_rank:
        model = MRPForCausalLM.from_pretrained(options.model, **where)
        _need_head(model.config, options.model)
    else:
        model = MRPForCausalLM.from_backbone(options.model, options.head, options.head_revision, **where)
        if options.head is None:
            with_new_head(model, options.head_layers, options.head_init)
        model.mrp_head.to(torch.float32)
    return with_adapter(model, settings) if options.lora_rank else model


def with_adapter(model: MRPForCausalLM, settings: Settings) -> Any:
    """The model with a LoRA adapter, which alone trains."""
    options = settings.options
    alpha = 2 * options.lora_rank if options.lora_alpha is None else options.lora_alpha
    targets = LORA_TARGETS[settings.objective]
    lora = LoraConfig(r=options.lora_rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    if os.path.isdir(options.model):
        model.name_or_path = os.path.abspath(options.model)  # the adapter names it
    return get_peft_model(model, lora)


def dry_run(settings: Settings) -> str:
    """Tell what a run would need: parameters, bytes of a process without what passes keep, and rows of a step.

    Raises:
        ValueError: as from `meta_model`, or if the settings do not go together.
    """
    arguments = settings.arguments(bf16=False, fp16=False, use_cpu=True)
    check_paths([*settings.options.data, *settings.options.eval_data])
    model = meta_model(settings)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = sum(p.numel() for name, p in trained.items() if p.dim() == 2 and "layers." in name)
    parameters, numbers = model.num_parameters(), sum(p.numel() for p in trained.values())
    half = bool(settings.training.get("bf16"))
    memory = {
        "weights": (parameters - numbers) * (2 if half else 4) + numbers * (6 if half else 4),  # autocast copies what trains
        "gradients": 4 * numbers,
        "optimizer": 8 * numbers - (0 if arguments.muon_learning_rate is None else 4 * matrices),
    }
    at_once = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    sizes = {**memory, "in all": sum(memory.values())}.items()
    lines = [f"parameters: {parameters:,}, of which {numbers:,} train"]
    lines += [f"{name}: {size / 2**30:.4g} GiB" for name, size in sizes]
    lines += ["a process, and activations, which grow with the batch; DDP holds gradients twice, FSDP divides it all"]
    return "\n".join([*lines, f"rows per step: {arguments.rows_per_step or at_once}"])


def meta_model(settings: Settings) -> Any:
    """Make the model that would train without its numbers, from configs alone: nothing is allocated, downloaded or written.

    Raises:
        ValueError: if a config is neither here nor in the cache.
    """
    config = _config(settings)
    with torch.device("meta"):
        model: Any = MRPForCausalLM(config)
        if settings.options.lora_rank:
            return with_adapter(model, settings)
    if settings.objective == "mrp":
        model.requires_grad_(False)
        model.mrp_head.requires_grad_(True)
    return model


def _config(settings: Settings) -> MRPConfig:
    """The config of the model that would train, from a folder or the cache."""
    options = settings.options
    found = _fields(options.model, options.revision)
    if found.get("model_type") == "qwen3":
        given = {name: getattr(options, name) for name in ("block_size", "mask_token_id")}
        found |= {"model_type": "sdar", **{name: value for name, value in given.items() if value is not None}}
    config = MRPConfig.from_dict(found)
    if settings.objective == "block_diffusion":
        config.num_nextn_predict_layers = 0
    elif options.lora_rank:
        _need_head(config, options.model)
    elif options.head is not None:
        head = MRPConfig.from_dict(_fields(options.head, options.head_revision))
        _need_head(head, options.head)
        config.num_nextn_predict_layers = head.num_nextn_predict_layers
    else:
        config.num_nextn_predict_layers = options.head_layers
    return config


def _fields(source: str, revision: str | None) -> dict[str, Any]:
    try:
        found, _ = PreTrainedConfig.get_config_dict(source, revision=revision, local_files_only=True)
    except OSError as error:
        raise ValueError(
            f"{source} is no folder with a config.json, nor in the cache, and a dry run connects to nothing: download its "
            f"files without the weights first (hf download {source} {WITHOUT_WEIGHTS}), or name a folder"
        ) from error
    return dict(found)


def _need_head(config: MRPConfig, source: str) -> None:
    if not config.has_head:
        raise ValueError(f"{source} has no MRP head: name a checkpoint that has one, or train one with mrp train head")


def _check_sharding(arguments: MRPTrainingArguments) -> None:
    """Raises `ValueError` where ZeRO-3 would leave nobody the whole weights to save."""
    plugin, key = arguments.deepspeed_plugin, "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if plugin is not None and plugin.zero_stage == 3 and not plugin.hf_ds_config.is_true(key):
        raise ValueError(f"{key} is not true, and what was trained could not be saved: set it in DeepSpeed's config")


@contextmanager
def _undivided(arguments: MRPTrainingArguments) -> Iterator[None]:
    """Inside, models are loaded whole under ZeRO-3, too: new heads are made from the backbone's layers. Weights are divided
    when training starts."""
    if (plugin := arguments.deepspeed_plugin) is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(plugin.dschf)


def _save(trainer: MRPTrainer, settings: Settings, folder: Path) -> None:
    """The adapter, the head alone, or everything, in the type of the passes."""
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if sharded else None
    if not trainer.args.should_save:
        return
    if settings.options.lora_rank:
        # Embeddings never train here, and to find out peft would ask the Hub.
        with under_own_class(bare_model(trainer.model)):
            trainer.model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)
        return
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float32
    if state is None:
        trainer.model.to(dtype)
    else:
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    only = settings.objective == "mrp" and settings.options.save == "head"
    with under_own_class(trainer.model):
        trainer.model.save_pretrained(folder, state_dict=state, head_only=only)
