"""HF Trainers for the two objectives: the backbone's block diffusion and the head's residual KL."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from modeling_mrp.diffusion_mrp import PackedBatch, residual_kl, weighted_cross_entropy
from modeling_mrp.modeling_mrp import MRPForCausalLM

from .data import LengthBucketSampler
from .optimizer import MuonAdamW


@dataclass
class MRPTrainingArguments(TrainingArguments):
    """`TrainingArguments` plus what block diffusion and the head need.

    Attributes:
        objective: `block_diffusion` trains the backbone, `mrp` trains the head on a frozen backbone.
        muon_learning_rate: Muon's learning rate for layer matrices; `learning_rate` is AdamW's, for the rest.
        unroll: K, the head steps unrolled in training; their losses are averaged (MRP, section 4).
    """

    objective: str = field(default="block_diffusion", metadata={"choices": ["block_diffusion", "mrp"]})
    muon_learning_rate: float = 1.5e-3
    unroll: int = 1
    remove_unused_columns: bool = False

    def __post_init__(self) -> None:
        if self.objective not in ("block_diffusion", "mrp"):
            raise ValueError(f"objective is {self.objective!r}: choose 'block_diffusion' or 'mrp'")
        if self.unroll < 1:
            raise ValueError(f"unroll is {self.unroll}: at least 1 head step is trained")
        super().__post_init__()


class MRPTrainer(Trainer):
    """Trains an `MRPForCausalLM` on batches of `DiffusionCollator`."""

    args: MRPTrainingArguments
    optimizer: torch.optim.Optimizer | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._measured: dict[str, list[Tensor]] = {}
        if self.args.objective == "mrp":
            model = self.model
            if model.mrp_head is None:
                raise ValueError("objective 'mrp' needs a model with a head: set num_nextn_predict_layers in its config")
            model.requires_grad_(False)
            model.mrp_head.requires_grad_(True)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Muon and AdamW in one."""
        if self.optimizer is None:
            self.optimizer = MuonAdamW(
                self.model, self.args.learning_rate, self.args.muon_learning_rate, self.args.weight_decay
            )
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> LengthBucketSampler:
        return LengthBucketSampler(
            train_dataset if train_dataset is not None else self.train_dataset, self.args.train_batch_size
        )

    def compute_loss(
        self, model: MRPForCausalLM, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The objective's loss of one packed batch."""
        batch = PackedBatch(**inputs)
        loss = self._block_diffusion(model, batch) if self.args.objective == "block_diffusion" else self._mrp(model, batch)
        return (loss, {}) if return_outputs else loss

    def _block_diffusion(self, model: MRPForCausalLM, batch: PackedBatch) -> Tensor:
        hidden = model.packed_hidden_states(batch)
        chosen = batch.supervised
        return weighted_cross_entropy(
            hidden[chosen], model.lm_head.weight, batch.target_ids[chosen], batch.weight[chosen], batch.response_tokens
        )

    def _mrp(self, model: MRPForCausalLM, batch: PackedBatch) -> Tensor:
        """Residual KL over K reveals: pass 1 gives h_A, a reveal and pass 2 give h_B (MRP, section 4)."""
        weight = model.lm_head.weight
        with torch.no_grad():
            estimate = start = model.packed_hidden_states(batch)
        ids, masked = batch.input_ids, batch.supervised
        losses = []
        for _ in range(self.args.unroll):
            ids, masked = self._reveal(model, batch, ids, masked, estimate)
            with torch.no_grad():
                target = model.packed_hidden_states(batch, ids)
            # Clean tokens keep their own hidden states: only noisy ones accumulate.
            residual = model.packed_residual(batch, ids, estimate)
            estimate = torch.where((batch.view > 0)[..., None], estimate + residual, start)
            losses.append(residual_kl(estimate[masked], target[masked], weight, batch.weight[masked], batch.response_tokens))
            if len(losses) == 1:
                with torch.no_grad():
                    self._note(
                        "kl_stale", residual_kl(start[masked], target[masked], weight, batch.weight[masked], masked.sum())
                    )
                    self._note(
                        "kl_head", residual_kl(estimate[masked], target[masked], weight, batch.weight[masked], masked.sum())
                    )
        return torch.stack(losses).mean()

    @torch.no_grad()
    def _reveal(
        self, model: MRPForCausalLM, batch: PackedBatch, ids: Tensor, masked: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Reveals, in every noisy block, the most confident masked position with the model's own token, as decoding does."""
        state = masked.nonzero(as_tuple=True)
        logp = model.lm_head(hidden[state]).float().log_softmax(-1)
        logp[:, model.config.mask_token_id] = -torch.inf
        confidence, token = logp.max(-1)
        blocks = batch.position_ids // model.config.block_size
        group = (torch.arange(len(ids), device=ids.device)[:, None] * (batch.view.max() + 1) + batch.view) * (
            blocks.max() + 1
        ) + blocks
        groups = group[state]
        best = torch.full((int(group.max()) + 1,), -torch.inf, device=ids.device).scatter_reduce(0, groups, confidence, "amax")
        chosen = confidence >= best[groups]
        row, column = state[0][chosen], state[1][chosen]
        ids, masked = ids.clone(), masked.clone()
        ids[row, column] = token[chosen]
        masked[row, column] = False
        return ids, masked

    def _note(self, name: str, value: Tensor) -> None:
        self._measured.setdefault(name, []).append(value.detach())

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the divergences measured since the last line: KL(B||A), KL(B||A+C) and the share of the gap closed."""
        if self._measured:
            means = {name: torch.stack(values).mean().item() for name, values in self._measured.items()}
            logs = {**logs, **means, "gap_closed": 1 - means["kl_head"] / max(means["kl_stale"], 1e-12)}
            self._measured.clear()
        super().log(logs, *args, **kwargs)
