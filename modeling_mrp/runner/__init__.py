"""The one owner of a model's forwards and of their keys and values."""
