"""Families of backbones, a file each: how a published config is read, which layers it has, how its tensors are named."""
