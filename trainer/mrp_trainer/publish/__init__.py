"""Publishing checkpoints on the Hub: checking their folders, rendering their model cards, and
pushing each in one commit."""

from .command import Publication, push

__all__ = ["Publication", "push"]
