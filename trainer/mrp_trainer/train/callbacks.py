"""What a training run does between its steps."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy


class LogAtSaves(TrainerCallback):
    """Logs at every checkpoint, too, so that a resumed run averages over the same steps as one that was not cut off."""

    def on_step_end(  # noqa: D102 - the class says it
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_save and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    on_epoch_end = on_step_end
