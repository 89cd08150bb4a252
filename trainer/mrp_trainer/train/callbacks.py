"""What a training run does between its steps."""

from typing import Any

from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy


class SetEpoch(TrainerCallback):
    """Tells the sampler its epoch: accelerate's wrappers of a resumed run over several processes do not pass it on.

    Args:
        sampler: It has `set_epoch`.
    """

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler: Any = sampler

    def on_epoch_begin(  # noqa: D102 - the class says it
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


class LogAtSaves(TrainerCallback):
    """Logs at every checkpoint, too, so that a resumed run averages over the same steps as one that was not cut off."""

    def on_step_end(  # noqa: D102 - the class says it
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    on_epoch_end = on_step_end
