"""The model: its configuration, backbones and head, and the loading and saving of checkpoints."""
