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

    The first has it where none runs. Three blocks are left over: the engine counts a request's next block, and a page, twice.

    Args:
        waiting: Requests, in the order in which they are to begin.
        running: Those that have begun.
        slots: Of the pool.
        block: Tokens of a block.
        context_length: Of the model.
    """
    left = slots - 3 * block - sum(end_of_text(req, block, context_length) for req in running)
    count = 0
    for req in waiting:
        left -= end_of_text(req, block, context_length)
        if left < 0:
            break
        count += 1
    return count


def fetch_what_fits(original: Callable[[Any], None], scheduler: Any) -> None:
    """Have the engine take no more waiting requests into its rounds than have room."""
    if scheduler.dllm_config.algorithm != ALGORITHM:
        return original(scheduler)
    waiting, running = scheduler.waiting_queue, scheduler.dllm_manager.waiting_queue
    block, context_length = scheduler.dllm_config.block_size, scheduler.model_config.context_len
    count = count_fitting(waiting, running, scheduler.max_total_num_tokens, block, context_length)
    count = max(count, int(not running))
    scheduler.waiting_queue, later = waiting[:count], waiting[count:]
    original(scheduler)
    scheduler.waiting_queue = scheduler.waiting_queue + later


def whole_blocks(original: Callable[..., int], adder: Any, req: Any = None) -> int:
    """Have the engine schedule a row's whole block, for which there is room, whatever its estimate."""
    if adder.dllm_config.algorithm != ALGORITHM:
        return original(adder, req)
    return int(min(adder.rem_dllm_tokens, adder.dllm_config.block_size))


__all__ = ["count_fitting", "fetch_what_fits", "whole_blocks"]
