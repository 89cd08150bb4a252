"""Pictures of decodes: facts from the output of `generate`, and a self-contained SVG of them.
Nothing here imports torch."""

from collections.abc import Mapping
from typing import Any

from .facts import Decode, read_decode
from .svg import Picture, draw


def show(
    outputs: Any, tokenizer: Any, *, prompt: str | None = None, row: int = 0, animated: bool = False
) -> Picture:
    """Draw the output of `generate(..., return_dict_in_generate=True)`; notebooks show the picture,
    and its `save` writes it.

    Args:
        outputs: An output, or a mapping of several by name, to be drawn side by side on one clock.
        tokenizer: The model's tokenizer.
        prompt: Text to show above the decodes.
        row: Index of the row in the batch.
        animated: Whether the text appears forward by forward, in a loop.

    Raises:
        ValueError: if there is no output, or an output is of another type or lacks the row.
    """
    is_mapping = isinstance(outputs, Mapping) and not hasattr(outputs, "sequences")
    named = outputs if is_mapping else {"decode": outputs}
    decodes = [read_decode(output, tokenizer, str(name), row) for name, output in named.items()]
    return draw(decodes, prompt=prompt, animated=animated)


__all__ = ["Decode", "Picture", "draw", "read_decode", "show"]
