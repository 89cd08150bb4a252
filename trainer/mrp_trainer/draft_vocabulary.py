"""A draft vocabulary: the tokens that a head drafts from, the most frequent ones of a text.

``python -m mrp_trainer.draft_vocabulary --model FOLDER --text FILE ... --size 16384 --save FOLDER`` counts the tokens of text
files that are like what the model will write, keeps the most frequent, and saves the checkpoint with them. Generated text does
not change; the head's vocabulary step reads a part of `lm_head` only, and prints how much of the text that part covers.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from modeling_mrp.modeling import MRPForCausalLM

from .loading import load_model, load_tokenizer


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], vocab_size: int) -> Tensor:
    """[vocab_size] long, how often each token occurs in the texts."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for text in texts:
        counts += torch.bincount(torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long), minlength=vocab_size)
    return counts


def most_frequent(counts: Tensor, size: int, always: Iterable[int], never: Iterable[int]) -> Tensor:
    """[size] long, ascending: the ids `always` taken, then the most frequent ones, of equals the lowest ids.

    Args:
        counts: [vocab] long.
        size: How many.
        always: Ids that are taken whatever their count, such as the eos.
        never: Ids that are not taken, such as the mask's.

    Raises:
        ValueError: if `size` leaves no room for `always`, or there are not so many tokens.
    """
    always, never = sorted(set(always)), sorted(set(never))
    if not len(always) <= size <= len(counts) - len(never):
        raise ValueError(
            f"a draft vocabulary of {size} tokens, {len(always)} of them fixed, out of {len(counts) - len(never)}: "
            "ask for a size between these"
        )
    rank = counts.clone()
    rank[always], rank[never] = counts.max() + 1, -1
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def set_draft_vocabulary(model: MRPForCausalLM, token_ids: Tensor) -> None:
    """Makes the head of a model draft from these tokens [n] long; it is saved with the head.

    Raises:
        ValueError: if the model has no head, or the ids are no draft vocabulary of its.
    """
    if model.mrp_head is None:
        raise ValueError("this checkpoint has no MRP head, and a draft vocabulary is a head's: load one that has")
    outside = (token_ids < 0) | (token_ids >= model.config.vocab_size) | (token_ids == model.config.mask_token_id)
    if len(token_ids) == 0 or bool(outside.any()) or len(token_ids.unique()) < len(token_ids):
        raise ValueError(
            f"{len(token_ids)} draft tokens, {int(outside.sum())} of them outside the vocabulary of {model.config.vocab_size} "
            f"or the mask id: pass at least one id, each once"
        )
    model.config.draft_vocab_size = len(token_ids)
    model.mrp_head.draft_token_ids = token_ids.long().to(model.lm_head.weight.device)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m mrp_trainer.draft_vocabulary", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint with a head")
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="text files like what the model will write")
    parser.add_argument("--size", type=int, required=True, help="tokens to draft from")
    parser.add_argument("--save", type=Path, required=True, help="folder for the checkpoint with its draft vocabulary")
    options = parser.parse_args(arguments)
    model = load_model(options.model)
    tokenizer = load_tokenizer(options.model)
    counts = count_tokens(tokenizer, (path.read_text() for path in options.text), model.config.vocab_size)
    eos = model.generation_config.eos_token_id
    always = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = most_frequent(counts, options.size, always, [model.config.mask_token_id])
    set_draft_vocabulary(model, ids)
    model.save_pretrained(options.save)
    tokenizer.save_pretrained(options.save)
    covered = 100 * int(counts[ids].sum()) / max(1, int(counts.sum()))
    print(f"{options.size} of {model.config.vocab_size} tokens cover {covered:.2f} % of the text; saved to {options.save}")


__all__ = ["count_tokens", "most_frequent", "set_draft_vocabulary"]

if __name__ == "__main__":
    main()
