"""A minimal decoding loop for the target `dynamic`, in sixty lines; `benchmarks.turns` times it
beside `generate`: ``python -m benchmarks.turns --batches 1 --targets dynamic --states bare alone
--dtype float64``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from modeling_mrp.model.compat import CACHE_NAME


@torch.inference_mode()
def decoded(model: Any, prompt: Sequence[int], new_tokens: int, tau: float) -> list[int]:
    """Decode a prompt; a step reveals the positions above `tau`, at least one. Return the ids, the
    prompt's included."""
    config, cache, ids = model.config, DynamicCache(), list(prompt)
    block, mask_id, limit = config.block_size, config.mask_token_id, len(prompt) + new_tokens
    eos = model.generation_config.eos_ids()

    def forward(tokens: list[int], begin: int, keep: bool) -> torch.Tensor:
        positions = torch.arange(begin, begin + len(tokens))
        visible = (torch.arange(begin + len(tokens)) // block <= positions[:, None] // block)[
            None, None
        ]
        out = model.model(
            input_ids=torch.tensor([tokens]),
            position_ids=positions[None],
            attention_mask={"full_attention": visible},
            **{CACHE_NAME: cache},
            use_cache=True,
        )
        if not keep:
            cache.crop(-len(tokens))
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    start = len(ids) // block * block
    if start:
        forward(ids[:start], 0, keep=True)
    while True:
        state = (ids[start:] + [mask_id] * block)[:block]
        end = block
        while free := [column for column in range(end) if state[column] == mask_id]:
            logits = model.lm_head(forward(state, start, keep=False)[free])
            logits[:, mask_id] = -torch.inf
            best, token = logits.softmax(-1).max(-1)
            confidences, tokens = best.tolist(), token.tolist()
            top = max(range(len(free)), key=lambda rank: confidences[rank])
            for rank, column in enumerate(free):
                if confidences[rank] > tau or rank == top:
                    state[column] = tokens[rank]
                    if tokens[rank] in eos:
                        end = min(end, column)
        ids[start:] = state
        stops = [position for position in range(len(prompt), len(ids)) if ids[position] in eos]
        if stops or len(ids) >= limit:
            return ids[: min([limit, *(position + 1 for position in stops)])]
        forward(state, start, keep=True)
        start += block
