"""`dynamic` in a loop of its own, of sixty lines, beside `generate`: what the package costs over the least that decodes.

    python -m benchmarks.bare_loop --count 16

Batch 1, greedy, in turns in one process; prints the ratio of CPU times, its spread, and how many texts are equal.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems
from transformers import DynamicCache

from modeling_mrp.modeling import MRPForCausalLM

from .common import TINY, emit, header, load

NEW, TAU = 64, 0.9


@torch.inference_mode()
def decoded(model: MRPForCausalLM, prompt: Sequence[int], eos: set[int]) -> list[int]:
    """Decode one prompt block by block: reveal all above tau, at least the surest, until no mask is left."""
    config, cache, ids = model.config, DynamicCache(), list(prompt)
    block, mask_id, limit = config.block_size, config.mask_token_id, len(prompt) + NEW

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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_loop", description=__doc__)
    parser.add_argument("--count", type=int, default=16, help="problems of math, each decoded in both ways")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float64")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    model, eos = model.to(getattr(torch, options.dtype)), {tokenizer.eos_token_id, tokenizer.pad_token_id}
    emit(header("bare_loop", options))
    ratios, equal = [], 0
    asked = {"decoding": "dynamic", "confidence_threshold": TAU, "do_sample": False, "max_new_tokens": NEW}
    for turn, problem in enumerate(problems("math", "heldout", options.count + 1)):
        prompt = encode(problem, tokenizer)[0]
        ids, seconds, made = torch.tensor([prompt]), [0.0, 0.0], [[0], [0]]
        for way in (0, 1) if turn % 2 else (1, 0):
            begun = time.process_time()
            if way:
                out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=sorted(eos), **asked)
                made[1] = out[0, len(prompt) :].tolist()
            else:
                made[0] = decoded(model, prompt, eos)
            seconds[way] = time.process_time() - begun
        if turn:  # the first one warms up
            ratios.append(seconds[1] / seconds[0])
            equal += made[0] == made[1]
    ratios.sort()
    spread = [round(ratios[at * (len(ratios) - 1) // 4], 3) for at in (0, 1, 2, 3, 4)]
    emit({"generate_over_bare_loop": spread, "texts_equal": equal, "texts": len(ratios)})


if __name__ == "__main__":
    main()
