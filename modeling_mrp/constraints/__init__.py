"""Languages that a text must belong to: automata over tokens, the tokens that they allow in a
block, and the libraries that make them."""
