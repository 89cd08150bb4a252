"""The computations on the device: backbone, head and pick over packed states, and their keys and
values."""
