"""The model: configuration, head, loading."""
