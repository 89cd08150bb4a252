"""A server of one model with OpenAI's API."""
