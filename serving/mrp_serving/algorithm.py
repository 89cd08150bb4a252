"""The algorithm `MRP`, which implements the engine's interface for diffusion algorithms
(`DllmAlgorithm`)."""

import logging
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import Counter
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.dllm.algorithm.base import DllmAlgorithm
from sglang.srt.dllm.config import DllmConfig
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.utils import enable_fused_set_kv_buffer
from sglang.srt.runtime_context import get_observability, get_parallel

from .backends import SUPPORTED, WRITES_FIRST, backend_obstacle
from .requests import GREEDY, refusal
from .rounds import Rounds

log = logging.getLogger(__name__)

_BACKEND_ARGUMENTS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


class MRP(DllmAlgorithm):
    """The algorithm `MRP`, with which the engine decodes. In some decoding modes, the backbone
    verifies drafts; in others, the head itself reveals tokens.

    A round takes one backbone forward, whatever it drafts. A forward that scores a block without
    masks also stores the keys and values of that block, and may score the first state of the next
    block. So no forward is needed only to store keys and values.

    Args:
        config: The engine's `DllmConfig`, as `dllm_config` makes it: with the server's `Settings`
            as `mrp_settings`.
    """

    supported_attention_backends = SUPPORTED

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rounds = Rounds(config.mrp_settings, self.block_size, self.mask_id, abort)
        self.batch: Any = None  # the scheduler's batch, while a round runs (`plugin.hold_batch`)
        SchedulerOutputStreamer.has_additional_customized_info = (
            True  # `plugin.stream_reports` fills it
        )
        if get_observability().enable_metrics and get_parallel().tp_rank == 0:
            self.rounds.report.count_in(Counter)

    @classmethod
    def configure_server_args(cls, server_args: Any) -> None:
        """Set the engine's limit on rows to the number of requests times the number of states per
        request. Make greedy decoding the default, unless the server has other defaults.

        Raises:
            ValueError: if CUDA graphs are to be recorded, and cannot be under the attention
                backend.
        """
        view = resolving_view(server_args)
        backends = {name: getattr(view, name, None) for name in _BACKEND_ARGUMENTS}
        records = view.cuda_graph_config.decode.backend != Backend.DISABLED
        if (obstacle := backend_obstacle(backends, records)) is not None:
            raise ValueError(obstacle)
        rows = rows_of(server_args)
        if view.preferred_sampling_params is None:
            declare_resolution(server_args, cls.__name__, preferred_sampling_params=dict(GREEDY))
        declare_resolution(server_args, cls.__name__, max_running_requests=rows)

    @classmethod
    def validate_request(cls, req: Any) -> str | None:
        """Return the reason why `req`, a request (`Req`) of the engine, cannot be served, with a
        remedy. Return None if it can."""
        return refusal(req)

    def run(self, model_runner: Any, forward_batch: Any, algo_states: Any = None) -> Any:
        """Run one round of a batch, as the engine requires.

        Args:
            model_runner: The engine's `ModelRunner`.
            forward_batch: The engine's `ForwardBatch`, which has one block of each row.
            algo_states: Not used.

        Returns:
            The five results that the engine expects: logits (None), each row's block of ids, the
                number of tokens by which each row's text grows, the state that each row carries
                over (None), and whether a CUDA graph ran.
        """
        evict = partial(evict_from_tree_cache, self.batch.tree_cache)
        sees_new = writes_first(model_runner, forward_batch)
        ids, grown, graph_ran = self.rounds(
            model_runner, forward_batch, self.batch.reqs, evict, sees_new
        )
        return None, ids, grown, [None] * len(ids), graph_ran


def rows_of(server_args: Any) -> int:
    """Compute the largest number of rows of a forward: `--max-running-requests`, which counts
    requests, times the largest number of states per request (`Mode.width`). Log a warning if CUDA
    graphs are recorded for fewer rows."""
    view = resolving_view(server_args)
    config = DllmConfig.from_server_args(server_args)
    rows = int(view.max_running_requests * config.mrp_settings.mode.width)
    graphs = view.cuda_graph_config.decode
    if graphs.backend != Backend.DISABLED and (graphs.max_bs or rows) < rows:
        log.warning(
            "CUDA graphs are recorded for forwards of up to %d rows, and drafts may need %d rows "
            "for %d requests: set --cuda-graph-max-bs-decode to %d",
            *(graphs.max_bs, rows, view.max_running_requests, rows),
        )
    return rows


def abort(req: Any, message: str) -> None:
    """Let the engine end a request once its current block is done, with an error of status 500.
    `req` is the engine's `Req`, and `message` the text of the error."""
    req.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def writes_first(engine: Any, batch: Any) -> bool:
    """Return whether each layer writes the keys and values of all rows before its attention reads
    any of them. `engine` is the engine's `ModelRunner`, and `batch` the `ForwardBatch`."""
    if engine.prefill_attention_backend_str in WRITES_FIRST:
        return True
    with forward_context(ForwardContext(attn_backend=engine.attn_backend)):
        return enable_fused_set_kv_buffer(batch)  # the rotary kernel writes them
