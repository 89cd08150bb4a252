"""A serving engine of two hundred lines: pools, a scheduler, and forwards that recompute everything
that a row sees.

In place of keys and values, a slot holds their inputs: the id and, for the head, the hidden state.
So a row sees what its slots hold when the row is scored. All rows of a forward write before any of
them reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from mrp_serving.options import settings_of
from mrp_serving.rounds import Rounds
from torch import Tensor

from modeling_mrp.model.diffusion import block_causal_mask


class FakePool:
    """The map of rows and positions to slots."""

    def __init__(self, rows: int, context: int) -> None:
        self.device = torch.device("cpu")
        self.req_to_token = torch.zeros(rows + 1, context + 4, dtype=torch.int32)
        self.free_slots = list(range(1, rows + 1))
        self.req_generation = torch.zeros(rows + 1, dtype=torch.long)

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc_rows(self, count: int) -> list[int] | None:
        if count > len(self.free_slots):
            return None
        rows, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        self.req_generation[rows] += 1
        return rows

    def free_rows(self, rows: list[int]) -> None:
        assert not set(rows) & set(self.free_slots)
        self.free_slots += rows


class FakeAllocator:
    """An allocator of whole pages of slots; the page of slot 0 is never given out."""

    def __init__(self, pages: int, size: int) -> None:
        self.size, self.free_pages = size, list(range(1, pages + 1))

    def available_size(self) -> int:
        return len(self.free_pages) * self.size

    def alloc(self, count: int) -> Tensor | None:
        assert count % self.size == 0
        if count > self.available_size():
            return None
        pages = torch.tensor(
            [self.free_pages.pop(0) for _ in range(count // self.size)], dtype=torch.long
        )
        return (pages[:, None] * self.size + torch.arange(self.size)).flatten()

    def free_segment(self, slots: Tensor, start_pos: int) -> None:
        assert start_pos == 0
        assert (slots.view(-1, self.size) % self.size == torch.arange(self.size)).all(), (
            "pages in order"
        )
        self.free(slots)

    def free(self, slots: Tensor) -> None:
        pages = (slots // self.size).unique().tolist()
        assert len(pages) * self.size == len(slots), "whole pages only"
        assert not set(pages) & set(self.free_pages), "freed twice"
        self.free_pages += pages


_FILLED = (
    *(
        "batch_size",
        "input_ids",
        "positions",
        "req_pool_indices",
        "seq_lens",
        "out_cache_loc",
        "seq_lens_sum",
    ),
    *("extend_num_tokens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc"),
    *("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "rids"),
)
_ABSENT = (
    *(
        "extend_logprob_start_lens_cpu",
        "req_pool_indices_cpu",
        "seq_lens_cpu",
        "orig_seq_lens",
        "lora_ids",
        "residual_stream",
    ),
    *("global_num_token_non_padded", "global_num_token_non_padded_cpu", "num_token_non_padded"),
    *(
        "kv_loc_plan",
        "kv_loc_cols",
        "out_cache_loc_virtual",
        "out_cache_loc_is_physical",
        "forward_metadata_ready",
        "next_token_logits_buffer",
    ),
)
# The fields of a `ForwardBatch` that the plugin replaces.
FakeBatch: Any = make_dataclass("FakeBatch", [*_FILLED, *((name, Any, None) for name in _ABSENT)])


class FakeModel(torch.nn.Module):
    """The interface of the plugin's model, around a model of `modeling_mrp`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.lm_head = model, model.lm_head

    def unembed(self, batch: FakeBatch, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.lm_head.weight)
        buffer = batch.next_token_logits_buffer
        if buffer is None or buffer.shape != logits.shape:
            return logits
        return buffer.copy_(logits)

    def run_head(self, engine: "FakeEngine", batch: FakeBatch, hidden: Tensor) -> Tensor:
        return engine.recompute(batch, engine.head_ids, hidden)


class SharedLogits:
    """The engine's buffer for logits, of some rows; `used` has the rows of each use."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.buffer = torch.empty(0)
        self.used: list[int] = []

    def get_logits_buffer(self, vocab_size: int, *, rows: int) -> Tensor:
        assert rows <= self.max_rows
        if not len(self.buffer):
            self.buffer = torch.full((self.max_rows, vocab_size), torch.nan, dtype=torch.double)
        self.used.append(rows)
        return self.buffer[:rows]


class FakeEngine:
    """A stand-in for the `ModelRunner`; with `graphs`, forwards return one buffer, which the next
    forward overwrites."""

    prefill_attention_backend_str = "torch_native"
    graph_shared_output: SharedLogits | None = None

    def __init__(
        self, model: Any, rows: int, pages: int, context: int = 256, graphs: bool = False
    ) -> None:
        self.model, self.block = FakeModel(model), model.config.block_size
        self.model_config = SimpleNamespace(
            context_len=context, vocab_size=model.config.vocab_size, hf_config=model.config
        )
        self.req_to_token_pool = FakePool(rows, context)
        self.token_to_kv_pool_allocator = FakeAllocator(pages, self.block)
        self.kv_index_translator = SimpleNamespace(
            own_plan=lambda batch: SimpleNamespace(bind=lambda *_: None)
        )
        slots = (pages + 1) * self.block
        self.ids, self.head_ids = (
            torch.zeros(slots, dtype=torch.long),
            torch.zeros(slots, dtype=torch.long),
        )
        self.positions = torch.zeros(slots, dtype=torch.long)
        self.hidden = torch.zeros(slots, model.config.hidden_size, dtype=model.dtype)
        self.replayed = (
            self.hidden.new_zeros(rows * self.block, self.hidden.shape[1]) if graphs else None
        )
        self.widths: list[int] = []

    def forward(self, batch: FakeBatch, pp_proxy_tensors: Any = None) -> Any:
        self.widths.append(batch.batch_size)
        hidden = self.recompute(batch, self.ids, None)
        if self.replayed is not None:
            self.replayed[: len(hidden)] = hidden.detach()
            hidden = self.replayed[: len(hidden)]
        return SimpleNamespace(
            logits_output=SimpleNamespace(hidden_states=hidden),
            can_run_graph=self.replayed is not None,
        )

    def recompute(self, batch: FakeBatch, ids: Tensor, hidden: Tensor | None) -> Tensor:
        """Compute hidden states [tokens, hidden_size] of a batch, or the head's residual if
        `hidden` is given."""
        at, block, inner = batch.out_cache_loc, self.block, self.model.inner
        assert len(at.unique()) == len(at), "two rows write to one slot"
        ids[at], self.positions[at] = batch.input_ids, batch.positions
        if hidden is not None:
            self.hidden[at] = hidden
        outputs = ids.new_zeros(batch.batch_size, block, self.hidden.shape[1]).to(self.hidden)
        for length in set(batch.seq_lens.tolist()):
            (rows,) = torch.where(batch.seq_lens == length)
            seen = self.req_to_token_pool.req_to_token[batch.req_pool_indices[rows], :length].long()
            positions = self.positions[seen]
            mask = block_causal_mask(positions, positions, torch.ones_like(positions).bool(), block)
            if hidden is None:
                output = inner.backbone(ids[seen], positions, mask)
            else:
                output = inner.residual(ids[seen], self.hidden[seen], positions, mask)
            outputs[rows] = output[:, -block:]
        return outputs.flatten(0, 1)


# The engine's fields for a request that gives nothing but a temperature of 0.
SAMPLING_PARAMS: dict[str, Any] = {
    **{"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_new_tokens": 40,
        "min_new_tokens": 0,
        "ignore_eos": False,
    },
    **{"stop_strs": [], "stop_regex_strs": []},
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "custom_params")),
    **dict.fromkeys(("sampling_seed", "logit_bias", "stop_token_ids")),
}


def abort(req: Any, message: str) -> None:
    """End a request with a message, as the plugin's algorithm does."""
    req.to_finish = message


@dataclass(eq=False)
class FakeRequest:
    """A request with the fields that plugin and scheduler read; `asked` has fields of its
    `SamplingParams`."""

    origin_input_ids: list[int]
    max_new_tokens: int = 40
    stop: tuple[int, ...] = ()
    rid: str = "request"
    output_ids: list[int] = field(default_factory=list)
    row: int = 0
    length: int = 0  # tokens with slots
    ended: bool = False
    tokenizer: Any = None
    asked: dict[str, Any] = field(default_factory=dict)
    return_logprob: bool = True
    to_finish: str | None = None

    def __post_init__(self) -> None:
        self.eos_token_ids = set(self.stop)
        self.sampling_params = SimpleNamespace(
            **{**SAMPLING_PARAMS, "max_new_tokens": self.max_new_tokens, **self.asked}
        )
        self.logprob = SimpleNamespace(
            output_token_logprobs_val=[],
            output_token_logprobs_idx=[],
            top_logprobs_num=0,
            token_ids_logprob=None,
        )

    def finished(self) -> bool:
        """Tell if the request has ended, as the engine's does."""
        return self.ended

    @property
    def kv(self) -> SimpleNamespace:
        """The place of the request's keys and values: its row of the pool."""
        return SimpleNamespace(req_pool_idx=self.row)

    @property
    def output_ids_through_stop(self) -> list[int]:
        """The ids that a client is shown: up to the first eos, or the limit."""
        shown = self.output_ids[: self.max_new_tokens]
        ends = (
            []
            if self.sampling_params.ignore_eos
            else [place for place, token in enumerate(shown) if token in self.stop]
        )
        return shown[: ends[0] + 1] if ends else shown


class FakeScheduler:
    """Serves requests as the engine does: first all prompts, a block in each forward; then rounds
    for all requests."""

    def __init__(self, engine: FakeEngine, rounds: Rounds, sees_new: bool = True) -> None:
        self.engine, self.rounds, self.sees_new = engine, rounds, sees_new
        self.running: list[FakeRequest] = []
        self.fresh: dict[FakeRequest, bool] = {}

    def add(self, *requests: FakeRequest) -> None:
        for req in requests:
            rows = self.engine.req_to_token_pool.alloc_rows(1)
            assert rows is not None
            req.row = rows[0]
            self.running.append(req)

    def release(self, req: FakeRequest) -> None:
        """Free the row and the slots of a request that has ended, was aborted, or has to make
        room."""
        self.running.remove(req)
        pool = self.engine.req_to_token_pool
        self.engine.token_to_kv_pool_allocator.free(pool.req_to_token[req.row, : req.length].long())
        pool.free_rows([req.row])
        req.length = 0

    def take_back(self, req: FakeRequest) -> None:
        """Retract a request: it goes on in another row, after its finished blocks."""
        self.release(req)
        self.fresh[req] = False
        self.add(req)

    def step(self) -> None:
        """Run one batch."""
        if self.engine.replayed is not None:
            self.engine.replayed.fill_(torch.nan)  # as other batches would overwrite it
        block, mask = self.engine.block, self.rounds.mask_id
        starts = {
            req: (req.length - block if self.fresh.get(req) else req.length) for req in self.running
        }
        prompts = [
            req
            for req in self.running
            if starts[req] + block <= len(req.origin_input_ids) + len(req.output_ids)
        ]
        batch = prompts or list(self.running)
        pool, ids = self.engine.req_to_token_pool, []
        for req in batch:
            start = starts[req]
            if not self.fresh.get(req):
                slots = self.engine.token_to_kv_pool_allocator.alloc(block)
                assert slots is not None
                pool.req_to_token[req.row, start : start + block] = slots.int()
                req.length = start + block
            text = [*req.origin_input_ids, *req.output_ids][start : start + block]
            ids += text + [mask] * (block - len(text))
        begins = [starts[req] for req in batch]
        made = self._batch(batch, torch.tensor(ids), begins)
        blocks, grown, _ = self.rounds(self.engine, made, batch, lambda count: None, self.sees_new)
        for req, tokens, size, start in zip(batch, blocks, grown, begins, strict=True):
            self.fresh[req] = not size
            # for a retracted request, its answer so far, too
            known = len(req.origin_input_ids) + len(req.output_ids)
            if size and start + size > known:
                req.output_ids += tokens[max(0, known - start) :]
                if (
                    req.to_finish
                    or len(req.output_ids_through_stop) < len(req.output_ids)
                    or len(req.output_ids) >= req.max_new_tokens
                ):
                    req.ended = True
                    self.release(req)

    def _batch(self, requests: Sequence[FakeRequest], ids: Tensor, starts: list[int]) -> FakeBatch:
        block, count = self.engine.block, len(requests)
        rows, prefix = (
            torch.tensor([req.row for req in requests], dtype=torch.int32),
            torch.tensor(starts),
        )
        positions = prefix[:, None] + torch.arange(block)
        slots = self.engine.req_to_token_pool.req_to_token[rows[:, None], positions].long()
        return FakeBatch(
            batch_size=count,
            input_ids=ids,
            positions=positions.flatten(),
            req_pool_indices=rows,
            seq_lens=prefix + block,
            out_cache_loc=slots.flatten(),
            seq_lens_sum=int(prefix.sum()) + count * block,
            extend_num_tokens=count * block,
            extend_seq_lens=torch.full((count,), block),
            extend_prefix_lens=prefix,
            extend_start_loc=torch.arange(count) * block,
            extend_seq_lens_cpu=[block] * count,
            extend_prefix_lens_cpu=starts,
            rids=[req.rid for req in requests],
        )

    def run(self, on_step: Callable[[], None] = lambda: None) -> None:
        """Serve until no request is left, and assert that all rows and pages are free again."""
        while self.running:
            self.step()
            on_step()
        pool, allocator = self.engine.req_to_token_pool, self.engine.token_to_kv_pool_allocator
        assert sorted(pool.free_slots) == list(range(1, len(pool.req_to_token)))
        assert sorted(allocator.free_pages) == list(
            range(1, len(self.engine.ids) // allocator.size)
        )


def rounds_of(model: Any, options: dict[str, Any], kind: type[Rounds] = Rounds) -> Rounds:
    """Make the rounds of a server with some options."""
    config = model.config
    return kind(
        settings_of(options, {}, config.block_size, True),
        config.block_size,
        config.mask_token_id,
        abort,
    )
