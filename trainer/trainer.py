"""HF Trainers for the two objectives: the backbone's block diffusion and the head's residual KL."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from modeling_mrp.diffusion_mrp import BLANK, PackedBatch, order_kl, residual_kl, weighted_cross_entropy
from modeling_mrp.modeling_mrp import MRPForCausalLM
from modeling_mrp.sampling_mrp import log_odds

from .data import LengthBucketSampler
from .optimizer import MuonAdamW
from .packing import CleanCache


@dataclass
class MRPTrainingArguments(TrainingArguments):
    """`TrainingArguments` plus what block diffusion and the head need.

    Attributes:
        objective: `block_diffusion` trains the backbone, `mrp` trains the head on a frozen backbone.
        muon_learning_rate: Muon's learning rate for layer matrices; `learning_rate` is AdamW's, for the rest.
        unroll: K, the head steps unrolled in training; their losses are averaged (MRP, section 4). The leave-one-out loss of
            the first step counts as a part of that step's.
        order_weight: Weight of `order_kl` beside the residual KL.
    """

    objective: str = field(default="block_diffusion", metadata={"choices": ["block_diffusion", "mrp"]})
    muon_learning_rate: float = 1.5e-3
    unroll: int = 1
    order_weight: float = 0.0
    remove_unused_columns: bool = False

    def __post_init__(self) -> None:
        if self.objective not in ("block_diffusion", "mrp"):
            raise ValueError(f"objective is {self.objective!r}: choose 'block_diffusion' or 'mrp'")
        if self.unroll < 1:
            raise ValueError(f"unroll is {self.unroll}: at least 1 head step is trained")
        if self.order_weight < 0:
            raise ValueError(f"order_weight is {self.order_weight}: it must be 0 or more")
        if self.gradient_checkpointing and self.objective == "mrp":
            raise ValueError(
                "gradient_checkpointing drops the keys that the head's passes share: leave it off for objective 'mrp'"
            )
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
                self.model,
                self.args.learning_rate,
                self.args.muon_learning_rate,
                self.args.weight_decay,
                (self.args.adam_beta1, self.args.adam_beta2),
                self.args.adam_epsilon,
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
        mask = batch.attention_mask(model.config.block_size)
        hidden = model.backbone(batch.input_ids, batch.position_ids, mask)
        chosen = batch.supervised
        return weighted_cross_entropy(
            hidden[chosen], model.lm_head.weight, batch.target_ids[chosen], batch.weight[chosen], batch.response_tokens
        )

    def _mrp(self, model: MRPForCausalLM, batch: PackedBatch) -> Tensor:
        """Residual KL over K reveals: pass 1 gives h_A, a reveal and pass 2 give h_B (MRP, section 4).

        In half of the blocks the first reveal is an eager one, as `mrp_remask` makes. What the head should say at a token
        revealed that way is what the backbone would, had this one token been left masked: each block teaches one.
        """
        length = batch.noisy_length
        mask = batch.attention_mask(model.config.block_size)
        backbone_cache, head_cache = CleanCache(length), CleanCache(length)
        with torch.no_grad():
            whole = model.backbone(batch.input_ids, batch.position_ids, mask, backbone_cache)
        # From here on the clean half is only looked at: all passes but the head's first hold the noisy copies alone.
        clean_ids, clean_hidden = batch.input_ids[:, length:], whole[:, length:]
        noisy, estimate = batch.noisy(), whole[:, :length]

        def backbone(ids: Tensor) -> Tensor:
            with torch.no_grad():
                return model.backbone(ids, noisy.position_ids, mask[:, :, :length], backbone_cache)

        def head(ids: Tensor, hidden: Tensor) -> Tensor:
            if head_cache.filled:
                return model.residual(ids, hidden, noisy.position_ids, mask[:, :, :length], head_cache)
            ids, hidden = torch.cat([ids, clean_ids], 1), torch.cat([hidden, clean_hidden], 1)
            return model.residual(ids, hidden, batch.position_ids, mask, head_cache)[:, :length]

        def divergence(name: str, ids: Tensor, where: Tensor, order_weight: float = 0.0) -> Tensor:
            return self._divergence(model, noisy, where, backbone(ids), whole[:, :length], estimate, name, order_weight)

        ids, masked = noisy.input_ids, noisy.supervised
        losses = []
        for step in range(self.args.unroll):
            before = masked
            ids, masked = self._reveal(model, noisy, ids, masked, estimate, eager=step == 0)
            estimate = estimate + head(ids, estimate)
            losses.append(divergence("kl" if step == 0 else "", ids, masked, self.args.order_weight))
            if step == 0:
                left_out = self._one_per_block(noisy, before & ~masked)
                again = ids.masked_fill(left_out, model.config.mask_token_id)
                losses.append(divergence("reread_kl", again, left_out))
        return torch.stack(losses).sum() / self.args.unroll

    def _divergence(
        self,
        model: MRPForCausalLM,
        batch: PackedBatch,
        where: Tensor,
        teacher: Tensor,
        stale: Tensor,
        estimate: Tensor,
        name: str,
        order_weight: float,
    ) -> Tensor:
        """KL(B || A + C) at some positions; notes it and KL(B || A) under a name, if there is one."""
        rest = teacher[where], model.lm_head.weight, batch.weight[where], batch.response_tokens
        loss = residual_kl(estimate[where], *rest)
        if name:
            with torch.no_grad():
                per_token = batch.response_tokens / where.sum().clamp(min=1)
                self._note(f"{name}_stale", residual_kl(stale[where], *rest) * per_token)
                self._note(f"{name}_head", loss * per_token)
        if order_weight:
            shown = where & (batch.target_ids != BLANK)
            blocks = self._blocks(batch)[shown]
            order = order_kl(
                estimate[shown],
                teacher[shown],
                model.lm_head.weight,
                blocks,
                batch.response_tokens,
                model.config.mask_token_id,
            )
            if name:
                self._note(f"{name}_order", order * batch.response_tokens / max(1, len(blocks.unique())))
            loss = loss + order_weight * order
        return loss

    @torch.no_grad()
    def _reveal(
        self, model: MRPForCausalLM, batch: PackedBatch, ids: Tensor, masked: Tensor, hidden: Tensor, eager: bool
    ) -> tuple[Tensor, Tensor]:
        """Reveals the most confident masked position of every noisy block with the model's own token, as decoding does.

        `eager` also reveals, in half of the blocks, every position above a threshold drawn from U(0.2, 0.95). Nothing
        behind the end of the text is revealed.
        """
        state = (masked & (batch.target_ids != BLANK)).nonzero(as_tuple=True)
        logits = model.lm_head(hidden[state]).float()
        logits[:, model.config.mask_token_id] = -torch.inf
        token = logits.argmax(-1)
        confidence = log_odds(logits, token)[1]
        groups = self._blocks(batch)[state]
        count = int(self._blocks(batch).max()) + 1
        best = torch.full((count,), -torch.inf, device=ids.device).scatter_reduce(0, groups, confidence, "amax")
        threshold = torch.full((count,), torch.inf, device=ids.device)
        if eager:
            draws = torch.rand(2, count, device=ids.device)
            threshold = torch.where(draws[0] < 0.5, (0.2 + 0.75 * draws[1]).logit(), threshold)
        order = torch.arange(len(groups), device=ids.device)
        tied = torch.where(confidence >= best[groups], order, len(groups))
        leftmost = torch.full((count,), len(groups), device=ids.device).scatter_reduce(0, groups, tied, "amin")
        chosen = (order == leftmost[groups]) | (confidence > threshold[groups])
        row, column = state[0][chosen], state[1][chosen]
        ids, masked = ids.clone(), masked.clone()
        ids[row, column] = token[chosen]
        masked[row, column] = False
        return ids, masked

    def _blocks(self, batch: PackedBatch) -> Tensor:
        """[batch, length] a number for every block of every copy of every row."""
        blocks = batch.position_ids // self.model.config.block_size
        rows = torch.arange(len(blocks), device=blocks.device)[:, None]
        return (rows * (batch.view.max() + 2) + batch.view + 1) * (blocks.max() + 1) + blocks

    def _one_per_block(self, batch: PackedBatch, where: Tensor) -> Tensor:
        """[batch, length] bool: one of the marked positions of each block, at random."""
        state = where.nonzero(as_tuple=True)
        groups = self._blocks(batch)[state]
        lot = torch.rand(len(groups), device=where.device)
        best = torch.zeros(int(self._blocks(batch).max()) + 1, device=where.device).scatter_reduce(0, groups, lot, "amax")
        return torch.zeros_like(where).index_put_(state, lot >= best[groups])

    def _note(self, name: str, value: Tensor) -> None:
        self._measured.setdefault(name, []).append(value.detach())

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the divergences measured since the last line: KL(B||A), KL(B||A+C) in nats and the share of the gap closed."""
        if self._measured:
            means = {name: torch.stack(values).mean().item() for name, values in self._measured.items()}
            logs = {**logs, **means, "gap_closed": 1 - means["kl_head"] / max(means["kl_stale"], 1e-12)}
            self._measured.clear()
        super().log(logs, *args, **kwargs)
