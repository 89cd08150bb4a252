"""CUDA graphs of the head, which the engine's own runner records and replays. The attention
metadata of these graphs are separate from those of the backbone's graphs.

This has never run on a GPU, so the first replays of each graph are compared with the head's result
without a graph. If they differ in any process, or recording fails in one, one warning is logged,
and from then on the head runs without graphs in all processes.
"""

import logging
from typing import Any

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from torch import Tensor

from .agreement import Agree, CheckedReplays

log = logging.getLogger(__name__)


class HeadGraphs(DecodeCudaGraphRunner):
    """The engine's CUDA graph runner, with the head in place of the model. There is a graph for
    each number of rows, and each row is a block.

    The backbone's graphs read metadata from their attention backend, which keeps one set for each
    number of rows. The head's graphs are recorded on a second backend of the same kind, so that
    neither overwrites the other's metadata.

    Args:
        engine: The engine's `ModelRunner`, which has already recorded the backbone's graphs.
        agree: Called by every process with its own answer; returns whether all answers are True
            (see `agree_in`).

    Attributes:
        checked: Decides between replays and runs of the head without graphs.
    """

    def __init__(self, engine: Any, agree: Agree) -> None:
        self.checked = CheckedReplays(agree, give_up)
        backend = engine._get_attention_backend()
        engine.kv_index_translator.bind_and_verify_backends([backend])
        super().__init__(engine, attn_backend=backend)

    def capture_one_shape(self, size: int, forward: Any, *args: Any, **more: Any) -> None:
        """Record a graph for batches of `size` rows, as the engine's method of this name does, but
        with the head in place of `forward`, the model's forward. Further arguments are passed
        on."""
        super().capture_one_shape(size, self._head, *args, **more)

    def _head(self, ids: Tensor, positions: Tensor, batch: Any, **_: Any) -> LogitsProcessorOutput:
        hidden = self.buffers.input_embeds[: len(ids)]
        residual = self.model_runner.model.residual(ids, positions, batch, hidden)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=residual)

    def takes(self, batch: Any) -> bool:
        """Return whether a recorded graph fits a batch, the engine's `ForwardBatch`."""
        return bool(batch.forward_mode.is_cuda_graph() and self.can_run_graph(batch))

    def replay(self, batch: Any, hidden: Tensor) -> tuple[int, Tensor]:
        """Replay the graph that fits a batch.

        Args:
            batch: The engine's `ForwardBatch`, in which each row is a block.
            hidden: [tokens, hidden_size], the hidden states that the head reads.

        Returns:
            The number of rows of the graph, and the head's output h_C [tokens, hidden_size].
        """
        self.buffers.input_embeds[: len(hidden)].copy_(hidden)
        output: Tensor = self.execute(batch).hidden_states
        return self.bs, output.clone()  # the next replay of any graph overwrites it


def record_head(engine: Any, agree: Agree) -> HeadGraphs | None:
    """Record CUDA graphs of the head if the engine has graphs of the backbone. Return None if the
    engine has no such graphs, or if recording fails in any process.

    Args:
        engine: The engine's `ModelRunner`.
        agree: Called by every process with its own answer; returns whether all answers are True
            (see `agree_in`).
    """
    if type(engine.decode_cuda_graph_runner) is not DecodeCudaGraphRunner:
        return None
    graphs: HeadGraphs | None = None
    failure: Exception | None = None
    try:
        graphs = HeadGraphs(engine, agree)
    except Exception as error:
        failure = error
    if agree(failure is None):
        return graphs
    give_up("cannot be recorded", failure or RuntimeError("so another process found"))
    return None


def give_up(failure: str, error: Exception) -> None:
    """Log a warning that the head runs without CUDA graphs.

    Args:
        failure: The middle of the message "The head ... as CUDA graphs", such as "cannot be
            recorded".
        error: The cause, which the message quotes.
    """
    log.warning(
        "The head %s as CUDA graphs (%s): it runs without them. --disable-cuda-graph records none",
        failure,
        error,
    )
