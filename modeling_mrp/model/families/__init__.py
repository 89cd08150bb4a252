"""Families of backbones, one file each. A file defines how published configs of its family are
read, which layers are used, and how tensors are converted."""
