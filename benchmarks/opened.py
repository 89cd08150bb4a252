"""Open an autoregressive checkpoint as a shifted block-diffusion backbone, untrained and without a
head, and count what drafts save: tokens a forward of `sequential` in small blocks.

    python -m benchmarks.opened FOLDER_OR_ID [--gguf model.gguf] [--show]

Prompts of three kinds in the checkpoint's chat template, one at a time, greedy, in float32: chats,
code to write, and texts to edit or copy. Drafts are stale scores alone, with prompt lookup, and
with lookup and drafts that go on into the next block. Each text is compared with its target's; in
float32 a near-tie may fall otherwise, which is counted. The result is a table of Markdown. `--show`
prints the texts.
"""

from typing import Any

import torch
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM

from .common import deciding, parser_of

PROMPTS = {
    "chat": [
        "Why is the sky blue? Answer in two sentences.",
        "Name three uses of a paper clip, one per line.",
        "What does an operating system do? Answer briefly.",
    ],
    "code": [
        "Write a Python function that returns the n-th Fibonacci number.",
        "Write a Python function that tells if a word is a palindrome.",
        "Write a SQL query that counts the orders of each customer.",
    ],
    "edit": [
        "Rename the variable x to total and print only the code:\n"
        "x = 0\nfor value in values:\n    x = x + value\nprint(x)",
        "Print this list again with the second item removed:\n- apples from the north\n"
        "- pears from the south\n- plums from the east\n- cherries from the west",
        "Correct the spelling and print the sentence only: The quick brown fox jumpd over the lazy "
        "dog and ran into the deep forrest.",
    ],
}
DRAFTS: dict[str, dict[str, Any]] = {
    "stale scores": {},
    "and lookup": {"prompt_lookup_num_tokens": 10},
    "and the next block": {"prompt_lookup_num_tokens": 10, "draft_next_block": True},
}


def decode(model: MRPForCausalLM, ids: torch.Tensor, **options: Any) -> Any:
    """Decode a prompt greedily; return the output with its stats."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


def main() -> None:
    """Print the table."""
    parser = parser_of("opened", __doc__ or "")
    parser.add_argument(
        "model", help="folder or id of an autoregressive checkpoint, or a saved one"
    )
    parser.add_argument("--gguf", help="a GGUF file in it")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of a prompt, at most")
    parser.add_argument("--count", type=int, default=3, help="prompts of a kind")
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--states", type=int, nargs="+", default=[4, 8], help="values of K")
    parser.add_argument("--mask-token-id", type=int, default=151665)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    gguf = {} if options.gguf is None else {"gguf_file": options.gguf}
    fields = {"block_size": options.blocks[0], "mask_token_id": options.mask_token_id}
    model = MRPForCausalLM.from_backbone(options.model, dtype=torch.float32, **fields, **gguf)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, config=model.config, **gguf)
    print(f"deciding code {deciding()}, {model.num_parameters() / 1e6:.0f} M parameters\n")
    print("| texts | block | K | tokens | differ | alone | " + " | ".join(DRAFTS) + " |")
    print("|" + "---|" * (6 + len(DRAFTS)))
    for kind, prompts in PROMPTS.items():
        inputs = []
        for prompt in prompts[: options.count]:
            messages = [{"role": "user", "content": prompt}]
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            inputs.append(encoded["input_ids"])
        for block in options.blocks:
            model.config.block_size = block
            outputs = []
            for ids in inputs:
                outputs.append(
                    decode(model, ids, decoding="sequential", max_new_tokens=options.tokens)
                )
                if options.show:
                    text = outputs[-1].sequences[0, ids.shape[1] :]
                    print(f"\n[{kind}, block {block}]\n{tokenizer.decode(text)}\n", flush=True)
            tokens = 0
            undrafted = 0
            for ids, output in zip(inputs, outputs, strict=True):
                tokens += output.sequences.shape[1] - ids.shape[1]
                undrafted += int(output.stats.row_forwards.sum())
            for states in options.states:
                different = 0
                cells = [f"{tokens / undrafted:.2f}"]
                for drafts in DRAFTS.values():
                    forwards = 0
                    for ids, output in zip(inputs, outputs, strict=True):
                        drafted = decode(
                            model,
                            ids,
                            decoding="self_spec",
                            target="sequential",
                            num_draft_states=states,
                            max_new_tokens=options.tokens,
                            **drafts,
                        )
                        forwards += int(drafted.stats.row_forwards.sum())
                        different += not drafted.sequences.equal(output.sequences)
                    cells.append(f"{tokens / forwards:.2f}")
                row = [kind, str(block), str(states), str(tokens), str(different), *cells]
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
