"""What the device computes: backbone, head and pick over packed states, and their keys and values."""
