"""Families of backbones, a file each: how a published config reads, whose layers it has, how its tensors are called."""
