"""`dynamic` in a minimal loop of sixty lines, beside `generate`: what the package costs over the least code that decodes.

    python -m benchmarks.bare_loop --count 16

Batch 1, greedy, the two in turns in one process; prints the ratio of CPU times, its spread, and how many texts are equal.
"""

import time
from collections.abc import Sequence

import torch
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from transformers import DynamicCache

from modeling_mrp.modeling import MRPForCausalLM

from .common import TINY, emit, header, load, parser_of
from .turns import CLOCKS, Way, batches_of, faster, take_turns

TAU = 0.9


@torch.inference_mode()
def decoded(model: MRPForCausalLM, prompt: Sequence[int], eos: set[int]) -> list[int]:
    """Decode one prompt block by block, revealing all columns above tau in each step, at least the most confident one."""
    config, cache, ids = model.config, DynamicCache(), list(prompt)
    block, mask_id, limit = config.block_size, config.mask_token_id, len(prompt) + NEW_TOKENS["math"]

    def forward(tokens: list[int], begin: int, keep: bool) -> torch.Tensor:
        positions = torch.arange(begin, begin + len(tokens))
        seen = (torch.arange(begin + len(tokens)) // block <= positions[:, None] // block)[None, None]
        out = model.model(
            input_ids=torch.tensor([tokens]),
            position_ids=positions[None],
            attention_mask={"full_attention": seen},
            past_key_values=cache,
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
            sure, tokens = best.tolist(), token.tolist()
            top = max(range(len(free)), key=lambda place: sure[place])
            for place, column in enumerate(free):
                if sure[place] > TAU or place == top:
                    state[column] = tokens[place]
                    if tokens[place] in eos:
                        end = min(end, column)
        ids[start:] = state
        stops = [at for at in range(len(prompt), len(ids)) if ids[at] in eos]
        if stops or len(ids) >= limit:
            return ids[len(prompt) : min([limit, *(at + 1 for at in stops)])]
        forward(state, start, keep=True)
        start += block


def main(arguments: list[str] | None = None) -> None:
    """Command line: one JSON line."""
    parser = parser_of("bare_loop", __doc__)
    parser.add_argument("--count", type=int, default=16, help="problems of math, each decoded in both ways")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    model, eos = model.to(getattr(torch, options.dtype)), {tokenizer.eos_token_id, tokenizer.pad_token_id}
    emit(header("bare_loop", options))
    batches = batches_of(tokenizer, "heldout", options.count, 1)
    prompts = [batch["input_ids"][0].tolist() for batch in batches]
    package = Way(model, batches, CLOCKS["cpu"], decoding="dynamic", confidence_threshold=TAU, eos_token_id=sorted(eos))
    texts: dict[int, list[int]] = {}

    def bare(turn: int) -> float:
        begun = time.process_time()
        texts[turn % options.count] = decoded(model, prompts[turn], eos)
        return time.process_time() - begun

    taken = take_turns({"bare": bare, "generate": package}, options.count)
    equal = sum(package.texts[turn][0].tolist() == prompts[turn] + texts[turn] for turn in texts)
    ratio = faster(taken["bare"], taken["generate"])  # `faster` divides speeds, so the ratio of times has its arguments swapped
    emit({"generate_over_bare_loop": ratio, "texts_equal": equal, "texts": len(texts)})


if __name__ == "__main__":
    main()
