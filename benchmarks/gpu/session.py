"""What a part of a session on a GPU gets: the device, models, the time that is left, and the file
that it writes its lines to."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from mrp_trainer.doctor.checks import Check, published_config, random_model

from modeling_mrp import MRPForCausalLM

from ..common import TINY, load, now

FAILED = "**failed**"
# Sizes of the random models that stand for those of published shapes where there is no GPU.
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "mask_token_id": 319,
    "num_nextn_predict_layers": 1,
}


@dataclass
class Session:
    """A part that is running.

    Attributes:
        device: Where it runs.
        small: Whether small models stand for those of published shapes.
        end: When it should have ended, by `time.monotonic`.
        file: Where its lines go.
    """

    device: torch.device
    small: bool
    end: float
    file: TextIO

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def line(self, table: str, **cells: Any) -> None:
        """Write a row of a table of the page, and flush it: what is interrupted keeps its rows."""
        print(json.dumps({"table": table, **cells}), file=self.file, flush=True)

    def check(self, where: str, check: Check) -> None:
        """Write the result of a check."""
        difference = None if check.difference is None else float(f"{check.difference:.3g}")
        fields = {"verdict": check.verdict, "difference": difference, "note": check.note}
        self.line("Checks", of=where, check=check.name, **fields)

    def checks(self, where: str, checks: Iterable[Check]) -> None:
        """Write the results of checks, as long as time is left."""
        for check in checks:
            self.check(where, check)
            if self.left < 0:
                break

    def random(self, size: str, dtype: torch.dtype = torch.bfloat16) -> MRPForCausalLM:
        """Make a model of a published size with random weights."""
        config = published_config(size)
        if self.small:
            for name, value in SMALL.items():
                setattr(config, name, value)
            config.layer_types = ["full_attention"] * SMALL["num_hidden_layers"]
        torch.manual_seed(0)
        return random_model(config, dtype, self.device)

    def embedded(self, dtype: torch.dtype) -> MRPForCausalLM:
        """Load the embedded checkpoint."""
        return load(TINY)[0].to(self.device, dtype)

    def seconds(self, call: Callable[[], Any], count: int = 1, warm_ups: int = 0) -> float:
        """Time `count` calls together, the wait for the device included; return seconds a call."""
        for _ in range(warm_ups):
            call()
        start = now(self.device)
        for _ in range(count):
            call()
        return (now(self.device) - start) / count
