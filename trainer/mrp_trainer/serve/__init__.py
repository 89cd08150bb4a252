"""A server that offers one model through OpenAI's API."""
