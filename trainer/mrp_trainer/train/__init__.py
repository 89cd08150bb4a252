"""Training of heads and backbones: settings, the Trainer, its objectives, and runs that resume
where they stopped."""
