"""Pictures of decoding runs: facts are read from the output of `generate`, and drawn as a
self-contained SVG. Nothing here imports torch."""

from collections.abc import Mapping
from typing import Any

from .facts import Decode, read_decode
from .svg import Picture, draw


def show(
    outputs: Any, tokenizer: Any, *, prompt: str | None = None, row: int = 0, animated: bool = False
) -> Picture:
    """Draw the output of `generate(..., return_dict_in_generate=True)`. Notebooks display the
    picture that is returned; its method `save` writes it to a file.

    Args:
        outputs: An output, or a mapping from names to several outputs. These are drawn side by
            side, and the n-th forward has the same colour in all of them.
        tokenizer: The model's tokenizer.
        prompt: A text to show above the decoded texts.
        row: Index of the row to draw in the batch of each output.
        animated: Whether the decoded texts appear forward by forward, in a loop.

    Raises:
        ValueError: if there is no output, or an output is of another type or lacks the row.
    """
    is_mapping = isinstance(outputs, Mapping) and not hasattr(outputs, "sequences")
    named = outputs if is_mapping else {"decode": outputs}
    decodes = [read_decode(output, tokenizer, str(name), row) for name, output in named.items()]
    return draw(decodes, prompt=prompt, animated=animated)


__all__ = ["Decode", "Picture", "draw", "read_decode", "show"]
