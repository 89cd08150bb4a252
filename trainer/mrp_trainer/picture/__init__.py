"""Pictures of decodes: facts out of what `generate` returns, and a self-contained SVG of them. Nothing here imports torch."""

from collections.abc import Mapping
from typing import Any

from .facts import Decode, read_decode
from .svg import Picture, draw


def show(outputs: Any, tokenizer: Any, *, prompt: str | None = None, row: int = 0, animated: bool = False) -> Picture:
    """Draw what `generate(..., return_dict_in_generate=True)` returned; a notebook shows it, `save` writes it to a file.

    Args:
        outputs: An output, or several by name, to be drawn side by side on one clock.
        tokenizer: The model's.
        prompt: Is shown above the text.
        row: Which row of a batch.
        animated: Whether the text comes forward by forward, again and again.
    """
    several = isinstance(outputs, Mapping) and not hasattr(outputs, "sequences")
    named = outputs if several else {"decode": outputs}
    decodes = [read_decode(output, tokenizer, str(name), row) for name, output in named.items()]
    return draw(decodes, prompt=prompt, animated=animated)


__all__ = ["Decode", "Picture", "draw", "read_decode", "show"]
