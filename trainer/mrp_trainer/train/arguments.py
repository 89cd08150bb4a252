"""The training arguments of `MRPTrainer`, checked when they are created."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from ..flags import Help
from .objectives import HeadObjective, SequentialObjective
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
    """Declare a dataclass field with its default and its help. `declared` holds its range (`min`,
    `max`) or its choices (`one_of`)."""
    return field(default=default, metadata={"help": Help(help, **declared)})


@dataclass
class MRPTrainingArguments(TrainerFlags, TrainingArguments):
    """`TrainingArguments` with the options of block diffusion and of the head. The defaults are
    those of `mrp train`.

    Attributes:
        objective: What is trained: `block_diffusion` trains the backbone, `mrp` trains the head on
            a frozen backbone. Required.
        learning_rate: Learning rate of AdamW; by default 1e-3 for a head and 1e-4 for a backbone.
        max_length: The largest number of tokens in a row of records; longer samples are cut. If
            None, samples have at most 4,096 tokens (fewer if the model has fewer positions), and a
            row has room for the longest sample or, if samples are short, for up to 2,048 tokens.
            The trainer then stores here how many tokens a row may hold.
        num_train_epochs: Number of passes over the data; by default the smallest number that makes
            at least 100 steps.
        per_device_eval_batch_size: By default `per_device_train_batch_size`.
        last_turn_only: Whether only one turn of each chat has a loss: the last of those that would
            otherwise be learned.
        skip_malformed: Whether malformed records are skipped; a warning counts and names them.
            Otherwise malformed records end the run.
        packed: Whether a row of records may hold several samples.
        noisy_copies: Number of noisy copies of each sample in one pass: 1 (as published), or 2 with
            complementary masks. With the reveal rule `sequential`, there are as many copies as a
            block has tokens instead.
        inverse_level: Whether the loss of each masked token is weighted by 1 / t, where t is its
            noise level (as published).
        noise_per: What draws a noise level t: each `block`, or each `sample` (as published).
        unroll: K, the number of head steps in training (MRP, section 4). Each step reveals tokens,
            and the head then estimates the logits after these reveals. The losses of the steps are
            averaged.
        reveal_rule: Rule of the reveals before each head step: `on_policy` reveals as decoding
            does, `random` reveals one true token of each block (as published). `sequential` is for
            a head that drafts for the target `sequential`: the objective is `SequentialObjective`,
            with a noisy copy for each state of a block.
        eager_share: Under `on_policy`, the share of blocks in which every token with a confidence
            above a random threshold is revealed, as `dynamic` does.
        order_weight: Weight of the loss on the order of reveals, which compares head and backbone
            by the position of each block that they would reveal next (`order_kl`).
        reread_weight: Weight of the leave-one-out loss. It trains the head at a revealed token to
            estimate the logits that the backbone would have if this one token were still masked. It
            is added to the loss of the first head step.
        packed_attention: Attention implementation of packed passes in training: `flex_attention`,
            `sdpa` or `tiles` (matrix products over the columns that are not masked). `auto`
            selects, on CUDA, flex attention, which holds no mask of [length, length]; on a CPU,
            tiles in place of SDPA; and elsewhere the model's own attention. Decoding is not
            affected.
        muon_learning_rate: Learning rate of Muon for the matrices of the layers; AdamW then trains
            everything else at `learning_rate`. If None, the optimizer named by `optim` trains
            everything.
        hub_strategy: What `push_to_hub` pushes: `end` pushes the result; `every_save` also pushes
            the model or head of each checkpoint. A push is one commit, as with `mrp push`.
        dataset_num_proc: Number of processes that encode large data; by default one per CPU, up to
            16.
        eval_prompts: Number of prompts of the evaluation dataset that are decoded in every
            evaluation; 0 for none. They are decoded with `mrp_spec` and, for comparison, with
            `self_spec`. Accepted drafts and tokens per forward are reported.
        eval_new_tokens: The largest number of new tokens for each decoded prompt.
        block_sizes: Block sizes to train for; each must divide the model's block size. Each sample
            draws one of them in every epoch. The trained model can decode with any of them: set
            `model.config.block_size`. If None, only the model's block size is used.
        rows_per_step: Number of rows in a step, over all processes and accumulation passes. It
            determines `gradient_accumulation_steps`, given `per_device_train_batch_size` and the
            number of processes, so that a recipe's step is the same on any number of devices.

    Raises:
        ValueError: if a value is missing, out of range or without effect, or conflicts with
            another; if a tracker is not installed; if one process sees several GPUs; or if
            DeepSpeed is used.
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

    @property
    def every_state(self) -> bool:
        """Return whether a head is trained on every state that the target `sequential` passes
        through (`reveal_rule` is `sequential`)."""
        return self.objective == "mrp" and self.reveal_rule == "sequential"

    def copies(self, block_size: int) -> int:
        """Return the number of noisy copies of a sample with blocks of `block_size` tokens. It is
        `noisy_copies` or, if `every_state`, `block_size`."""
        return block_size if self.every_state else self.noisy_copies

    @property
    def later_passes(self) -> int:
        """Return how many passes of the backbone over the noisy copies follow its first pass when
        the loss of a head is computed: one for each of the `unroll` head steps, and one for the
        leave-one-out loss if it has a weight. It is 0 if `every_state`."""
        return 0 if self.every_state else self.unroll + bool(self.reread_weight)

    def head_objective(self) -> HeadObjective | SequentialObjective:
        """Return the loss function of a head, with the settings in these arguments: a
        `SequentialObjective` if `every_state`, otherwise a `HeadObjective`."""
        if self.every_state:
            return SequentialObjective(self.unroll)
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
