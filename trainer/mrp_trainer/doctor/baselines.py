"""Baselines for the time of a round: the same step in plain transformers, without this package's
decoding. A step is a forward of one block after a prefix, and the choice of the likeliest token at
each position."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from modeling_mrp.model.compat import CACHE_NAME
from modeling_mrp.modeling import MRPForCausalLM

from .checks import inputs_of
from .replays import CALLS, WARM_UPS
from .rounds import now

Step = Callable[[], Tensor]


def baseline_steps(model: MRPForCausalLM, rows: int, prefix: int) -> dict[str, Step]:
    """Make two functions that each compute a decoding step in plain transformers, for comparison
    with a round of this package.

    A function takes no arguments. It runs the backbone over a block of masks in each of `rows`
    rows, and returns the likeliest token at each position, int64 [rows, block]. The cache of each
    row holds random tokens before this block: `prefix` tokens, rounded down to whole blocks, but at
    least one block.

    Returns:
        A dict with the two functions by name. "transformers, DynamicCache" has a `DynamicCache`.
        "transformers, compiled" has a `StaticCache`, and is compiled by
        `torch.compile(mode="reduce-overhead")` at its first call.
    """
    config = model.config
    block = config.block_size
    prefix = max(1, prefix // block) * block
    ids = inputs_of(model, None, rows, prefix)["input_ids"]
    backbone: Any = model.model
    masks = torch.full((rows, block), config.mask_token_id, device=model.device)
    positions = torch.arange(prefix + block, device=model.device)
    visible = (positions // block <= positions[:, None] // block)[None, None]

    def forward(cache: Any, tokens: Tensor, begin: int, keys: int, network: Any = backbone) -> Any:
        end = begin + tokens.shape[1]
        return network(
            input_ids=tokens,
            position_ids=positions[None, begin:end],
            attention_mask={"full_attention": visible[:, :, begin:end, :keys]},
            use_cache=True,
            **{CACHE_NAME: cache},
        ).last_hidden_state

    def likeliest(hidden: Tensor) -> Tensor:
        logits = model.lm_head(hidden)
        logits[..., config.mask_token_id] = -torch.inf
        return logits.argmax(-1)

    growing = DynamicCache()
    forward(growing, ids, 0, prefix)

    def dynamic() -> Tensor:
        tokens = likeliest(forward(growing, masks, prefix, prefix + block))
        growing.crop(-block)
        return tokens

    fixed = StaticCache(config=config, max_cache_len=prefix + block)
    forward(fixed, ids, 0, prefix + block)
    compiled = torch.compile(backbone.__call__, mode="reduce-overhead")

    def static() -> Tensor:
        for layer in fixed.layers:
            layer.cumulative_length.fill_(prefix)
        return likeliest(forward(fixed, masks, prefix, prefix + block, compiled))

    return {"transformers, DynamicCache": dynamic, "transformers, compiled": static}


@torch.inference_mode()
def time_baselines(
    model: MRPForCausalLM, rows: int, prefix: int, compiled: bool
) -> Iterator[tuple[str, float]]:
    """Time the steps of `baseline_steps`: forwards of one block in plain transformers. Yield the
    name of each and its median seconds, including the transfer of the tokens to the host. The
    compiled step is included only if `compiled`."""
    for name, step in baseline_steps(model, rows, prefix).items():
        if not compiled and name.endswith("compiled"):
            continue
        for _ in range(WARM_UPS):
            step().tolist()
        seconds = []
        for _ in range(CALLS):
            start = now(model.device)
            step().tolist()
            seconds.append(now(model.device) - start)
        yield name, statistics.median(seconds)
