"""Admission control: a request begins only when there is room for its whole text, so that the pool
of slots never runs out.

The engine's own estimate counts the limits of only some of the running requests. When the pool runs
out, the engine cuts blocks short, but a diffusion model cannot decode parts of blocks. Nor can the
engine retract a request without losing the progress of that request.
"""

from collections.abc import Callable, Iterable
from typing import Any

from . import ALGORITHM
from .requests import end_of_text


def count_fitting(
    waiting: Iterable[Any], running: Iterable[Any], slots: int, block: int, context_length: int
) -> int:
    """Return the number of waiting requests that fit into the pool with their whole texts, beside
    the running requests. Requests are taken in order, up to the first one that does not fit.

    Args:
        waiting: Requests, in the order in which they are to begin.
        running: Requests that have begun.
        slots: The number of slots of the pool that may be used.
        block: The number of tokens of a block.
        context_length: The model's context length.
    """
    free_slots = slots - sum(end_of_text(req, block, context_length) for req in running)
    count = 0
    for req in waiting:
        free_slots -= end_of_text(req, block, context_length)
        if free_slots < 0:
            break
        count += 1
    return count


def fetch_fitting(original: Callable[[Any], None], scheduler: Any) -> None:
    """Let the engine take into its rounds only those waiting requests for which there is room. The
    engine calls this function in place of `original`, its own method, which is called here with
    those requests alone in the waiting queue of the engine's `Scheduler`.

    The first request's limit of length is cut to the size of the pool, so that the request has room
    when no other one runs. Three blocks stay free, since the engine counts a request's next block
    and a page twice, and would otherwise wait forever.
    """
    if scheduler.dllm_config.algorithm != ALGORITHM:
        return original(scheduler)
    waiting = scheduler.waiting_queue
    running = scheduler.dllm_manager.waiting_queue
    block = scheduler.dllm_config.block_size
    context_length = scheduler.model_config.context_len
    slots = scheduler.max_total_num_tokens // block * block - 3 * block
    for req in waiting[:1]:
        params = req.sampling_params
        params.max_new_tokens = min(
            params.max_new_tokens, max(1, slots - len(req.origin_input_ids))
        )
    count = max(count_fitting(waiting, running, slots, block, context_length), int(not running))
    scheduler.waiting_queue = waiting[:count]
    later = waiting[count:]
    original(scheduler)
    scheduler.waiting_queue = scheduler.waiting_queue + later


def schedule_block(original: Callable[..., int], adder: Any, req: Any = None) -> int:
    """Return the number of tokens that the engine may schedule for a row of its batch: a whole
    block (or what the engine's budget of tokens leaves), even where the engine's own estimate finds
    too little room, because `fetch_fitting` has ensured the room.

    The engine calls this function in place of `original`, its own method, which answers for other
    algorithms. `adder` is the engine's `PrefillAdder`.
    """
    if adder.dllm_config.algorithm != ALGORITHM:
        return original(adder, req)
    return int(min(adder.rem_dllm_tokens, adder.dllm_config.block_size))
