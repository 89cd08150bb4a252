"""The command `mrp doctor`: checks that results on this machine are right, and times a round."""
