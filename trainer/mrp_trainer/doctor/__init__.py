"""The command `mrp doctor`, which checks that results on this machine are correct, and times
rounds."""
