"""Decoding as pure functions of tensors, callable without a model: states, reveals, drafts, acceptance."""
