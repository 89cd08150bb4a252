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
    """Return the number of waiting requests that fit, with their whole texts, into the engine's
    pool of slots for keys and values, beside the running requests. Waiting requests are counted in
    order, up to the first one that does not fit.

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
    """Let the engine take into its rounds only those waiting requests for which there is room.

    The engine calls this function in place of `original`. Under the algorithm `MRP`, this function
    hides all other requests from the waiting queue while it calls `original`, and then puts them
    back. Under other algorithms, it only calls `original`.

    The limit on new tokens of the first waiting request is cut, so that its text fits in the pool
    when no other request runs. Three blocks of the pool always stay free: the engine counts a
    request's next block and a page twice, and would otherwise wait forever.

    Args:
        original: The engine's own method.
        scheduler: The engine's `Scheduler`, which has the waiting queue.
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
    """Return the number of tokens that the engine may schedule for a row of its batch.

    Under the algorithm `MRP`, this is a whole block, or what is left of the engine's budget of
    tokens if that is less. The engine's own estimate of the room is not used, because
    `fetch_fitting` has ensured the room. Under other algorithms, it is what `original` returns.

    Args:
        original: The engine's own method, in whose place the engine calls this function.
        adder: The engine's `PrefillAdder`.
        req: The request of the row, which is only passed on to `original`.
    """
    if adder.dllm_config.algorithm != ALGORITHM:
        return original(adder, req)
    return int(min(adder.rem_dllm_tokens, adder.dllm_config.block_size))
