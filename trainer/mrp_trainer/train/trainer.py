"""An HF Trainer for the two objectives: block diffusion, which trains the backbone, and residual
prediction, which trains the head."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from huggingface_hub import CommitInfo
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.utils import logging

from modeling_mrp.model.layouts import is_hub_id

from ..data.sampler import LengthBucketSampler, PaddedRows
from ..evaluate.acceptance import measure_acceptance
from ..outputs import OwnFolder
from ..publish import push
from ..publish.card import render_card
from ..publish.folder import read_folder
from .arguments import MRPTrainingArguments
from .attention import TRAINING_FLEX, attention_implementation, training_attention
from .checkpoints import LogAtSaves, last_whole_checkpoint, make_room, step_of, under_own_class
from .collator import DiffusionCollator, widths_of
from .inputs import (
    as_rows,
    bare_model,
    check_tokenizer,
    fit_to_rows,
    prepare_model,
    prompts_of,
)
from .measures import Measures
from .objectives import Measured, block_diffusion
from .optimizer import MuonAdamW
from .packed import PackedBatch

Objective = Callable[[Any, PackedBatch], tuple[Tensor, Measured]]
logger = logging.get_logger(__name__)

# In nats: a smaller KL(B||A) is caused by rounding, as where the only token of a reveal is masked
# again, so that A and B are equal.
_NO_GAP = 1e-6


class MRPTrainer(Trainer):
    """A Trainer for an `MRPForCausalLM`, bare or in a peft model. It trains on records, as
    `mrp train` reads them, or on a dataset of encoded samples.

    The loss is a sum over tokens, divided by the number of response tokens in the whole step, over
    all processes and accumulation passes. So it does not depend on how a step is divided. All noise
    is a function of the seed, the sample and the epoch. If a gradient norm, a weight or a held-out
    loss is not finite, training ends with a `FloatingPointError`, before anything is saved.

    Args:
        model: The model. Objective `mrp` freezes all weights but those of the head,
            `block_diffusion` freezes the head; in a peft model, trainable weights stay trainable.
            Trainable weights become float32.
        args: The training arguments.
        train_dataset: Records, as a `datasets.Dataset`, a list or a path (see `source_of`); or a
            map-style dataset of encoded rows. Each of its items is a `Sample` or a list of several,
            which are packed into one row. Indices continue over epochs: a dataset of n rows must
            give row i for the indices i, n + i, 2 * n + i and so on. `Sample.index` must differ
            between these, since the noise depends on it.
        eval_dataset: Held-out records or encoded rows in the same form, or a mapping of several
            such datasets by name.
        data_collator: By default a `DiffusionCollator` with the options in `args`.
        processing_class: The tokenizer. It encodes records, and is saved with the model.
        kwargs: Further arguments of `Trainer`.

    Raises:
        RecordError: if records are malformed or a path is missing.
        ValueError: if model, data, tokenizer and options do not fit each other.
    """

    args: MRPTrainingArguments
    optimizer: torch.optim.Optimizer | None
    data_collator: Any

    def __init__(
        self,
        model: Any,
        args: MRPTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, MRPTrainingArguments):
            raise ValueError(
                f"args is {type(args).__name__}: pass MRPTrainingArguments(output_dir, "
                "objective='mrp', ...)"
            )
        for name in (
            "compute_metrics",
            "compute_loss_func",
            "preprocess_logits_for_metrics",
            "model_init",
        ):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is given and would never be called, as no logits are kept and one "
                    "model trains: leave it out. Evaluations measure what is listed at "
                    "MRPTrainer.log, and with eval_prompts how far drafts carry"
                )
        prepare_model(model, args)
        bare = bare_model(model)
        if isinstance(processing_class, PreTrainedTokenizerBase):
            check_tokenizer(processing_class, bare)
        train_dataset = as_rows(train_dataset, "train_dataset", model, args, processing_class)
        fit_to_rows(args, train_dataset)
        eval_dataset = as_rows(
            eval_dataset, "eval_dataset", model, args, processing_class, held_out=True
        )
        for rows in eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]:
            if args.eval_prompts and (
                rows is None or processing_class is None or not prompts_of(rows, 1)
            ):
                raise ValueError(
                    f"eval_prompts is {args.eval_prompts}: give eval_dataset, with prompts, and "
                    "processing_class, the tokenizer"
                )
        # an adapter of the backbone may get no gradient if the head has one, too
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = bare is not model
        if data_collator is None:
            data_collator = DiffusionCollator(
                bare.config.block_size,
                bare.config.mask_token_id,
                bare.config.pad_token_id or 0,
                args.noisy_copies,
                args.inverse_level,
                args.noise_per,  # type: ignore[arg-type]  # checked by the arguments
                args.seed,
                args.block_sizes or (),
                args.every_state,
            )
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, **kwargs
        )
        if args.muon_learning_rate is not None and self.is_fsdp_enabled:
            raise ValueError(
                "muon_learning_rate is set, but Muon needs whole matrices, which FSDP shards: "
                "leave it unset"
            )
        # in transformers 5.23
        checkpointing = args.gradient_checkpointing or getattr(
            args, "activation_checkpointing", None
        )
        checkpointing = checkpointing or (
            self.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.activation_checkpointing
        )
        if args.objective == "mrp" and checkpointing:
            raise ValueError(
                "gradient_checkpointing drops the keys that the head's passes share: leave it off "
                "for 'mrp'"
            )
        self.add_callback(LogAtSaves())
        self.model_accepts_loss_kwargs = (
            True  # the loss is divided by num_items_in_batch, not by the accumulation steps
        )
        self._head_objective = args.head_objective()
        self._trained = Measures()
        self._evaluated = Measures()
        self._steps_done = 0

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does. `resume_from_checkpoint=True` resumes from the newest
        complete checkpoint, if there is one. If the checkpoint is of the run's last step, no
        further step is made. `ValueError` if the checkpoint is incomplete, `FloatingPointError` if
        a gradient norm or a weight is not finite."""
        if resume_from_checkpoint is True:
            newest = self.newest_checkpoint()
            resume_from_checkpoint = None if newest is None else str(newest)
        self._steps_done = 0
        if isinstance(resume_from_checkpoint, str):
            steps_done = step_of(Path(resume_from_checkpoint))
            if steps_done is None:
                raise ValueError(
                    f"{resume_from_checkpoint} holds no whole trainer_state.json: resume from "
                    "another checkpoint, or load its weights as the model and begin a new run"
                )
            self._steps_done = steps_done
        if self.args.objective == "block_diffusion":
            # after training, the backbone differs from the one with that name
            bare_model(self.model).backbone_source = None
        bare = bare_model(self.model)
        attention = training_attention(bare, self.args.packed_attention, self.args.device)
        collator: Any = self.data_collator
        compiled = attention == TRAINING_FLEX and isinstance(collator, DiffusionCollator)
        if compiled and collator.widths is None:
            self.data_collator = replace(collator, widths=self._widths(collator))
        try:
            output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self.data_collator = collator
        self._check_trained_weights()
        return output

    def _widths(self, collator: DiffusionCollator) -> tuple[int, int]:
        """Return the number of columns of the noisy copies and the number of columns of the clean
        text to which all batches of all datasets are padded, so that attention is compiled only
        once."""
        held_out = self.eval_dataset
        datasets = [self.train_dataset]
        datasets += held_out.values() if isinstance(held_out, Mapping) else [held_out]
        widths = (0, 0)
        for rows in datasets:
            if rows is not None:
                columns = widths_of(
                    rows, collator.block_size, self.args.copies(collator.block_size)
                )
                widths = (max(widths[0], columns[0]), max(widths[1], columns[1]))
        return widths

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint in the output folder (one whose
        `trainer_state.json` can be read), the same in all processes. Return None if there is none.
        A checkpoint with another file that is missing or cannot be read is skipped with a warning;
        `ValueError` if this holds for all complete checkpoints."""
        newest: Path | None = None
        if self.is_world_process_zero():
            with_states = not (self.args.save_only_model or self.is_fsdp_enabled)
            newest = last_whole_checkpoint(Path(str(self.args.output_dir)), with_states)
        (newest,) = broadcast_object_list([newest])
        return newest

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return what `Trainer` returns here: a tuple of counts of epochs, steps and samples. If
        training resumes from a checkpoint of the last step, the number of epochs, its first item,
        becomes the number of those already done, so that no step is made. `Trainer` checks only
        after a step whether training is done."""
        epochs, steps_per_epoch, *counts, max_steps = super().set_initial_training_values(
            args, dataloader
        )
        if self._steps_done >= max_steps:
            epochs = self._steps_done // steps_per_epoch
        return epochs, steps_per_epoch, *counts, max_steps

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create the optimizer as `Trainer` does. If a learning rate for Muon is given, create Muon
        and AdamW as one optimizer."""
        args = self.args
        if self.optimizer is None and args.muon_learning_rate is not None:
            rates = args.learning_rate, args.muon_learning_rate, args.weight_decay
            adamw = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
            self.optimizer = MuonAdamW(self.model, *rates, **adamw)
        return super().create_optimizer() if self.optimizer is None else self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        step = (
            self.args.train_batch_size
            * self.args.world_size
            * self.args.gradient_accumulation_steps
        )
        rows = train_dataset if train_dataset is not None else self.train_dataset
        return LengthBucketSampler(rows, step, lambda: int(self.state.epoch or 0))

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a dataloader as `Trainer` does. A dataset to evaluate may hold records, which become
        rows; it is padded for several processes, so that no row is evaluated twice."""
        if description != "Training":
            dataset = as_rows(
                dataset, "eval_dataset", self.model, self.args, self.processing_class, held_out=True
            )
            if self.args.world_size > 1:
                dataset = PaddedRows(dataset, batch_size * self.args.world_size)
        return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Return the batches of a step in this process, and the number of response tokens, int64
        [], in the batches of this step in all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [batch["response_tokens"] for batch in batches]
        total = torch.zeros((), dtype=torch.long, device=device)
        if counts:
            total = torch.stack(counts).sum().to(device)
        return batches, self.accelerator.reduce(total, reduction="sum")

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the gradient norm; `FloatingPointError` if it is not finite. Training in float16
        is not checked, since its gradient scaler skips such steps."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16:
            self._check_finite(f"the gradient norm of step {self.state.global_step + 1}", norm)
        return norm

    def _check_finite(self, name: str, value: Any) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {float(value)}, and nothing is saved: lower learning_rate, which is "
                f"{self.args.learning_rate:g}, or look at the data and at the weights that were "
                "loaded"
            )

    def _check_trained_weights(self) -> None:
        """Raise `FloatingPointError`, in all processes, if a trainable weight is not finite."""
        finite = all(
            _is_finite(weight) for weight in self.model.parameters() if weight.requires_grad
        )
        indicator = torch.tensor(0.0 if finite else math.nan, device=self.args.device)
        self._check_finite(
            f"a weight behind step {self.state.global_step}",
            self.accelerator.reduce(indicator, reduction="sum"),
        )

    @contextmanager
    def _training_attention(self) -> Iterator[None]:
        """Give the model the attention for packed passes while the context is open. Outside of the
        context, the model has the attention with which it was loaded, so that callbacks can decode
        with the model."""
        bare = bare_model(self.model)
        attention = training_attention(bare, self.args.packed_attention, self.args.device)
        with attention_implementation(bare, attention):
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run a forward and a backward pass as `Trainer` does. Leave the model in eval mode,
        without dropout, for the callbacks between steps."""
        with self._training_attention():  # open for recomputed layers of the backward pass, too
            loss: Tensor = super().training_step(*args, **kwargs)
        self.model.eval()
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss of a batch, given as the fields of a `PackedBatch` by name, divided by
        the number of response tokens: `num_items_in_batch` or, by default, those of the batch.
        Return the loss or, with `return_outputs`, the loss and an empty dict.

        Gradients are averaged over processes. So if `num_items_in_batch` is given, which counts the
        tokens of all processes, the loss is multiplied by the number of processes.
        """
        batch = PackedBatch(**inputs)
        objective = (
            block_diffusion if self.args.objective == "block_diffusion" else self._head_objective
        )
        items = batch.response_tokens
        processes = 1
        if num_items_in_batch is not None:
            items = torch.as_tensor(num_items_in_batch, device=items.device)
            processes = self.accelerator.num_processes
        training = model.training
        backbone = bare_model(self.model).model
        if not any(weight.requires_grad for weight in backbone.parameters()):
            backbone.eval()  # a frozen teacher has no dropout
        with self._training_attention():
            loss, measured = self._compute_in_forward(
                model, objective, batch, processes / items.clamp(min=1)
            )
        if training:
            self._trained.add(measured)
        else:
            self._evaluated.add({**measured, "loss": (loss * items, items)})
        return (loss, {}) if return_outputs else loss

    def _compute_in_forward(
        self, model: nn.Module, objective: Objective, batch: PackedBatch, scale: Tensor
    ) -> tuple[Tensor, Measured]:
        """Compute the objective inside the forward of the wrapped model. Return the loss,
        multiplied by `scale`, and the measurements.

        In their own forward, the wrappers of DDP, FSDP and peft synchronise gradients, gather
        shards and choose adapters. But they also change the arguments and outputs of the model's
        forward: peft passes arguments by name, and FSDP rounds to bfloat16. So the batch bypasses
        the wrappers, and only the autograd graph of their output is used.
        """
        bare = bare_model(self.accelerator.unwrap_model(model))
        own_forward = vars(bare).get("forward")
        computed: list[tuple[Tensor, Measured]] = []

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            if isinstance(bare.lm_head, FSDPModule) and not bare.lm_head.weight.requires_grad:
                # its weight is read directly, and only its forward would gather it
                bare.lm_head.unshard()
            with self.accelerator.autocast():
                total, measured = objective(bare, batch)
            computed.append((total * scale, measured))
            return computed[0][0]

        bare.forward = forward
        try:
            returned = model(batch.input_ids)
        finally:
            if own_forward is None:
                del bare.forward
            else:
                bare.forward = own_forward
        loss, measured = computed[0]
        return loss.detach() + (returned - returned.detach()), measured

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, None, None]:
        """Compute the loss of a held-out batch; return (loss, None, None)."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    @contextmanager
    def decoding_model(self) -> Iterator[Any]:
        """Return a context manager that yields the model, ready to decode while the context is
        open. The model is without the wrapper of peft, if it has one, and has complete weights even
        if they are sharded. Autocast is on, since frozen weights may be bfloat16 while trained
        weights are float32."""
        with gathered(self.model), self.accelerator.autocast():
            yield bare_model(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model to `output_dir`, by default the output folder. A run that trains a head
        saves only the head, if the backbone has a name by which it can be loaded.

        Without `_internal_call`, which `Trainer` sets in its own calls, weights that FSDP shards
        are gathered and saved as a whole. `Trainer.save_model` would save nothing, and raise no
        error, if FSDP's state dict is sharded.
        """
        with self._saving_head_only(self.args.push_to_hub):
            if _internal_call or not self.is_fsdp_enabled:
                super().save_model(output_dir, _internal_call)
            else:
                self._save(
                    output_dir or self.args.output_dir, self.accelerator.get_state_dict(self.model)
                )

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Save as `Trainer` does, but with the remote code of the model's own class."""
        with under_own_class(bare_model(self.model)):
            super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint as `Trainer` does; `FloatingPointError` if a trainable weight is not
        finite.

        A folder of `mrp train` has a listing of the files that runs wrote. There, only listed
        checkpoints are removed to make room for others (`save_total_limit`), and a new checkpoint
        that cannot be saved, as on a full disk, is removed.
        """
        self._check_trained_weights()
        folder = OwnFolder(str(self.args.output_dir))
        name = f"checkpoint-{self.state.global_step}"
        limit = self.args.save_total_limit
        has_listing = self.args.should_save and folder.claimed
        new = not (folder.path / name).exists()
        if has_listing:
            folder.claim(name)
            self.args.save_total_limit = None
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError):
            if has_listing and new:
                folder.remove(name)
            raise
        finally:
            self.args.save_total_limit = limit
        if has_listing and limit is not None and limit > 0:
            make_room(folder, limit, {name, Path(self.state.best_model_checkpoint or "").name})

    @contextmanager
    def _saving_head_only(self, pushed: bool) -> Iterator[None]:
        """Make the model save only its head while the context is open, if its frozen backbone has a
        name by which it can be loaded; if the result is `pushed`, this must be a name on the Hub.
        Otherwise the whole model is saved."""
        bare: Any = bare_model(self.model)
        head_only = self.args.objective == "mrp" and bare is self.model
        source = bare.backbone_source if head_only else None
        named = source is not None and (not pushed or is_hub_id(source[0]))
        if named:
            bare.save_pretrained = partial(type(bare).save_pretrained, bare, head_only=True)
        try:
            yield
        finally:
            vars(bare).pop("save_pretrained", None)

    def push_to_hub(  # fewer arguments than Trainer's: `args` has the rest
        self,
        commit_message: str | None = "End of training",
        revision: str | None = None,
        tags: str | Sequence[str] = (),
    ) -> CommitInfo | None:
        """Save the model to the output folder, and push this folder to the Hub by
        `mrp_trainer.publish.push`: in one commit, with a card and without pickles. If a head was
        trained and its backbone has a name on the Hub, only the head is saved and pushed.

        Args:
            commit_message: The message of the commit.
            revision: The branch to push to; by default `hub_revision` of the arguments.
            tags: Tags for the card, in addition to its own.

        Returns:
            The commit; None in processes other than the first.

        Raises:
            ValueError: if the folder, its card or the id is not fit to be published, or the files
                to send do not load and decode.
            OSError: if the Hub refuses the commit, or cannot be reached.
        """
        if self.hub_model_id is None:
            self.init_hf_repo()
        with self._saving_head_only(pushed=True):
            self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        published = push(
            str(self.args.output_dir),
            str(self.hub_model_id),
            revision=revision or self.args.hub_revision,
            commit_message=commit_message,
            token=self.args.hub_token,
            tags=[tags] if isinstance(tags, str) else tags,
        )
        return published.commit

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model or head of a checkpoint as `mrp push` does, if `hub_strategy` is
        "every_save". If the push fails, a warning is logged and training continues."""
        if not self.is_world_process_zero() or self.args.hub_strategy != "every_save":
            return
        try:
            push(
                checkpoint_folder,
                str(self.hub_model_id),
                revision=self.args.hub_revision,
                commit_message=f"Training in progress, step {self.state.global_step}",
                token=self.args.hub_token,
            )
        except (OSError, ValueError) as error:
            logger.warning(f"{checkpoint_folder} was not pushed, and training goes on: {error}")

    def create_model_card(
        self, model_name: str | None = None, tags: str | Sequence[str] = (), **metadata: Any
    ) -> None:
        """Write the card that `mrp push` would render, as README.md in the output folder. Only the
        first process writes it.

        Args:
            model_name: The model's name in the card; by default its id on the Hub or, without one,
                the name of the output folder.
            tags: Tags in addition to those that every card has.
            metadata: Further metadata of the card; values that are None are left out.

        Raises:
            ValueError: if no model is saved in the folder.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir))
        name = model_name or self.hub_model_id or folder.name
        given = {key: value for key, value in metadata.items() if value is not None}
        card = render_card(
            folder,
            read_folder(folder).kind,
            name,
            extra_tags=[tags] if isinstance(tags, str) else tags,
            metadata=given,
        )
        (folder / "README.md").write_text(str(card), encoding="utf-8")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn as `Trainer` does, but not about frozen weights that the checkpoint lacks.
        `ValueError` if it lacks other weights."""
        frozen = {
            name for name, parameter in self.model.named_parameters() if not parameter.requires_grad
        }
        missing = [name for name in load_result.missing_keys if name not in frozen]
        if missing:
            raise ValueError(
                f"the checkpoint lacks {missing[0]} and {len(missing) - 1} more: resume from "
                "another one"
            )
        super()._issue_warnings_after_load(load_result._replace(missing_keys=[]))

    def _save_rng_state(self, output_dir: str) -> None:
        """Save random states as `Trainer` does. Then wait for all processes, because the file that
        is saved next marks the checkpoint as complete."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as `Trainer.log` does. Add means of what the objective measured in training: for a
        head, KL(B || A) and KL(B || A + C) in nats, the share of KL(B || A) that C removes, and how
        often A + C and B have the same likeliest token. A and B are the backbone's logits before
        and after a reveal, and C is the head's correction of A."""
        if "loss" in logs:
            logs = {**logs, **_summary(self._trained.take(self.accelerator))}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as `Trainer` does. The metrics in the returned output have these values in
        addition, with the prefix `eval_` by default:

        - `loss`, a mean over all response tokens, not over batches. It replaces that of `Trainer`.
        - For a head, the measurements that `log` describes.
        - With `eval_prompts`, the decoding of prompts with `mrp_spec`: denoising steps per round,
          tokens per forward, and the share of first drafts that were accepted. For comparison, the
          tokens per forward with `self_spec`.

        `FloatingPointError` if the loss is not finite.
        """
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        measured = self._evaluated.take(self.accelerator)
        summary = _summary(measured)
        self._check_finite("the held-out loss", summary.get("loss", 0.0))
        if self.args.eval_prompts:
            with self.decoding_model() as inner:
                prompts = prompts_of(dataloader.dataset, self.args.eval_prompts)
                arguments = inner, self.processing_class, prompts, self.args.eval_new_tokens
                summary |= measure_acceptance(*arguments)
                stale = measure_acceptance(*arguments, decoding="self_spec")
                summary["stale_tokens_per_forward"] = stale["tokens_per_forward"]
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in summary.items()})
        return output


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather the weights of a model that FSDP2 shards, while the context is open. Calls that do not
    start at the model's `forward`, such as `generate`, need this. Other models are unchanged."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def _is_finite(weight: Any) -> bool:
    """Return whether the part of a weight that this process holds is finite."""
    return bool(getattr(weight, "to_local", lambda: weight)().isfinite().all())


def _summary(measured: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the mean of each measurement, which is given as (sum, count). Add `gap_closed`, the
    share of KL(B || A) that the head removes: 1 - KL(B || A + C) / KL(B || A). It is left out where
    KL(B || A) is 0 up to rounding."""
    means = {}
    for name, (total, count) in measured.items():
        if count:
            means[name] = total / count
    closed = {}
    for name, value in means.items():
        stale = means.get(name.replace("head", "stale"), 0.0)
        if name.endswith("kl_head") and stale > _NO_GAP:
            closed[name.replace("kl_head", "gap_closed")] = 1 - value / stale
    return {**means, **closed}
