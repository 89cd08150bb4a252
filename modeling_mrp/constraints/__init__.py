"""Languages that a text must keep to: automata of tokens, what they allow in a block, and the
libraries that make them."""
