"""Triton kernels. Each is defined beside its twin, a PyTorch function that computes the same."""
