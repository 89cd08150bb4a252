"""The options of training, checked where they enter."""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from .objectives import HEAD_LOSSES, HeadObjective
from .reveals import REVEAL_RULES, Reveals

OBJECTIVES = ("block_diffusion", "mrp")
ATTENTIONS = ("auto", "flex_attention", "sdpa", "eager")
NO_CHECKPOINTING = "gradient_checkpointing drops the keys that the head's passes share: leave it off for objective 'mrp'"
NO_MUON = "muon_learning_rate is set, but Muon needs whole matrices, which FSDP and DeepSpeed shard: leave it unset"


@dataclass
class MRPTrainingArguments(TrainingArguments):
    """`TrainingArguments` plus what block diffusion and the head need.

    Attributes:
        objective: `block_diffusion` trains the backbone, `mrp` trains the head on a frozen backbone.
        noisy_copies: Noisy copies of a sample in one pass, 1 (published) or 2 that complement each other.
        inverse_level: Weigh each masked token by 1 / t (published).
        noise_per: Whether a `block` or a `sample` (published) draws its noise level t.
        head_loss: `kl` (published), `reverse_kl`, `cross_entropy` with the true tokens, or `mse` of the logits.
        loss_temperature: Divides the logits of teacher and student.
        unroll: K, the head steps unrolled in training; their losses are averaged (MRP, section 4). The leave-one-out loss of
            the first step counts as a part of that step's.
        reveal_rule: `on_policy` reveals as decoding does, `random` one true token of each block (published), `random_count`
            a random number of them.
        eager_share: The share of blocks in which `on_policy` reveals, at first, all that is above a random threshold.
        order_weight: Weight of the divergence of which position comes next.
        reread_weight: Weight of the leave-one-out loss.
        packed_attention: How the packed pass attends while training: `flex_attention`, `sdpa` or `eager`; `auto` is flex
            attention on CUDA, which never holds a mask of [length, length], and what the model has elsewhere. Decoding is not
            touched.
        muon_learning_rate: Trains layer matrices with Muon at this rate, and all else with AdamW at `learning_rate`; None
            leaves everything to `optim`.
        eval_prompts: How many prompts of the evaluation dataset every evaluation decodes with `mrp_spec`, to report accepted
            drafts and tokens per forward; 0 for none.
        eval_new_tokens: How many tokens each of them may get.

    Raises:
        ValueError: on values out of range or that do not go together.
    """

    objective: str = field(default="block_diffusion", metadata={"choices": OBJECTIVES})
    noisy_copies: int = 2
    inverse_level: bool = False
    noise_per: str = field(default="block", metadata={"choices": ("block", "sample")})
    head_loss: str = field(default="kl", metadata={"choices": HEAD_LOSSES})
    loss_temperature: float = 1.0
    unroll: int = 1
    reveal_rule: str = field(default="on_policy", metadata={"choices": REVEAL_RULES})
    eager_share: float = 0.5
    order_weight: float = 0.0
    reread_weight: float = 1.0
    packed_attention: str = field(default="auto", metadata={"choices": ATTENTIONS})
    muon_learning_rate: float | None = None
    eval_prompts: int = 0
    eval_new_tokens: int = 64
    remove_unused_columns: bool = False

    def __post_init__(self) -> None:
        self._check()
        super().__post_init__()
        if self.accelerator_config.dispatch_batches is None:  # a stream's items are samples, which no process can scatter
            self.accelerator_config.dispatch_batches = False

    def _check(self) -> None:
        for name, choices in (
            ("objective", OBJECTIVES),
            ("noise_per", ("block", "sample")),
            ("head_loss", HEAD_LOSSES),
            ("reveal_rule", REVEAL_RULES),
            ("packed_attention", ATTENTIONS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is {value!r}: choose {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")
        at_least: dict[str, Any] = {"unroll": 1, "order_weight": 0, "reread_weight": 0, "eval_prompts": 0, "eval_new_tokens": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be {least} or more")
        if self.noisy_copies not in (1, 2):
            raise ValueError(f"noisy_copies is {self.noisy_copies}: 1, or 2 that complement each other")
        if not 0 <= self.eager_share <= 1:
            raise ValueError(f"eager_share is {self.eager_share}: it must be between 0 and 1")
        if not self.loss_temperature > 0:
            raise ValueError(f"loss_temperature is {self.loss_temperature}: it must be above 0")
        if self.muon_learning_rate is not None and (self.fsdp or self.deepspeed):
            raise ValueError(NO_MUON)
        # transformers 5.23 has renamed it
        checkpointing = self.gradient_checkpointing or getattr(self, "activation_checkpointing", None)
        if checkpointing and self.objective == "mrp":
            raise ValueError(NO_CHECKPOINTING)

    def head_objective(self, block_size: int) -> HeadObjective:
        """The head's loss that these options describe."""
        return HeadObjective(
            Reveals(self.reveal_rule, self.eager_share, block_size),  # type: ignore[arg-type]  # checked above
            self.head_loss,  # type: ignore[arg-type]
            self.loss_temperature,
            self.unroll,
            self.order_weight,
            self.reread_weight,
        )
