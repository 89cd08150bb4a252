"""The method `generate`: from options and prompts to text."""
