"""The engine's runner of CUDA graphs on a CPU: what it would record becomes a tape of operations,
repeated without its Python.

A plugin of the engine, found on the path. All else of the runner is its own: buffers, padding,
metadata, replays.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

METADATA = "[metadata]\nName: mrp-cpu-graphs\nVersion: 0\n"
ENTRY_POINT = "[sglang.srt.plugins]\nmrp_cpu_graphs = cpu_graphs:register\n"


def register() -> None:
    """Put it in place; called by the engine in each of its processes."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from modeling_mrp.kernels.dispatch import CHECKED_ON
    from tests.support.tape import TapeRecorder

    runner: Any = decode_cuda_graph_runner.DecodeCudaGraphRunner

    class FixedAttention(TorchNativeAttnBackend):
        """Attention without a number that the host reads; a graph's metadata is made as it is
        recorded, and stays."""

        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.fixed: dict[int, Any] = {}

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            assert not self.fixed, "graphs of two networks on one backend"

        def init_forward_metadata(self, batch: Any) -> None:
            self.forward_metadata = (
                batch.req_pool_indices,
                batch.seq_lens,
                batch.extend_num_tokens // batch.batch_size,
            )

        def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
            rows, lengths = batch.req_pool_indices, batch.seq_lens
            if in_capture:
                self.fixed[len(rows)] = (
                    rows.clone(),
                    lengths.clone(),
                    len(batch.input_ids) // len(rows),
                )
                self.forward_metadata = self.fixed[len(rows)]
            self.fixed[len(rows)][0].copy_(rows)
            self.fixed[len(rows)][1].copy_(lengths)

        def forward_extend(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,
            batch: Any,
            save_kv_cache: bool = True,
        ) -> Tensor:
            rows, lengths, block = self.forward_metadata
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
            slots = self.req_to_token_pool.req_to_token.index_select(0, rows).long()
            keys, values = (
                side(layer.layer_id)
                .index_select(0, slots.flatten())
                .unflatten(0, slots.shape)
                .transpose(1, 2)
                for side in (
                    self.token_to_kv_pool.get_key_buffer,
                    self.token_to_kv_pool.get_value_buffer,
                )
            )
            seen = torch.arange(slots.shape[1]) < lengths[:, None]
            asks = q.view(len(rows), block, layer.tp_q_head_num, -1).transpose(1, 2)
            made = F.scaled_dot_product_attention(
                asks,
                keys,
                values,
                seen[:, None, None],
                scale=layer.scaling,
                enable_gqa=asks.shape[1] != keys.shape[1],
            )
            return made.transpose(1, 2).reshape(q.shape)

    class Tapes:
        """In place of a `BaseCudaGraphBackend`."""

        def __init__(self, of: Any) -> None:
            self.name, self.recorder, self.graphs = (
                type(of).__name__,
                TapeRecorder(torch.device("cpu")),
                dict[Any, Any](),
            )

        @contextmanager
        def replay_session(self) -> Iterator[None]:
            yield

        def can_run(self, batch: Any, key: Any) -> bool:
            return key in self.graphs

        def capture_one(self, key: Any, forward: Callable[[], Any], **_: Any) -> None:
            outputs = [forward()]  # it warms up

            def step() -> Tensor:
                outputs.append(forward())
                made: Tensor = outputs[-1].hidden_states
                return made

            repeat = self.recorder.record(step)
            repeat()  # what was computed as it was recorded
            self.graphs[key] = repeat, outputs[-1]

        def replay(self, key: Any, batch: Any) -> Any:
            print(f"replayed by {self.name}: {key.size} for {batch.batch_size}", flush=True)
            repeat, output = self.graphs[key]
            return replace(output, hidden_states=repeat())

    def capture(self: Any) -> None:
        self.buffers.seq_lens.fill_(self.seq_len_fill_value)
        self._capture_one_stream()

    def capture_on_cpu(original: Any, *, model_runner: Any) -> Any:
        shared = SimpleNamespace(get_logits_buffer=lambda size, rows: torch.zeros(rows, size))
        model_runner.graph_shared_output = shared
        return msgspec.structs.replace(
            original(model_runner=model_runner), runner=runner(model_runner)
        )

    ATTENTION_BACKENDS["torch_native"] = FixedAttention
    CHECKED_ON.add("cpu")
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    decode_cuda_graph_runner.resolve_decode_backend = Tapes
    runner.capture = capture
    runner._record_in_graph_metadata_prep_done = lambda self: None
    target = f"{cuda_graph_setup.__name__}.capture_decode_graph"
    HookRegistry.register(target, capture_on_cpu, HookType.AROUND)


__all__ = ["ENTRY_POINT", "METADATA", "register"]
