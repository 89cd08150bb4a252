"""Publishing: checked folders of checkpoints, their cards, and one commit with everything in it, or none."""

from .command import Publication, push

__all__ = ["Publication", "push"]
