"""Agreement of several processes that share a model: all of them use a CUDA graph, or none does.

Under tensor parallelism each forward is a collective operation. If one process replayed a graph and
another ran the same step without it, they would wait for each other.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling_mrp.kernels.dispatch import CHECKED_ON, check_close

# A function that every process calls; it returns to each whether the answer is True in all of them.
Agree = Callable[[bool], bool]

COMPARED = 2  # number of compared replays of each graph


def alone(answer: bool) -> bool:
    """Return the answer unchanged. A process that does not share the model with others uses this
    function to agree, as it has nobody to agree with."""
    return answer


def agree_in(group: Any) -> Agree:
    """Make the function by which the processes of a group agree: every process calls it with its
    own answer, and each gets True only if all answers are True. It exchanges the answers through
    the hosts. For a group of one process, return `alone`.

    Args:
        group: A `ProcessGroup` of torch.distributed that exchanges tensors on the CPU.
    """
    if dist.get_world_size(group) == 1:
        return alone

    def agree(answer: bool) -> bool:
        answers = torch.tensor(int(answer))
        dist.all_reduce(answers, op=dist.ReduceOp.MIN, group=group)
        return bool(answers)

    return agree


class CheckedReplays:
    """Replays CUDA graphs. The first replays of each graph are compared with the step that the
    graph replaces.

    Args:
        agree: Called by every process with its own answer; returns whether all answers are True
            (see `agree_in`).
        give_up: Called with a description of a failure and with its error; after this call, graphs
            are not used any more.

    Attributes:
        given_up: Whether all processes have stopped using graphs.
        compared: For each graph, the number of replays that were compared.
    """

    def __init__(self, agree: Agree, give_up: Callable[[str, Exception], None]) -> None:
        self.agree = agree
        self.give_up = give_up
        self.given_up = False
        self.compared: Counter[Hashable] = Counter()

    def run(
        self, replay: Callable[[], tuple[Hashable, Tensor]], eagerly: Callable[[], Tensor]
    ) -> Tensor:
        """Run a step by replaying a graph, and return the step's output. Once graphs are given up,
        run the step without one.

        Graphs are given up if the comparison of a replay fails in any process, or if a replay
        raises an error and no other process shares the model. The returned output is then that of
        the step without a graph.

        Args:
            replay: Replays a graph; returns a value that identifies the graph, and the output.
            eagerly: Runs the same step without graphs; returns the output.

        Raises:
            Exception: the error of a failed replay, if other processes share the model. Graphs are
                not given up then, because the other processes are waiting within their replays.
        """
        if self.given_up:
            return eagerly()
        try:
            graph, output = replay()
        except Exception as error:
            if self.agree is not alone:
                raise
            self._stop(error)
            return eagerly()
        if output.device.type not in CHECKED_ON or self.compared[graph] >= COMPARED:
            return output
        expected = eagerly()
        failure: Exception | None = None
        try:
            check_close("a replay of the head and the head differ", output, expected)
        except ArithmeticError as error:
            failure = error
        if self.agree(failure is None):
            self.compared[graph] += 1
            return output
        self._stop(failure or ArithmeticError("so another process found"))
        return expected

    def _stop(self, error: Exception) -> None:
        self.given_up = True
        self.give_up("does not run rightly", error)
