"""An HF Trainer for the two objectives: the backbone's block diffusion and the head's residual prediction."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer

from modeling_mrp.diffusion_mrp import PackedBatch
from modeling_mrp.modeling_mrp import MRPForCausalLM

from .arguments import MRPTrainingArguments
from .checkpoints import last_whole_checkpoint
from .collator import DiffusionCollator
from .measures import Measures
from .objectives import Measured, block_diffusion
from .optimizer import MuonAdamW
from .sampler import LengthBucketSampler


class MRPTrainer(Trainer):
    """Trains an `MRPForCausalLM`, bare or in a peft model, on rows of samples (see `Samples`).

    The loss is a sum over tokens divided by the response tokens of the whole step, over all processes and accumulation steps,
    so that it does not matter how a step is divided. All noise is a function of (seed, sample, visit).

    Args:
        model: The model; under objective `mrp` all but its head is frozen, unless it is a peft model, which says itself what
            trains.
        args: The options.
        train_dataset: Rows of samples, by number or as a stream.
        eval_dataset: The same, held out.
        data_collator: By default the `DiffusionCollator` that the options describe.

    Raises:
        ValueError: if the objective is `mrp` and the model has no head, or `eval_prompts` are asked for without it.
    """

    args: MRPTrainingArguments
    optimizer: torch.optim.Optimizer | None

    def __init__(
        self,
        model: Any,
        args: MRPTrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        bare = _bare(model)
        if args.objective == "mrp" and bare.mrp_head is None:
            raise ValueError("objective 'mrp' needs a model with a head: set num_nextn_predict_layers in its config")
        if args.eval_prompts and bare.mrp_head is None:
            raise ValueError(f"eval_prompts is {args.eval_prompts}, but there is no head to decode them with: use 0")
        if args.objective == "mrp" and bare is model:
            model.requires_grad_(False)
            bare.get_submodule("mrp_head").requires_grad_(True)
        if data_collator is None:
            data_collator = DiffusionCollator(
                bare.config.block_size,
                bare.config.mask_token_id,
                bare.config.pad_token_id or 0,
                args.noisy_copies,
                args.inverse_level,
                args.noise_per,  # type: ignore[arg-type]  # the arguments have checked it
                args.seed,
            )
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = True  # the loss is divided by num_items_in_batch, not by the accumulation steps
        self._head_objective = args.head_objective(bare.config.block_size)
        self._trained, self._evaluated = Measures(), Measures()
        self._since = time.perf_counter()

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`; `resume_from_checkpoint=True` takes up the newest checkpoint that was written to its end, if
        any."""
        if resume_from_checkpoint is True:
            newest = last_whole_checkpoint(Path(self.args.output_dir))
            resume_from_checkpoint = None if newest is None else str(newest)
        self._since = time.perf_counter()
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Muon and AdamW in one, if a rate for Muon is given."""
        if self.optimizer is None and self.args.muon_learning_rate is not None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError(
                    "muon_learning_rate is set, but Muon needs whole matrices and here they are sharded: leave it unset"
                )
            self.optimizer = MuonAdamW(
                self.model,
                self.args.learning_rate,
                self.args.muon_learning_rate,
                self.args.weight_decay,
                (self.args.adam_beta1, self.args.adam_beta2),
                self.args.adam_epsilon,
            )
        return super().create_optimizer() if self.optimizer is None else self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        step = self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        return LengthBucketSampler(train_dataset if train_dataset is not None else self.train_dataset, step)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """The batches of a step, and how many response tokens all processes have in theirs."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = [batch["response_tokens"] for batch in batches]
        total = torch.stack(counts).sum().to(device) if counts else torch.zeros((), dtype=torch.long, device=device)
        return batches, self.accelerator.reduce(total, reduction="sum")

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The objective's loss of one packed batch, over `num_items_in_batch` response tokens (by default the batch's own).

        Gradients are averaged over processes, hence the factor when the count is that of all of them.
        """
        batch = PackedBatch(**inputs)
        objective = block_diffusion if self.args.objective == "block_diffusion" else self._head_objective
        total, measured = self._inside(model, objective, batch)
        (self._trained if model.training else self._evaluated).add(
            {**measured, "response_tokens": (batch.response_tokens, torch.ones(()))}
        )
        if num_items_in_batch is None:
            loss = total / batch.response_tokens.clamp(min=1)
        else:
            loss = (
                total * self.accelerator.num_processes / torch.as_tensor(num_items_in_batch, device=total.device).clamp(min=1)
            )
        return (loss, {}) if return_outputs else loss

    def _inside(
        self, model: nn.Module, objective: Callable[[Any, PackedBatch], tuple[Tensor, Measured]], batch: PackedBatch
    ) -> tuple[Tensor, Measured]:
        """Runs the objective in place of the bare model's forward, inside those of its wrappers.

        The wrappers of DDP, FSDP and peft synchronise gradients, gather shards and choose adapters in their own forward.
        """
        bare = _bare(self.accelerator.unwrap_model(model))
        own = vars(bare).get("forward")

        def forward(batch: PackedBatch) -> tuple[Tensor, Measured]:
            with self.accelerator.autocast():
                return objective(bare, batch)

        bare.forward = forward
        try:
            return model(batch)
        finally:
            if own is None:
                del bare.forward
            else:
                bare.forward = own

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """The loss of a held-out batch."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds to a line of training what was measured since the last: KL(B||A), KL(B||A+C) in nats, the share of the gap
        closed, how often A+C names the same token as B, and response tokens per second."""
        if "loss" in logs:
            measured, now = self._trained.take(self.accelerator), time.perf_counter()
            tokens, _ = measured.pop("response_tokens", (0.0, 0.0))
            logs = {**logs, **_summary(measured), "tokens_per_second": tokens / (now - self._since)}
            self._since = now
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.evaluation_loop`, with what was measured on the way."""
        output = super().evaluation_loop(*args, **kwargs)
        measured = self._evaluated.take(self.accelerator)
        measured.pop("response_tokens", None)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in _summary(measured).items()})
        return output


def _bare(model: Any) -> MRPForCausalLM:
    """The model inside a peft model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _summary(measured: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Means, and the share of each gap between KL(B||A) and 0 that KL(B||A+C) has closed."""
    means = {name: total / max(count, 1) for name, (total, count) in measured.items()}
    closed = {
        name.replace("kl_head", "gap_closed"): 1 - value / max(means[name.replace("head", "stale")], 1e-12)
        for name, value in means.items()
        if name.endswith("kl_head")
    }
    return {**means, **closed}
