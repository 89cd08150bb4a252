"""Publishing: which folders are fit for it, their cards, and one commit with everything in it, or none."""

from .command import Publication, push

__all__ = ["Publication", "push"]
