"""The computations on the device: backbone, head and picks over states that lie side by side, and
their keys and values."""
