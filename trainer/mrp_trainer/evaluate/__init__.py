"""Accuracy and cost of decoding, with confidence intervals."""
