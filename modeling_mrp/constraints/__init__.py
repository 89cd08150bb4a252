"""Languages that a text must belong to: the automata and grammars that define them, the tokens that
they allow in a block, and the libraries that make automata and grammars."""
