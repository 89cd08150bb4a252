"""`generate`: options in, text out."""
