"""What a device would make the host wait for in a whole decode, and a cache that stays where it is."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from helpers import LIVELY, MODES
from tape import waits
from torch.utils._python_dispatch import TorchDispatchMode

from modeling_mrp.networks import networks
from modeling_mrp.networks.networks import Networks
from tests.random_cases import dampened, make_model

PROMPTS = torch.tensor([[0, 0, 1, 2, 3], [4, 5, 6, 7, 8], [0, 9, 10, 11, 12]])
SAMPLED = {**LIVELY, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "eos_token_id": [3, 9], "min_new_tokens": 7, "seed": 4}


class Waits(TorchDispatchMode):
    """Notes every operation for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        if waits(name, args):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_for_what_was_picked_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each network once; no operation of a round needs a result on the host, nor has a size that depends on one. Keys
    and values stay where they are, from the first round to the last. transformers' top-k and top-p do not wait either."""
    reads, places, score, found = list[int](), list[list[int]](), Networks.score, Waits()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: reads.append(1) or function(*args)  # type: ignore[func-returns-value]

    def watched(self: Networks, *args: Any) -> Any:
        places.append([buffer.data_ptr() for buffer in self.cache._buffers.values()])
        with found:
            return score(self, *args)

    monkeypatch.setattr(networks, "spread_columns", noted(networks.spread_columns))
    monkeypatch.setattr(Networks, "score", watched)
    options: dict[str, Any] = {"decoding": mode, "max_new_tokens": 13, "mrp_steps": 2, "num_draft_states": 5, "draft_passes": 2}
    options |= {"attention_mask": (PROMPTS > 0).long(), "return_dict_in_generate": True, **SAMPLED}
    out = dampened(make_model(4), 0.3).generate(PROMPTS, **options)
    assert found.found == []
    assert 3 < len(reads) <= sum(out.stats.forwards.values())
    assert len(places) > 3
    assert places == places[:1] * len(places)
