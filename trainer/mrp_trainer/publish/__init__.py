"""Publishing: which folders are fit for it, their cards, and one commit with everything in it, or none."""

from .command import push
from .send import Publication, publish

__all__ = ["Publication", "publish", "push"]
