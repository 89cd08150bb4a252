"""`mrp doctor`: what this machine computes, checked against what it should, and what a round takes on it."""
