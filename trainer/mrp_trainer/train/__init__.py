"""Training of heads and backbones: settings, the Trainer, what it minimises, and runs that go on where they stopped."""
