"""The command `mrp doctor`: checks whether results on this machine are right, and timings of a
round."""
