"""The command `mrp doctor`: checks of the results on this machine, and the time of a round."""
