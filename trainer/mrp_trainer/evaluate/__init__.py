"""Accuracy and cost of decoding, with intervals."""
