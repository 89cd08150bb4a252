"""Admission: a request begins when its whole text has room, so that the pool of slots never runs out.

The engine counts the limits of some running requests only, and then cuts blocks short, which no diffusion model can be asked
for; and it has no way of taking a request back that keeps what it has come to.
"""

from collections.abc import Callable, Iterable
from typing import Any

from . import ALGORITHM
from .requests import end_of_text


def count_fitting(waiting: Iterable[Any], running: Iterable[Any], slots: int, block: int, context_length: int) -> int:
    """Count the waiting requests, from the first, that have room beside the running ones until all of them end.

    Args:
        waiting: Requests, in the order in which they are to begin.
        running: Those that have begun.
        slots: Of the pool, or of a part of it.
        block: Tokens of a block.
        context_length: Of the model.
    """
    left = slots - sum(end_of_text(req, block, context_length) for req in running)
    count = 0
    for req in waiting:
        left -= end_of_text(req, block, context_length)
        if left < 0:
            break
        count += 1
    return count


def fetch_what_fits(original: Callable[[Any], None], scheduler: Any) -> None:
    """Have the engine take no more waiting requests into its rounds than have room.

    The first has it where none runs: its limit is set to what the pool holds, where it is beyond. Three blocks are left over,
    as the engine counts a request's next block, and a page, twice, and else would wait forever.
    """
    if scheduler.dllm_config.algorithm != ALGORITHM:
        return original(scheduler)
    waiting, running = scheduler.waiting_queue, scheduler.dllm_manager.waiting_queue
    block, context_length = scheduler.dllm_config.block_size, scheduler.model_config.context_len
    slots = scheduler.max_total_num_tokens // block * block - 3 * block
    for req in waiting[:1]:
        asked = req.sampling_params
        asked.max_new_tokens = min(asked.max_new_tokens, max(1, slots - len(req.origin_input_ids)))
    count = max(count_fitting(waiting, running, slots, block, context_length), int(not running))
    scheduler.waiting_queue, later = waiting[:count], waiting[count:]
    original(scheduler)
    scheduler.waiting_queue = scheduler.waiting_queue + later


def whole_blocks(original: Callable[..., int], adder: Any, req: Any = None) -> int:
    """Have the engine schedule a row's whole block, for which there is room, whatever its estimate."""
    if adder.dllm_config.algorithm != ALGORITHM:
        return original(adder, req)
    return int(min(adder.rem_dllm_tokens, adder.dllm_config.block_size))
