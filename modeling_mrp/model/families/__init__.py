"""Families of backbones, a file each: how published configs are read, which layers are used, how
tensors are converted."""
