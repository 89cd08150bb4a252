"""The arguments of the trainer, checked when they are made."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from ..flags import Help
from .objectives import HeadObjective
from .options import TrainerFlags, check_declared
from .reveals import Reveals

OBJECTIVES = ("block_diffusion", "mrp")
ATTENTIONS = ("auto", "flex_attention", "sdpa", "tiles")
# `end` pushes the result, `every_save` each checkpoint's model, too.
_HUB_STRATEGIES = ("end", "every_save")
# Options of `TrainingArguments` that have no effect here, and why.
_COMPILED = "the objectives run in place of the forward that it compiles"
_WITHOUT_EFFECT = {
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILED),
    "train_sampling_strategy": "rows of like length meet in one batch anyway, in an order that the "
    "seed decides",
    "label_smoothing_factor": "no objective has labels to smooth",
    "dataloader_drop_last": "epochs are rounded up to whole steps",
}


def _option(default: Any, help: str, **declared: Any) -> Any:
    """Declare a field with its help, and its range or choices."""
    return field(default=default, metadata={"help": Help(help, **declared)})


@dataclass
class MRPTrainingArguments(TrainerFlags, TrainingArguments):
    """`TrainingArguments` with the options of block diffusion and of the head; the defaults are
    those of `mrp train`.

    Attributes:
        objective: `block_diffusion` trains the backbone, `mrp` trains the head on a frozen
            backbone. Required.
        learning_rate: AdamW's rate; by default 1e-3 for a head and 1e-4 for a backbone.
        max_length: Tokens per row of records; longer samples are cut. By default rows fit the
            records (`RecordRows`), and the trainer sets this to their length.
        num_train_epochs: Passes over the data; by default 1, or as many as make 100 steps.
        per_device_eval_batch_size: By default `per_device_train_batch_size`.
        last_turn_only: Whether only the last learned turn of each chat is learned.
        skip_malformed: Whether malformed records are skipped, counted and named, instead of ending
            the run.
        packed: Whether a row of records holds several samples.
        noisy_copies: Noisy copies of a sample in one pass: 1 (published), or 2 with complementary
            masks.
        inverse_level: Whether each masked token is weighed by 1 / t, where t is its noise level
            (published).
        noise_per: Whether each `block` or each `sample` (published) draws its noise level t.
        unroll: K, the head steps unrolled in training; their losses are averaged (MRP, section 4).
            The leave-one-out loss is added to that of the first step.
        reveal_rule: `on_policy` reveals as decoding does; `random` reveals one true token of each
            block (published).
        eager_share: The share of blocks in which `on_policy` reveals everything above a random
            threshold, as `dynamic` does.
        order_weight: Weight of the divergence in the order of reveals (`order_kl`).
        reread_weight: Weight of the leave-one-out loss (`HeadObjective`).
        packed_attention: Attention of packed passes in training: `flex_attention`, `sdpa` or
            `tiles`, matrix products over the unmasked columns. `auto` is flex attention on CUDA,
            which never holds a mask of [length, length], tiles on a CPU in place of SDPA, and the
            model's own attention elsewhere. Decoding is not affected.
        muon_learning_rate: Rate at which Muon trains layer matrices, while AdamW trains all else at
            `learning_rate`; None leaves everything to `optim`.
        hub_strategy: With `push_to_hub`, `end` pushes the result and `every_save` each checkpoint's
            model or head, too, as `mrp push` does.
        dataset_num_proc: Processes that encode large data; by default all CPUs, up to 16.
        eval_prompts: Prompts of the evaluation dataset that every evaluation decodes with
            `mrp_spec` and, for comparison, with `self_spec`, to report accepted drafts and tokens
            per forward; 0 for none.
        eval_new_tokens: Limit of new tokens per prompt.
        block_sizes: Block sizes to train for, divisors of the model's; each sample draws one at
            each visit. The trained model decodes with any of them: set `model.config.block_size`.
            None: the model's alone.
        rows_per_step: Rows of a step over all processes and passes; sets
            `gradient_accumulation_steps` to match `per_device_train_batch_size` and the number of
            processes, so that a recipe's step is the same on any number of devices.

    Raises:
        ValueError: for values out of range, without effect or in conflict; for several GPUs in one
            process; with DeepSpeed.
    """

    objective: str | None = _option(None, "What trains; required.", one_of=OBJECTIVES)
    learning_rate: float = None  # type: ignore[assignment]  # the objective decides
    per_device_eval_batch_size: int = None  # type: ignore[assignment]  # that of training
    lr_scheduler_type: str = "cosine_with_min_lr"
    lr_scheduler_kwargs: dict[str, Any] | str | None = None
    save_total_limit: int | None = 2
    inverse_level: bool = False
    noise_per: str = _option("block", "What draws a noise level.", one_of=("block", "sample"))
    eager_share: float = _option(0.5, "Share of blocks with eager reveals.", min=0, max=1)
    order_weight: float = _option(0.5, "Weight of the order of reveals.", min=0)
    reread_weight: float = _option(1.0, "Weight of the leave-one-out loss.", min=0)
    packed_attention: str = _option("auto", "Attention of packed passes.", one_of=ATTENTIONS)
    eval_new_tokens: int = _option(64, "Limit of new tokens per prompt.", min=1)
    block_sizes: list[int] | None = None
    dataset_num_proc: int | None = _option(None, "Processes that encode large data.", min=1)
    rows_per_step: int | None = None
    hub_strategy: str = "end"
    hub_private_repo: bool | None = True
    remove_unused_columns: bool = False

    def __post_init__(self) -> None:
        if self.objective is None:
            raise ValueError(
                "objective is not given: 'mrp' trains the head on a frozen backbone, "
                "'block_diffusion' trains the backbone"
            )
        for name, reason in _WITHOUT_EFFECT.items():
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, which does nothing here: {reason}. Leave "
                    "it out"
                )
        if self.hub_strategy not in _HUB_STRATEGIES:
            raise ValueError(
                f"hub_strategy is {str(self.hub_strategy)!r}: a checkpoint's pickled states are "
                f"never pushed. Use one of {', '.join(_HUB_STRATEGIES)}"
            )
        if self.objective == "mrp" and self.neftune_noise_alpha is not None:
            raise ValueError(
                f"neftune_noise_alpha is {self.neftune_noise_alpha!r}, which would add noise to "
                "the frozen backbone that a head learns from ('mrp'). Leave it out"
            )
        _check_trackers(self.report_to)
        check_declared(self)
        epochs = self.num_train_epochs
        if self.max_steps == 0 or (self.max_steps < 0 and epochs is not None and not epochs > 0):
            name = "num_train_epochs"
            alternative = "a number above 0"
            if self.max_steps == 0:
                name = "max_steps"
                alternative = "-1 (by epochs)"
            raise ValueError(
                f"{name} is {getattr(self, name)!r}: nothing would be trained. Give {alternative}, "
                "or max_steps of 1 or more"
            )
        # Otherwise several processes on a CPU would each train separately, on the same data.
        if not torch.accelerator.is_available():
            self.use_cpu = True
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self.per_device_train_batch_size
        if self.learning_rate is None:
            self.learning_rate = 1e-3 if self.objective == "mrp" else 1e-4
        if self.lr_scheduler_type == "cosine_with_min_lr" and self.lr_scheduler_kwargs is None:
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        super().__post_init__()
        if self.rows_per_step is not None:
            at_once = self.per_device_train_batch_size * self.world_size
            accumulation = vars(self)["gradient_accumulation_steps"]
            passes, remainder = divmod(self.rows_per_step, at_once)
            if remainder or passes < 1 or accumulation not in (1, passes):
                raise ValueError(
                    f"rows_per_step is {self.rows_per_step}: {self.world_size} processes with "
                    f"per_device_train_batch_size {self.per_device_train_batch_size} take "
                    f"{at_once} rows at once, so make it a multiple of that, and leave "
                    f"gradient_accumulation_steps out, which is {accumulation}"
                )
            self.gradient_accumulation_steps = passes
        if self.n_gpu > 1:
            raise ValueError(
                f"one process sees {self.n_gpu} GPUs, and needs one for itself: start one on each, "
                f"with accelerate launch --multi_gpu --num_processes {self.n_gpu} -m "
                "mrp_trainer.cli train ..., or show it one with CUDA_VISIBLE_DEVICES=0"
            )
        if self.deepspeed_plugin is not None:
            raise ValueError(
                "deepspeed was never run with this trainer: use FSDP2, which shards the frozen "
                "backbone, too"
            )

    def head_objective(self) -> HeadObjective:
        """Return the objective of the head that these options describe."""
        return HeadObjective(
            Reveals(self.reveal_rule, self.eager_share),  # type: ignore[arg-type]  # checked above
            self.unroll,
            self.order_weight,
            self.reread_weight,
        )


def _check_trackers(names: Any) -> None:
    """Raise `ValueError` for a tracker that is not installed, or that transformers does not
    know."""
    installed = get_available_reporting_integrations()
    for name in [names] if isinstance(names, str) else names or ():
        # flyte is not listed, and needs no package of its own
        if name not in (*installed, "all", "none", "flyte"):
            raise ValueError(
                f"report_to is {name!r}: this tracker is not installed, or transformers has no "
                "such one. Install its package (such as pip install wandb), or leave it out; "
                f"installed: {', '.join(installed) or 'none'}"
            )
