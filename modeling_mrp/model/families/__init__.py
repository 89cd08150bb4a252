"""Families of backbones, one file each: how published configs are read, which layers are used, how
tensors are converted."""
