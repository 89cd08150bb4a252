"""A draft vocabulary: the tokens that a head drafts from, the most frequent ones of a text.

``python -m mrp_trainer.draft_vocabulary --model FOLDER --text FILE --size 16384 --save FOLDER`` counts the tokens of text
files that are like what the model will write, keeps the most frequent, and saves the checkpoint with them. Generated text does
not change; the head's vocabulary step reads a part of `lm_head` only, and prints how much of the text that part covers.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
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


def main(
    model: Annotated[str, typer.Option(help="A checkpoint with a head.")],
    text: Annotated[list[Path], typer.Option(help="Text file like what the model will write. Repeatable.")],
    size: Annotated[int, typer.Option(help="Tokens to draft from.")],
    save: Annotated[Path, typer.Option(help="Folder for the checkpoint with its draft vocabulary.")],
) -> None:
    """Give a head a vocabulary of frequent tokens for its drafts."""
    loaded = load_model(model)
    tokenizer = load_tokenizer(model)
    counts = count_tokens(tokenizer, (path.read_text() for path in text), loaded.config.vocab_size)
    eos = loaded.generation_config.eos_token_id
    always = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = most_frequent(counts, size, always, [loaded.config.mask_token_id])
    set_draft_vocabulary(loaded, ids)
    loaded.save_pretrained(save)
    tokenizer.save_pretrained(save)
    covered = 100 * int(counts[ids].sum()) / max(1, int(counts.sum()))
    print(f"{size} of {loaded.config.vocab_size} tokens cover {covered:.2f} % of the text; saved to {save}")


__all__ = ["count_tokens", "most_frequent", "set_draft_vocabulary"]

if __name__ == "__main__":
    typer.run(main)
