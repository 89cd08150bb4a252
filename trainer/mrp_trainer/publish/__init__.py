"""Publishing of checkpoints on the Hub: checks of their folders, model cards, and pushes of one
commit each."""

from .command import Publication, push

__all__ = ["Publication", "push"]
